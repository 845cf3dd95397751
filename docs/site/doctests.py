"""Examples in docstrings (``>>> ..``) as blocks of code, where Markdown would see quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """An extension of griffe, which reads the sources for the reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put a fence around each example."""
        if obj.docstring:
            text = EXAMPLE.sub(lambda match: f"\n```pycon\n{match[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = text
