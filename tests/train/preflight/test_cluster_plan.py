"""The dry run of this engine, and the paper's configs; nothing here needs OpenRLHF."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

from sorl_env.task.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.openrlhf.flags import as_arguments, openrlhf_flags
from sorl_train.preflight.dry_run import plan_text
from sorl_train.rollout.environments import limits
from sorl_train.run.folder import RunDir

# Qwen2.5-7B's published sizes.
QWEN_7B = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
QWEN_7B |= {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
QWEN_7B |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, tiny_folder: str) -> Path:
    """A folder with a 7B model's configuration and some tokenizer, without weights."""
    folder = tmp_path_factory.mktemp("qwen")
    for file in Path(tiny_folder).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def plan(name: str, model: Path | str, **overrides: Any) -> str:
    """The plan of a packaged config with the task's embedded questions; ``a__b=1`` overrides ``a.b``."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return plan_text(load_config(name, {"model": str(model), "data": None, "run_dir": "runs/x"} | dotted))


def part(text: str, title: str) -> str:
    """The lines under a title."""
    (found,) = [block for block in text.split("\n\n") if block.startswith(title)]
    return found


# --- the paper's configs --------------------------------------------------------------------------------------
PLACEMENT = {
    "paper/nq_so_ppo_8gpu": (
        "cluster: 1 node x 8 GPUs = 8 GPUs",
        "training: 1 node x 8 GPUs = 8 data-parallel ranks, ZeRO-3",
        "sampling: 2 vLLM engines x tensor parallel 4 = 8 GPUs, the same as training, in turns",
        "rollout: 512 trajectories, 256 for each engine to sample, 64 for each rank to score",
        "micro-batch of a GPU: 8 (updates), 16 (scoring)",
        "optimizer step: mini-batch of 256 = 8 ranks x 8 x 4 accumulation steps",
    ),
    "paper/nq_so_ppo_2nodes": (
        "cluster: 2 nodes x 8 GPUs = 16 GPUs",
        "training: 2 nodes x 8 GPUs = 16 data-parallel ranks, ZeRO-3",
        "sampling: 4 vLLM engines x tensor parallel 4 = 16 GPUs, the same as training, in turns",
        "rollout: 512 trajectories, 128 for each engine to sample, 32 for each rank to score",
        "optimizer step: mini-batch of 256 = 16 ranks x 8 x 2 accumulation steps",
    ),
    "paper/nq_so_ppo_8gpu_async": (
        "training: 1 node x 4 GPUs = 4 data-parallel ranks, ZeRO-3",
        "sampling: 1 vLLM engine x tensor parallel 4 = 4 GPUs, separate ones, while the others train",
        "optimizer step: mini-batch of 256 = 4 ranks x 8 x 8 accumulation steps",
        "staleness: at most 1 training step, turns continue through weight updates",
    ),
}


@pytest.mark.parametrize("name", PLACEMENT)
def test_the_plan_of_a_paper_config(name: str, tiny_folder: str) -> None:
    placement = part(plan(name, tiny_folder), "Placement").splitlines()
    assert {f"  {line}" for line in PLACEMENT[name]} <= set(placement)


# --- the command ----------------------------------------------------------------------------------------------
def test_the_plan_shows_the_command_that_is_run(tiny_folder: str) -> None:
    given = {"model": tiny_folder, "data": None, "run_dir": "runs/with space"}
    given["cluster.flags"] = {"ds.overlap_comm": True}
    config = load_config("paper/nq_so_ppo_8gpu", given)
    shown = part(plan_text(config), "OpenRLHF flags").splitlines()[1:]
    command = [line for line in shown if not line.strip().startswith("switches that are off: ")]
    assert all(line.endswith(" \\") for line in command[:-1]) and not command[-1].endswith("\\")
    # a shell reads it as the words that launch passes on
    echo = " ".join(line.removesuffix("\\") for line in command).replace(
        "python -m sorl_train.openrlhf.driver", "printf '%s\\n'"
    )
    words = subprocess.run(["bash", "-c", echo], capture_output=True, text=True, check=True).stdout
    task_limits = limits(load_task("nq"), config.limits)
    flags = openrlhf_flags(config, RunDir(Path("runs/with space")), tiny_folder, task_limits, resume=None)
    assert words.splitlines() == as_arguments(flags)
    assert f"SORL_RUN_DIR='{Path('runs/with space').absolute()}'" in command[0]
    assert "--ds.overlap_comm" in words
    off = {name for name, value in flags.items() if value is False}
    assert shown[-1].strip() == f"switches that are off: {', '.join(name for name in flags if name in off)}"


def test_rays_workers_get_the_whole_path_of_a_model(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not start in the folder that a relative path begins from. A hub name stays as it is."""
    monkeypatch.chdir(Path(tiny_folder).parent)
    near = Path(tiny_folder).name
    config = load_config("paper/nq_so_ppo_8gpu", {"data": None})
    for model, seen in ((near, str(Path(near).absolute())), ("owner/name", "owner/name")):
        flags = openrlhf_flags(
            config, RunDir(tmp_path), model, limits(load_task("nq"), config.limits), resume=None
        )
        assert (flags["actor.model_name_or_path"], flags["critic.model_name_or_path"]) == (seen, seen)


def test_the_quickstart_can_be_planned_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path))
    one = dict.fromkeys(("gpus_per_node", "vllm_engines", "vllm_tensor_parallel"), 1)
    cluster = {f"cluster.{name}": number for name, number in one.items()}
    config = load_config("minihop", {"engine": "openrlhf", "hardware.device": "cpu"} | cluster)
    text = plan_text(config)
    assert "tiny, built for the task, cold-started with" in text
    assert f"--actor.model_name_or_path {tmp_path}/policies/minihop-" in text
    assert "Memory of each process, all in host memory" in text
    assert not any(tmp_path.iterdir())  # nothing was built


# --- memory ---------------------------------------------------------------------------------------------------
def test_the_memory_of_a_7b_model(qwen: Path) -> None:
    """The figures that docs/scaling_out.md works out by hand."""
    memory = part(plan("paper/nq_so_ppo_8gpu", qwen), "Memory per GPU")
    rows = dict(re.findall(r"^  (.{19}) +([\d.]+) GB", memory, re.MULTILINE))
    parameters, ranks, critic = 7_615_616_512, 8, 7_070_619_136 + 3584
    held = 2 * parameters / ranks + 1e9 + 2 * critic / ranks + 1e9 + 4e9
    assert float(rows["held all the time  "]) == pytest.approx(held / 1e9, abs=0.01)
    assert float(rows["sampling           "]) == pytest.approx((held + 0.6 * 80e9) / 1e9, abs=0.01)
    largest = 152_064 * 3584
    gathered = 2 * (1.05e9 + largest)
    kept = 2 * 8 * 4096 * (28 * 3584 + 5 * 3584)
    logits = 2 * 8 * 152_064 * (4096 + 2000)
    update = held + gathered + kept + logits
    assert float(rows["policy update      "]) == pytest.approx(update / 1e9, abs=0.01)
    reference = held + gathered + 2 * 16 * 4096 * 3584 + 2 * 16 * 152_064 * (4096 + 2000)
    assert float(rows["scoring, reference "]) == pytest.approx(reference / 1e9, abs=0.01)
    assert "of 80.00 GB, in 'sampling'" in memory and "CAUTION" not in memory
    documented = (Path(__file__).parents[3] / "docs" / "scaling_out.md").read_text()
    host = part(plan("paper/nq_so_ppo_8gpu", qwen), "Memory of the host")
    for line in (*memory.splitlines()[1:], *host.splitlines()[1:]):
        assert line.strip() in documented


def test_what_does_not_fit_says_what_to_turn(qwen: Path) -> None:
    text = plan("paper/nq_so_ppo_8gpu", qwen, update__log_prob_micro_batch_size=64)
    assert re.search(
        r"CAUTION: 'scoring, reference' does not fit, .* GB too much: change update.log_prob_micro_batch_size",
        text,
    )
    squeezed = plan("paper/nq_so_ppo_8gpu", qwen, cluster__vllm_memory=0.05)
    assert "leave nothing for the cache: raise cluster.vllm_memory" in squeezed
