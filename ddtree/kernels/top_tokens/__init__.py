"""The best tokens of rows of scores, exactly and in one order: for the drafter's candidates and for sampling filters."""
