"""Preparing: every published form to one schema, the same bytes each time, and nobody trains on test."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

pa = pytest.importorskip("pyarrow", reason="data preparation needs pyarrow")
datasets = pytest.importorskip("datasets")
import pyarrow.parquet as pq  # noqa: E402

from sorl_env import UserError, load_examples, load_task  # noqa: E402
from sorl_train.cli import main as train_main  # noqa: E402
from sorl_train.config import TrainConfig  # noqa: E402
from sorl_train.environments import make_env  # noqa: E402
from sorl_train.prepare.build import Options, choose_sources, prepare, to_row  # noqa: E402
from sorl_train.prepare.cli import main  # noqa: E402
from sorl_train.prepare.manifest import read_manifest  # noqa: E402
from sorl_train.prepare.recipes import RECIPES, find_recipe  # noqa: E402

SHARED = {  # data set -> split -> file of the shared data
    "nq": {"train": "nq/train", "test": "nq/test"},
    "hotpotqa": {"train": "hotpotqa/train_distractor", "test": "hotpotqa/test"},
    "alphamed19k": {"train": "alphamed/train_shaped"},
    "medqa": {"test": "medical/medqa_test"},
    "medmcqa": {"test": "medical/medmcqa_dev"},
    "pubmedqa": {"train": "medical/pubmedqa", "test": "medical/pubmedqa"},
    "mmlu_medical": {"test": "medical/mmlu_med_test"},
    "medxpertqa": {"test": "medical/medxpertqa_text"},
    "bioasq": {"test": "medical/bioasq_factoid_yesno"},
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def made(name: str, out: Path, *sources: str, **options: Any) -> dict[str, Any]:
    recipe = find_recipe(name)
    return prepare(recipe, choose_sources(recipe, sources), out, Options(**options))


# --- the real files -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHARED)
def test_real_files_twice(name: str, shared_data: Path, tmp_path: Path) -> None:
    sources = [f"{split}={shared_data / file}.jsonl.gz" for split, file in SHARED[name].items()]
    manifest = made(name, tmp_path / "one", *sources)
    made(name, tmp_path / "two", *sources)
    made(name, tmp_path / "one", *sources)  # over itself
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {f"{split}.jsonl" for split in SHARED[name]} | {"README.md", "sorl_data.json"} <= set(files)
    for file in files:
        content = (tmp_path / "one" / file).read_bytes()
        assert content == (tmp_path / "two" / file).read_bytes()
        assert str(tmp_path).encode() not in content and str(shared_data).encode() not in content
    task = load_task(name)
    for split, file in SHARED[name].items():
        entry = manifest["files"][f"{split}.jsonl"]
        loaded = load_examples(task, tmp_path / "one", split)
        assert (len(loaded), loaded.sha256) == (entry["rows"], entry["sha256"])
        content = (shared_data / f"{file}.jsonl.gz").read_bytes()
        assert entry["source_sha256"] == hashlib.sha256(content).hexdigest()
        if name != "pubmedqa":  # its one file holds both splits
            # the same questions as the task reads from the published rows, but for the corpora's own columns
            published = load_examples(task, shared_data / f"{file}.jsonl.gz", "test").examples
            assert [e.id for e in loaded.examples] == [e.id for e in published]
            assert [(e.question, e.golden_answers, e.options) for e in loaded.examples] == [
                (e.question, e.golden_answers, e.options) for e in published
            ]
            assert all(e.metadata == p.metadata for e, p in zip(loaded.examples, published, strict=True))


def test_pubmedqa_is_split_by_its_rows(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "medical/pubmedqa.jsonl.gz"
    manifest = made("pubmedqa", tmp_path / "out", f"train={file}", f"test={file}")
    files = manifest["files"]
    assert (files["train.jsonl"]["rows"], files["test.jsonl"]["rows"]) == (500, 236)
    assert files["train.jsonl"]["dropped"] == {"of the test split": 236}
    assert manifest["overlap"]["with"]["test.jsonl"]["exact_pairs"] == 0


def test_the_card_loads_with_datasets_and_names_licence_and_counts(shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(
        "hotpotqa",
        out,
        *(f"{s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()),
        drop="exact",
    )
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "cc-by-sa-4.0"
    assert "| train.jsonl | train | 247 | training |" in text
    assert "| test.jsonl | test | 253 | evaluation only: training on it is refused |" in text
    assert "| test.jsonl | 51 test questions | 0 test questions |" in text and "51 also for testing" in text
    for split, count in (("train", 247), ("test", 253)):
        loaded = datasets.load_dataset(str(out), split, cache_dir=str(tmp_path / "cache"))
        assert {name: len(rows) for name, rows in loaded.items()} == {split: count}
    assert len(rows_of(out / "overlap.jsonl")) == 51
    assert not {r["question"] for r in rows_of(out / "train.jsonl")} & {
        r["question"] for r in rows_of(out / "test.jsonl")
    }


# --- published forms ------------------------------------------------------------------------------------------
def test_search_r1s_joint_parquet_and_flashrag(tmp_path: Path) -> None:
    """Search-R1 publishes NQ and HotpotQA in one table with more columns; FlashRAG puts details into ``metadata``."""
    shared = {"prompt": [{"role": "user", "content": "x"}], "ability": "fact-reasoning"}
    joint = [
        {"id": "train_0", "question": "who?", "golden_answers": ["a"], "data_source": "nq", **shared},
        {"id": "train_1", "question": "which?", "golden_answers": ["b"], "data_source": "hotpotqa", **shared},
    ]
    file = parquet(tmp_path / "joint.parquet", joint)
    for name, gold in (("nq", "a"), ("hotpotqa", "b")):
        manifest = made(name, tmp_path / name, f"train={file}")
        (row,) = rows_of(tmp_path / name / "train.jsonl")
        assert (row["golden_answers"], row["data_source"], row["split"]) == ([gold], name, "train")
        assert "prompt" not in row
        assert manifest["files"]["train.jsonl"]["dropped"] == {"of another data set": 1}
    facts = {"title": ["X", "Y"], "sent_id": [0, 2]}
    flash = {"id": "dev_0", "question": "q", "golden_answers": ["a"]}
    details = {"type": "bridge", "level": "hard", "supporting_facts": facts}
    file = jsonl(tmp_path / "dev.jsonl", [{**flash, "metadata": details}])
    made("hotpotqa", tmp_path / "flash", f"test={file}")
    (row,) = rows_of(tmp_path / "flash" / "test.jsonl")
    assert (row["type"], row["supporting_facts"]) == ("bridge", [["X", 0], ["Y", 2]])


def test_original_hotpotqa(tmp_path: Path) -> None:
    original = [
        {
            "_id": "5a7a",
            "question": "Which?",
            "answer": "Paris",
            "type": "bridge",
            "level": "easy",
            "supporting_facts": [["X", 0], ["Y", 1]],
            "context": [["X", ["One.", "Two."]]],
        },
        {"_id": "5a7b", "question": "Hidden?", "context": []},  # as the test split
    ]
    file = tmp_path / "hotpot_train_v1.1.json"
    file.write_text(json.dumps(original))
    manifest = made("hotpotqa", tmp_path / "out", f"train={file}")
    (row,) = rows_of(tmp_path / "out" / "train.jsonl")
    assert row == {
        "id": "5a7a",
        "data_source": "hotpotqa",
        "split": "train",
        "question": "Which?",
        "golden_answers": ["Paris"],
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["X", 0], ["Y", 1]],
    }
    assert manifest["files"]["train.jsonl"]["dropped"] == {"answer withheld": 1}


def test_original_nq(tmp_path: Path) -> None:
    words = "<P> The fifth one was built in Rome by Nero and his men </P>"

    def row(number: int, *spans: tuple[int, int]) -> dict[str, Any]:
        short = [{"start_token": start, "end_token": end} for start, end in spans]
        notes = [{"short_answers": short, "yes_no_answer": "NONE"}]
        return {
            "example_id": number,
            "question_text": f"q {number}",
            "document_text": words,
            "annotations": notes,
        }

    file = jsonl(
        tmp_path / "simplified.jsonl",
        [row(1, (7, 8), (9, 10)), row(2), row(3, (1, 8)), row(4, (9, 13), (9, 13))],
    )
    manifest = made("nq", tmp_path / "out", f"train={file}")
    found = {r["id"]: r["golden_answers"] for r in rows_of(tmp_path / "out" / "train.jsonl")}
    assert found == {"1": ["Rome", "Nero"], "4": ["Nero and his men"]}
    assert manifest["files"]["train.jsonl"]["dropped"] == {"no short answer of at most 5 tokens": 2}
    nq_open = jsonl(tmp_path / "open.jsonl", [{"question": "who?", "answer": ["a", "b"]}])
    made("nq", tmp_path / "open", f"test={nq_open}")
    assert rows_of(tmp_path / "open" / "test.jsonl")[0]["golden_answers"] == ["a", "b"]


def test_alphamed19k_as_published(tmp_path: Path) -> None:
    """``train19k.parquet`` in a folder of its own, as a copy of the hub's: through ``datasets``."""
    question = "Which drug helps in gout?\nA: Aspirin\nB: Colchicine\nC: Insulin\nD: Zinc"
    rows = [{"question": question, "answer": "B", "subset_name": "medqa"}]
    parquet(tmp_path / "copy" / "train19k.parquet", rows)
    manifest = made("alphamed19k", tmp_path / "out", str(tmp_path / "copy"))
    (row,) = rows_of(tmp_path / "out" / "train.jsonl")
    assert row["options"] == {"A": "Aspirin", "B": "Colchicine", "C": "Insulin", "D": "Zinc"}
    assert (row["question"], row["golden_answers"], row["subset_name"]) == (
        "Which drug helps in gout?",
        ["B"],
        "medqa",
    )
    assert manifest["files"]["train.jsonl"]["source"] == "copy"
    assert not (tmp_path / "out" / "test.jsonl").exists()


def test_hub_layouts_through_datasets(tmp_path: Path) -> None:
    """MMLU keeps a subject in each configuration, MedMCQA evaluates on its validation split, PubMedQA mixes both."""
    subjects = find_recipe("mmlu_medical").configs
    configs = []
    for i, subject in enumerate(subjects):
        row = {
            "question": f"About {subject}?",
            "subject": subject,
            "choices": ["1", "2", "3", "4"],
            "answer": i % 4,
        }
        parquet(tmp_path / "mmlu" / str(subject) / "test-00000-of-00001.parquet", [row])
        configs.append(
            {"config_name": subject, "data_files": [{"split": "test", "path": f"{subject}/test-*"}]}
        )
    (tmp_path / "mmlu" / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    manifest = made("mmlu_medical", tmp_path / "out", str(tmp_path / "mmlu"))
    assert [row["subject"] for row in rows_of(tmp_path / "out" / "test.jsonl")] == list(subjects)
    assert manifest["files"]["test.jsonl"]["source"] == f"mmlu:{'+'.join(map(str, subjects))}"
    assert manifest["files"]["test.jsonl"]["source_split"] == "test"

    options = {"opa": "a", "opb": "b", "opc": "c", "opd": "d"}
    for split, cop in (("train", 0), ("validation", 3), ("test", -1)):
        row = {"id": split, "question": f"{split}?", **options, "cop": cop, "subject_name": "Skin"}
        parquet(tmp_path / "medmcqa" / "data" / f"{split}-00000-of-00001.parquet", [row])
    made("medmcqa", tmp_path / "medmcqa_out", str(tmp_path / "medmcqa"))
    assert [r["id"] for r in rows_of(tmp_path / "medmcqa_out" / "test.jsonl")] == ["validation"]
    assert rows_of(tmp_path / "medmcqa_out" / "train.jsonl")[0]["golden_answers"] == ["A"]

    labelled = [{"pubid": i, "question": f"Is it {i}?", "final_decision": "no"} for i in range(4)]
    parquet(tmp_path / "pubmedqa" / "pqa_labeled" / "train-00000-of-00001.parquet", labelled)
    config = {"config_name": "pqa_labeled", "data_files": [{"split": "train", "path": "pqa_labeled/train-*"}]}
    (tmp_path / "pubmedqa" / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': [config]})}---\n")
    with pytest.raises(
        UserError, match=r"nothing says whether this question is for training .* give --test_ids"
    ):
        made("pubmedqa", tmp_path / "pubmedqa_out", str(tmp_path / "pubmedqa"))
    made("pubmedqa", tmp_path / "pubmedqa_out", str(tmp_path / "pubmedqa"), test_ids=frozenset(("1", "3")))
    for split, ids in (("train", ["0", "2"]), ("test", ["1", "3"])):
        assert [r["id"] for r in rows_of(tmp_path / "pubmedqa_out" / f"{split}.jsonl")] == ids


def test_bioasq_release(tmp_path: Path) -> None:
    questions = [
        {"id": "a", "body": "Is it?", "type": "yesno", "exact_answer": "Yes", "documents": ["http://x"]},
        {"id": "b", "body": "Which gene?", "type": "factoid", "exact_answer": [["MEF2C", "Mef2c"]]},
        {"id": "c", "body": "List them.", "type": "list", "exact_answer": [["x"], ["y"]]},
    ]
    file = tmp_path / "10B1_golden.json"
    file.write_text(json.dumps({"questions": questions}))
    manifest = made("bioasq", tmp_path / "out", f"test={file}")
    assert [r["golden_answers"] for r in rows_of(tmp_path / "out" / "test.jsonl")] == [
        ["yes"],
        ["MEF2C", "Mef2c"],
    ]
    assert manifest["files"]["test.jsonl"]["dropped"] == {"neither factoid nor yes/no": 1}


def test_a_row_and_its_example_are_the_same_thing() -> None:
    for name in RECIPES:
        task = load_task(name)
        assert task.embedded is not None
        for split in ("train", "test"):
            for example in task.embedded(split):
                assert task.parse_row(to_row(example, name, split)) == example


# --- nobody trains on test ------------------------------------------------------------------------------------
@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    train = jsonl(tmp_path / "a.jsonl", [{"question": f"q{i}?", "golden_answers": ["a"]} for i in range(4)])
    test = jsonl(tmp_path / "b.jsonl", [{"question": f"t{i}?", "golden_answers": ["a"]} for i in range(2)])
    made("nq", tmp_path / "nq", f"train={train}", f"test={test}")
    return tmp_path / "nq"


def test_training_on_a_test_split_is_refused(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = load_task("nq")
    assert len(load_examples(task, prepared, "train")) == 4
    assert len(load_examples(task, prepared / "test.jsonl", "test")) == 2
    copy = tmp_path / "train.jsonl"  # a copy under a harmless name is still test data
    copy.write_bytes((prepared / "test.jsonl").read_bytes())
    for path in (prepared / "test.jsonl", copy):
        with pytest.raises(UserError, match=r"jsonl:1: this question is of a test split .* nobody trains on"):
            load_examples(task, path, "train")
        assert (
            train_main(
                ["--task", "nq", "--model", "x", "--data", str(path), "--run_dir", str(tmp_path / "run")]
            )
            == 2
        )
        assert "sorl-train: " in (error := capsys.readouterr().err) and "of a test split" in error
        assert not (tmp_path / "run").exists()
    # nor does calling the split by its name help; to evaluate on it is what it is for
    config = TrainConfig(task="nq", data=str(prepared), split="test")
    with pytest.raises(
        UserError, match=r"split 'test' of .*test\.jsonl holds test questions .* nobody trains on"
    ):
        make_env(config)
    assert len(make_env(replace(config, split="train"), evaluation=True).examples) == 2
    with pytest.raises(UserError, match="no rows of nq for split 'train'"):
        made("nq", tmp_path / "again", f"train={prepared / 'test.jsonl'}")


def test_drop_leaves_near_duplicates_out_of_train(tmp_path: Path) -> None:
    texts = [
        "who built the great wall of china first",
        "who built the great wall of china",
        "what is a lemur",
    ]
    train = jsonl(
        tmp_path / "a.jsonl",
        [{"id": str(i), "question": t, "golden_answers": ["a"]} for i, t in enumerate(texts)],
    )
    test = jsonl(
        tmp_path / "b.jsonl",
        [{"id": "t", "question": "Who built the Great Wall of China?", "golden_answers": ["a"]}],
    )
    for drop, left in (("none", ["0", "1", "2"]), ("exact", ["0", "2"]), ("near", ["2"])):
        manifest = made("nq", tmp_path / drop, f"train={train}", f"test={test}", drop=drop)
        assert [row["id"] for row in rows_of(tmp_path / drop / "train.jsonl")] == left
        counts = manifest["overlap"]["with"]["test.jsonl"]
        assert (counts["exact_pairs"], counts["near_pairs"]) == (1, 1)


def test_train_is_checked_against_other_benchmarks(shared_data: Path, tmp_path: Path) -> None:
    """The shared file in AlphaMed19K's columns was made of benchmark questions: it shows."""
    medqa = tmp_path / "medqa"
    made("medqa", medqa, f"test={shared_data / 'medical/medqa_test.jsonl.gz'}")
    train = f"train={shared_data / 'alphamed/train_shaped.jsonl.gz'}"
    mmlu = shared_data / "medical/mmlu_med_test.jsonl.gz"
    tests = (medqa / "test.jsonl", mmlu)
    manifest = made("alphamed19k", tmp_path / "alphamed", train, against=tests, drop="near")
    counts = manifest["overlap"]["with"]
    assert {name: found["exact_test"] for name, found in counts.items()} == {
        "medqa/test.jsonl": 626,
        "medical/mmlu_med_test.jsonl.gz": 0,
    }
    assert manifest["files"]["train.jsonl"]["rows"] == 5809 - 626
    assert {row["with"] for row in rows_of(tmp_path / "alphamed" / "overlap.jsonl")} == {"medqa/test.jsonl"}
    with pytest.raises(UserError, match="--against checks a train split, and none is prepared"):
        made("medqa", medqa, f"test={shared_data / 'medical/medqa_test.jsonl.gz'}", against=(mmlu,))
    with pytest.raises(UserError, match=r"another file is called medqa/test\.jsonl, too"):
        made("alphamed19k", tmp_path / "alphamed", train, against=(medqa / "test.jsonl",) * 2)


# --- mistakes -------------------------------------------------------------------------------------------------
def test_unreadable_rows(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "x.jsonl",
        [{"question": "q?", "golden_answers": ["a"]}, {"question": 3, "golden_answers": ["a"]}],
    )
    with pytest.raises(UserError, match=r"x\.jsonl:2: not a row of nq: column 'question' must be a text"):
        made("nq", tmp_path / "out", f"train={file}")
    assert not (tmp_path / "out").exists()
    manifest = made("nq", tmp_path / "out", f"train={file}", skip_unreadable=True)
    assert manifest["files"]["train.jsonl"]["dropped"] == {"unreadable": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("3", "a list of JSON objects is wanted"),
        ('{"a": [], "b": []}', "an object with 2 lists"),
        ("[1]", "a list of JSON objects is wanted"),
    ],
)
def test_a_json_file_of_another_form(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=message):
        made("hotpotqa", tmp_path / "out", f"train={tmp_path / 'x.json'}")


def test_sources(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", [{"question": "q?", "golden_answers": ["a"]}])
    nq = find_recipe("nq")
    assert choose_sources(nq, []) == dict.fromkeys(("train", "test"), "hf:RUC-NLPIR/FlashRAG_datasets")
    assert choose_sources(nq, ["test=hf:a/b"]) == {"test": "hf:a/b"}
    for given, message in (
        ([str(file)], "a file holds one split, say which: --source train="),
        ([f"tset={file}"], "Did you mean 'test'"),
        ([f"train={file}", f"train={file}"], "gives split 'train' twice"),
    ):
        with pytest.raises(UserError, match=message):
            choose_sources(nq, given)
    with pytest.raises(UserError, match="bioasq is on no hub: give --source"):
        choose_sources(find_recipe("bioasq"), [])
    with pytest.raises(UserError, match="Did you mean 'medqa'"):
        find_recipe("medq")


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", [{"question": "q?", "golden_answers": ["a"]}])
    with pytest.raises(UserError, match="holds files that sorl-data did not write"):
        made("nq", tmp_path, f"train={file}")
    with pytest.raises(UserError, match="is a file; give a folder"):
        made("nq", file, f"train={file}")


def test_a_second_call_with_fewer_splits_leaves_nothing_stale(prepared: Path, tmp_path: Path) -> None:
    assert (prepared / "overlap.jsonl").exists()
    made("nq", prepared, f"test={tmp_path / 'b.jsonl'}")
    assert sorted(path.name for path in prepared.iterdir()) == ["README.md", "sorl_data.json", "test.jsonl"]
    manifest = read_manifest(prepared)
    assert manifest is not None and set(manifest["files"]) == {"test.jsonl"}


def test_the_hub_out_of_reach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "medqa", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.match(
        r"sorl-data: hf:GBaker/MedQA-USMLE-4-options, split 'train': .*Give --source a copy", error, re.DOTALL
    )


# --- the command ----------------------------------------------------------------------------------------------
def test_prepare_check_and_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_data: Path
) -> None:
    sources = [f"--source={s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()]
    out = tmp_path / "hotpotqa"
    assert main(["prepare", "hotpotqa", *sources, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert (
        f"{out}/train.jsonl: 298 questions" in said.out
        and "test.jsonl: 51 of its questions stand in train word for word" in said.err
    )
    assert (
        main(
            [
                "check",
                str(out / "train.jsonl"),
                str(out / "test.jsonl"),
                "--out",
                str(tmp_path / "pairs.jsonl"),
            ]
        )
        == 1
    )
    assert "exact: 51 pairs, 51 questions of the first file, 51 of the second" in capsys.readouterr().out
    beside = [{"with": "test.jsonl", **pair} for pair in rows_of(tmp_path / "pairs.jsonl")]
    assert rows_of(out / "overlap.jsonl") == beside
    assert main(["show", str(out), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert (
        "298 questions" in shown
        and "as prepared, from train_distractor.jsonl.gz; hotpotqa, licence cc-by-sa-4.0" in shown
    )
    assert re.search(r"  type: bridge \d+, comparison \d+\n", shown) and '{"id": "meve_0"' in shown
    with (out / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "q?", "golden_answers": ["a"]}) + "\n")
    main(["show", str(out / "train.jsonl")])
    assert "CHANGED since it was prepared" in capsys.readouterr().out


def test_check_of_clean_files(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(prepared / "train.jsonl"), str(prepared / "test.jsonl")]) == 0
    assert "exact: 0 pairs" in capsys.readouterr().out


@pytest.mark.slow  # imports transformers
def test_show_counts_prompt_tokens(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from sorl_train.tiny import build_tiny_policy

    build_tiny_policy(load_task("minihop"), tmp_path / "tiny", hidden_size=32, num_layers=1, num_heads=2)
    assert main(["show", str(prepared / "train.jsonl"), "--tokenizer", str(tmp_path / "tiny")]) == 0
    assert re.search(r"tokens of a prompt: median \d+, .* 0 over the limit of 2,048", capsys.readouterr().out)


def test_command_line_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "x.jsonl")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert "no train or test file" in capsys.readouterr().err
    row = jsonl(tmp_path / "mcq.jsonl", [{"question": "q?", "opa": "x"}])
    assert main(["check", str(row), str(row)]) == 2
    assert (
        "no column 'golden_answers'. --task NAME reads the columns of that task." in capsys.readouterr().err
    )
    assert main(["prepare", "pubmedqa", "--test_ids", str(tmp_path / "none.json"), "--out", "x"]) == 2
    assert "--test_ids" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["prepare"])
    assert stopped.value.code == 2
