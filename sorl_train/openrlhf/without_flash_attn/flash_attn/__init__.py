"""Stands in for flash-attn where that is not installed: OpenRLHF imports it, but calls it for packed rows only.

``launch`` puts the folder above on ``PYTHONPATH``. transformers looks for an installed distribution and vLLM for
``flash_attn.ops``, so neither takes this for the package.
"""

from __future__ import annotations

from typing import Any, NoReturn


def missing(*_: Any, **__: Any) -> NoReturn:
    """What every function of flash-attn is here."""
    raise ModuleNotFoundError("flash-attn is not installed")
