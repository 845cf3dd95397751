"""The cards of policies: what they say, that it is the run's, and that their commands work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

from huggingface_hub import ModelCard

from sorl_env.task.registry import load_task
from sorl_env.trajectory import read_jsonl
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.evaluate.ask import main as sorl_ask
from sorl_train.rollout.environments import env_facts, make_env
from sorl_train.run.cards import usage_options, write_policy_card
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import MetricsLog

EVALUATIONS = {0: 0.25, 10: 0.5, 20: 0.75}


def made_run(path: Path, **overrides: Any) -> tuple[RunDir, TrainConfig]:
    """The folder of a run of 20 steps that was evaluated on 4 questions three times; nothing was trained."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load_config("minihop", {"update.steps": 20, "log.tensorboard": False} | dotted)
    run = RunDir.create(path, config)
    env = make_env(config, evaluation=True)
    run.record("data", {"train": env_facts(make_env(config)), "eval": env_facts(env)})
    with closing(MetricsLog(run, tensorboard=False)) as log:
        for step, success in EVALUATIONS.items():
            (run.trajectories / f"eval_{step:06d}.jsonl").write_text("{}\n" * 4)
            log.log(step, {"eval/success": success, "eval/num_turns": 2.5, "rollout/success": 0.125})
    return run, config


def card_of(run: RunDir, config: TrainConfig, step: int, *, best: bool = False) -> str:
    folder = run.path / "policy"
    folder.mkdir(exist_ok=True)
    write_policy_card(folder, run, config, load_task(config.task, **config.task_args), step, best=best)
    return (folder / "README.md").read_text()


# --- a policy -------------------------------------------------------------------------------------------------
def test_a_card_has_its_head_figures_and_data(tmp_path: Path) -> None:
    run, config = made_run(tmp_path / "run")
    text = card_of(run, config, 20, best=True)
    data = ModelCard(text).data
    assert (data.license, data.base_model, data.library_name) == ("unknown", None, "transformers")
    assert "| 0, before training | 4 | 0.250 | 2.500 |\n| 20, this policy | 4 | 0.750 | 2.500 |" in text
    assert "chosen by its figure on these questions" in text and "medical" not in text
    for part in ("train", "eval"):
        assert run.read_manifest()["data"][part]["sha256"] in text
    assert run.read_manifest()["versions"]["torch"] in text and str(tmp_path) not in text


def test_a_policy_that_was_not_evaluated_itself_has_no_figure_of_its_own(tmp_path: Path) -> None:
    run, config = made_run(tmp_path / "run")
    text = card_of(run, config, 15)
    assert "| 10, an earlier policy | 4 | 0.500 |" in text and "0.750" not in text
    assert "chosen by" not in text
    (run.trajectories / "eval_000010.jsonl").unlink()
    assert "| 10, an earlier policy | | 0.500 |" in card_of(run, config, 15)
    run.metrics.unlink()
    assert "## Figures" not in card_of(run, config, 0)


def test_the_base_models_licence_is_left_to_its_reader(tmp_path: Path) -> None:
    run, config = made_run(tmp_path / "hub", model="owner/base")
    data, text = ModelCard(card_of(run, config, 20)).data, card_of(run, config, 20)
    assert (data.base_model, data.license, data.license_name) == ("owner/base", "other", "as-the-base-model")
    assert "is not known here" in text
    run, config = made_run(tmp_path / "local", model=str(tmp_path))
    text = card_of(run, config, 20)
    assert ModelCard(text).data.base_model is None
    assert f"`{tmp_path.name}`, a local folder" in text and str(tmp_path) not in text


def test_medical_tasks_and_samples_are_marked(tmp_path: Path) -> None:
    text = card_of(*made_run(tmp_path / "run", task="alphamed19k", task_args={}, model="owner/base"), 20)
    assert "**Nothing that it says is medical advice.**" in text
    assert text.count("**not the benchmark**") == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algo": "turn_ppo"}, "| method | turn_ppo |\n| steps | 20 of 20, of 128 trajectories |"),
        ({"stage": "sft", "sft__steps": 20}, "| steps | 20, of 24 demonstrations of the task's scripted expert |"),
    ],
)  # fmt: skip
def test_the_settings_that_matter(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in card_of(*made_run(tmp_path / "run", **settings), 20)


def test_a_resumed_run_writes_the_same_card_or_says_what_changed(tmp_path: Path) -> None:
    run, config = made_run(tmp_path / "run")
    before = card_of(run, config, 20)
    run, _ = RunDir.resume(run.path, config)
    run.begin_resume()
    assert card_of(run, config, 20) == before
    later = load_config("minihop", {"update.steps": 20, "log.tensorboard": False, "eval.every": 5})
    run, _ = RunDir.resume(run.path, later)
    run.begin_resume()
    assert f"| changed on the way | eval.every: {config.eval.every} -> 5 |" in card_of(run, later, 20)


def test_what_only_the_author_has_is_named_in_the_commands() -> None:
    settings = {"search.url": "http://10.0.0.1:8000/retrieve", "limits.max_turns": 4, "search.top_k": 5}
    config = load_config("paper/nq_so_ppo_8gpu", {**settings, "chat_template": False})
    text = shlex.join(usage_options(config))
    assert "--search.url RETRIEVAL_SERVER --search.top_k 5 --chat_template false" in text
    assert "--limits.max_turns 4" in text and "10.0.0.1" not in text
    assert usage_options(load_config("minihop", {"task_args": {"hops": [1, 2]}}))[-2:] == [
        "--task_args.hops",
        "[1, 2]",
    ]


# --- of a run that was trained --------------------------------------------------------------------------------
def test_datasets_loads_the_folder_of_a_run(run_folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets (the train extra)")
    folder = run_folder / "trajectories"
    for kind, file in (("step", "step_000001"), ("eval", "eval_000001")):
        names, place = f"{kind}_*.jsonl", str(tmp_path)
        rows = datasets.load_dataset(str(folder), data_files=names, split="train", cache_dir=place)
        stored = {t.id: t for t in read_jsonl(folder / f"{file}.jsonl")}
        found = {row["id"]: row for row in rows if row["id"] in stored}
        assert found.keys() == stored.keys()
        assert all(json.loads(found[name]["reward_items"]) == t.reward_items for name, t in stored.items())


def test_every_saved_policy_has_a_card_and_its_first_command_works_elsewhere(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = {path.parent.parent.name for path in run_folder.glob("checkpoints/*/policy/README.md")}
    assert cards == {path.name for path in (run_folder / "checkpoints").iterdir()} >= {"best", "step_000001"}
    policy = tmp_path / "elsewhere"
    shutil.copytree(run_folder / "checkpoints" / "step_000001" / "policy", policy)
    text = (policy / "README.md").read_text()
    assert "| 1, this policy | 8 |" in text
    (command,) = re.findall(r"^sorl-ask (.*)", text, re.MULTILINE)
    arguments = shlex.split(command.replace("POLICY", shlex.quote(str(policy))))
    assert sorl_ask([*arguments, "--hardware.threads", "1"]) in (0, 1)
    assert "Question: a question" in capsys.readouterr().out
