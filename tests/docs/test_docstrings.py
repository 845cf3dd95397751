"""Public names of sorl_env and sorl_train have docstrings, which give the shapes of tensors and the units of times.

A method without one has that of a base class, or of a protocol that the docstring of its class names in ``marks``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .blocks import REPOSITORY

_DIM = r"(?:[A-Z]\w{0,2}|[bndw]|heads|dim|width|\d+|\.\.)(?: ?[-+*] ?\w+)?"
# (B, T), (N,), [B, T], [N]; or no shape, because there is none or any will do
SHAPE = re.compile(
    rf"[(\[]{_DIM}(?:, {_DIM})+,?[)\]]|\({_DIM},\)|\[{_DIM}\]|\bscalar|\b(?:any|same|own) shape|\bshaped\b"
)
TENSOR = re.compile(r"\b(?:Tensor|ndarray|NDArray)\b")
UNIT = re.compile(r"\b(?:seconds?|s|milliseconds|minutes|hours)\b", re.IGNORECASE)
TIME = re.compile(r"(?:_s|seconds|timeout)$")


@dataclass
class Name:
    """A public class, function or method, with the docstring that a reader finds for it."""

    place: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    doc: str

    def faults(self) -> Iterator[str]:
        if not self.doc:
            yield f"{self.place}: no docstring"
        if isinstance(self.node, ast.ClassDef):
            return
        arguments = [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]
        hints = [
            ast.unparse(hint) for hint in [self.node.returns, *(a.annotation for a in arguments)] if hint
        ]
        if any(TENSOR.search(hint) for hint in hints) and not SHAPE.search(self.doc):
            yield f"{self.place}: no shape of its tensors, as (B, T)"
        times = [a.arg for a in arguments if TIME.search(a.arg)]
        if TIME.search(self.node.name):
            times.append(self.node.name)
        if times and not UNIT.search(self.doc):
            yield f"{self.place}: no unit of {', '.join(times)}"


def public_names(sources: dict[str, str]) -> list[Name]:
    """Those of all files, given as path: text."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    classes = {n.name: n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)}
    found: list[Name] = []

    def inherited(owner: ast.ClassDef, name: str) -> str:
        named = re.findall(r"``(\w+)``", ast.get_docstring(owner) or "")
        for base in [*(ast.unparse(base).split("[")[0].split(".")[-1] for base in owner.bases), *named]:
            parent = classes.get(base)
            if parent is None or parent is owner:
                continue
            own = (
                n
                for n in parent.body
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name
            )
            if doc := next((ast.get_docstring(n) for n in own), None) or inherited(parent, name):
                return doc
        return ""

    def visit(path: str, owner: ast.ClassDef | None, body: list[ast.stmt]) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            doc = ast.get_docstring(node) or ""
            if owner is not None and node.name == "__init__":
                doc = f"{ast.get_docstring(owner) or ''} {doc}"
            elif node.name.startswith("_") or any("overload" in ast.unparse(d) for d in node.decorator_list):
                continue
            elif owner is not None and not doc:
                doc = inherited(owner, node.name)
            found.append(Name(f"{path}:{node.lineno} {node.name}", node, doc.strip()))
            if isinstance(node, ast.ClassDef):
                visit(path, node, node.body)

    for path, tree in trees.items():
        visit(path, None, tree.body)
    return found


def test_public_names_say_what_they_are() -> None:
    files = [file for package in ("sorl_env", "sorl_train") for file in (REPOSITORY / package).rglob("*.py")]
    names = public_names(
        {str(f.relative_to(REPOSITORY)): f.read_text(encoding="utf-8") for f in sorted(files)}
    )
    assert len(names) > 900
    assert [fault for name in names for fault in name.faults()] == []


BASE = '''
class Base:
    """A base."""
    def step(self, rows: Tensor) -> None:
        """Take rows, (B, T)."""
'''


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("def f(): ...", ["no docstring"]),
        ("class A:\n def m(self): ...", ["no docstring", "no docstring"]),
        ('def f(x: torch.Tensor):\n """Of x (see PPO)."""', ["no shape"]),
        ('def f() -> dict[str, np.ndarray]:\n """Arrays."""', ["no shape"]),
        ('class A:\n """Of x."""\n def __init__(self, x: Tensor): ...', ["no shape"]),
        ('def wait(timeout_s: float):\n """Wait."""', ["no unit of timeout_s"]),
        ('def age_seconds():\n """The age."""', ["no unit of age_seconds"]),
        ('def f(x: Tensor):\n """x is (B, T)."""', []),
        ('def f(x: Tensor):\n """x is (N,)."""', []),
        ('def f() -> Tensor:\n """The mean, a scalar."""', []),
        ('def wait(timeout_s: float):\n """Wait that many seconds."""', []),
        ("def _f(x: Tensor): ...", []),
        (BASE + "class B(Base):\n '''Another.'''\n def step(self, rows: Tensor): ...", []),
        (
            BASE + "class B(Base):\n '''Another.'''\n def other(self, rows: Tensor): ...",
            ["no docstring", "no shape"],
        ),
    ],
)
def test_the_check_can_fail(source: str, faults: list[str]) -> None:
    found = [fault for name in public_names({"a.py": source}) for fault in name.faults()]
    assert len(found) == len(faults)
    assert all(part in fault for part, fault in zip(faults, found, strict=True)), found
