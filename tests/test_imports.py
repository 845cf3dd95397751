"""Which imports are lazy, what a fresh interpreter loads, and that the import contracts of pyproject see what is wrong.

The contracts themselves are checked by ``make lint``.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sorl_env": "sorl_env", "sorl_tasks": "tasks", "sorl_tools": "tools", "sorl_train": "sorl_train"}
HEAVY = set("datasets faiss pandas peft pyarrow ray sentence_transformers torch transformers vllm".split())


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
        i
        for i in of("sorl_env")
        if not i.lazy and i.top not in {"sorl_env", "gymnasium", "numpy", "httpx", "websockets"}
    }
    assert not eager
    never = {"torch", "ray", "transformers", "vllm", "sorl_train"}
    found = {i for i in of("sorl_env") if i.top in never}
    # a user who names a tokenizer to sorl-check-task has the package that loads it
    assert {(i.importer, i.module, i.lazy) for i in found} <= {
        ("sorl_env.commands.check_task", "transformers", True)
    }


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    light = {"sorl_env", "sorl_tasks", "sorl_tools", "numpy"}
    assert not {i for i in of("sorl_tasks") if not i.lazy and i.top not in light}
    assert not {i for i in of("sorl_tasks") if i.top in HEAVY}
    assert not {i for i in of("sorl_tools") if not i.lazy and i.top in HEAVY}


# They run inside OpenRLHF's own processes and nowhere else.
WORKERS = {
    f"sorl_train.openrlhf.{name}"
    for name in ("agent", "train_step", "trainers", "worker_watchdog", "workers")
}


def test_training_imports_distributed_engines_lazily() -> None:
    eager = {i for i in of("sorl_train") if not i.lazy and i.importer not in WORKERS}
    assert not {i for i in eager if i.top in {"ray", "vllm", "deepspeed", "openrlhf"} or i.module in WORKERS}


# What is put behind the last line of a module, and the import that the contracts of pyproject must then name.
PLANTED = {
    "sorl_train/losses/segments.py": ("from sorl_train.learner import batch", "sorl_train.learner.batch"),
    "sorl_train/run/folder.py": ("def planted():\n    import sorl_train.engine", "sorl_train.engine"),
    "sorl_train/learner/batch.py": (
        "def planted():\n    import sorl_train.rollout.jobs",
        "sorl_train.rollout.jobs",
    ),
    "sorl_env/envs/step.py": ("if TYPE_CHECKING:\n    from sorl_tools import corpus", "sorl_tools.corpus"),
    "sorl_tools/corpus.py": (
        "def planted():\n    from sorl_tools.index import manifest",
        "sorl_tools.index.index",
    ),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources under the names they are installed as, with the contracts."""
    folder = tmp_path_factory.mktemp("sources")
    for package, source in FOLDERS.items():
        shutil.copytree(ROOT / source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    return subprocess.run(
        [*command, "--no-logo", "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_contracts_see_upward_imports(copied: Path) -> None:
    for module, (line, _) in PLANTED.items():
        with (copied / module).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{line}\n")
    checked = lint_imports(copied)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    for module, (_, target) in PLANTED.items():
        name = module.removesuffix(".py").replace("/", ".")
        assert f"{name} -> {target}" in checked.stdout or f"{name} is not allowed" in checked.stdout, module


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sorl_env", HEAVY | {"bm25s", "sorl_tasks", "sorl_tools", "sorl_train", "yaml", "rich"}),
        ("sorl_train.losses.policy", HEAVY - {"torch"} | {"sorl_env"}),
        ("sorl_train.losses.advantages", HEAVY - {"torch"} | {"sorl_env"}),
        ("sorl_train.cli", HEAVY),
        ("sorl_env.commands.check_task", HEAVY),
        ("sorl_env.commands.play", HEAVY),
    ],
)
def test_a_fresh_interpreter_loads_nothing_heavy(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert not absent & set(loaded.stdout.split())
