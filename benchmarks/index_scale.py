"""Building and opening indexes of many passages: peak memory, a kill -9 halfway, and what stays resident.

The corpus is made in a temporary folder: real passages, over and over, under made-up titles, so that words and lengths
are those of text while no passage is the same. For each size and kind:

    build      time, and the peak of the building process (getrusage; with and without pages of mapped files)
    resume     the same build, killed when half of it is done, ends with the same hash
    search     queries a second of one process, its own memory, and all that is resident, over the index on disk

    python benchmarks/index_scale.py --corpus ../shared/data/corpus/wiki.jsonl.gz --sizes 50000 200000 1000000
    python benchmarks/index_scale.py --corpus .. --model FOLDER --vectors WIKI.npy --kinds bm25 flat sq4 pq

``--vectors`` are those of the corpus by the model, which are repeated with noise: no machine embeds a million passages
for a benchmark. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sorl_tools.corpus import Passage
from sorl_tools.index.corpora import Corpus
from sorl_tools.index.estimate import estimate
from sorl_tools.index.manifest import BUILDING, read_manifest

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu bran clar dren flor grim".split()
QUERIES = 300
POLL_S = 0.02
WANTED_PEAK = 4e9

BUILD = """
import resource, sys
from sorl_tools.index.cli import main
status = main(sys.argv[1:])
print("maxrss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""

# opens an index, searches, and says how it went; waits for a line so that two may be resident at a time
SEARCH = """
import json, sys, time
from sorl_tools.index import open_index
index = open_index(sys.argv[1])
queries = json.load(open(sys.argv[2]))
index.search(queries[:4], 3)
began = time.perf_counter()
for start in range(0, len(queries), 32):
    index.search(queries[start : start + 32], 3)
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
sys.stdin.readline()
"""


def made_up_corpus(source: Path, size: int) -> Iterator[Passage]:
    """``size`` passages, the source's texts in turn, each title new and no text twice the same."""
    draw = random.Random(0)
    texts = [row.passage.text for row in islice(Corpus([source]).rows(), size)]
    for number in range(size):
        name = " ".join("".join(draw.choices(SYLLABLES, k=3)).title() for _ in range(2))
        turn, place = divmod(number, len(texts))
        words = texts[place].split()
        cut = turn % max(1, len(words))
        yield Passage(str(number), f"{name} ({number})", " ".join(words[cut:] + words[:cut]))


def write_corpus(path: Path, source: Path, size: int) -> list[str]:
    """Write the corpus; returns queries: what some of its passages begin with."""
    every = max(1, size // QUERIES)
    queries = []
    with path.open("w", encoding="utf-8") as file:
        for number, passage in enumerate(made_up_corpus(source, size)):
            contents = f'"{passage.title}"\n{passage.text}'
            file.write(json.dumps({"id": passage.id, "contents": contents}, ensure_ascii=False) + "\n")
            if number % every == 0:
                queries.append(" ".join(passage.text.split()[:8]))
    return queries[:QUERIES]


def write_vectors(path: Path, source: Path, size: int) -> None:
    """Repeat the source's vectors, each time with noise, normalized."""
    vectors = np.load(source, mmap_mode="r")
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(size, vectors.shape[1]))
    draw = np.random.default_rng(0)
    for start in range(0, size, 8192):
        rows = np.arange(start, min(start + 8192, size)) % len(vectors)
        noise = draw.standard_normal((len(rows), vectors.shape[1]), dtype=np.float32)
        block = vectors[rows] + noise * np.float32(0.2 / vectors.shape[1] ** 0.5)
        out[start : start + len(rows)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    out.flush()


def status_of(pid: int, *names: str) -> dict[str, int]:
    """Fields of /proc/PID/status, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(found[1]) * 1024 for name in names if (found := re.search(rf"{name}:\s+(\d+)", text))}


def run_build(command: Sequence[str], out: Path, kill_at: int = 0) -> dict[str, float]:
    """Build in a process of its own; with ``kill_at``, kill it when so many passages are stored (or embedded).

    Returns seconds, ``maxrss`` and the largest ``anon`` (memory that is no mapped file) seen in passing.
    """
    began, anon = time.perf_counter(), 0
    child = subprocess.Popen(
        [sys.executable, "-c", BUILD, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    journal = out / BUILDING / "journal.jsonl"
    while child.poll() is None:
        anon = max(anon, status_of(child.pid, "RssAnon").get("RssAnon", 0))
        if kill_at and journal.is_file() and stored(journal) >= kill_at:
            child.send_signal(signal.SIGKILL)
            child.wait()
            break
        time.sleep(POLL_S)
    output = child.communicate()[0]
    if not kill_at and child.returncode:
        raise SystemExit(f"index_scale: the build failed; try: sorl-index {' '.join(command)}")
    if kill_at and child.returncode != -signal.SIGKILL:
        raise SystemExit("index_scale: the build was done before it could be killed; take more passages")
    maxrss = re.search(r"maxrss (\d+)", output)
    return {"seconds": time.perf_counter() - began, "anon": anon, "maxrss": int(maxrss[1]) if maxrss else 0}


def stored(journal: Path) -> int:
    return max((int(n) for n in re.findall(r'"passages": (\d+)', journal.read_text())), default=0)


def run_searches(out: Path, queries: Path) -> dict[str, float]:
    """Search with two processes at a time; memory of the first, as the kernel splits it."""
    command = [sys.executable, "-c", SEARCH, str(out), str(queries)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = []
    for child in children:
        assert child.stdin and child.stdout
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"index_scale: {out} could not be searched")
        answers.append(json.loads(line))
    memory = status_of(children[0].pid, "VmRSS", "RssAnon", "RssFile")
    rollup = Path(f"/proc/{children[0].pid}/smaps_rollup").read_text()
    memory["Pss"] = int(re.search(r"Pss:\s+(\d+)", rollup)[1]) * 1024  # type: ignore[index]
    for child in children:
        child.communicate("\n")
    return {"seconds": max(answer["seconds"] for answer in answers), **memory}


def measure(size: int, kind: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of one size and kind; prints a line."""
    corpus, queries = folder / "corpus.jsonl", folder / "queries.json"
    backend = "bm25" if kind == "bm25" else "dense"
    options = ["--backend", backend]
    if backend == "dense":
        options += ["--model", arguments.model, "--faiss", kind, "--vectors", str(folder / "vectors.npy")]
    outs = [folder / f"{kind}-{name}" for name in ("whole", "killed")]
    whole = run_build(["build", str(corpus), "--out", str(outs[0]), *options], outs[0])
    again = ["build", str(corpus), "--out", str(outs[1]), *options]
    run_build(again, outs[1], kill_at=size // 2)
    resumed = run_build(again, outs[1])
    manifests = [read_manifest(out) for out in outs]
    search = run_searches(outs[0], queries)
    guess = estimate(
        size, backend, words=arguments.words, dim=arguments.dim, faiss=kind if backend == "dense" else "flat"
    )
    row = {
        "size": size,
        "kind": kind,
        "disk": manifests[0].bytes,
        "build_seconds": whole["seconds"],
        "peak": whole["maxrss"],
        "peak_anon": whole["anon"],
        "resume_seconds": resumed["seconds"],
        "same_hash": manifests[0].hash == manifests[1].hash,
        "queries_a_second": QUERIES / search["seconds"],
        "resident": search["VmRSS"],
        "private": search["RssAnon"],
        "share_of_pages": search["Pss"],
        "resident_over_disk": search["VmRSS"] / manifests[0].bytes,
        "estimate": {"disk": guess.disk, "build_memory": guess.build_memory, "private": guess.private_memory},
    }
    print(
        f"{size:>9,} {kind:<7}{row['disk'] / 1e6:>8.0f} MB on disk, built in {whole['seconds']:.0f} s, peak "
        f"{whole['maxrss'] / 1e6:.0f} MB ({whole['anon'] / 1e6:.0f} without mapped files); killed and resumed: "
        f"{'same hash' if row['same_hash'] else 'ANOTHER HASH'}; {row['queries_a_second']:.0f} queries/s, resident "
        f"{row['resident'] / 1e6:.0f} MB ({row['private'] / 1e6:.0f} private), {row['resident_over_disk']:.2f} of disk",
        flush=True,
    )
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="real passages to make the corpus of")
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", default=["bm25"], help="bm25, or kinds of --faiss")
    parser.add_argument("--model", help="for kinds other than bm25")
    parser.add_argument(
        "--vectors", type=Path, help="the model's vectors of the corpus, for kinds other than bm25"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args(argv)
    vectors = set(arguments.kinds) - {"bm25"}
    if vectors and not (arguments.model and arguments.vectors):
        parser.error(f"--kinds {' '.join(sorted(vectors))} need --model and --vectors")
    arguments.dim = np.load(arguments.vectors, mmap_mode="r").shape[1] if vectors else 1
    rows = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(prefix="index_scale-") as name:
            folder = Path(name)
            queries = write_corpus(folder / "corpus.jsonl", arguments.corpus, size)
            (folder / "queries.json").write_text(json.dumps(queries))
            sample = islice(made_up_corpus(arguments.corpus, min(size, 2000)), 2000)
            lengths = [len(f"{p.title} {p.text}".split()) for p in sample]
            arguments.words = sum(lengths) / len(lengths)
            if vectors:
                write_vectors(folder / "vectors.npy", arguments.vectors, size)
            rows += [measure(size, kind, folder, arguments) for kind in arguments.kinds]
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "cores": os.cpu_count()}, indent=2) + "\n")
    faults = [
        row for row in rows if not row["same_hash"] or (row["kind"] == "bm25" and row["peak"] > WANTED_PEAK)
    ]
    for row in faults:
        print(f"missed: {row['size']:,} {row['kind']}: another hash after a kill, or more than 4 GB")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
