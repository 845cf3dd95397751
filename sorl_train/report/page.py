"""Renders a self-contained page from a template, with its styles and scripts inline.

Text that comes from a run is escaped by Jinja, or set as plain text by the scripts. The page's content security policy
lets it load nothing, and run no scripts but its own, which it names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from sorl_env.figures import duration

_ASSETS = Path(__file__).resolve().parent / "assets"


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str], **context: Any) -> str:
    """The page as text; ``styles`` and ``scripts`` are names of assets, in the order in which they apply."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves keep their order
    environment.filters |= {"seconds": duration, "pretty": _pretty}
    texts = [_script(name) for name in scripts]
    return environment.get_template(template).render(
        styles=[_asset(name) for name in styles],
        scripts=texts,
        script_hashes=" ".join(f"'sha256-{_sha256(text)}'" for text in texts),
        **context,
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def _script(name: str) -> str:
    license_file = _ASSETS / f"{name.partition('.')[0]}.LICENSE"
    notice = f"/* {license_file.read_text(encoding='utf-8').strip()} */\n" if license_file.is_file() else ""
    return notice + _asset(name)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
