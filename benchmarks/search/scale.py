"""Building, opening and searching BM25 indexes of many passages: time, peak memory, disk, and a line to 21 million.

The corpus is made in a temporary folder: real passages, over and over, under made-up titles, so that words and lengths
are those of text while no passage is the same.

    python benchmarks/search scale --corpus ../shared/data/corpus/wiki.jsonl.gz --sizes 50000 200000 1000000

Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sorl_tools.corpus import Passage, read_corpus
from sorl_tools.index.index import read_manifest

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu bran clar dren flor grim".split()
QUERIES = 300
WIKIPEDIA = 21_000_000  # passages of psgs_w100.tsv

# opens an index, searches, and says how it went
SEARCH = """
import json, re, sys, time
from sorl_tools.index import open_index
began = time.perf_counter()
index = open_index(sys.argv[1])
opened = time.perf_counter() - began
queries = json.load(open(sys.argv[2]))
index.search(queries[:4], 3)
began = time.perf_counter()
for start in range(0, len(queries), 32):
    index.search(queries[start : start + 32], 3)
rate = len(queries) / (time.perf_counter() - began)
private = int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps({"open_seconds": opened, "queries_per_s": rate, "private": private}))
"""


def made_up_corpus(source: Path, size: int) -> Iterator[Passage]:
    """``size`` passages, the source's texts in turn, each title new and no text twice the same."""
    draw = random.Random(0)
    texts = [passage.text for passage in islice(read_corpus(source), size)]
    for number in range(size):
        name = " ".join("".join(draw.choices(SYLLABLES, k=3)).title() for _ in range(2))
        turn, place = divmod(number, len(texts))
        words = texts[place].split()
        cut = turn % max(1, len(words))
        yield Passage(str(number), f"{name} ({number})", " ".join(words[cut:] + words[:cut]))


def measure_size(size: int, folder: Path, source: Path) -> dict[str, Any]:
    """All of one size; the build and the search run in processes of their own."""
    corpus, index, queries = folder / "corpus.jsonl", folder / "index", folder / "queries.json"
    texts = []
    with corpus.open("w", encoding="utf-8") as file:
        for passage in made_up_corpus(source, size):
            contents = f'"{passage.title}"\n{passage.text}'
            file.write(json.dumps({"id": passage.id, "contents": contents}, ensure_ascii=False) + "\n")
            if int(passage.id) % max(1, size // QUERIES) == 0:
                texts.append(" ".join(passage.text.split()[:8]))
    queries.write_text(json.dumps(texts))
    began, peak = time.perf_counter(), 0
    command = [
        "-m",
        "sorl_tools.index.cli",
        "build",
        str(corpus),
        "--out",
        str(index),
        "--quiet",
        "--restart",
    ]
    child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    while child.poll() is None:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text())
        peak = max(peak, int(found[1]) * 1024 if found else 0)
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"the build failed; try: sorl-index {' '.join(command[2:])}")
    row = {"size": size, "build_seconds": time.perf_counter() - began, "build_memory": peak}
    search = [sys.executable, "-c", SEARCH, str(index), str(queries)]
    done = subprocess.run(search, capture_output=True, text=True, check=True)
    row |= {"disk": read_manifest(index).bytes, **json.loads(done.stdout)}
    print(json.dumps(row), flush=True)
    return row


def add_scale(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    parser.add_argument("--corpus", type=Path, required=True, help="real passages to make the corpus of")
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    return measure


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """All sizes, and a line through the smallest and the largest of them."""
    rows = []
    for size in sorted(args.sizes):
        with tempfile.TemporaryDirectory(prefix="search-scale-") as made:
            rows.append(measure_size(size, Path(made), args.corpus))
    line = {}
    if len(rows) > 1:
        ahead = (WIKIPEDIA - rows[-1]["size"]) / (rows[-1]["size"] - rows[0]["size"])
        for name in ("disk", "build_seconds", "build_memory", "open_seconds", "private"):
            line[name] = rows[-1][name] + ahead * (rows[-1][name] - rows[0][name])
            unit, scale = ("s", 1.0) if name.endswith("seconds") else ("GB", 1e9)
            print(f"{WIKIPEDIA:>10,} {name:<14}{line[name] / scale:10.2f} {unit} by the line")
    return {"rows": rows, "line": line, "cores": os.cpu_count()}, False
