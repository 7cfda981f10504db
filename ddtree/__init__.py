"""Speculative decoding with draft trees: the target's own words, several times faster."""

__version__ = "0.1.0"
