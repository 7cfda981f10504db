"""Timing of single kernels, each checked first and shown beside its floor."""
