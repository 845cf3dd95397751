"""Search indexes in a folder: built by ``sorl-index``, memory-mapped by whoever searches them."""

from sorl_tools.index.index import Hit, Index, open_index
from sorl_tools.index.manifest import Manifest

__all__ = ["Hit", "Index", "Manifest", "open_index"]
