"""Where models come from: a folder, a .gguf file, a Hub id, or an embedded name; and the per-user cache."""

from ddtree.sources.cache import cache_dir
from ddtree.sources.errors import SourceError
from ddtree.sources.fetching import fetch
from ddtree.sources.resolving import Source, resolve

__all__ = ["Source", "SourceError", "cache_dir", "fetch", "resolve"]
