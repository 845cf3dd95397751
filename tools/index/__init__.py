"""Search indexes: folders that ``sorl-index`` builds and that are memory-mapped for searching."""

from sorl_tools.index.hits import Hit, Index
from sorl_tools.index.manifest import Manifest
from sorl_tools.index.open import open_index

__all__ = ["Hit", "Index", "Manifest", "open_index"]
