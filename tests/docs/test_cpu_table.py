"""The table of docs/scaling_out.md names all that a CPU run replaces, its rehearsals, and lines of gpu-check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sorl_env.task import Limits
from sorl_train.config.files import load_config
from sorl_train.openrlhf.flags import openrlhf_flags
from sorl_train.openrlhf.launch import CPU_MODE
from sorl_train.preflight.gpu_lines import LINES
from sorl_train.run.folder import RunDir

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sorl_train"
BRANCH = re.compile(r"device\.type [!=]=|is_cuda|[!=]= \"nccl\"|torch\.cuda\.")
# They describe a machine, plan for one, or measure on one.
OUTSIDE = {
    "dry_run.py", "engine_limits.py", "gpu_lines.py", "manifest.py", "memory.py", "preflight.py", "sitecustomize.py",
}  # fmt: skip


def table() -> list[list[str]]:
    page = (ROOT / "docs/scaling_out.md").read_text()
    section = page.partition("\n## What a CPU cannot show\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) > 8
    return rows[1:]


def test_every_replacement_of_cpu_mode_is_named() -> None:
    """What a hook assigns to the module that it patches, or to a class in it."""
    replaced = set()
    hooks = ast.parse((CPU_MODE / "sitecustomize.py").read_text()).body
    for hook in hooks:
        if isinstance(hook, ast.FunctionDef) and hook.decorator_list:
            module = hook.args.args[0].arg
            for node in ast.walk(hook):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        # of the module, not of what a replacement is called with
                        if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] == module:
                            replaced.add(target.attr)
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                    assert isinstance(node.args[0], ast.Attribute)
                    replaced.add(node.args[0].attr)
    assert len(replaced) > 10
    first = " ".join(row[0] for row in table())
    assert {name for name in replaced if f"`{name}`" not in first} == set()


def test_every_flag_that_a_cpu_run_changes_is_named(tmp_path: Path) -> None:
    flags = []
    for device in ("cpu", "cuda"):
        given = {"hardware.device": device, "data": None, "search.url": "http://127.0.0.1:9/retrieve"}
        config = load_config("paper/nq_so_ppo_8gpu", given)
        flags.append(openrlhf_flags(config, RunDir(tmp_path), "model", Limits(), resume=None))
    changed = {name for name in flags[0] if flags[0][name] != flags[1][name]}
    assert len(changed) > 4
    first = " ".join(row[0] for row in table())
    assert {name for name in changed if f"`{name}`" not in first} == set()


def test_every_file_that_asks_for_the_device_is_named() -> None:
    asking = {path.name for path in PACKAGE.rglob("*.py") if BRANCH.search(path.read_text())} - OUTSIDE
    assert len(asking) > 5
    first = " ".join(row[0] for row in table())
    assert {name for name in asking if f"`{name}`" not in first} == set()


def test_rehearsals_and_lines_exist() -> None:
    for what, _, rehearsal, line in table():
        (path,) = re.findall(r"`([^`]+)`", rehearsal)
        assert (ROOT / "tests/train" / path).is_file(), path
        named = re.findall(r"`([^`]+)`", line)
        assert set(named) <= set(LINES), named
        assert named or line.strip() == "none: takes two GPUs", what
