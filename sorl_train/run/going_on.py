"""What a run says about going on: when it is resumed, and when it has ended before its last step."""

from __future__ import annotations

import shlex

from sorl_train.config.settings import TrainConfig
from sorl_train.run.checkpoint import Whole, best_ahead, set_aside
from sorl_train.run.display import Display
from sorl_train.run.files import free_name
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import append_event


def next_moves(config: TrainConfig, run_dir: RunDir, best_step: int | None) -> str:
    """What to do after a run that ended before its last step: its own settings would lead to the same place again."""
    lower, trust_kl = f"--optim.lr {config.optim.lr / 2:g}", config.update.trust_kl
    if trust_kl is None:
        change = "--update.trust_kl 0.01"
        advice = f"a trust region ({change}), which takes bad steps back, or a lower rate ({lower})"
    else:
        change = lower
        advice = (
            f"a lower rate ({change}), or a limit of the trust region (update.trust_kl) below {trust_kl:g}"
        )
    start = run_dir.checkpoints / "best" / "policy"
    words = ["sorl-train", "--config", run_dir.config, "--model", start, *change.split()]
    command = shlex.join(map(str, [*words, "--run_dir", free_name(run_dir.path)]))
    return f"Go on from the last good policy, that of step {best_step}, with {advice}:\n  {command}"


def tell_state(run_dir: RunDir, display: Display, point: Whole) -> None:
    """Say which damaged checkpoints a resume passed over, to the user and in ``events.jsonl``, and set them aside; say
    that the best policy is of a later step."""
    if ahead := best_ahead(point.path):
        display.message(
            f"checkpoints/best is of step {ahead[0]}, after this checkpoint (success {ahead[1]:.3f}): it stays the "
            "best policy, and the summary names it, unless the resumed run comes to a better one"
        )
    for reason in point.passed_over:
        append_event(run_dir, {"step": point.step, "kind": "damaged_checkpoint", "reason": reason})
        display.message(f"{reason}; going on from step {point.step}")
    set_aside(point.damaged)
