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
from sorl_tools.index import Hit, open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.index import NAME
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


def add_recall(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    add, kept = parser.add_argument, cache_folder() / "search_recall"
    add("--data", type=Path, required=True, help="folder with corpus/, nq/, hotpotqa/ and medical/")
    add("--work", type=Path, default=kept, help="keeps the indexes")
    add("--model", help="embedding model; without one only BM25 is measured")
    add("--vectors", type=Path, help=".npy of the vectors of corpus/wiki by this model")
    add("--faiss", nargs="*", default=["fp16", "sq8", "sq4", "pq"], help="kinds to compare with flat")
    return measure


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Recall by index and questions, printed as it comes, and the bars that were missed."""
    found = {("bm25", name): share for corpus in QUESTIONS for name, share in recall(args, "bm25", corpus)}
    missed = [
        f"bm25 on {name}: {found['bm25', name]:.4f}, wanted {bar}"
        for name, bar in BM25_BARS.items()
        if found["bm25", name] < bar - TOLERANCE
    ]
    if args.model:
        vectors = args.work / "wiki-dense" / "dense" / "vectors.npy"
        for label in ("dense", "hybrid", *args.faiss):
            faiss = label if label in args.faiss else "flat"
            made = args.vectors if label == "dense" else vectors
            dense = DenseOptions(args.model, vectors=made, faiss=faiss)
            found |= {(label, name): share for name, share in recall(args, label, "wiki", dense)}
            for name in QUESTIONS["wiki"] if label in args.faiss else ():
                file = args.work / f"wiki-{label}" / "dense" / "index.faiss"
                memory = file.stat().st_size / vectors.stat().st_size
                kept = found[label, name] / found["dense", name]
                print(f"{label:<16}{name:<10}{kept:.3f} of flat's recall, {memory:.3f} of its memory")
                if memory <= 0.15 and kept < COMPRESSED_BAR:
                    missed.append(f"{label} on {name}: {kept:.3f} of flat's recall, wanted {COMPRESSED_BAR}")
    for miss in missed:
        print(f"missed: {miss}")
    rows = [{"index": label, "questions": name, "recall": share} for (label, name), share in found.items()]
    return {"rows": rows, "missed": missed}, bool(missed)


def recall(
    args: argparse.Namespace, label: str, corpus: str, dense: DenseOptions = DenseOptions()
) -> list[tuple[str, float]]:
    """Of each file of questions the share that an index finds, which is built or finished first where need be."""
    out = args.work / f"{corpus}-{label}"
    if not (out / NAME).is_file():
        backend = label if label in ("bm25", "hybrid") else "dense"
        build([args.data / "corpus" / f"{corpus}.jsonl.gz"], out, backend, dense=dense, progress=Progress())
    index, shares = open_index(out), []
    for name, (file, counts) in QUESTIONS[corpus].items():
        with gzip.open(args.data / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        hits = [
            one
            for start in range(0, len(rows), BATCH)
            for one in index.search([row["question"] for row in rows[start : start + BATCH]], TOP_K)
        ]
        shares.append((name, round(sum(map(counts, rows, hits)) / len(rows), 4)))
        print(
            f"{label:<16}{name:<10}{len(rows):>6} questions   recall@{TOP_K} {shares[-1][1]:.4f}", flush=True
        )
    return shares
