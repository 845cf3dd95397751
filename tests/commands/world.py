"""A folder of good and of spoilt files, for command lines that ought to be refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

DEEP = "[" * 100_000
DIGITS = "7" * 5_000  # more than Python turns into a number
QUESTIONS = [{"id": f"q{i}", "question": f"Who made {i}?", "golden_answers": ["Ann"]} for i in range(4)]
CHOICES = [
    {"id": f"c{i}", "question": f"Which {i}?", "options": {"A": "x", "B": "y"}, "answer_idx": "A"}
    for i in range(4)
]
PASSAGES = [{"id": f"p{i}", "contents": f'"Title {i}"\nAnn made {i} of words.'} for i in range(6)]


def lines(rows: list[dict[str, object]]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_world(folder: Path) -> None:
    """Write all files that the tables of command lines name into a new folder."""
    folder.mkdir(parents=True)
    for make in (_data, _configs, _tasks, _studies, _small_files):
        make(folder)
    _runs(folder)
    _indexes(folder)
    _evaluations(folder)


def _data(folder: Path) -> None:
    good = lines(QUESTIONS)
    texts = {
        "good.jsonl": good,
        "choices.jsonl": lines(CHOICES),
        "test_split.jsonl": lines([row | {"split": "test"} for row in QUESTIONS]),
        "deep.jsonl": good + DEEP + "\n",
        "deep_value.jsonl": '{"question": ' + DEEP + "}\n",
        "digits.jsonl": '{"id": ' + DIGITS + ', "question": "q?", "golden_answers": ["a"]}\n',
        "empty.jsonl": "",
        "numbers.jsonl": "1\n2\n",
        "cut.jsonl": good[:-20],
        "page.jsonl": "<html><body>404</body></html>\n",
        "other_columns.jsonl": '{"prompt": "x", "response": "y"}\n',
        "wrong_types.jsonl": '{"question": 3, "golden_answers": "a"}\n',
        "notes.csv": "question,golden_answers\nWho?,Ann\n",
        "text.parquet": "no columns here\n",
        "text.jsonl.gz": "not zipped\n",
        "deep.json": DEEP,
        "empty.json": "",
        "two_lists.json": '{"a": [], "b": []}',
        "corpus.jsonl": lines(PASSAGES),
        "corpus_deep.jsonl": lines(PASSAGES) + DEEP + "\n",
        "corpus_other.jsonl": '{"name": "no passage"}\n',
        "corpus_list.jsonl": "[1, 2]\n",
        "header.tsv": "name\tbody\n1\tx\n",
        "columns.tsv": "id\ttext\ttitle\n1\tx\n",
        "empty.tsv": "",
        "blank.txt": " \n",
        "records_text.jsonl": '{"study": "s", "cell": "c", "seed": 0, "step": [1], "eval/success": ["high"]}\n',
        "records.jsonl": '{"study": "s", "cell": "c", "seed": 0}\n',
        "ids_number.json": "3",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    latin = '{"id": "1", "question": "caf\u00e9?", "golden_answers": ["a"], "contents": "caf\u00e9"}\n'
    (folder / "latin1.jsonl").write_bytes(latin.encode("latin-1"))
    (folder / "latin1.tsv").write_bytes("id\ttext\n1\tcaf\u00e9\n".encode("latin-1"))
    (folder / "latin1.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "bytes.jsonl").write_bytes(bytes(range(256)) * 8)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(good.encode() * 50)[:-30])
    (folder / "cut.parquet").write_bytes(b"PAR1" + b"\0" * 100)
    for name in ("empty", "folder", "other", "folder.jsonl", "folder.yaml", "folder.py"):
        (folder / name).mkdir()
    for name in ("other", "folder.jsonl", "folder.yaml", "folder.py"):
        (folder / name / "notes").write_text("somebody's own\n")
    (folder / "folder" / "train.jsonl").write_text(good)


def _configs(folder: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
    texts = {
        "tabs.yaml": "optim:\n\tlr: 1e-4\n",
        "twice.yaml": "seed: 1\nseed: 2\n",
        "bomb.yaml": bomb,
        "bomb_args.yaml": bomb.replace("a0: &a0", "task_args:\n  a0: &a0").replace("\na", "\n  a"),
        "circle.yaml": "task_args: &a\n  hops: *a\n",
        "tag.yaml": 'seed: !!python/object/apply:os.system ["true"]\n',
        "tag_bool.yaml": "seed: !!bool maybe\n",
        "tag_int.yaml": 'seed: !!int ""\n',
        "digits.yaml": f"seed: {DIGITS}\n",
        "deep.yaml": "task_args: {a: " + DEEP[:5_000] + "}\n",
        "list.yaml": "- seed\n- 1\n",
        "word.yaml": "quickstart\n",
        "unclosed.yaml": "optim: {lr: 1e-4\n",
        "unknown_key.yaml": "optim: {learning_rate: 1e-4}\n",
        "wrong_type.yaml": "optim: {lr: fast}\n",
        "section.yaml": "optim: 3\n",
        "number_key.yaml": "1: 2\n",
        "huge_float.yaml": f"optim: {{lr: {DIGITS[:400]}}}\n",
        "circle_a.yaml": "base: circle_b.yaml\n",
        "circle_b.yaml": "base: circle_a.yaml\n",
        "no_base.yaml": "base: quickstrat\n",
        "base_list.yaml": "base: [quickstart]\n",
        "algos_list.yaml": "algos: [ppo]\n",
        "algos_unknown.yaml": "algos: {pppo: {seed: 1}}\n",
        "nul.yaml": "seed: \0\n",
        "two_documents.yaml": "seed: 1\n---\nseed: 2\n",
        "anchor.yaml": "seed: *nowhere\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin1.yaml").write_bytes("task: caf\u00e9\n".encode("latin-1"))
    (folder / "bytes.yaml").write_bytes(bytes(range(256)))


def _tasks(folder: Path) -> None:
    head = "from sorl_env import Example, Task\n\n"
    task = (
        'TASK = Task(name="mine", prompt={prompt}, reward={reward}, parse_row={parse}, '
        'embedded=lambda split: [Example("1", "q?", ("a",))])\n'
    )
    good = {"prompt": "lambda e: e.question", "reward": "lambda e, t: {'r': 0.0}", "parse": "dict.pop"}
    texts = {
        "syntax.py": "x = 1\ndef broken(:\n    pass\n",
        "indent.py": "def f():\nreturn 1\n",
        "missing_import.py": "import surely_not_a_module\n",
        "wrong_import.py": "from sorl_env import Taks\n",
        "name.py": "x = 1\ny = undefined_name + 1\n",
        "raises.py": "def f():\n    return {}['key']\n\n\nf()\n",
        "exits.py": "import sys\n\nsys.exit('bye')\n",
        "no_task.py": "x = 1\n",
        "not_a_task.py": "TASK = 3\n",
        "wrong_field.py": head + 'TASK = Task(nmae="x")\n',
        "bad_prompt.py": head + task.format(**(good | {"prompt": "lambda e: e.text"})),
        "bad_reward.py": head + task.format(**(good | {"reward": "lambda e, t: {'r': 1 / 0}"})),
        "bad_embedded.py": head + task.format(**good).replace("Example(", "Exampel("),
        "builder.py": "def TASK(n=1):\n    raise RuntimeError('no such world')\n",
        "nul.py": "x = 1\0\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin1.py").write_bytes("x = 'caf\u00e9'\n".encode("latin-1"))


def _studies(folder: Path) -> None:
    texts = {
        "study_keys.yaml": "bases: quickstart\n",
        "study_seeds.yaml": "seeds: 3\n",
        "study_seed.yaml": "seeds: [-1]\n",
        "study_seed_text.yaml": "seeds: [one]\n",
        "study_axes.yaml": "axes: {optim.lrr: [1]}\n",
        "study_same.yaml": "seeds: [0, 0]\n",
        "study_empty.yaml": "",
        "study_slash.yaml": "arms: {a/b: {algo: ppo}}\n",
        "study_on_off.yaml": "arms: {on: {algo: so_ppo}, off: {algo: ppo}}\n",
        "study_number_key.yaml": "settings: {1: 2}\n",
        "study_arm_number.yaml": "arms: {1: {algo: ppo}}\naxes: 3\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _small_files(folder: Path) -> None:
    (folder / "token_empty").write_text("\n")
    (folder / "token_words").write_text("two words\n")
    (folder / "token_bytes").write_bytes(b"\xff\xfe\x00")
    (folder / "vectors.npy").write_text("no vectors\n")
    (folder / "replies.db").write_text("no SQLite, but long enough to look at its first bytes\n" * 40)


def _copies(source: Path, changes: Mapping[str, Callable[[Path], object]]) -> None:
    """Copies of a folder beside it, each with its name and a change."""
    for name, change in changes.items():
        change(shutil.copytree(source, source.with_name(name)))


def _cut(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def _runs(folder: Path) -> None:
    from sorl_env.task.registry import load_task
    from sorl_train.models.tiny import build_tiny_policy

    model = folder / "model"
    build_tiny_policy(load_task("minihop"), model, hidden_size=16, num_layers=1, num_heads=2, num_dialogues=4)
    weights, config = "model.safetensors", "config.json"
    changes = {
        "model_cut": lambda at: _cut(at / weights),
        "model_head": lambda at: (at / weights).write_bytes(b"\xff" * 8 + b"{}"),
        "model_empty": lambda at: (at / weights).write_bytes(b""),
        "model_text": lambda at: (at / weights).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model_no_weights": lambda at: (at / weights).unlink(),
        "model_no_tokenizer": lambda at: [p.unlink() for p in at.glob("tokenizer*")],
        "model_cut_tokenizer": lambda at: _cut(at / "tokenizer.json"),
        "model_cut_config": lambda at: _cut(at / config),
        "model_deep_config": lambda at: (at / config).write_text(DEEP),
        "model_list_config": lambda at: (at / config).write_text("[]"),
        "model_kind": lambda at: (at / config).write_text('{"model_type": "surely_not"}'),
        "model_bytes_config": lambda at: (at / config).write_bytes(bytes(range(256))),
    }
    _copies(model, changes)

    from sorl_train.config.files import load_config
    from sorl_train.run.folder import RunDir

    run = RunDir.create(folder / "run", load_config("minihop"))
    rows = [{"step": s, "eval/success": 0.5, "loss/grad_norm": 1.0, "loss/approx_kl": 0.1} for s in range(3)]
    run.metrics.write_text(lines(rows))
    shutil.copytree(model, run.checkpoints / "step_000002" / "policy")
    changes = {
        "run_bytes": lambda at: (at / "metrics.jsonl").write_bytes(bytes(range(256)) * 4 + b"\n"),
        "run_deep": lambda at: (at / "metrics.jsonl").write_text(DEEP + "\n"),
        "run_numbers": lambda at: (at / "metrics.jsonl").write_text("1\n2\n"),
        "run_no_step": lambda at: (at / "metrics.jsonl").write_text('{"loss/grad_norm": 1}\n'),
        "run_text_figures": lambda at: (at / "metrics.jsonl").write_text(
            '{"step": 1, "eval/success": "high", "loss/grad_norm": "low"}\n'
        ),
        "run_bytes_config": lambda at: (at / "config.yaml").write_bytes(bytes(range(256))),
        "run_other_config": lambda at: (at / "config.yaml").write_text("name: of another program\n"),
        "run_no_checkpoint": lambda at: shutil.rmtree(at / "checkpoints" / "step_000002"),
        "run_cut_policy": lambda at: _cut(at / "checkpoints" / "step_000002" / "policy" / weights),
        "run_bad_dialogues": lambda at: (at / "trajectories" / "step_000001.jsonl").write_text(DEEP + "\n"),
        "run_bytes_dialogues": lambda at: (at / "trajectories" / "step_000001.jsonl").write_bytes(b"\xff\n"),
    }
    _copies(folder / "run", changes)
    for moved in ({"task": "moved.py"}, {"eval_data": "moved.jsonl"}):
        name = f"run_moved_{'task' if 'task' in moved else 'data'}"
        other = RunDir.create(folder / name, dataclasses.replace(load_config("minihop"), **moved))
        shutil.copytree(model, other.checkpoints / "step_000002" / "policy")
    study = folder / "study" / "runs"
    study.mkdir(parents=True)
    shutil.copytree(folder / "study", folder / "study_no_runs")
    shutil.copytree(run.path, study / "a-s0-0123456789")
    for name, content in {"study_bad_results": DEEP.encode() + b"\n", "study_bytes": b"\xff\xfe\n"}.items():
        (shutil.copytree(folder / "study", folder / name) / "results.jsonl").write_bytes(content)


def _indexes(folder: Path) -> None:
    from sorl_tools.index.build.build import build

    build([folder / "corpus.jsonl"], folder / "index")
    manifest = "manifest.json"

    def edit(at: Path, **changes: object) -> None:
        content = json.loads((at / manifest).read_text())
        (at / manifest).write_text(json.dumps(content | changes))

    changes = {
        "index_deep": lambda at: (at / manifest).write_text(DEEP),
        "index_list": lambda at: (at / manifest).write_text("[]"),
        "index_bytes": lambda at: (at / manifest).write_bytes(b"\xff\xfe\x00"),
        "index_format": lambda at: edit(at, format=99),
        "index_backend": lambda at: edit(at, backend="pigeon"),
        "index_corpus": lambda at: edit(at, corpus=3, parameters=[1]),
        "index_lost": lambda at: (at / "passages.jsonl").unlink(),
        "index_cut": lambda at: _cut(at / "passages.jsonl"),
        "index_flipped": lambda at: _flip(at / "bm25", 40),
        "index_unfinished": lambda at: ((at / manifest).unlink(), (at / "request.json").touch()),
        "index_journal": lambda at: ((at / manifest).unlink(), (at / "request.json").write_text(DEEP + "\n")),
    }
    _copies(folder / "index", changes)


def _flip(folder: Path, at: int) -> None:
    """Flip bits in the middle of the largest file of a folder, which keeps its size."""
    path = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= at
    path.write_bytes(bytes(data))


def _evaluations(folder: Path) -> None:
    good = folder / "evaluation"
    good.mkdir()
    settings = {"label": "x", "policy": {}, "tasks": {}, "modes": ["agent"], "limit": None, "samples": 1}
    (good / "settings.json").write_text(json.dumps(settings))
    (good / "results.jsonl").write_text("")
    (good / "summary.json").write_text(json.dumps({"label": "x", "settings": settings, "entries": []}))
    changes = {
        "evaluation_deep": lambda at: (at / "settings.json").write_text(DEEP),
        "evaluation_bytes": lambda at: (at / "results.jsonl").write_bytes(b"\xff\xfe\n"),
        "evaluation_list": lambda at: (at / "settings.json").write_text("[]"),
        "evaluation_rows": lambda at: (at / "results.jsonl").write_text('{"task": "x"}\n'),
        "evaluation_numbers": lambda at: (at / "results.jsonl").write_text("3\n"),
        "evaluation_deep_rows": lambda at: (at / "results.jsonl").write_text(DEEP + "\n"),
        "evaluation_summary": lambda at: (at / "summary.json").write_text(DEEP),
        "evaluation_summary_list": lambda at: (at / "summary.json").write_text("[]"),
    }
    _copies(good, changes)
