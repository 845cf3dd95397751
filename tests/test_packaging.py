"""The distribution: packages are found from any folder, and a wheel works alone, offline, in another environment."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sorl_env": "sorl_env", "sorl_tasks": "tasks", "sorl_tools": "tools", "sorl_train": "sorl_train"}
IDS = ("sorl/NQ-v0", "sorl/HotpotQA-v0", "sorl/AlphaMed19K-v0", "sorl/MiniHop-v0")
COMMANDS = tuple(
    f"sorl-{name}"
    for name in "ask check-task data doctor eval index lab play push report serve train view".split()
)

PLAY = """
import socket, sys, warnings
def refuse(*args): raise OSError("this test is offline")
socket.socket.connect = socket.getaddrinfo = refuse

import gymnasium as gym, sorl_env
for env_id in sys.argv[1:]:
    env = gym.make(env_id)
    prompt, info = env.reset(seed=0)
    assert prompt.strip(), prompt
    reply, reward, terminated, truncated, info = env.step("<think>look</think><search>who</search>")
    assert "<information>" in reply and not terminated and not truncated, (reply, info)
    reply, reward, terminated, truncated, info = env.step("<think>guess</think><answer>nobody</answer>")
    assert terminated and reward == 0, (reward, info)
heavy = {"torch", "transformers", "datasets", "pyarrow", "sorl_train"} & set(sys.modules)
assert not heavy, heavy
print(sorl_env.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that has to succeed, in an environment that does not point at this checkout."""
    import os

    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive made from a copy, so that nothing left by an earlier build gets in."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*FOLDERS.values(), "configs", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, out, cwd=copy)
    (built,) = out.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the source archive alone."""
    out = tmp_path_factory.mktemp("wheel")
    options = "-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir".split()
    run(sys.executable, *options, out, sdist, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def link_dependencies(site_packages: Path) -> None:
    """Link what the installed wheel requires, and what that requires, from this environment: no more than declared."""
    (info,) = site_packages.glob("sorl-*.dist-info")
    wanted, seen = list(importlib.metadata.Distribution.at(info).requires or ()), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in seen or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        seen.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        wanted += distribution.requires or ()
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.mark.slow
def test_a_wheel_holds_all_of_the_packages_and_nothing_else(wheel: Path, sdist: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {package: ROOT / folder for package, folder in FOLDERS.items()}
    sources["sorl_train/configs"] = ROOT / "configs"
    files = {
        f"{package}/{path.relative_to(source).as_posix()}"
        for package, source in sources.items()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == files
    assert any(name.startswith("sorl_tasks/samples/") for name in held)
    assert "sorl_train/configs/quickstart.yaml" in held
    assert {f"{package}/py.typed" for package in FOLDERS} <= held

    with tarfile.open(sdist) as archive:
        folders = {tuple(Path(name).parts[1:2]) for name in archive.getnames()} - {()}
    more = (
        "CHANGELOG.md LICENSE MANIFEST.in PKG-INFO README.md pyproject.toml setup.cfg sorl.egg-info".split()
    )
    assert {name for (name,) in folders} == {*FOLDERS.values(), "configs", *more}


@pytest.mark.slow
def test_a_wheel_works_offline_with_its_declared_dependencies(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    install = "install --quiet --no-deps --no-index".split()
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=tmp_path)
    (site_packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    link_dependencies(site_packages)
    where = run(python, "-I", "-W", "error", "-c", PLAY, *IDS, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    for command in COMMANDS:
        assert (python.parent / command).is_file()
    run(python.parent / "sorl-check-task", "minihop", cwd=tmp_path)


def test_a_message_names_extras_that_exist_and_no_package_index() -> None:
    extras = set(importlib.metadata.metadata("sorl").get_all("Provides-Extra") or ())
    named = set()
    for file in (path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")):
        source = file.read_text()
        assert "'sorl[" not in source and '"sorl[' not in source, f"{file}: call install_command"
        named |= {
            name for found in re.findall(r"install_command\('([^']+)'\)", source) for name in found.split(",")
        }
    assert {"train", "search", "mcp", "openrlhf"} <= named <= extras


def test_packages_import_from_any_folder(tmp_path: Path) -> None:
    code = (
        f"import {', '.join(FOLDERS)}; from sorl_train.config.files import packaged_configs as f; print(*f())"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert "quickstart" in loaded.stdout.split()
