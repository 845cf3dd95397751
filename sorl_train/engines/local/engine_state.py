"""What a checkpoint holds of the local engine: everything that a run needs to go on as if it had not been stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import read_jsonl, write_jsonl
from sorl_train.batch import Batch
from sorl_train.checkpoint import load_optimizers, read_json, save_optimizers, write_json
from sorl_train.log_lengths import log_lengths
from sorl_train.models import save_policy
from sorl_train.policy_card import write_policy_card
from sorl_train.summary import Summary

if TYPE_CHECKING:
    from sorl_train.engines.local.engine import LocalEngine


@dataclass(frozen=True)
class Collected:
    """One step's trajectories and the tensors of those not excluded (None if there are none)."""

    trajectories: list[Trajectory]
    batch: Batch | None


def write_policy(engine: LocalEngine, folder: Path, *, best: bool) -> None:
    """The policy's weights and tokenizer as ``folder/policy``, with its card."""
    policy, is_sft = folder / "policy", engine.config.stage == "sft"
    save_policy(engine.policy, engine.tokenizer, policy)
    step = engine.config.sft.steps if is_sft else engine.step
    task = engine.env.task
    write_policy_card(policy, engine.run_dir, engine.config, task, step, best=best and not is_sft)


def write_state(engine: LocalEngine, folder: Path) -> None:
    """All of the engine that the next step depends on, and how long the run's metrics files are."""
    write_policy(engine, folder, best=False)
    if engine.critic_update is not None:
        engine.critic_update.critic.save(folder / "critic")  # type: ignore[operator]
    save_optimizers(folder / "optimizer.safetensors", engine.optimizers)
    for number, item in enumerate(engine.waiting):
        write_jsonl(folder / f"stale_{number}.jsonl", item.trajectories)
        if item.batch is not None:  # scored with weights that are gone by now
            save_file(_scores(item.batch), folder / f"stale_{number}.safetensors")
    state: dict[str, Any] = {"step": engine.step, "waiting": len(engine.waiting), "lr_scale": engine.lr_scale}
    state |= {"lost_steps": engine.lost_steps, "summary": engine.summary.state()}
    write_json(folder / "state.json", state | {"logs": log_lengths(engine.run_dir)})


def load_state(engine: LocalEngine, folder: Path) -> None:
    """Inverse of ``write_state``, for an engine whose models were loaded from the same checkpoint."""
    load_optimizers(folder / "optimizer.safetensors", engine.optimizers)
    state = read_json(folder / "state.json")
    engine.step, engine.lr_scale = state["step"], state["lr_scale"]
    engine.lost_steps = state["lost_steps"]
    engine.summary = Summary.from_state(state["summary"])
    for number in range(state["waiting"]):
        trajectories = list(read_jsonl(folder / f"stale_{number}.jsonl"))
        usable = [t for t in trajectories if not t.excluded]
        scores = load_file(folder / f"stale_{number}.safetensors") if usable else {}
        batch = engine.collate(usable).with_fields(**scores) if usable else None
        engine.waiting.append(Collected(trajectories, batch))


def _scores(batch: Batch) -> dict[str, Tensor]:
    """What ``LocalEngine.score`` filled in."""
    names = ("old_log_probs", "ref_log_probs", "values")
    return {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
