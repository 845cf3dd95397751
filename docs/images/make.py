"""The pictures of README and docs, from the committed results and from the environment itself.

python docs/images/make.py            # says which pictures differ from what this makes; exit status 1 if one does
python docs/images/make.py --write    # draws them

Each follows the reader's light or dark setting. Numbers in a picture are read from docs/stability, docs/recipes and
docs/scaling.
"""

import argparse
import itertools
import json
import math
import re
import runpy
import sys
from collections import defaultdict
from html import escape
from pathlib import Path

import numpy as np

from sorl_env import ToolUseEnv, load_task

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
STYLE = """
:root{--bg:#ffffff;--ink:#1f2328;--mute:#59636e;--line:#d1d9e0;--fill:#f6f8fa;--red:#cf222e;--blue:#0969da;
--green:#1a7f37;--gold:#9a6700;--purple:#8250df}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--ink:#f0f6fc;--mute:#9198a1;--line:#3d444d;--fill:#151b23;
--red:#ff7b72;--blue:#58a6ff;--green:#3fb950;--gold:#d29922;--purple:#bc8cff}}
text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:var(--ink)}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.mute{fill:var(--mute)}"""


def color(name):
    """A colour of ``STYLE``."""
    return f"var(--{name})"


class Picture:
    """An SVG of a width and a height in pixels, drawn from back to front."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" style="fill:var(--mute)"/></marker></defs>'
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, fill="bg", stroke="line", round=10)

    def add(self, tag, body=None, style="", **attributes):
        """An element; numbers are rounded to a tenth of a pixel."""
        given = {
            k.replace("_", "-"): f"{v:.1f}".removesuffix(".0") if isinstance(v, float) else v
            for k, v in attributes.items()
        }
        words = "".join(f' {k}="{v}"' for k, v in given.items()) + (f' style="{style}"' if style else "")
        self.parts.append(f"<{tag}{words}/>" if body is None else f"<{tag}{words}>{body}</{tag}>")

    def rect(self, x, y, width, height, fill="fill", stroke=None, round=6, opacity=1.0):
        edge = f"stroke:{color(stroke)}" if stroke else ""
        style = f"fill:{color(fill)};fill-opacity:{opacity:g};{edge}"
        self.add("rect", x=x, y=y, width=width, height=height, rx=round, style=style)

    def text(self, x, y, words, size=13, anchor="start", fill=None, bold=False, kind=""):
        style = (f"fill:{color(fill)};" if fill else "") + ("font-weight:600" if bold else "")
        more = {"class": kind} if kind else {}
        self.add("text", escape(words), style, x=x, y=y, font_size=size, text_anchor=anchor, **more)

    def path(self, points, stroke="mute", width=1.5, fill=None, opacity=1.0, dashed=False, arrow=False):
        """A line through ``points``, or with ``fill`` the area that they enclose."""
        where = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        style = f"fill:{color(fill) if fill else 'none'};fill-opacity:{opacity:g};"
        style += f"stroke:{color(stroke)};stroke-width:{width};stroke-linejoin:round" if stroke else ""
        style += ";stroke-dasharray:4 4" if dashed else ""
        self.add("path", d=where, style=style, **({"marker_end": "url(#tip)"} if arrow else {}))

    def dot(self, x, y, fill, radius=4.5):
        self.add(
            "circle", cx=x, cy=y, r=radius, style=f"fill:{color(fill)};stroke:{color('bg')};stroke-width:1.5"
        )

    def box(self, x, y, width, height, head, below, tone):
        """A box with a bold word and a line below it."""
        self.rect(x, y, width, height, fill=tone, opacity=0.1)
        self.rect(x, y, width, height, fill=tone, stroke=tone, opacity=0.0)
        self.text(x + width / 2, y + 23, head, 14, "middle", bold=True)
        self.text(x + width / 2, y + 41, below, 11.5, "middle", kind="mute")

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


class Axes:
    """A part of a picture with a horizontal and a vertical axis. ``log`` is for the horizontal one."""

    def __init__(self, picture, left, top, width, height, x_range, y_range=(0.0, 1.0), log=False):
        self.picture, self.left, self.top, self.width, self.height = picture, left, top, width, height
        self.x_range, self.y_range, self.log = x_range, y_range, log

    def x(self, value):
        low, high, value = (math.log(v) if self.log else v for v in (*self.x_range, value))
        return self.left + self.width * (value - low) / (high - low)

    def y(self, value):
        low, high = self.y_range
        return self.top + self.height * (high - value) / (high - low)

    def grid(self, x_ticks, y_ticks, x_name, labels=True):
        """Lines with their numbers; ticks are pairs of a value and its text."""
        for value, words in y_ticks:
            self.picture.path(
                [(self.left, self.y(value)), (self.left + self.width, self.y(value))], "line", 1
            )
            if labels:
                self.picture.text(self.left - 8, self.y(value) + 4, words, 12, "end", kind="mute")
        for value, words in x_ticks:
            self.picture.text(self.x(value), self.top + self.height + 20, words, 12, "middle", kind="mute")
        middle = self.left + self.width / 2
        self.picture.text(middle, self.top + self.height + 40, x_name, 12.5, "middle", kind="mute")

    def line(self, points, tone, width=3, dots=True, dashed=False):
        here = [(self.x(x), self.y(y)) for x, y in points]
        self.picture.path(here, tone, width, dashed=dashed)
        for x, y in here if dots else ():
            self.picture.dot(x, y, tone)

    def band(self, low, high, tone):
        points = [(self.x(x), self.y(y)) for x, y in [*low, *reversed(high)]]
        self.picture.path(points, None, fill=tone, opacity=0.13)


TENTHS = [(0.0, "0"), (0.25, ".25"), (0.5, ".5"), (0.75, ".75"), (1.0, "1")]


def short(value):
    """A success as in README: .97."""
    return f"{value:.2f}".removeprefix("0")


def rates():
    """Success after training by learning rate: as published, normalized, with a trust region."""
    tables = runpy.run_path(str(DOCS.parent / "benchmarks" / "stability_tables.py"))
    runs, marks = tables["whole_grid"](), tables["RATES"]
    shown = 1.6e-3  # ten times the highest rate at which no algorithm loses anything
    picture = Picture(960, 440, "Success after training by learning rate: with a trust region none is lost")
    picture.text(28, 40, "With a trust region, the learning rate hardly matters", 22, bold=True)
    about = "Success on held-out questions after training. Numbers are at ten times the right learning rate."
    picture.text(28, 64, about, 14, kind="mute")
    for panel, algo in enumerate(("ppo", "grpo")):
        axes = Axes(picture, 66 + 460 * panel, 124, 360, 240, (marks[0], marks[-1]), log=True)
        axes.grid(
            [(r, f"{r:.1e}".replace(".0e", "e").replace("e-0", "e-")) for r in marks], TENTHS, "learning rate"
        )
        picture.path(
            [(axes.x(shown), axes.top), (axes.x(shown), axes.top + axes.height)], "line", 1, dashed=True
        )
        arms = (
            (algo, "red", algo.upper(), -12, 0, "end"),
            (f"so_{algo}", "blue", f"SO-{algo.upper()}", 12, -4, "start"),
            (algo + tables["TRUST"], "green", f"{algo.upper()} with a trust region", 0, -18, "middle"),
        )
        labels = []
        for arm, tone, name, right, down, anchor in arms:
            by_rate = defaultdict(list)
            for (_, rate), finals in sorted(tables["cells_of"](runs, arm, "final").items()):
                by_rate[rate].append(float(np.median(finals)))
            axes.band([(r, min(by_rate[r])) for r in marks], [(r, max(by_rate[r])) for r in marks], tone)
            labels.append(([(r, float(np.mean(by_rate[r]))) for r in marks], tone, name, right, down, anchor))
        for points, tone, name, right, down, anchor in labels:
            axes.line(points, tone)
            at = dict(points)[shown]
            words = f"{name} {short(at)}"
            picture.text(axes.x(shown) + right, axes.y(at) + down, words, 14, anchor, fill=tone, bold=True)
    note = (
        "A 0.3-million-parameter policy on MiniHop. Line: mean over five kinds of reuse; band: their range."
    )
    picture.text(28, 424, note, 12, kind="mute")
    return picture


def trajectory():
    """A question of MiniHop as one sequence of tokens, played by the task's expert."""
    env = ToolUseEnv(load_task("minihop"))
    index = next(i for i, one in enumerate(env.examples.examples) if one.metadata["hops"] == 2)
    observation, _ = env.begin_episode(index)
    parts, replies, ended = [("prompt", "from the task", "mute", observation)], [], False
    while not ended:
        turn = env.task.expert(env.example, replies)
        number, tone = len(replies), ("blue", "purple", "green")[len(replies)]
        parts.append((f"turn {number}", "drawn by the policy", tone, turn))
        observation, reward, ended, _, _ = env.step(turn)
        replies.append(observation)
        if not ended:
            parts.append(("observation", "from the tool", "mute", observation))
    chips, y = [], 98  # of each part: its rows of words
    for part, where, tone, words in parts:
        found = re.findall(r"</?\w+>|\w+|[^\w\s]", words)
        shown = [*found[:15], "\u2026", found[-1]] if part == "observation" else found
        x, top = 172, y
        for word in shown:
            wide = 7.3 * len(word) + 9
            if x + wide > 936:
                x, y = 172, y + 27
            chips.append((x, y, wide, word, tone))
            x += wide + 4
        chips.append((part, top, where, tone))
        y += 40
    picture = Picture(960, y + 38, "A trajectory: prompt, turns and observations in one sequence of tokens")
    picture.text(28, 40, "One trajectory: a question, three turns, one reward", 22, bold=True)
    picture.text(
        28, 64, "Coloured tokens were drawn by the policy: they alone enter the loss.", 14, kind="mute"
    )
    for chip in chips:
        if len(chip) == 5:
            x, top, wide, word, tone = chip
            picture.rect(x, top, wide, 22, fill=tone, round=4, opacity=0.08 if tone == "mute" else 0.2)
            kind = "mono mute" if tone == "mute" else "mono"
            picture.text(x + wide / 2, top + 15, word, 12, "middle", kind=kind)
        else:
            part, top, where, tone = chip
            picture.text(28, top + 11, part, 13, fill=tone, bold=True)
            picture.text(28, top + 26, where, 11.5, kind="mute")
    words = f"reward {reward:g}: the answer is right \u00b7 SO-PPO has a ratio for each turn, SO-GRPO for each token"
    picture.text(28, y + 18, words, 13, kind="mute")
    return picture


def step():
    """What turn ratio, normalization and trust region do to an optimizer step; the ratios are made up."""
    picture = Picture(960, 372, "What turn ratio, normalization and trust region do to a step")
    heads = (
        ("Turn ratio", "The tokens of a turn share one ratio"),
        ("Normalization", "The more was clipped, the shorter the step"),
        ("Trust region", "Steps that went too far are taken back"),
    )
    for number, (head, about) in enumerate(heads):
        picture.text(28 + 316 * number, 38, f"{number + 1}  {head}", 17, bold=True)
        picture.text(28 + 316 * number, 60, about, 13, kind="mute")
    axes = Axes(picture, 66, 92, 236, 190, (0.0, 15.0), (0.5, 1.75))
    axes.grid(
        [], [(r, f"{r:.1f}".removeprefix("0")) for r in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)], "tokens of two turns"
    )
    axes.band([(0.0, 0.8), (15.0, 0.8)], [(0.0, 1.2), (15.0, 1.2)], "mute")
    turns = ((1.02, 1.65, 0.97, 1.1, 0.7, 1.05, 1.0), (1.2, 1.38, 1.25, 1.5, 1.22, 1.45, 1.28))
    for k, ratios in enumerate(turns):
        first = 0.5 + 7.25 * k
        for i, ratio in enumerate(ratios):
            low, high = sorted((axes.y(1.0), axes.y(ratio)))
            tone = "mute" if 0.8 <= ratio <= 1.2 else "red"
            picture.rect(axes.x(first + i), low, 9.5, max(high - low, 1.5), fill=tone, round=2, opacity=0.75)
        shared = math.exp(sum(map(math.log, ratios)) / len(ratios))
        axes.line([(first - 0.2, shared), (first + 6.8, shared)], "blue", 3.5, dots=False)
        picture.text(
            axes.x(first + 3.3), axes.y(1.68), f"turn: {shared:.2f}", 12.5, "middle", fill="blue", bold=True
        )
    picture.text(28, 342, "Bars: ratio of a token, red outside the clip", 12, kind="mute")
    picture.text(28, 358, "range. Blue: that of its turn (SO-PPO).", 12, kind="mute")
    axes = Axes(picture, 382, 92, 236, 190, (0.0, 6.0))
    multiples = [(float(m), f"{m}" if m else "0") for m in (0, 1, 2, 4, 6)]
    axes.grid(multiples, TENTHS, "clipping bias, in multiples of \u03b4")
    bends = [(m / 10, 1 / max(m / 10, 1.0)) for m in range(61)]
    axes.line(bends, "blue", 3.5, dots=False)
    for m in (0.5, 4.0):
        picture.dot(axes.x(m), axes.y(1 / max(m, 1.0)), "blue", 6)
    picture.text(axes.x(1.3), axes.y(0.93), "nothing changes", 12.5, fill="blue", bold=True)
    picture.text(axes.x(4.0), axes.y(0.33), "a quarter", 12.5, fill="blue", bold=True)
    picture.text(344, 342, "The step is multiplied by \u03b4 / max(\u2016C\u2016, \u03b4):", 12, kind="mute")
    picture.text(344, 358, "C is what clipping removed from the loss.", 12, kind="mute")
    middle, radius = (760.0, 200.0), 96.0
    for share, opacity in ((1.0, 0.1), (0.5**0.5, 0.14)):
        style = f"fill:{color('green')};fill-opacity:{opacity};stroke:{color('green')}"
        picture.add("circle", cx=middle[0], cy=middle[1], r=radius * share, style=style)
    ends = [middle, (768.0, 158.0), (797.0, 130.0), (846.0, 112.0), (905.0, 104.0)]
    for begin, end in itertools.pairwise(ends):
        picture.path([begin, end], "red" if end == ends[-1] else "mute", 1.8, arrow=True)
    reach = math.dist(middle, ends[-1])
    back = [m + (e - m) * radius * 0.5**0.5 / reach for m, e in zip(middle, ends[-1], strict=True)]
    picture.path([ends[-1], (back[0] + 1.5, back[1] - 1.0)], "green", 2.2, dashed=True, arrow=True)
    for (x, y), tone in ((middle, "mute"), (ends[-1], "red"), (back, "green")):
        picture.dot(x, y, tone, 6)
    picture.text(middle[0] - 8, middle[1] + 20, "start of the batch", 12.5, "middle", bold=True)
    picture.text(middle[0], middle[1] + 47, "half the limit", 11.5, "middle", fill="green")
    picture.text(middle[0], middle[1] + 82, "KL at the limit", 11.5, "middle", fill="green")
    picture.text(660, 342, "The weights go back along the line to half of", 12, kind="mute")
    picture.text(660, 358, "the limit, and later steps are smaller.", 12, kind="mute")
    return picture


def loop():
    """A training step: rollouts above, updates below."""
    picture = Picture(960, 380, "The training loop: rollouts, then several optimizer steps on each batch")
    x, upper, lower, wide, high = [28 + 188.5 * i for i in range(5)], 96, 216, 150, 56
    picture.text(28, 40, "The training loop", 22, bold=True)
    rows = (
        (upper, "gold", ("question", "of a task")),
        (upper, "blue", ("turn", "the policy draws tokens")),
        (upper, "gold", ("tool", "the environment replies")),
        (upper, "blue", ("trajectory", "tokens, turns, reward")),
        (upper, "purple", ("advantages", "from a group or a critic")),
        (lower, "purple", ("ratio and loss", "of tokens or turns")),
        (lower, "purple", ("normalization", "\u03b4 / max(\u2016C\u2016, \u03b4)")),
        (lower, "purple", ("optimizer step", "of one mini-batch")),
        (lower, "green", ("trust region", "moves back what is too far")),
    )
    for place, (y, tone, (head, below)) in zip((*x, *reversed(x[1:])), rows, strict=True):
        picture.box(place, y, wide, high, head, below, tone)

    def arrow(*points, **how):
        picture.path(points, "mute", 1.8, arrow=True, **how)

    middle = upper + high / 2
    arrow((x[0] + wide, middle), (x[1], middle))
    arrow((x[1] + wide, middle - 10), (x[2], middle - 10))
    arrow((x[2], middle + 12), (x[1] + wide, middle + 12))
    picture.text(x[2] - 19, middle - 16, "call", 11.5, "middle", kind="mute")
    picture.text(x[2] - 19, middle + 26, "reply", 11.5, "middle", kind="mute")
    over = upper - 20
    arrow(
        (x[1] + wide / 2, upper), (x[1] + wide / 2, over), (x[3] + wide / 2, over), (x[3] + wide / 2, upper)
    )
    picture.text(x[2] + wide / 2, over - 7, "after the answer, or at a limit", 11.5, "middle", kind="mute")
    arrow((x[3] + wide, middle), (x[4], middle))
    arrow((x[4] + wide / 2, upper + high), (x[4] + wide / 2, lower))
    for i in (4, 3, 2):
        arrow((x[i], lower + high / 2), (x[i - 1] + wide, lower + high / 2))
    arrow((x[1] + wide / 2, lower), (x[1] + wide / 2, upper + high))
    picture.text(
        x[1] + wide / 2 + 10,
        (upper + high + lower) / 2 + 4,
        "new weights, for the next batch",
        12,
        kind="mute",
    )
    under = lower + high + 30
    arrow(
        *((x[1] + wide / 2, lower + high), (x[1] + wide / 2, under)),
        *((x[4] + wide / 2, under), (x[4] + wide / 2, lower + high)),
    )
    words = (
        "next mini-batch of the same batch: the weights have moved since it was sampled, so it is off-policy"
    )
    picture.text((x[1] + x[4] + wide) / 2, under + 20, words, 12, "middle", kind="mute")
    picture.text(
        28,
        358,
        "Turn ratio and normalization are the paper's. The trust region is this project's.",
        12,
        kind="mute",
    )
    return picture


def curves_of(axes, runs, tones, steps):
    """Success over training: thin for each seed of an arm, thick for their median."""
    medians = []
    for arm, tone in tones.items():
        curves = [run["curve"] for run in runs if run["arm"] == arm]
        for curve in curves:
            axes.line(curve, tone, 0.8, dots=False)
        # a run that ended early, because it had collapsed, stays where it ended
        at = [[dict(curve).get(step, curve[-1][1]) for curve in curves] for step in steps]
        medians.append((list(zip(steps, map(float, np.median(at, axis=1)), strict=True)), tone))
    for points, tone in medians:
        axes.line(points, tone, 3.5, dots=False)


def severe():
    """Success over training steps in the two severe settings: each seed, and the median."""
    tables = runpy.run_path(str(DOCS.parent / "benchmarks" / "stability_tables.py"))
    small = [run for run in tables["read"]("mini_batch") if tables["reuse_of"](run) == "3, of 32"]
    settings = (
        ("12 optimizer steps of 8 trajectories, rate 5e-4", tables["read"]("severe")),
        ("3 optimizer steps of 32 trajectories, rate 1.6e-3", [r for r in small if r["optim.lr"] == 1.6e-3]),
    )
    tones = {"ppo": "red", "grpo": "gold", "so_ppo": "blue", "so_grpo": "green"}
    picture = Picture(960, 380, "Success over training steps: PPO and GRPO fall, SO-PPO and SO-GRPO stay")
    for panel, (about, runs) in enumerate(settings):
        axes = Axes(picture, 62 + 462 * panel, 64, 390, 240, (0.0, 16.0))
        picture.text(axes.left, 38, about, 14, bold=True)
        axes.grid([(float(i), str(i)) for i in range(0, 17, 4)], TENTHS, "training step")
        curves_of(axes, runs, tones, range(17))
    for place, (arm, tone) in enumerate(tones.items()):
        picture.text(62 + 110 * place, 366, arm.upper().replace("_", "-"), 13, fill=tone, bold=True)
    picture.text(932, 366, "thin: one of five seeds; thick: their median", 12, "end", kind="mute")
    return picture


def long_horizon():
    """Success over training steps on Coin Collector: each cold start, and the median."""
    tables = runpy.run_path(str(DOCS.parent / "benchmarks" / "stability_tables.py"))
    runs, trust = tables["read"]("long_horizon"), tables["TRUST"]
    picture = Picture(960, 380, "Success over training steps on Coin Collector, with up to 20 turns")
    for panel, algo in enumerate(("ppo", "grpo")):
        tones = {algo: "red", "gigpo": "gold", f"so_{algo}": "blue", algo + trust: "green"}
        if algo == "ppo":
            del tones["gigpo"]  # whose advantages are those of groups
        axes = Axes(picture, 62 + 462 * panel, 44, 390, 240, (0.0, 12.0))
        axes.grid([(float(i), str(i)) for i in range(0, 13, 2)], TENTHS, "training step")
        curves_of(axes, runs, tones, range(0, 13, 2))
        for place, (arm, tone) in enumerate(tones.items()):
            name = arm.replace(trust, "").upper().replace("_", "-").replace("GI", "Gi")
            name += ", trust region" if trust in arm else ""
            picture.text(axes.left + 92 * place, 350, name, 13, fill=tone, bold=True)
    picture.text(932, 24, "thin: one of three cold starts; thick: their median", 12, "end", kind="mute")
    return picture


def region():
    """Final over peak by learning rate and reuse; the numbers are final success."""
    tables = runpy.run_path(str(DOCS.parent / "benchmarks" / "stability_tables.py"))
    runs, marks, reuse = tables["whole_grid"](), tables["RATES"], tables["REUSE"]
    picture = Picture(960, 318, "Final success by learning rate and reuse, one panel an algorithm")
    for panel, arm in enumerate(tables["MAIN"]):
        kept, final = tables["cells_of"](runs, arm, "held"), tables["cells_of"](runs, arm, "final")
        left = 148 + 202 * panel
        picture.text(left, 36, arm.upper().replace("_", "-"), 14, bold=True)
        picture.text(
            left, 56, "{:.0%} above .95".format(tables["share_above"](0.95, kept)[0]), 12, kind="mute"
        )
        for row, name in enumerate(reversed(reuse)):
            if not panel:
                picture.text(left - 10, 90 + 36 * row, name, 12, "end", kind="mute")
            for column, rate in enumerate(marks):
                x, y, share = left + 38.0 * column, 68.0 + 36 * row, float(np.median(kept[name, rate]))
                picture.rect(x, y, 36, 34, fill="blue", round=4, opacity=round(0.04 + 0.6 * share**2, 3))
                picture.text(x + 18, y + 22, short(float(np.median(final[name, rate]))), 12, "middle")
        for column, rate in enumerate(marks):
            words = f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")
            picture.text(left + 38.0 * column + 18, 264, words, 10.5, "middle", kind="mute")
    note = "Rows: optimizer steps on a batch. Columns: learning rate. Number: final success; colour: final over peak."
    picture.text(28, 298, note, 12, kind="mute")
    return picture


def recipe(name, panels):
    """Curves of a recipe over training steps: ``panels`` have a head, and pairs of a metric and its label."""
    lines = (DOCS / "recipes" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    last = float(rows[-1]["step"])
    picture = Picture(960, 280, f"{name}: " + ", ".join(head for head, *_ in panels))
    wide = 924 / len(panels)
    for panel, (head, top, metrics) in enumerate(panels):
        axes = Axes(picture, 70 + wide * panel, 76, wide - 76, 140, (0.0, last), (0.0, top))
        picture.text(axes.left - 42, 34, head, 14, bold=True)
        ticks = [(top * i / 4, f"{top * i / 4:g}".removeprefix("0") or "0") for i in range(5)]
        axes.grid([(float(i), str(i)) for i in range(0, int(last) + 1, 4)], ticks, "training step")
        for place, (metric, label, tone) in enumerate(metrics):
            axes.line([(row["step"], row[metric]) for row in rows if metric in row], tone, 2.5)
            picture.text(axes.left - 42 + 130 * place, 56, label, 12, fill=tone, bold=True)
    return picture


def recipe_minihop():
    """SmolLM2-135M on MiniHop."""
    kl = ("KL after a batch", 0.03, (("loss/trust_kl", "to the start of the batch", "purple"),))
    return recipe("minihop_smollm2", (SUCCESS, VALID, kl))


def recipe_nq():
    """SmolLM2-135M on NQ."""
    success = ("Success", 0.4, SUCCESS[2])
    kl = ("KL after a batch", 0.02, (("loss/trust_kl", "to its start", "purple"),))
    turns = (
        "Turns",
        2.4,
        (("eval/num_turns", "held out", "green"), ("rollout/num_turns", "training", "blue")),
    )
    return recipe("smollm2_nq", (success, turns, kl))


def pipeline():
    """Trajectories a second and GPU, simulated: three ways to sample, a fast retriever and a slow one."""
    lines = (DOCS / "scaling" / "pipeline.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    picture = Picture(960, 330, "Trajectories a second and GPU over the number of GPUs")
    gpus, calls = sorted({row["gpus"] for row in rows}), sorted({row["calls"] for row in rows})
    axes = Axes(picture, 62, 30, 560, 230, (float(gpus[0]), float(gpus[-1])), (0.0, 1.6), log=True)
    axes.grid(
        [(float(n), str(n)) for n in gpus], [(0.4 * i, f"{0.4 * i:.1f}") for i in range(5)], "GPUs (H100)"
    )
    modes = {"synchronous": "red", "one step off": "gold", "fully asynchronous": "blue"}
    for place, (mode, tone) in enumerate(modes.items()):
        for limit in calls:
            found = [row for row in rows if (row["mode"], row["calls"]) == (mode, limit)]
            points = [(float(row["gpus"]), row["trajectories_per_s"] / row["gpus"]) for row in found]
            axes.line(points, tone, 2.5, dashed=limit == calls[0])
        stale = max(row["staleness"] for row in rows if row["mode"] == mode)
        picture.text(650, 70 + 52 * place, mode, 13, fill=tone, bold=True)
        picture.text(
            650, 90 + 52 * place, f"staleness at most {stale:.1f} steps, on average", 12, kind="mute"
        )
    picture.text(650, 226, "the last two are equally fast", 12, kind="mute")
    picture.text(650, 246, f"dashed: a retriever of {calls[0]} calls at once", 12, kind="mute")
    return picture


SUCCESS = (
    "Success",
    1.0,
    (("eval/success", "held out, greedy", "green"), ("rollout/success", "training", "blue")),
)
VALID = ("Valid turns", 1.0, (("rollout/valid_turn_rate", "training", "blue"),))
PICTURES = {
    "rates": rates,
    "trajectory": trajectory,
    "step": step,
    "loop": loop,
    "severe": severe,
    "long_horizon": long_horizon,
    "region": region,
    "recipe_minihop": recipe_minihop,
    "recipe_nq": recipe_nq,
    "pipeline": pipeline,
}


def main():
    """Compare, or write with ``--write``; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the pictures")
    writes, differing = parser.parse_args().write, []
    for name, draw in PICTURES.items():
        path, made = HERE / f"{name}.svg", draw().svg()
        if not path.is_file() or path.read_text(encoding="utf-8") != made:
            differing.append(path.name)
            if writes:
                path.write_text(made, encoding="utf-8")
    print("\n".join(differing) or "the pictures are these")
    return int(bool(differing) and not writes)


if __name__ == "__main__":
    sys.exit(main())
