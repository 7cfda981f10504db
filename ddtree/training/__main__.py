"""`python -m ddtree.training sample | fit`: training without the rest of the program's dependencies."""

from ddtree.training.command import main

if __name__ == "__main__":
    main()
