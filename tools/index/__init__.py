"""Search indexes: folders that ``sorl-index`` builds and that are memory-mapped for searching."""

from sorl_tools.index.index import Hit, Index, Manifest, open_index

__all__ = ["Hit", "Index", "Manifest", "open_index"]
