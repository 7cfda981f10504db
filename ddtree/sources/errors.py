"""The one error of this room."""


class SourceError(ValueError):
    """A model could not be found or fetched; the message names the value and the remedy."""
