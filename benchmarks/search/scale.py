"""Building and opening indexes of many passages: peak memory, a kill -9 halfway, and what stays resident.

The corpus is made in a temporary folder: real passages, over and over, under made-up titles, so that words and lengths
are those of text while no passage is the same. For each size and kind:

    build      time, and the peak of the building process (getrusage; with and without pages of mapped files)
    resume     the same build, killed when half of it is done, ends with the same hash
    search     queries a second of one process, its own memory, and all that is resident, over the index on disk
    serve      sorl-serve under 64 clients of eight queries a request: queries a second, and the memory of all of its
               processes, shared pages once, over the index on disk

Then a line through the smallest and the largest size, on to 21 million passages, beside what sorl-index estimate says.

    python benchmarks/search scale --corpus ../shared/data/corpus/wiki.jsonl.gz --sizes 50000 200000 1000000
    python benchmarks/search scale --corpus .. --model FOLDER --vectors WIKI.npy --kinds bm25 flat sq4 pq

A million passages take about ten minutes. With ``--work`` what was made and measured is kept, and the same command
continues from there.

``--vectors`` are those of the corpus by the model, which are repeated with noise: no machine embeds a million passages
for a benchmark. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from servers import load, memory_mb, sorl_serve

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index.build.corpora import Corpus
from sorl_tools.index.build.estimate import estimate
from sorl_tools.index.manifest import BUILDING, read_manifest

SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu bran clar dren flor grim".split()
QUERIES = 300
POLL_S = 0.02
SERVE_S = 10.0
CLIENTS, QUERIES_A_REQUEST = 64, 8
WIKIPEDIA = 21_000_000  # passages of psgs_w100.tsv
WANTED_PEAK = 4e9
# memory over disk; at smaller sizes Python itself weighs more than the index
WANTED_SERVED, LARGE = 1.5, 1_000_000

# opens an index, searches, and says how it went; waits for a line so that two may be resident at a time
SEARCH = """
import gzip, json, sys, time
from sorl_tools.index import open_index
index = open_index(sys.argv[1])
queries = [json.loads(line)["question"] for line in gzip.open(sys.argv[2])]
index.search(queries[:4], 3)
began = time.perf_counter()
for start in range(0, len(queries), 32):
    index.search(queries[start : start + 32], 3)
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
sys.stdin.readline()
"""


def status_of(pid: int, *names: str) -> dict[str, int]:
    """Fields of /proc/PID/status, in bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: int(found[1]) * 1024 for name in names if (found := re.search(rf"{name}:\s+(\d+)", text))}


def run_build(command: Sequence[str], out: Path, kill_at: int = 0) -> dict[str, float]:
    """Build in a process of its own; with ``kill_at``, kill it when so many passages are stored (or embedded).

    Returns seconds, ``maxrss`` and the largest ``anon`` (memory that is no mapped file) that was seen.
    """
    began, anon, killed = time.perf_counter(), 0, False
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-m", "sorl_tools.index.cli", *command], **options)
    journal = out / BUILDING / "journal.jsonl"
    while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
        anon = max(anon, status_of(child.pid, "RssAnon").get("RssAnon", 0))
        if kill_at and not killed and journal.is_file() and stored(journal) >= kill_at:
            os.kill(child.pid, signal.SIGKILL)
            killed = True
        time.sleep(POLL_S)
    child.returncode = os.waitstatus_to_exitcode(ended[1])
    if kill_at and child.returncode != -signal.SIGKILL:
        raise SystemExit("the build was done before it could be killed; take more passages")
    if not kill_at and child.returncode:
        raise SystemExit(f"the build failed; try: sorl-index {' '.join(command)}")
    return {"seconds": time.perf_counter() - began, "anon": anon, "maxrss": ended[2].ru_maxrss * 1024}


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
            raise SystemExit(f"{out} could not be searched")
        answers.append(json.loads(line))
    memory = status_of(children[0].pid, "VmRSS", "RssAnon", "RssFile")
    rollup = Path(f"/proc/{children[0].pid}/smaps_rollup").read_text()
    memory["Pss"] = int(re.search(r"Pss:\s+(\d+)", rollup)[1]) * 1024  # type: ignore[index]
    for child in children:
        child.communicate("\n")
    return {"seconds": max(answer["seconds"] for answer in answers), **memory}


def run_server(out: Path, questions: Path) -> dict[str, float]:
    """Serve the index with a worker a core, under load."""
    with sorl_serve(out, os.cpu_count() or 1) as (pid, port):
        result = load(port, questions, SERVE_S, CLIENTS, [QUERIES_A_REQUEST])
        memory = memory_mb(pid) * 2**20
    if result["errors"]:
        raise SystemExit(f"{result['errors']} of {result['requests']} requests to the server of {out} failed")
    return {"memory": memory, **{name: result[name] for name in ("queries_per_s", "p50_ms", "p99_ms")}}


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


def write_corpus(path: Path, source: Path, size: int) -> None:
    """Write the corpus and, beside it, queries: what some of its passages begin with."""
    every = max(1, size // QUERIES)
    queries = []
    with path.open("w", encoding="utf-8") as file:
        for number, passage in enumerate(made_up_corpus(source, size)):
            contents = f'"{passage.title}"\n{passage.text}'
            file.write(json.dumps({"id": passage.id, "contents": contents}, ensure_ascii=False) + "\n")
            if number % every == 0:
                queries.append(" ".join(passage.text.split()[:8]))
    with gzip.open(path.with_name("questions.jsonl.gz"), "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"question": query}) + "\n" for query in queries[:QUERIES])


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


class Parts:
    """The figures of one size and kind, kept in a file part by part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """A part's figures, measured now if they are not known."""
        if name not in self._done:
            self._done[name] = measure()
            self._path.write_text(json.dumps(self._done, indent=2) + "\n")
        return self._done[name]


def measure(
    size: int, kind: str, folder: Path, parts: Parts, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All of one size and kind; prints a line."""
    backend = "bm25" if kind == "bm25" else "dense"
    options = ["--backend", backend]
    if backend == "dense":
        options += ["--model", arguments.model, "--faiss", kind, "--vectors", str(folder / "vectors.npy")]
    whole_out, killed_out = (folder / f"{kind}-{name}" for name in ("whole", "killed"))

    def build(out: Path, kill_at: int = 0) -> dict[str, float]:
        command = ["build", str(folder / "corpus.jsonl"), "--out", str(out), *options]
        return run_build(command, out, kill_at=kill_at)

    def build_anew() -> dict[str, Any]:
        shutil.rmtree(whole_out, ignore_errors=True)
        figures = build(whole_out)
        manifest = read_manifest(whole_out)
        return {**figures, "disk": manifest.bytes, "hash": manifest.hash}

    def kill_and_resume() -> dict[str, Any]:
        shutil.rmtree(killed_out, ignore_errors=True)
        build(killed_out, kill_at=size // 2)
        figures = build(killed_out)
        return {**figures, "hash": read_manifest(killed_out).hash}

    whole = parts.get("build", build_anew)
    resumed = parts.get("resume", kill_and_resume)
    search = parts.get("search", lambda: run_searches(whole_out, folder / "questions.jsonl.gz"))
    served = parts.get("serve", lambda: run_server(whole_out, folder / "questions.jsonl.gz"))
    row = {
        "size": size,
        "kind": kind,
        "disk": whole["disk"],
        "build_seconds": whole["seconds"],
        "peak": whole["maxrss"],
        "peak_anon": whole["anon"],
        "resume_seconds": resumed["seconds"],
        "same_hash": whole["hash"] == resumed["hash"],
        "queries_a_second": QUERIES / search["seconds"],
        "resident": search["VmRSS"],
        "private": search["RssAnon"],
        "share_of_pages": search["Pss"],
        "resident_over_disk": search["VmRSS"] / whole["disk"],
        "served": served,
        "served_over_disk": served["memory"] / whole["disk"],
        "estimate": guessed(size, kind, arguments),
    }
    fault = "" if row["same_hash"] else "; ANOTHER HASH after a kill"
    print(
        f"{size:>9,} {kind:<7}{row['disk'] / 1e6:>8.0f} MB on disk, built in {whole['seconds']:.0f} s, peak "
        f"{whole['maxrss'] / 1e6:.0f} MB; {row['queries_a_second']:.0f} queries/s with {row['resident'] / 1e6:.0f} MB; "
        f"served: {served['queries_per_s']:.0f} queries/s with {served['memory'] / 1e6:.0f} MB{fault}",
        flush=True,
    )
    return row


def guessed(size: int, kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    """What ``sorl-index estimate`` says, under the names of the figures."""
    backend, faiss = ("bm25", "flat") if kind == "bm25" else ("dense", kind)
    guess = estimate(size, backend, words=arguments.words, dim=arguments.dim, faiss=faiss)
    return {
        "disk": guess.disk,
        "peak_anon": guess.build_memory,
        "private": guess.private_memory,
        "build_seconds": guess.build_seconds,
    }


def extrapolate(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each kind a line through its smallest and its largest size, on to Wikipedia; prints it."""
    found = []
    for kind in arguments.kinds:
        low, *_, high = (row for row in rows if row["kind"] == kind)
        guess = guessed(WIKIPEDIA, kind, arguments)
        ahead = (WIKIPEDIA - high["size"]) / (high["size"] - low["size"])
        line = {name: high[name] + ahead * (high[name] - low[name]) for name in guess}
        found.append({"kind": kind, "size": WIKIPEDIA, "line": line, "estimate": guess})
        for name in guess:
            unit, scale = ("s", 1.0) if name == "build_seconds" else ("GB", 1e9)
            print(
                f"{WIKIPEDIA:>9,} {kind:<7}{name:<14}{line[name] / scale:10.2f} {unit:<3}by the line, "
                f"{guess[name] / scale:.2f} by the estimate"
            )
    return found


def add_scale(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], tuple[dict[str, Any], bool]]:
    parser.add_argument("--corpus", type=Path, required=True, help="real passages to make the corpus of")
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", default=["bm25"], help="bm25, or kinds of --faiss")
    parser.add_argument("--model", help="for kinds other than bm25")
    parser.add_argument(
        "--vectors", type=Path, help="the model's vectors of the corpus, for kinds other than bm25"
    )
    parser.add_argument("--work", type=Path, help="keep what is made and measured here, and continue from it")
    return measure_all


def measure_all(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    vectors = set(arguments.kinds) - {"bm25"}
    if vectors and not (arguments.model and arguments.vectors):
        raise UserError(f"--kinds {' '.join(sorted(vectors))} need --model and --vectors")
    arguments.dim = np.load(arguments.vectors, mmap_mode="r").shape[1] if vectors else 1
    sample = islice(made_up_corpus(arguments.corpus, 2000), 2000)
    lengths = [len(f"{p.title} {p.text}".split()) for p in sample]
    arguments.words = sum(lengths) / len(lengths)
    rows = [row for size in sorted(arguments.sizes) for row in measure_size(size, arguments)]
    lines = extrapolate(rows, arguments) if len(arguments.sizes) > 1 else []
    return {"rows": rows, "extrapolated": lines, "cores": os.cpu_count()}, report_faults(rows)


def measure_size(size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All kinds of one size, in a folder of their own."""
    with ExitStack() as stack:
        if arguments.work:
            folder = arguments.work / str(size)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="search-scale-")))
        corpus = Parts(folder / "corpus.json")
        corpus.get("corpus", lambda: write_corpus(folder / "corpus.jsonl", arguments.corpus, size))
        if arguments.vectors:
            corpus.get("vectors", lambda: write_vectors(folder / "vectors.npy", arguments.vectors, size))
        return [
            measure(size, kind, folder, Parts(folder / f"{kind}.json"), arguments) for kind in arguments.kinds
        ]


def report_faults(rows: Sequence[dict[str, Any]]) -> bool:
    """Say which bars were missed; returns whether any was."""
    missed = False
    for row in rows:
        faults = {
            "another hash after a kill": not row["same_hash"],
            "more than 4 GB to build": row["kind"] == "bm25" and row["peak"] > WANTED_PEAK,
            "more than 1.5 of the disk to serve": row["size"] >= LARGE
            and row["served_over_disk"] > WANTED_SERVED,
        }
        for fault in (name for name, is_missed in faults.items() if is_missed):
            print(f"missed: {row['size']:,} {row['kind']}: {fault}")
            missed = True
    return missed
