"""The import rules of CONTRIBUTING.md, read off the source and off a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sorl_env": "sorl_env", "sorl_tasks": "tasks", "sorl_tools": "tools", "sorl_train": "sorl_train"}
HEAVY = {
    "datasets",
    "faiss",
    "pandas",
    "peft",
    "pyarrow",
    "ray",
    "sentence_transformers",
    "torch",
    "transformers",
    "vllm",
}


class Import(NamedTuple):
    """One imported module of a source file; lazy: inside a function, or only for the type checker."""

    importer: str
    module: str
    lazy: bool
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def modules() -> dict[str, Path]:
    """Module name to file, of all four packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def names(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module, "imports are absolute here"
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in known else node.module for name in inner]


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, lazy
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield from walk(child, lazy or inside)


def imports_of(source: str, importer: str, known: dict[str, Path]) -> list[Import]:
    return [
        Import(importer, name, lazy, node.lineno)
        for node, lazy in walk(ast.parse(source))
        for name in names(node, known)
        if name.partition(".")[0] not in sys.stdlib_module_names
    ]


def all_imports() -> list[Import]:
    known = modules()
    return [
        i for name, path in known.items() for i in imports_of(path.read_text(encoding="utf-8"), name, known)
    ]


def of(package: str) -> list[Import]:
    found = [i for i in all_imports() if i.importer.partition(".")[0] == package]
    assert found, f"no imports found in {package}: is the folder where FOLDERS says?"
    return found


def test_the_reader_tells_lazy_imports_from_eager_ones() -> None:
    source = "import a.b\nif TYPE_CHECKING:\n  from c import d\ndef f():\n  import e\nclass G:\n  import h\nimport os"
    read = [(i.module, i.lazy, i.line) for i in imports_of(source, "m", {})]
    assert read == [("a.b", False, 1), ("c", True, 3), ("e", True, 5), ("h", False, 7)]


def test_environments_import_nothing_heavy_and_nothing_above_them() -> None:
    eager = {
        i for i in of("sorl_env") if not i.lazy and i.top not in {"sorl_env", "gymnasium", "numpy", "httpx"}
    }
    assert not eager
    never = {"torch", "ray", "transformers", "vllm", "sorl_train"}
    found = {i for i in of("sorl_env") if i.top in never}
    # a user who names a tokenizer to sorl-check-task has the package that loads it
    assert {(i.importer, i.module, i.lazy) for i in found} <= {("sorl_env.check_task", "transformers", True)}


def test_tasks_import_environments_and_tools_only() -> None:
    found = of("sorl_tasks")
    assert not {
        i for i in found if not i.lazy and i.top not in {"sorl_env", "sorl_tasks", "sorl_tools", "numpy"}
    }
    assert not {i for i in found if i.top in HEAVY | {"sorl_train"}}


def test_tools_do_not_know_tasks_or_training() -> None:
    assert not {i for i in of("sorl_tools") if i.top in {"sorl_tasks", "sorl_train"}}
    assert not {i for i in of("sorl_tools") if not i.lazy and i.top in HEAVY}


def test_losses_and_advantages_import_torch_alone() -> None:
    found, pure = (
        of("sorl_train"),
        {"sorl_train.losses.policy", "sorl_train.losses.advantages", "sorl_train.losses.log_probs"},
    )
    assert {i.importer for i in found} >= pure
    while more := {i.module for i in found if i.importer in pure and i.top == "sorl_train"} - pure:
        pure |= more
    assert not {i for i in found if i.importer in pure and i.top not in {"torch", "sorl_train"}}


# They run inside OpenRLHF's own processes and nowhere else.
WORKERS = {f"sorl_train.openrlhf.{name}" for name in ("agent", "train_step", "trainers", "watch", "workers")}


def test_training_imports_distributed_engines_lazily() -> None:
    eager = {i for i in of("sorl_train") if not i.lazy and i.importer not in WORKERS}
    assert not {i for i in eager if i.top in {"ray", "vllm", "deepspeed", "openrlhf"} or i.module in WORKERS}


def test_no_import_cycle() -> None:
    known = modules()
    graph: dict[str, set[str]] = {name: set() for name in known}
    for found in all_imports():
        if not found.lazy and found.module in known:
            graph[found.importer].add(found.module)
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in finished:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sorl_env", HEAVY | {"bm25s", "sorl_tasks", "sorl_tools", "sorl_train", "yaml", "rich"}),
        ("sorl_train.losses.policy", HEAVY - {"torch"} | {"sorl_env"}),
        ("sorl_train.losses.advantages", HEAVY - {"torch"} | {"sorl_env"}),
        ("sorl_train.cli", HEAVY),
        ("sorl_env.check_task", HEAVY),
        ("sorl_env.play", HEAVY),
    ],
)
def test_a_fresh_interpreter_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert not absent & set(loaded.stdout.split())
