"""Search indexes in a folder: built by ``sorl-index``, memory-mapped by whoever searches them."""

from sorl_tools.index.manifest import Manifest
from sorl_tools.index.open import Hit, Index, open_index

__all__ = ["Hit", "Index", "Manifest", "open_index"]
