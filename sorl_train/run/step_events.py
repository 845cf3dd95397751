"""What a user has to know of a step or of an early end, in sentences for ``events.jsonl`` and the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from sorl_train.config.settings import TrainConfig
from sorl_train.run.files import free_name
from sorl_train.run.folder import RunDir

IN_VAIN = "in_vain"


def step_events(metrics: Mapping[str, float], rounds: int) -> Iterator[tuple[str, str, bool]]:
    """What happened in a step: the kind of an event, its reason, and whether it is told on the terminal, too.

    Args:
        rounds: further rounds that dynamic sampling may draw.
    """
    if moves := metrics.get("loss/trust_moves_back"):
        times = "once" if moves == 1 else f"{moves:g} times"
        most, kl, scale = (metrics[f"loss/trust_{name}"] for name in ("kl_max", "kl", "scale"))
        yield (
            "moved_back",
            f"the KL reached {most:.2g}: weights were moved back {times}, and the step ends at {kl:.2g}; learning "
            f"rates are times {scale:.2g} from here",
            False,
        )
    if missing := metrics.get("rollout/dynamic_missing"):
        reason = (
            f"of the batch's groups {missing:g} are missing after {metrics['rollout/dynamic_drawn']:g} rollouts "
            f"(rollout.dynamic_sampling {rounds}): the others drawn have equal rewards, or were excluded"
        )
        if kept := metrics["rollout/dynamic_kept"]:
            yield "dynamic_sampling", f"{reason}; the step was trained on {kept:g} rollouts", False
        else:
            yield "no_step", f"{reason}; nothing was trained on", True
    if reason := in_vain(metrics):
        yield IN_VAIN, reason, True
    if metrics.get("rollout/overlong_filtered_frac") == 1.0:
        yield (
            "no_step",
            "every trajectory was filtered by overlong.exclude, nothing was trained on",
            True,
        )


def in_vain(metrics: Mapping[str, float]) -> str:
    """What came of a batch in which no trajectory succeeded and no token had an advantage; empty for any other.

    A term for the KL to the reference or for the entropy takes steps of its own, unless a trust region or
    ``update.skip_without_signal`` leaves out what has no advantages.
    """
    if metrics.get("rollout/success") != 0 or metrics.get("loss/signal_frac") != 0:
        return ""
    if not metrics["loss/effective_lr"]:
        outcome = "no step was taken"
    elif metrics["loss/grad_norm"]:
        outcome = "steps followed the KL and entropy terms alone"
    else:
        outcome = "no step had a gradient"
    return (
        f"no trajectory succeeded, and none was better than another, so {outcome}: start with --stage sft, or with an "
        "easier task"
    )


def next_moves(config: TrainConfig, run_dir: RunDir, best_step: int | None) -> str:
    """What to do after a run that ended before its last step: its own settings would lead to the same place again."""
    change, trust_kl = f"--optim.lr {config.optim.lr / 2:g}", config.update.trust_kl
    if trust_kl is None:
        lower, change = change, "--update.trust_kl 0.01"
        advice = f"a trust region ({change}), which takes bad steps back, or a lower rate ({lower})"
    else:
        advice = (
            f"a lower rate ({change}), or a limit of the trust region (update.trust_kl) below {trust_kl:g}"
        )
    start = run_dir.checkpoints / "best" / "policy"
    words = ["sorl-train", "--config", run_dir.config, "--model", start, *change.split()]
    command = shlex.join(map(str, [*words, "--run_dir", free_name(run_dir.path)]))
    return f"Go on from the last good policy, that of step {best_step}, with {advice}:\n  {command}"
