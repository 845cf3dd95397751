"""The figures of a run: those of ``summary.json``, how stable it was, and what is to be said of a step."""

from __future__ import annotations

import itertools
import math
import resource
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.run.files import free_name, read_jsonl
from sorl_train.run.folder import RunDir

COLLAPSED = 0.5  # a policy with less than this share of the best success has collapsed


@dataclass
class Summary:
    """Final and best figures. They follow from the logged metrics: a resumed run observes those of its log again.

    ``evaluations_below`` counts the newest evaluations in a row below ``COLLAPSED`` times the best. ``saved`` is step
    and success of the policy in ``checkpoints/best`` at a resume, possibly of a later step than the checkpoint: no
    worse policy takes its place.
    """

    cold_start_success: float | None = None
    final_success: float | None = None
    best_success: float | None = None
    best_step: int | None = None
    search_off_success: float | None = None
    evaluations_below: int = 0
    saved: tuple[int, float] | None = None
    earlier_s: float = 0.0  # before the last resume
    started: float = field(default_factory=time.monotonic)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Take in the metrics of a step; True if its policy is to be kept as the best so far."""
        self.search_off_success = metrics.get("eval/search_off_success", self.search_off_success)
        success = metrics.get("eval/success")
        if success is None:
            return False
        self.final_success = success
        if step == 0:
            self.cold_start_success = success
        if self.best_success is None or success > self.best_success:
            self.evaluations_below = 0
            self.best_success, self.best_step = success, step
            return self.saved is None or success >= self.saved[1]
        below = success < COLLAPSED * self.best_success
        self.evaluations_below = self.evaluations_below + 1 if below else 0
        return False

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken, over all resumes."""
        return self.earlier_s + time.monotonic() - self.started

    def out_of_patience(self) -> str:
        """A message that says why ``eval.patience`` ended the run."""
        return (
            f"ended early (eval.patience): success is {self.final_success:.3f}, and for {self.evaluations_below} "
            f"evaluations below half of the best, {self.best_success:.3f} at step {self.best_step}, whose policy is "
            "kept in checkpoints/best"
        )

    def figures(self) -> dict[str, Any]:
        """The figures for ``summary.json``, whose best policy is the one in ``checkpoints/best``.

        ``peak_rss_mb`` is the most memory, in MiB, that the process took since the last resume.
        """
        step, best = self.best_step, self.best_success
        if self.saved is not None and (best is None or best < self.saved[1]):
            step, best = self.saved
        return {
            "cold_start_success": self.cold_start_success,
            "final_success": self.final_success,
            "best_success": best,
            "best_step": step,
            "search_off_success": self.search_off_success,
            "wall_s": round(self.wall_s, 1),
            "peak_rss_mb": round(peak_rss() / 2**20, 1),
        }


def peak_rss() -> int:
    """The most memory, in bytes, that this process has taken. On Linux ``getrusage`` also counts what the process took
    that started it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux; bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


WINDOW = 3  # evaluations that ``kept_mean`` averages
LEAST_GAIN = 0.1  # a run that ends less than this above its start has not learned
SMALLEST_PEAK = 0.05  # below it a run has nothing that it could keep


def success_curve(run_dir: Path) -> list[tuple[int, float]]:
    """Step and success of each evaluation that was not lost to excluded trajectories."""
    lines = read_jsonl(RunDir(run_dir).metrics)
    return [(line["step"], success) for line in lines if (success := line.get("eval/success")) is not None]


def learned(success: Sequence[float]) -> bool:
    """Whether the last success is at least ``LEAST_GAIN`` above that of the cold start, which comes first.

    A run that never moved has kept all of nothing: its final / peak is 1. So it must not count as one that held.
    """
    return success[-1] >= success[0] + LEAST_GAIN


def step_seconds(run_dir: Path) -> float:
    """The median time of a training step in seconds; NaN if the run kept no timings."""
    lines = read_jsonl(RunDir(run_dir).timings)
    times = [line["time/step_s"] for line in lines if line.get("time/step_s") is not None]
    return statistics.median(times) if times else math.nan


def measure(run_dir: Path) -> dict[str, float]:
    """The figures of a finished run that tell how stable it was; NaN where there is none.

    A step's figure that was not finite counts as infinite in ``max_grad_norm``, and is left out of means. Raises
    ``UserError`` if the metrics have no evaluation or no training step.

    Returns:
        peak, final: highest and last greedy success.
        kept: final / peak, 0 if hardly a question was ever solved. As the highest of many noisy evaluations is above
            what the policy can do, it is below 1 even for a run that lost nothing.
        kept_mean: the same of means over ``WINDOW`` evaluations in a row.
        learned: 1 if success ended ``LEAST_GAIN`` above the cold start's, else 0; NaN if that was not evaluated.
        worst_drop: the deepest fall of success from its peak so far.
        collapse_step: the evaluation from which on success stayed below half of its peak.
        max_grad_norm, grad_norm: the highest and the mean gradient norm.
        normalized: share of optimizer steps that the clipping bias scaled.
        mean_rate: mean effective learning rate.
        moves_back: how often the trust region moved weights back; NaN without one.
        scale, least_scale: its scale of the learning rate after the last step, and the smallest.
        clip_frac: mean share of clipped tokens.
    """
    lines = read_jsonl(RunDir(run_dir).metrics)
    evaluated = [line for line in lines if line.get("eval/success") is not None]
    trained = [line for line in lines if "loss/grad_norm" in line]
    if not evaluated or not trained:
        raise UserError(f"{run_dir}: no evaluation or no training step in its metrics")
    steps, success = zip(*((line["step"], line["eval/success"]) for line in evaluated), strict=True)
    peaks = list(itertools.accumulate(success, max))
    peak, final = peaks[-1], success[-1]
    below = [value < COLLAPSED * top for value, top in zip(success, peaks, strict=True)]
    lasting = next((steps[i] for i in range(len(below)) if all(below[i:])), math.nan)

    # means of evaluations in a row; the evaluations themselves if there are not more, as one mean loses nothing
    width = WINDOW if len(success) > WINDOW else 1
    means = [math.fsum(success[i : i + width]) / width for i in range(len(success) - width + 1)]

    def mean(name: str) -> float:
        known = [line[name] for line in trained if line[name] is not None]
        return math.fsum(known) / len(known) if known else math.nan

    scales = [line.get("loss/trust_scale", math.nan) for line in trained]
    return {
        "peak": peak,
        "final": final,
        "kept": _kept(success),
        "kept_mean": _kept(means),
        "learned": float(learned(success)) if steps[0] == 0 else math.nan,
        "worst_drop": max(top - value for value, top in zip(success, peaks, strict=True)),
        "collapse_step": float(lasting),
        "max_grad_norm": max(infinite_if_none(line["loss/grad_norm_max"]) for line in trained),
        "normalized": mean("loss/normalized_frac"),
        "mean_rate": mean("loss/effective_lr"),
        "moves_back": math.fsum(line.get("loss/trust_moves_back", math.nan) for line in trained),
        "scale": scales[-1],
        "least_scale": min(scales),
        "clip_frac": mean("loss/clip_frac"),
        "grad_norm": mean("loss/grad_norm"),
    }


def _kept(curve: Sequence[float]) -> float:
    return curve[-1] / max(curve) if max(curve) >= SMALLEST_PEAK else 0.0


def infinite_if_none(value: float | None) -> float:
    """A logged figure, which is None if it was not finite."""
    return math.inf if value is None else value


def off_policy_words(lines: Sequence[Mapping[str, Any]], *, normalizes: bool, clips: bool) -> str:
    """What clipping, normalization and the trust region did in a run, in one sentence; empty without optimizer steps.

    ``lines`` are those of ``metrics.jsonl``. Figures are means over optimizer steps; ``normalizes`` and ``clips`` say
    whether the algorithm does so at all.
    """
    lines = [line for line in lines if line.get("loss/policy_updates") and line.get("loss/effective_lr") != 0]
    steps = [line["loss/policy_updates"] for line in lines]
    total = sum(steps)
    if not total:
        return ""

    def per_step(name: str) -> float:
        return math.fsum(n * (line.get(name) or 0.0) for n, line in zip(steps, lines, strict=True)) / total

    acted, idle = [], []
    if clips and (clipped := per_step("loss/clip_frac")):
        acted.append(f"{_percent(clipped)} of tokens were clipped")
    elif clips:
        idle.append("no token was clipped")
    if normalizes and (share := per_step("loss/normalized_frac")):
        # a step that is not shortened has the factor 1, so all that the mean lacks to 1 comes from the others
        factor = 1.0 - (1.0 - per_step("loss/normalizer")) / share
        acted.append(f"normalization shortened {_percent(share)} of the steps (mean factor {factor:.2f})")
    elif normalizes:
        idle.append("normalization shortened no step")
    known = [line for line in lines if line.get("loss/trust_scale") is not None]
    if known:
        moves, scale = sum(line["loss/trust_moves_back"] for line in known), known[-1]["loss/trust_scale"]
        ended = f"ended at {scale:.2g} of the learning rate"
        if moves:
            acted.append(f"the trust region moved weights back {_times(moves)} and {ended}")
        elif scale == 1.0:
            idle.append("the trust region moved no weights back")
        else:
            acted.append(f"the trust region moved no weights back and {ended}")
    if not acted and not idle:
        return ""
    over = f"Over {total:,.0f} optimizer steps"
    if acted:
        return f"{over}, {'; '.join(acted + idle)}."
    return f"{over}, {'; '.join(idle)}: the updates stayed close to on-policy."


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def _times(number: float) -> str:
    return "once" if number == 1 else f"{number:g} times"


IN_VAIN = "in_vain"


def step_events(metrics: Mapping[str, float], rounds: int) -> Iterator[tuple[str, str, bool]]:
    """What happened in a step: the kind of an event, its reason, and whether it is told on the terminal, too.
    ``rounds`` are the further ones that dynamic sampling may draw."""
    if moves := metrics.get("loss/trust_moves_back"):
        times = _times(moves)
        most, kl, scale = (metrics[f"loss/trust_{name}"] for name in ("kl_max", "kl", "scale"))
        yield (
            "moved_back",
            f"the KL reached {most:.2g}: weights were moved back {times}, and the step ends at {kl:.2g}; learning "
            f"rates are times {scale:.2g} from here",
            True,
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
        yield "no_step", "every trajectory was filtered by overlong.exclude, nothing was trained on", True


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
        f"no trajectory succeeded, and none was better than another, so {outcome}: start with --stage sft (model=tiny: "
        "with more --sft.steps), or with an easier task"
    )


def next_moves(rate: float, trust_kl: float | None, run_dir: RunDir, best_step: int | None) -> str:
    """What to do after a run, with this learning rate and trust region, that ended before its last step: its own
    settings would lead to the same place again."""
    change = f"--optim.lr {rate / 2:g}"
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
