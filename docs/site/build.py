"""Builds the documentation site into build/docs/site: ``make docs``.

The pages of docs/ are copied to build/docs, formulas become MathML, the reference is generated, and zensical makes the
site of all that, strictly and without a network. Nothing that is generated is committed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import griffe
import yaml
from annotated_types import Ge, Gt, Le, Lt
from latex2mathml.converter import convert

from sorl_train.config.schema import as_text, fields, flatten, sections
from sorl_train.config.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"sorl_env": "sorl_env", "sorl_train": "sorl_train", "sorl_tasks": "tasks", "sorl_tools": "tools"}
WITH_NAMES = (
    "sorl_env",
    "sorl_env.tool",
    "sorl_env.task",
    "sorl_env.trajectory",
)  # packages with ``__all__``
# pages that stand outside docs/
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
}
BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


class Refused(Exception):
    """Something that must not be on the site."""


# --- the build ---


def main() -> None:
    """``build.py [--docs FOLDER] [--out FOLDER]``."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="the pages")
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs", help="receives pages/ and site/")
    arguments = parser.parse_args()
    try:
        build(arguments.docs, arguments.out)
    except Refused as error:
        sys.exit(f"make docs: {error}")


def build(docs: Path, out: Path) -> None:
    """Build the site of the pages ``docs`` into ``out / "site"``. Raises ``Refused``."""
    if missing := undocumented(ROOT):
        raise Refused("public names without a docstring: " + ", ".join(missing))
    work, site = out, out / "site"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(
        docs, work / "pages", ignore=shutil.ignore_patterns("*.py", "*.yml", "*.ipynb", "__pycache__")
    )
    tutorials = [*docs.glob("tutorials/*.ipynb"), *docs.glob("tutorials/*.py")]
    for path in tutorials:
        _write((work / "pages" / path.relative_to(docs)).with_suffix(".md"), code_page(path))
    origins = {path.relative_to(work / "pages").as_posix(): "" for path in (work / "pages").rglob("*.md")}
    for source, path in MOVED.items():
        if path not in origins:
            origins[path] = source
            _write(work / "pages" / path, (ROOT / source).read_text(encoding="utf-8"))
    for path, source in origins.items():
        file = work / "pages" / path
        text = site_links(file.read_text(encoding="utf-8"), source or f"docs/{path}", path)
        file.write_text(with_formulas(text), encoding="utf-8")
    reference = reference_pages()
    for path, text in reference.values():
        _write(work / "pages" / path, text)
    config = yaml.safe_load((docs / "site/mkdocs.yml").read_text(encoding="utf-8"))
    links = [{title: path} for title, (path, _) in reference.items()]
    (entry,) = (entry for entry in config["nav"] if "Reference" in entry)
    entry["Reference"] = [*links[:3], {"Modules": links[3:]}]
    mkdocstrings = next(plugin["mkdocstrings"] for plugin in config["plugins"] if "mkdocstrings" in plugin)
    python = mkdocstrings["handlers"]["python"]
    python["paths"] = [str(ROOT), str(ROOT / ".ci/typings")]
    python["options"]["extensions"] = [str(ROOT / "docs/site/doctests.py")]
    (work / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    named = list(_named(config["nav"]))
    if orphans := sorted({*origins, *(path for path, _ in reference.values())} - {path for _, path in named}):
        raise Refused(f"pages that docs/site/mkdocs.yml does not name: {', '.join(orphans)}")
    call = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(work / "mkdocs.yml")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=work)
    if done.returncode or not (site / "index.html").exists():
        found = re.sub(r"\x1b\[[\d;]*m", "", done.stderr).partition("Traceback")[0]
        raise Refused(f"zensical ended with {done.returncode}\n{found}")
    for path in (work / "pages").rglob("*.md"):  # for readers that want no HTML
        copy = site / path.relative_to(work / "pages")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    _write(site / "llms.txt", "\n".join(_llms(config, named, work / "pages")) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _named(entries: list[Any], section: str = "") -> Iterator[tuple[str, str]]:
    """The pages of the navigation: section and path."""
    for entry in entries:
        if isinstance(entry, str):
            yield section, entry
            continue
        for title, below in entry.items():
            if isinstance(below, list):
                yield from _named(below, title)
            else:
                yield section, below


def _llms(config: dict[str, Any], named: list[tuple[str, str]], pages: Path) -> Iterator[str]:
    """llms.txt: the pages with their first sentences, for language models. See llmstxt.org."""
    yield f"# {config['site_name']}\n\n> {config['site_description']}"
    last = None
    for section, path in named:
        if section != last and section:
            yield f"\n## {section}\n"
        last = section
        text = (pages / path).read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        body = re.sub(r"^#.*$", "", text, flags=re.MULTILINE).strip()
        first = re.split(r"(?<=[.:])\s", " ".join(body.split("\n\n")[0].split()))[0]
        about = f": {first}" if first and not first.startswith(("|", ":::", "`", "<")) else ""
        yield f"- [{title[1] if title else path}]({path}){about}"


# --- code as pages ---


def code_page(path: Path) -> str:
    """The page of a notebook with its recorded outputs, or of a Python file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        about = (ast.get_docstring(ast.parse(text)) or "").replace("``", "`").split("\n\n")[0]
        return f"# The method in one file: {path.name}\n\n{about}\n\n```python\n{text}```\n"
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            html, plain = ("".join(shown.get(kind, "")) for kind in ("text/html", "text/plain"))
            parts.append(f'<div class="output">{html}</div>' if html else f"```text\n{plain.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# --- links ---


def site_links(markdown: str, origin: str, here: str) -> str:
    """Links of ``origin``, a path in the repository, as the page ``here`` of the site has them. A link to a file that
    the site does not have, such as source code, becomes its text; one to nothing stays, and the build refuses it."""

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path in MOVED:
            path = MOVED[path]
        elif path.startswith("docs/"):
            path = re.sub(r"^(tutorials/.+)\.(ipynb|py)$", r"\1.md", path.removeprefix("docs/"))
        elif (ROOT / path).exists():
            return text
        else:
            return match[0]
        return f"[{text}]({posixpath.relpath(path, posixpath.dirname(here) or '.')}{anchor})"

    link = r"(?<!!)\[(?P<text>(?:[^\[\]]|!?\[[^\]]*\]\S*?)+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    # fenced blocks stay as they are
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(link, replace, part) for part in parts)


# --- formulas ---


def with_formulas(markdown: str) -> str:
    """``$x$`` in a line and fences named math, as GitHub has them, as MathML. Code stays as it is."""
    code = r"(^```.*?^```|^    .*?$|`[^`\n]+`)"
    fence = re.compile(r"^```math\n(.*?)^```", re.DOTALL | re.MULTILINE)
    markdown = fence.sub(lambda match: f"<div>{_mathml(match[1], 'block')}</div>", markdown)
    inline = r"(?<![\\\w$])\$(?![\s$])([^$\n]+?)(?<![\s\\])\$(?![\w$])"
    parts = re.split(code, markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [re.sub(inline, lambda match: _mathml(match[1], "inline"), part) for part in parts[::2]]
    return "".join(parts)


def _mathml(latex: str, display: str) -> str:
    html = convert(" ".join(latex.split()), display=display)
    if "\\" in html:
        raise Refused(f"no MathML for this formula, or for a part of it: {latex}")
    return html.replace("*", "&#42;").replace("_", "&#95;")  # not Markdown's


# --- the reference ---


def reference_pages() -> dict[str, tuple[str, str]]:
    """The generated pages by title: path and Markdown. Settings, commands, the public names, and each package."""
    pages = {
        "Settings": ("reference/settings.md", settings_page()),
        "Commands": ("reference/commands.md", commands_page()),
        "Public names": ("reference/names.md", names_page()),
    }
    rooms: dict[str, list[str]] = {}
    for name in modules(ROOT):
        rooms.setdefault(_room(name), []).append(name)
    for room, names in sorted(rooms.items()):
        text = f"# {room}\n\n" + "\n\n".join(_shown(name) for name in names) + "\n"
        pages[room] = (f"reference/{room}.md", text)
    return pages


def _shown(module: str) -> str:
    """A module; where its members are on another page, as those of the settings and of ``__all__``, without them."""
    elsewhere = module in (*WITH_NAMES, "sorl_train.config.settings", "sorl_train.config.run_settings")
    return f"::: {module}" + ("\n    options:\n      members: false" if elsewhere else "")


def modules(root: Path) -> list[str]:
    """Every public module as it is imported, without the stand-ins that only Ray's workers load on a CPU."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if not any(part.startswith("_") or part in ("cpu_mode", "without_flash_attn") for part in parts):
                found.append(".".join((package, *parts)))
    return found


def _room(module: str) -> str:
    package, *parts = module.split(".")
    folder = ROOT / PACKAGES[package] / "/".join(parts[:1])
    return ".".join((package, *parts[:1])) if parts and folder.is_dir() else package


def undocumented(root: Path) -> list[str]:
    """The public modules, classes and functions below ``root`` that have no docstring."""
    loader = griffe.GriffeLoader(search_paths=[root, root / ".ci/typings"])
    packages = {package: loader.load(package) for package in PACKAGES}
    missing = []
    for name in modules(root):
        package, *rest = name.split(".")
        module = functools.reduce(lambda item, part: item.members[part], rest, packages[package])
        missing += [item.path for item in _with_members(module) if item.docstring is None]
    # an empty __init__.py has nothing to say
    return sorted(set(missing) - {name for name in missing if _is_empty(root, name)})


def _is_empty(root: Path, name: str) -> bool:
    package, *rest = name.split(".")
    init = root / PACKAGES[package] / "/".join(rest) / "__init__.py"
    return init.exists() and not init.read_text(encoding="utf-8").strip()


def _with_members(item: Any) -> Iterator[Any]:
    yield item
    for name, member in item.members.items():
        if name.startswith("_") or member.is_alias or member.is_module or item.is_class:
            continue
        if member.is_class or member.is_function:
            yield from _with_members(member)


def names_page() -> str:
    """What the packages offer by name, with the first sentence of each docstring."""
    lines = [
        "# Public names",
        "",
        "What `import` offers by name. Each name leads to its place in its module.",
        "",
    ]
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / ".ci/typings"])
    loader.load("sorl_env")
    loader.resolve_aliases()
    for package in WITH_NAMES:
        lines += [f"## {package}", "", "| name | what it is |", "|---|---|"]
        for name in importlib.import_module(package).__all__:
            item = loader.modules_collection[f"{package}.{name}"].final_target
            if item.docstring is None and not item.is_attribute:
                raise Refused(f"{package}.{name} has no docstring")
            about = (
                " ".join(item.docstring.value.split("\n\n")[0].split()).replace("|", "\\|")
                if item.docstring
                else ""
            )
            link = f"[`{name}`][{item.path}]" if item.docstring else f"`{name}`"
            lines.append(f"| {link} | {about} |")
        lines.append("")
    return "\n".join(lines)


def settings_page() -> str:
    """Every setting of a run: default, bounds, the paper's value and its text."""
    defaults, about = flatten(TrainConfig()), sections()
    lines = [
        "# Settings",
        "",
        "Every setting of `sorl-train`, made from the settings themselves. A config file has them nested;",
    ]
    lines += [
        "the command line names them with dots, as in `--update.trust_kl 0.01`. The default is the value without any"
    ]
    lines += ["config; `sorl-train --config NAME --help all` shows the values of a config.", ""]
    section = None
    for field in fields():
        own = field.name.rpartition(".")[0].partition(".")[0] or "general"
        if own != section:
            section = own
            lines += [f"## {section}", "", *([about[section], ""] if section in about else [])]
        paper = re.search(r" ?Paper: (.+?)\.(?= |$)", field.help)
        text = field.help.replace(paper[0], "") if paper else field.help
        facts = [f"default `{as_text(defaults[field.name])}`"]
        if field.choices:
            facts.append("one of " + ", ".join(f"`{choice}`" for choice in field.choices))
        if limits := _bounds(field.name):
            facts.append(f"bounds {limits}")
        if paper:
            facts.append(f"paper {paper[1]}")
        if field.resumable:
            facts.append("may change when a run is resumed")
        lines += [
            f"### `{field.name}` {{ #{field.name} }}",
            "",
            f"{text}",
            "",
            f"*{field.metavar.lower()}* · " + " · ".join(facts),
            "",
        ]
    return "\n".join(lines)


def _bounds(name: str) -> str:
    cls: Any = TrainConfig
    *path, leaf = name.split(".")
    for part in path:
        cls = type(cls.__dataclass_fields__[part].default)
    info = cls.__pydantic_fields__[leaf]
    found = [*info.metadata, *_metadata(info.annotation)]
    return ", ".join(
        f"{sign} {getattr(one, key)}" for kind, key, sign in BOUNDS for one in found if isinstance(one, kind)
    )


def _metadata(hint: Any) -> Iterator[Any]:
    yield from getattr(hint, "__metadata__", ())
    for inner in getattr(hint, "__args__", ()):
        yield from _metadata(inner)


def commands_page() -> str:
    """Every command with its own help."""
    lines = [
        "# Commands",
        "",
        "Every command with what its `--help` prints. `sorl-train` has its settings in [Settings](settings.md).",
        "",
    ]
    for script in sorted(importlib.metadata.entry_points(group="console_scripts"), key=lambda one: one.name):
        if not script.name.startswith("sorl-"):
            continue
        text = _help(script, [])
        lines += [f"## {script.name}", "", "```text", text, "```", ""]
        subcommands = re.search(r"\{([a-z_,-]+)\} \.\.\.", text)
        for name in subcommands[1].split(",") if subcommands else ():
            lines += [f"### {script.name} {name}", "", "```text", _help(script, [name]), "```", ""]
    return "\n".join(lines)


def _help(script: importlib.metadata.EntryPoint, arguments: list[str]) -> str:
    out = io.StringIO()
    call = [script.name, *arguments, "--help"]
    with (
        mock.patch.object(sys, "argv", call),
        mock.patch.dict(os.environ, COLUMNS="88", NO_COLOR="1"),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        script.load()()
    if not (text := out.getvalue().strip()):
        raise Refused(f"{' '.join(call)} printed nothing")
    return text


if __name__ == "__main__":
    main()
