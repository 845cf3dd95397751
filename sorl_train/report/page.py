"""A self-contained page from a template: styles and scripts inline, and a policy that lets nothing else in.

Everything that comes from a run is escaped by Jinja or set as text by the scripts. The content security policy of the
page lets nothing load, and no script run but those whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from sorl_env.errors import UserError

_ASSETS = Path(__file__).resolve().parent / "assets"


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str], **context: Any) -> str:
    """The page as text; ``styles`` and ``scripts`` are names of assets, in the order in which they count."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves keep their order
    environment.filters |= {"figure": figure, "seconds": seconds, "pretty": _pretty}
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


def check_place_for(page: Path) -> None:
    """Raise UserError where there is a folder in place of the page."""
    if page.is_dir():
        raise UserError(f"--out {page} is a folder; name a file, as {page / 'page.html'}")


def figure(value: Any, kind: str = "") -> str:
    """A figure as a person reads it; an en dash for one that is not there."""
    if not isinstance(value, (int, float)):
        return "–"  # noqa: RUF001
    if kind == "seconds":
        return seconds(value)
    if kind == "megabytes":
        return f"{value / 1000:.2f} GB" if value >= 1000 else f"{value:.0f} MB"
    if kind == "step":
        return f"step {value:.0f}"
    if kind == "short":
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.3f}" if kind == "share" else f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration with the units that suit it."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
