"""The best tokens of rows of scores, exactly and in one order: the drafter's candidates, and sampling filters."""
