"""The curves on docs/recipes/smollm2.md, from the metrics that are committed beside it.

python benchmarks/recipe_figures.py                          # writes docs/images/recipe_*.png
python benchmarks/recipe_figures.py --keep RUN_FOLDER NAME   # first takes a run's metrics into docs/recipes/NAME.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
# What the panels show, and what a reader may want to look up.
SUCCESS, SAMPLED, VALID = "eval/success", "rollout/success", "rollout/valid_turn_rate"
TURNS, TURNS_SAMPLED = "eval/num_turns", "rollout/num_turns"
KL, KL_AFTER = "loss/approx_kl", "loss/trust_kl"
KEPT = (
    SUCCESS,
    SAMPLED,
    VALID,
    TURNS,
    TURNS_SAMPLED,
    KL,
    KL_AFTER,
    "loss/trust_scale",
    "loss/trust_moves_back",
    "time/step_s",
)


def kept(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``, of which only ``step`` and ``KEPT`` stay."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [{name: row[name] for name in ("step", *KEPT) if row.get(name) is not None} for row in rows]


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Panels over training steps: success, valid turns, KL, and turns of a trajectory where they were kept."""
    panels: list[Mapping[str, str]] = [
        {SUCCESS: "held-out questions, greedy", SAMPLED: "training questions, sampled"},
        {VALID: "valid turns"},
        {KL: "KL to the policy that sampled", KL_AFTER: "after the batch"},
    ]
    if any(TURNS in row for row in rows):
        panels.append({TURNS: "turns, greedy", TURNS_SAMPLED: "turns, sampled"})
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        for name, label in panel.items():
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axis.plot(
                    *zip(*points, strict=True), label=label, marker="o" if name in (SUCCESS, TURNS) else ""
                )
        axis.set_xlabel("training step")
        if len(panel) == 1:
            axis.set_title(*panel.values(), fontsize=9)
        else:
            axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(0, 1.02)
    for axis in axes[2:]:
        axis.set_ylim(0, axis.get_ylim()[1] * 1.3)  # room for the legend
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", nargs=2, metavar=("FOLDER", "NAME"), help="take a run's metrics first")
    parser.add_argument("--out", type=Path, default=DOCS / "images", help="folder of the images")
    args = parser.parse_args()
    if args.keep:
        lines = [json.dumps(row) + "\n" for row in kept(Path(args.keep[0]) / "metrics.jsonl")]
        (DOCS / "recipes" / f"{args.keep[1]}.jsonl").write_text("".join(lines), encoding="utf-8")
    for metrics in sorted((DOCS / "recipes").glob("*.jsonl")):
        draw(kept(metrics), args.out / f"recipe_{metrics.stem}.png")
        print(args.out / f"recipe_{metrics.stem}.png")


if __name__ == "__main__":
    main()
