"""The estimate of time and cost: by hand, and beside published runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

from sorl_env.errors import UserError
from sorl_env.task import Limits
from sorl_train.cli import main
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import ModelShape
from sorl_train.preflight.dry_run import plan_text
from sorl_train.preflight.duration import (
    ASSUMED,
    GPUS,
    SEATS,
    Duration,
    Gpu,
    Plan,
    assumed,
    estimate_duration,
    read_measured,
)

SMALL = ModelShape(
    1_000_000, 900_000, 1_000_000, 2, 100, 200, key_value_width=50, vocabulary=1000, key_value_heads=2
)
LIMITS = Limits(
    max_turns=4,
    max_prompt_tokens=100,
    max_new_tokens=100,
    max_observation_tokens=50,
    max_trajectory_tokens=1000,
)
GPU = Gpu(1e12, 1e9, 10**9)
GIVEN = {"mfu_update": 0.5, "mfu_score": 0.4, "mfu_prefill": 0.2, "decode_bandwidth": 0.5, "tail": 2.0}
GIVEN |= {"decode_step_s": 0.01, "tool_s": 1.0, "other_s": 3.0}
GIVEN |= {"link_gb_s": 1e-3, "host_gb_s": 2e-2, "disk_gb_s": 1e-3}
GIVEN |= {"turns": 3.0, "response_tokens": 150.0, "observation_tokens": 50.0}


def config(**settings: Any) -> TrainConfig:
    """The paper's run with some settings changed; ``a__b=1`` changes ``a.b``."""
    return load_config("paper/nq_so_ppo_8gpu", {k.replace("__", "."): v for k, v in settings.items()})


def small(cache: int = 10**6, **settings: Any) -> Duration:
    return estimate_duration(config(**settings), SMALL, LIMITS, 100.0, cache, GIVEN, GPU)


# --- by hand --------------------------------------------------------------------------------------------------
def test_the_phases_by_hand() -> None:
    """512 trajectories of 100 + 150 + 50 tokens; two engines of four GPUs; policy and critic."""
    found = small()
    forward = 2 * 1_000_000 + 2 * 2 * 100 * 300
    work = 512 * 300 * forward / (8 * 1e12)
    both, critic = 1 + 900_101 / 1e6, 900_101
    assert found.trajectory_tokens == 300 and found.response_tokens == 150
    assert found.phases["scoring"] == pytest.approx((both + 1) * work / 0.4)
    adam = 2 * 32 * (1_000_000 + critic) / 2e7
    assert found.phases["update"] == pytest.approx(4 * both * work / 0.5 + adam)  # checkpointing: 4
    assert found.phases["weights to vLLM"] == pytest.approx((2e6 + 2e6 / 4) / 1e6)
    # 256 for each engine, SEATS at once, and the longest one has twice the mean; two heads on four GPUs
    steps = 150 * 256 / SEATS + 150
    reads = steps * 2e6 / 4 + 150 * 256 * 200 * (4 * 2 * 50 / 2)
    prefill = 150 * 256 * forward / (4 * 1e12 * 0.2)
    assert found.phases["sampling"] == pytest.approx(prefill + reads / 0.5e9 + steps * 0.01 + 2 * 1.0)
    assert found.step == pytest.approx(sum(found.phases.values())) and found.phases["other"] == 3.0
    saves = 1 + 617 // 25
    assert found.checkpoints == pytest.approx(saves * (14 * (1_000_000 + critic) + 2e6) / 1e6)
    assert found.run == pytest.approx(618 * found.step + found.evaluations + found.checkpoints)
    assert found.calls_per_s == pytest.approx(512 * 2 / found.phases["sampling"])
    assert found.sampled_per_s == pytest.approx(512 * 150 / found.phases["sampling"])


def test_settings_change_what_they_have_to() -> None:
    base = small()
    group = small(algo="grpo", rollout__group_size=8, loss__kl_coef=0.0)
    assert base.phases["scoring"] / group.phases["scoring"] == pytest.approx(2 + 0.900101)
    plain = small(hardware__gradient_checkpointing=False, cluster__offload_optimizer=False)
    adam = 2 * 32 * 1_900_101 / 2e7
    assert plain.phases["update"] == pytest.approx((base.phases["update"] - adam) * 3 / 4)
    # optimizers that wait in host memory while vLLM samples, there and back
    moved = 2 * 12 * 1_900_101 / 8 / 1e6
    assert plain.phases["weights to vLLM"] == pytest.approx(base.phases["weights to vLLM"] + moved)
    crowded = small(cache=300 * 64)  # room for 64
    assert crowded.phases["sampling"] > base.phases["sampling"]
    nodes = small(cluster__nodes=2, cluster__vllm_engines=4)
    assert nodes.phases["scoring"] == pytest.approx(base.phases["scoring"] / 2)


def test_an_asynchronous_step_takes_the_longer_side() -> None:
    settings = {"rollout__max_staleness": 1, "cluster__async_rollout": True, "cluster__vllm_engines": 1}
    whole, partial = small(**settings), small(**settings, cluster__partial_rollout=True)
    training = sum(whole.phases.values()) - whole.phases["sampling"]
    assert whole.step == max(whole.phases["sampling"], training)
    # without the longest trajectory's end and without waiting for tools: other trajectories fill the engine
    tail = 150 * (2e6 / 4 / 0.5e9 + 0.01)
    assert whole.phases["sampling"] - partial.phases["sampling"] == pytest.approx(tail + 2.0)


def test_lengths_keep_to_the_limits() -> None:
    figures = [assumed(LIMITS, Plan(), column) for column in range(3)]
    assert [one["turns"] for one in figures] == [2, 3, 4]
    assert [one["response_tokens"] for one in figures] == pytest.approx([30, 90, 400])
    assert [one["observation_tokens"] for one in figures] == pytest.approx([25, 90, 150])
    long = GIVEN | {"response_tokens": 3000.0, "observation_tokens": 600.0}
    found = estimate_duration(config(), SMALL, LIMITS, 100.0, 10**6, long, GPU)
    assert (found.trajectory_tokens, found.response_tokens) == pytest.approx((1000, 750))


# --- beside published runs ------------------------------------------------------------------------------------
def dense(parameters: int, layers: int, hidden: int, width: int, heads: int, words: int) -> ModelShape:
    """``width`` of keys in ``heads`` heads."""
    return ModelShape(parameters, parameters, parameters, layers, hidden, 4 * hidden, width, words, heads)


QWEN_3B = dense(3_085_938_688, 36, 2048, 256, 2, 151_936)
LLAMA_8B = dense(8_030_261_248, 32, 4096, 1024, 8, 128_256)
QWEN_32B = dense(32_762_123_264, 64, 5120, 1024, 8, 151_936)
SEARCH = Limits(
    max_turns=4,
    max_prompt_tokens=2048,
    max_new_tokens=500,
    max_observation_tokens=500,
    max_trajectory_tokens=4096,
)
MATH = Limits(max_turns=1, max_prompt_tokens=2048, max_new_tokens=4096, max_trajectory_tokens=4096)
GRPO = {"algo": "grpo", "cluster.offload_optimizer": False}


@dataclass(frozen=True)
class Published:
    """A run's seconds (a step, or all) and settings, as published; ``lengths`` where they are."""

    seconds: float
    shape: ModelShape
    limits: Limits
    settings: dict[str, Any]
    whole: bool = False
    gpu: str = "H100"
    lengths: dict[str, float] = field(default_factory=dict)


def engines(number: int, parallel: int, memory: float = 0.6, nodes: int = 1) -> dict[str, Any]:
    return {
        "cluster.nodes": nodes,
        "cluster.vllm_engines": number,
        "cluster.vllm_tensor_parallel": parallel,
        "cluster.vllm_memory": memory,
    }


def batches(size: int, group: int, mini: int) -> dict[str, Any]:
    return {"rollout.batch_size": size, "rollout.group_size": group, "update.mini_batch_size": mini}


EVALUATED = {"update.steps": 331, "eval.every": 50, "eval.num_examples": 51_700, "eval.num_examples_final": 1}
PUBLISHED = {
    # novasky-ai.notion.site/skyrl-searchr1: ~28 hours for 331 steps on 8 x H100; run_search.sh
    "SkyRL, Search-R1 3B, 8 H100, 331 steps": Published(
        28 * 3600, QWEN_3B, SEARCH, batches(2560, 5, 1280) | engines(4, 2, 0.5) | EVALUATED | GRPO, whole=True
    ),
    # docs/sglang_multiturn/search_tool_example.rst: about 27 hours on 8 x H20, validation of 51k every 50 steps
    "verl, Search-R1 3B, 8 H20, 331 steps": Published(
        27 * 3600,
        QWEN_3B,
        SEARCH,
        batches(2560, 5, 1280) | engines(8, 1, 0.5) | EVALUATED | GRPO,
        whole=True,
        gpu="H20",
    ),
    # Search-R1's issue 1: PPO, 200 steps on 8 x H100; the author remembers 2 or 3 hours, a user had 6 to 7
    "Search-R1 3B, PPO, 8 H100, its author": Published(2.5 * 3600 / 200, QWEN_3B, SEARCH, engines(8, 1)),
    "Search-R1 3B, PPO, 8 H100, a user": Published(6.5 * 3600 / 200, QWEN_3B, SEARCH, engines(8, 1)),
    # NeMo RL 0.4's performance summary, whose mean lengths are known; a prompt is taken to have 100 tokens
    "NeMo RL, 8B, 16 H100, 1,060 tokens": Published(
        97.7,
        LLAMA_8B,
        MATH,
        batches(2048, 32, 512) | engines(16, 1, nodes=2) | GRPO,
        lengths={"response_tokens": 960},
    ),
    "NeMo RL, 32B, 32 H100, 3,206 tokens": Published(
        393,
        QWEN_32B,
        MATH,
        batches(2048, 32, 512) | engines(8, 4, nodes=4) | GRPO,
        lengths={"response_tokens": 3106},
    ),
}


PAGE = (Path(__file__).parents[3] / "docs" / "scaling_out.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_run_is_within_the_bounds(name: str) -> None:
    """And the page says so."""
    run = PUBLISHED[name]
    settings = load_config("paper/nq_so_ppo_8gpu", run.settings)
    lengths = run.lengths | {"turns": 1, "observation_tokens": 0} if run.lengths else {}
    prompt = 100.0 if run.lengths else 200.0
    seconds = []
    for column in range(3):
        given = assumed(run.limits, Plan(measured=lengths), column)
        found = estimate_duration(settings, run.shape, run.limits, prompt, 10**6, given, GPUS[run.gpu])
        seconds.append(found.run if run.whole else found.step)
    best, expected, worst = seconds
    assert best < run.seconds < worst
    # a factor of 1.3 where the lengths are known
    assert expected == pytest.approx(run.seconds, rel=0.3) or not run.lengths
    assert run.seconds / 3 < expected < run.seconds * 3
    unit, name_of_unit = (3600, "h") if run.whole else (1, "s a step")
    published, *row = (f"{float(f'{value / unit:.3g}'):,g}" for value in (run.seconds, *seconds))
    assert f"| {name} | {published} {name_of_unit} | {' / '.join(row)} |" in PAGE


# prime-rl's benchmarks/baselines: RL of all weights, flash attention 3, activations recomputed
@pytest.mark.parametrize("mfu", [0.111, 0.139, 0.354], ids=["0.6B, 16k", "4B on 8, 16k", "4B on 8, 65k"])
def test_prime_rls_mfu_is_within_the_bounds(mfu: float) -> None:
    best, expected, worst = ASSUMED["mfu_update"]
    assert worst < 4 / 3 * mfu < best
    assert worst < expected < best


# --- what was measured ----------------------------------------------------------------------------------------
def test_measured_figures_take_the_place_of_assumed_ones(tmp_path: Path) -> None:
    file = tmp_path / "gpu_check.json"
    file.write_text(json.dumps({"device": "H100", "mfu_update": 0.42, "decode_bandwidth": 0.7}))
    assert read_measured(file) == {"mfu_update": 0.42, "decode_bandwidth": 0.7}
    rows = [{"step": 0, "eval/success": 0.1}]
    for step, tokens in ((1, 999.0), (2, 300.0), (3, 500.0)):
        lengths = {"rollout/num_turns": 3.0, "rollout/response_tokens": tokens}
        rows.append({"step": step, **lengths, "rollout/observation_tokens": 100.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_measured(tmp_path) == {"turns": 3.0, "response_tokens": 400.0, "observation_tokens": 100.0}
    figures = [assumed(LIMITS, Plan(measured=read_measured(file)), column) for column in range(3)]
    assert {one["mfu_update"] for one in figures} == {0.42} and len(
        {one["mfu_score"] for one in figures}
    ) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it needs one of these at least, above 0: mfu_update, "),
        ('{"mfu_updat": 1}', "it needs one of these"),
        ('{"mfu_update": 0}', "above 0"),
        ('{"mfu_update": "fast"}', "cannot be read"),
        ("[1]", "cannot be read"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_file_that_measured_nothing_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        read_measured(file)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read|needs one of these"):
        read_measured(tmp_path)


# --- the command ----------------------------------------------------------------------------------------------
def columns(text: str, title: str) -> list[str]:
    """The three estimates of a line."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(title)]
    return re.findall(r"\d[\d,.]*(?: s| min| h)?", line.strip()[30:])


def test_the_dry_run_shows_hours_and_cost(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"mfu_update": 0.42}')
    options = ["--config", "paper/nq_so_ppo_8gpu", "--model", tiny_folder, "--data", "null", "--dry_run"]
    assert main([*options, "--price", "2.5", "--gpu", "H200", "--measured", str(file)]) == 0
    text = capsys.readouterr().out
    assert "of 141.00 GB" in text and "measured: mfu_update 0.42" in text
    assert "share of 989 TFLOP/s reached: mfu_score 0.5/0.3/0.1," in text
    assert "share of 4.80 TB/s reached: decode_bandwidth" in text
    hours = [float(value.replace(",", "")) for value in columns(text, "GPU-hours of 8 H200")]
    cost = [float(value.replace(",", "")) for value in columns(text, "cost at 2.5 a GPU-hour")]
    assert len(hours) == 3 and hours == sorted(hours)
    assert cost == pytest.approx([2.5 * value for value in hours], abs=2.5)
    plain = plan_text(load_config("paper/nq_so_ppo_8gpu", {"model": tiny_folder, "data": None}))
    assert "a GPU-hour" not in plain and "GPU-hours of 8 H100" in plain and "of 80.00 GB" in plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "H100"], "--gpu is for --dry_run alone"),
        (["--dry_run", "--price", "2"], "need --engine openrlhf"),
        (["--dry_run", "--price", "much"], "invalid float value"),
        (
            ["--dry_run", "--engine", "openrlhf", "--gpu", "H10"],
            "--gpu H10: there are no figures of it. Did you mean",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(options) in (1, 2)
    assert said in capsys.readouterr().err
