"""python -m ddtree"""

import sys

from ddtree.cli.main import main

sys.exit(main())
