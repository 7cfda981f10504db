"""Recipes: how the models that ship with the package were made, from data to checkpoint."""
