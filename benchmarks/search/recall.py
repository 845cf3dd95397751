"""Does the passage that answers come back among the first three? BM25, vectors, both, and compressed vectors.

Over the project's real questions and corpora (see the data folder's README):

    NQ        an answer, normalized as for exact match, is in one of the passages
    HotpotQA  all gold titles are among the passages' titles
    PubMedQA  a passage is of the question's own abstract
    BioASQ    a passage is one of the gold ones

    python benchmarks/search recall --data ../shared/data --json recall.json
    python benchmarks/search recall --data ../shared/data --model MODEL_FOLDER --faiss fp16 sq8 sq4 pq

Embedding the 43,918 passages of wiki takes MiniLM most of an hour on one core; it can be stopped, and the same command
continues. With ``--vectors`` it is not done again. No figure depends on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sorl_env.folders import cache_folder
from sorl_env.rewards import normalize_answer
from sorl_tools.index import Hit, Index, open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.manifest import NAME
from sorl_tools.progress import Progress

TOP_K = 3
BATCH = 128
TOLERANCE = 0.01
# bm25s alone, English stemmer, on the same data
BM25_BARS = {"nq": 0.784, "hotpotqa": 0.407, "pubmedqa": 0.944, "bioasq": 0.870}
COMPRESSED_BAR = 0.95  # of flat's recall, at an eighth of its memory

Row = dict[str, Any]


def answered(row: Row, hits: Sequence[Hit]) -> bool:
    texts = [normalize_answer(f"{hit.passage.title} {hit.passage.text}") for hit in hits]
    return any(normalize_answer(gold) in text for gold in row["golden_answers"] for text in texts)


def complete(row: Row, hits: Sequence[Hit]) -> bool:
    return set(row["gold_titles"]) <= {hit.passage.title for hit in hits}


def own_abstract(row: Row, hits: Sequence[Hit]) -> bool:
    return any(hit.passage.id.startswith(f"{row['gold_doc']}:") for hit in hits)


def any_gold(row: Row, hits: Sequence[Hit]) -> bool:
    return any(hit.passage.id in row["gold_ids"] for hit in hits)


# corpus -> name of the questions -> their file and what counts
Found = Callable[[Row, Sequence[Hit]], bool]
QUESTIONS: dict[str, dict[str, tuple[str, Found]]] = {
    "wiki": {"nq": ("nq/test", answered), "hotpotqa": ("hotpotqa/test", complete)},
    "medical": {
        "pubmedqa": ("medical/pubmedqa", own_abstract),
        "bioasq": ("medical/bioasq_factoid_yesno", any_gold),
    },
}


def read_rows(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def ready(data: Path, corpus: str, out: Path, backend: str, dense: DenseOptions) -> Index:
    """The index in ``out``, built or finished first where need be."""
    if not (out / NAME).is_file():
        progress = Progress()
        build([data / "corpus" / f"{corpus}.jsonl.gz"], out, backend, dense=dense, progress=progress)
        progress.close()
    return open_index(out)


class Table:
    """Recall by index and questions, printed as it comes."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.rows: list[dict[str, Any]] = []

    def measure(self, label: str, index: Index, corpus: str) -> None:
        for name, (file, counts) in QUESTIONS[corpus].items():
            rows = read_rows(self.data / f"{file}.jsonl.gz")
            found = 0
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                hits = index.search([row["question"] for row in batch], TOP_K)
                found += sum(map(counts, batch, hits))
            recall = found / len(rows)
            self.rows.append(
                {"index": label, "questions": name, "count": len(rows), "recall": round(recall, 4)}
            )
            note = f"  (bm25s: {BM25_BARS[name]:.3f})" if label == "bm25" else ""
            print(
                f"{label:<16}{name:<10}{len(rows):>6} questions   recall@{TOP_K} {recall:.4f}{note}",
                flush=True,
            )

    def recall(self, label: str, name: str) -> float:
        return next(row["recall"] for row in self.rows if (row["index"], row["questions"]) == (label, name))


def dense_part(table: Table, arguments: argparse.Namespace) -> list[str]:
    """Vectors, hybrid and compressed kinds on wiki; returns the bars that were missed."""
    missed: list[str] = []

    def measure(label: str, backend: str, dense: DenseOptions) -> Path:
        out = arguments.work / f"wiki-{''.join(c if c.isalnum() else '-' for c in label)}"
        table.measure(label, ready(arguments.data, "wiki", out, backend, dense), "wiki")
        return Path(out / "dense")

    model = arguments.model
    vectors = measure("dense", "dense", DenseOptions(model, vectors=arguments.vectors)) / "vectors.npy"
    measure("hybrid", "hybrid", DenseOptions(model, vectors=vectors))
    for name in QUESTIONS["wiki"]:
        gain = table.recall("hybrid", name) - max(table.recall("bm25", name), table.recall("dense", name))
        print(f"{'hybrid':<16}{name:<10}{gain:+.4f} over the better of its parts")
        table.rows.append({"index": "hybrid", "questions": name, "gain": gain})
    for kind in arguments.faiss:
        index = measure(kind, "dense", DenseOptions(model, vectors=vectors, faiss=kind)) / "index.faiss"
        memory = index.stat().st_size / vectors.stat().st_size
        for name in QUESTIONS["wiki"]:
            kept = table.recall(kind, name) / table.recall("dense", name)
            table.rows.append({"index": kind, "questions": name, "memory": memory, "kept": kept})
            print(f"{kind:<16}{name:<10}{kept:.3f} of flat's recall, {memory:.3f} of its memory")
            if memory <= 0.15 and kept < COMPRESSED_BAR:
                missed.append(f"{kind} on {name}: {kept:.3f} of flat's recall, wanted {COMPRESSED_BAR}")
    return missed


def add_recall(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with corpus/, nq/, hotpotqa/ and medical/"
    )
    parser.add_argument(
        "--work", type=Path, default=cache_folder() / "search_recall", help="keeps the indexes"
    )
    parser.add_argument("--model", help="embedding model; without one only BM25 is measured")
    parser.add_argument("--vectors", type=Path, help=".npy of the vectors of corpus/wiki by this model")
    kinds = ["fp16", "sq8", "sq4", "pq"]
    parser.add_argument("--faiss", nargs="*", default=kinds, help="kinds of index to compare with flat")
    return measure


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    table = Table(arguments.data)
    for corpus in QUESTIONS:
        index = ready(arguments.data, corpus, arguments.work / f"{corpus}-bm25", "bm25", DenseOptions())
        table.measure("bm25", index, corpus)
    missed = [
        f"bm25 on {name}: {table.recall('bm25', name):.4f}, wanted {bar}"
        for name, bar in BM25_BARS.items()
        if table.recall("bm25", name) < bar - TOLERANCE
    ]
    if arguments.model:
        missed += dense_part(table, arguments)
    for miss in missed:
        print(f"missed: {miss}")
    return {"rows": table.rows, "missed": missed}, bool(missed)
