"""Which way to fuse BM25 with vectors? Recall@3 of several, on questions to choose by and on questions to report.

To choose by: NQ's train questions (whose answer is in BM25's first ten, which favours BM25), and HotpotQA's train
questions that are not among its test questions. To report: the tests. The vectors of corpus/wiki are those that
``search_recall.py --work DIR`` leaves in DIR/wiki-dense.

    python benchmarks/search_fusion.py --data ../shared/data --work DIR --json search_fusion.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from search_recall import Row, answered, complete, read_rows

from sorl_env.errors import UserError
from sorl_tools.index import Hit
from sorl_tools.index.bm25 import Bm25Index
from sorl_tools.index.encoder import Encoder
from sorl_tools.index.manifest import read_manifest
from sorl_tools.index.words import query_stems

DEPTH, TOP_K = 100, 3
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Candidates:
    """The passages that either part ranks among its first hundred, for one question, (n,) each."""

    places: npt.NDArray[np.int64]
    words: Floats  # BM25's scores
    cosines: Floats
    word_ranks: Floats  # from 1; infinite beyond the first hundred
    vector_ranks: Floats


Fusion = Callable[[Candidates], Floats]


def rank_fusion(k: int, weight: float = 1.0) -> Fusion:
    return lambda found: 1 / (k + found.word_ranks) + weight / (k + found.vector_ranks)


def score_fusion(weight: float) -> Fusion:
    return lambda found: found.cosines + weight * found.words


def scaled_fusion(share: float) -> Fusion:
    def scale(scores: Floats) -> Floats:
        return (scores - scores.min()) / max(scores.max() - scores.min(), 1e-9)

    return lambda found: share * scale(found.cosines) + (1 - share) * scale(found.words)


FUSIONS: dict[str, Fusion] = {
    "bm25": lambda found: -found.word_ranks,
    "vectors": lambda found: -found.vector_ranks,
    **{f"ranks, k {k}": rank_fusion(k) for k in (0, 1, 2, 5, 10, 60)},
    **{f"ranks, k 5, vectors x {weight}": rank_fusion(5, weight) for weight in (1.5, 2.0, 3.0)},
    **{f"cosine + {w} bm25": score_fusion(w) for w in (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08)},
    **{f"scaled scores, {share} vectors": scaled_fusion(share) for share in (0.4, 0.5, 0.6, 0.7)},
}


def questions(data: Path) -> dict[str, tuple[list[Row], Callable[[Row, Sequence[Hit]], bool]]]:
    """Rows by name, and what counts as found."""
    test = read_rows(data / "hotpotqa" / "test.jsonl.gz")
    held_out = {row["question"].strip().lower() for row in test}
    train = read_rows(data / "hotpotqa" / "train_distractor.jsonl.gz")
    train = [row for row in train if row["question"].strip().lower() not in held_out]
    for row in train:
        row["gold_titles"] = [title for title, _ in row["supporting_facts"]]
    return {
        "nq train": (read_rows(data / "nq" / "train.jsonl.gz"), answered),
        "hotpotqa train": (train, complete),
        "nq test": (read_rows(data / "nq" / "test.jsonl.gz"), answered),
        "hotpotqa test": (test, complete),
    }


def candidates(index: Bm25Index, question: str, cosines: npt.NDArray[np.float32]) -> Candidates:
    scores = index.postings.get_scores_from_ids(index.postings.get_tokens_ids(query_stems(question)))
    orders = [np.argsort(-part, kind="stable")[:DEPTH] for part in (scores, cosines)]
    orders[0] = orders[0][scores[orders[0]] > 0]
    places = np.union1d(*orders)
    ranks = np.full((2, len(places)), np.inf)
    for row, order in zip(ranks, orders, strict=True):
        row[np.searchsorted(places, order)] = np.arange(1, len(order) + 1)
    return Candidates(places, scores[places].astype(float), cosines[places].astype(float), ranks[0], ranks[1])


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Recall by fusion and questions; prints the table."""
    folder = arguments.work / "wiki-dense"
    manifest = read_manifest(folder)
    vectors = np.load(folder / "dense" / "vectors.npy", mmap_mode="r")
    words = arguments.work / "wiki-bm25"
    index = Bm25Index(words, read_manifest(words))
    encoder = Encoder(arguments.model or manifest.parameters["dense"]["model"])
    recall: dict[str, dict[str, float]] = {name: {} for name in FUSIONS}
    for name, (rows, counts) in questions(arguments.data).items():
        hits: dict[str, int] = dict.fromkeys(FUSIONS, 0)
        texts = [row["question"] for row in rows]
        cosines = encoder.queries(texts) @ np.asarray(vectors).T  # (questions, passages)
        for row, text, line in zip(rows, texts, cosines, strict=True):
            found = candidates(index, text, line)
            for fusion, fuse in FUSIONS.items():
                best = found.places[np.argsort(-fuse(found), kind="stable")[:TOP_K]]
                hits[fusion] += counts(row, [Hit(index.passages[int(place)], 0.0) for place in best])
        for fusion, count in hits.items():
            recall[fusion][name] = round(count / len(rows), 4)
    print(f"{'':32}" + "".join(f"{name:>16}" for name in next(iter(recall.values()))))
    for fusion, by_name in recall.items():
        print(f"{fusion:32}" + "".join(f"{value:16.4f}" for value in by_name.values()))
    return recall


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with nq/ and hotpotqa/")
    parser.add_argument("--work", type=Path, required=True, help="folder of search_recall.py's indexes")
    parser.add_argument("--model", help="where the embedding model is now")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    try:
        recall: dict[str, Any] = measure(arguments)
    except UserError as error:
        print(f"search_fusion: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        arguments.json.write_text(json.dumps(recall, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
