"""An algorithm that the package does not know: trained, resumed, listed and reported, and the page that explains it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.cli import main
from sorl_train.config.files import load_config, read_resolved
from sorl_train.config.find_algorithm import algorithm_facts, find_algorithm, short_name
from sorl_train.config.schema import flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.update_settings import loss_settings
from sorl_train.report.report import main as report
from sorl_train.rollout.environments import make_env
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import saved_config

from .conftest import short_config, train_short

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def my_algo(tmp_path: Path) -> Path:
    """The file that docs/algorithms.md shows, which counts the calls of its surrogate."""
    code = re.search(r"```python\n(# my_algo\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    counted = code[1].replace(
        '    """The ratio inside', '    CALLS.append(len(ratio))\n    """The ratio inside'
    )
    file = tmp_path / "my_algo.py"
    file.write_text(f"CALLS = []\n{counted}", encoding="utf-8")
    return file


def calls(algo: str) -> list[int]:
    surrogate: Any = find_algorithm(algo).surrogate
    return [count for count in surrogate.__globals__["CALLS"] if count != 4]  # without the trial on 4 tokens


def test_a_file_is_trained_resumed_reported_and_not_exchanged(
    my_algo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algo = str(my_algo)
    run_dir, summary = train_short(tmp_path / "run", algo=algo, update__steps=2)
    lines = list(read_jsonl(run_dir.metrics))
    assert summary["steps"] == 2 and "loss/policy" in lines[2] and "loss/value" not in lines[2]
    first = len(calls(algo))
    assert first == 4  # two steps of two mini-batches

    saved = read_resolved(run_dir.config)  # as the workers of OpenRLHF do
    assert saved.algo == algo and saved.rollout.group_size == 8  # that of all group algorithms
    assert loss_settings(saved).surrogate.args == (find_algorithm(algo).surrogate,)  # inside call_outside
    _, summary = train_short(run_dir.path, resume=True, algo=algo, update__steps=3)
    assert summary["steps"] == 3 and len(calls(algo)) == first + 2

    page = tmp_path / "report.html"
    assert report([str(run_dir.path), "--out", str(page)]) == 0
    assert "my_algo on minihop" in page.read_text(encoding="utf-8")
    capsys.readouterr()

    facts = algorithm_facts(algo)
    my_algo.write_text(my_algo.read_text() + "\n# edited\n")
    assert algorithm_facts(algo) != facts and algorithm_facts("so_ppo") == {}
    with pytest.raises(UserError, match=r"(?s)another algorithm.*file_sha256"):
        train_short(run_dir.path, resume=True, algo=algo, update__steps=4)
    my_algo.unlink()
    assert saved_config(run_dir.path, check=False).algo == algo  # who only reads needs no file


def test_an_entry_point_is_listed_trained_and_suggested(
    my_algo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site"
    (package / "mine-1.0.dist-info").mkdir(parents=True)
    (package / "mine-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"
    )
    entry = "[sorl.algorithms]\nmasked = masked_of_mine:ALGORITHM\n"
    (package / "mine-1.0.dist-info" / "entry_points.txt").write_text(entry)
    my_algo.rename(package / "masked_of_mine.py")
    monkeypatch.syspath_prepend(package)
    assert main(["--help"]) == 0
    assert re.search(r"Installed:\s+masked", capsys.readouterr().out)
    assert "masked_of_mine" not in sys.modules  # listing imports nothing
    with pytest.raises(UserError, match=r"unknown algorithm 'maskd'\. Did you mean 'masked'"):
        load_config("minihop", {"algo": "maskd"})
    train_short(tmp_path / "run", algo="masked", update__steps=1)
    assert len(calls("masked")) == 2
    del sys.modules["masked_of_mine"]


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown algorithm 'so_pppo'\. Did you mean 'so_ppo'.*path of a \.py"
    ):
        load_config("minihop", {"algo": "so_pppo"})
    with pytest.raises(UserError, match=r"absent\.py: no such file"):
        find_algorithm(str(tmp_path / "absent.py"))
    with pytest.raises(UserError, match="algorithm 'no_such_package': no module 'no_such_package'"):
        find_algorithm("no_such_package:X")
    with pytest.raises(UserError, match=r"has no Algorithm called PPO\. Declare one there"):
        find_algorithm("json:PPO")
    broken = tmp_path / "broken.py"
    broken.write_text("from sorl_train.algorithms import Algorithm\nALGORITHM = Algorithm('turns', 'gae')\n")
    with pytest.raises(UserError, match=r'(?s)broken\.py", line 2.*unknown ratio level \'turns\''):
        find_algorithm(str(broken))
    broken.with_name("other.py").write_text(
        "from sorl_train.algorithms import Algorithm\nMINE = Algorithm('turn', 'group')\n"
    )
    with pytest.raises(UserError, match=r"Did you mean 'MINE'|Known: MINE"):
        find_algorithm(str(tmp_path / "other.py"))
    mine = f"{tmp_path / 'other.py'}:MINE"
    assert find_algorithm(mine).ratio == "turn" and short_name(mine) == "MINE"
    with pytest.raises(UserError, match=r"group_size must be at least 2, it is 1"):
        load_config("minihop", {"algo": mine, "rollout.group_size": 1})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return (ratio.detach() * advantage)", "has no gradient"),
        ("return (ratio * advantage).mean()", r"returned \(\) torch.float32 for 4 tokens"),
        ("return None", "returned None"),
        ("return ratio > 1", "returned .* torch.bool"),
        ("return ratio.clamp_(max=1.2) * advantage", "failed on 4 tokens: RuntimeError"),
        ("return ratio.log().sqrt() * advantage", "is not finite"),
        ("raise KeyError('x')", "failed on 4 tokens: KeyError: 'x'"),
    ],
)
def test_a_surrogate_is_tried_before_the_first_rollout(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from sorl_train.algorithms import Algorithm\n"
        f"def wrong(ratio, advantage, clip):\n    {body}\n"
        "ALGORITHM = Algorithm('token', 'gae', surrogate=wrong)\n"
    )
    config = load_config("minihop", {"algo": str(file)})
    with pytest.raises(UserError, match=f"its surrogate wrong {says}"):
        loss_settings(config)


def settings_text(algorithm: Algorithm) -> str:
    """The settings that its paper publishes, and whether they are applied."""
    values, defaults = {**algorithm.published, **algorithm.defaults}, flatten(TrainConfig())
    shown = ", ".join(
        f"`{name}` {value:g}" if isinstance(value, float) else f"`{name}` {value}"
        for name, value in values.items()
    )
    applied = all(value == defaults[name] for name, value in algorithm.published.items())
    return (shown or "none") + ("" if applied else "; not applied")


def table_of_algorithms() -> list[str]:
    heads = ["switch", "what it is", "surrogate", "ratio of a", "advantages", "normalized"]
    heads += ["source", "published default", "when to use it"]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, a in ALGORITHMS.items():
        assert a.surrogate_name is not None and a.about and a.source and a.when
        cells = (
            f"`--algo {name}`",
            a.about,
            f"`{a.surrogate_name}`",
            a.ratio,
            a.advantage,
            "yes" if a.normalize else "no",
            ", ".join(filter(None, (a.source, a.equation))),
            settings_text(a),
            a.when,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    found = PAGE.read_text(encoding="utf-8").partition("<!-- algorithms:")[2].partition("<!-- end -->")[0]
    assert found.splitlines()[1:] == table_of_algorithms()


def test_comparing_the_rewards_of_turns_needs_rewards_of_turns() -> None:
    config = short_config(algo="mt_grpo", rollout__group_size=4)
    with pytest.raises(UserError, match=r"(?s)task minihop gives none.*--task_args\.hit_reward"):
        make_env(config)
    make_env(config, evaluation=True)
    make_env(short_config(algo="mt_grpo", rollout__group_size=4, stage="sft"))


def test_an_algorithm_brings_its_published_settings() -> None:
    rloo, gigpo = short_config(algo="rloo").loss, short_config(algo="gigpo").loss
    assert (rloo.group_baseline, rloo.group_std) == ("leave_one_out", False)
    assert (gigpo.gamma, gigpo.turn_weight, gigpo.anchor_state) == (0.95, 1.0, "observation")
    assert short_config(algo="gigpo", loss__gamma=0.9).loss.gamma == 0.9
    assert short_config(algo="grpo").loss.gamma == 1.0
