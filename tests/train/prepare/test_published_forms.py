"""Every published form of a data set is read to one schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sorl_env import UserError, load_task
from sorl_train.prepare.build import to_row
from sorl_train.prepare.recipes import RECIPES, find_recipe

from .files import jsonl, made, parquet, rows_of

pytestmark = pytest.mark.usefixtures("offline")


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
    shared = {
        "question": "Which?",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["X", 0], ["Y", 1]],
    }
    original = [
        {"_id": "5a7a", "answer": "Paris", "context": [["X", ["One.", "Two."]]], **shared},
        {"_id": "5a7b", "question": "Hidden?", "context": []},  # as the test split
    ]
    file = tmp_path / "hotpot_train_v1.1.json"
    file.write_text(json.dumps(original))
    manifest = made("hotpotqa", tmp_path / "out", f"train={file}")
    (row,) = rows_of(tmp_path / "out" / "train.jsonl")
    known = {"id": "5a7a", "data_source": "hotpotqa", "split": "train", "golden_answers": ["Paris"]}
    assert row == shared | known
    assert manifest["files"]["train.jsonl"]["dropped"] == {"without an answer": 1}


def test_nq_open(tmp_path: Path) -> None:
    nq_open = jsonl(tmp_path / "open.jsonl", [{"question": "who?", "answer": ["a", "b"]}])
    made("nq", tmp_path / "out", f"test={nq_open}")
    assert rows_of(tmp_path / "out" / "test.jsonl")[0]["golden_answers"] == ["a", "b"]


def test_alphamed19k_as_published(tmp_path: Path) -> None:
    """``train19k.parquet`` in a folder of its own, as a copy of the hub's: through ``datasets``."""
    question = "Which drug helps in gout?\nA: Aspirin\nB: Colchicine\nC: Insulin\nD: Zinc"
    rows = [{"question": question, "answer": "B", "subset_name": "medqa"}]
    parquet(tmp_path / "copy" / "train19k.parquet", rows)
    manifest = made("alphamed19k", tmp_path / "out", str(tmp_path / "copy"))
    (row,) = rows_of(tmp_path / "out" / "train.jsonl")
    assert row["options"] == {"A": "Aspirin", "B": "Colchicine", "C": "Insulin", "D": "Zinc"}
    assert row["question"] == "Which drug helps in gout?"
    assert (row["golden_answers"], row["subset_name"]) == (["B"], "medqa")
    assert manifest["files"]["train.jsonl"]["source"] == "copy"
    assert not (tmp_path / "out" / "test.jsonl").exists()


def test_hub_layouts_through_datasets(tmp_path: Path) -> None:
    """MMLU keeps a subject in each configuration, MedMCQA evaluates on its validation split, PubMedQA mixes both."""
    subjects = find_recipe("mmlu_medical").configs
    configs = []
    for i, subject in enumerate(subjects):
        row = {"question": f"About {subject}?", "subject": subject, "choices": [*"1234"], "answer": i % 4}
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
        UserError, match=r"it is not known whether this is a train or a test question: give --test_ids"
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
