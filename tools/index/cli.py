"""``sorl-index``: build a search index over a corpus; look at one, or check it."""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.commands.check import Check, describe_checks
from sorl_env.commands.command import (
    Parser,
    add_json_option,
    interrupt_on,
    number,
    print_json,
    run_command,
    whole,
)
from sorl_env.errors import UserError
from sorl_env.text import duration, size
from sorl_tools.index.build.build import BACKENDS, build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.index import Index, Manifest, find_damage, open_index, read_manifest
from sorl_tools.progress import Progress

QUERY_WORDS = 24
WANTED = {"bm25": 0.9, "dense": 0.8, "hybrid": 0.9}  # a lower self-recall is a fault, see check_recall


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 done, 1 an index has a fault, 2 wrong usage, 130 interrupted."""
    interrupt_on(signal.SIGTERM)
    given = list(sys.argv[1:] if argv is None else argv)
    again = "; the same command finishes the build" if given[:1] == ["build"] else ""
    return run_command("sorl-index", _run, given, interrupted=f"interrupted{again}")


def _run(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    what = "Build a search index over a corpus; look at one, or check it."
    parser = Parser(prog="sorl-index", description=what)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_build(commands.add_parser("build", help="build an index, or finish an interrupted build"))
    info = commands.add_parser("info", help="print the facts about an index")
    info.add_argument("index", type=Path, help="folder of the index")
    add_json_option(info)
    info.set_defaults(run=_info)
    verify = commands.add_parser("verify", help="check the files and search for some passages")
    verify.add_argument("index", type=Path, help="folder of the index")
    verify.add_argument("--sample", type=whole(1), default=200, help="passages to search for (default: 200)")
    verify.add_argument("--model", help="folder, name or address of the embedding model, if it has moved")
    verify.add_argument("--device", help="torch device of the model")
    add_json_option(verify)
    verify.set_defaults(run=_verify)
    return parser


def _add_build(parser: argparse.ArgumentParser) -> None:
    add, most = parser.add_argument, 1_000_000
    add("corpus", type=Path, nargs="+", help="files (.jsonl, .tsv, .parquet, .txt, .md) or folders")
    add("--out", type=Path, required=True, help="folder of the index")
    add("--backend", choices=BACKENDS, default="bm25")
    add("--k1", type=number(0, 1000), default=1.5, help="of BM25 (default: 1.5)")
    add("--b", type=number(0, 1), default=0.75, help="of BM25 (default: 0.75)")
    add("--model", default="", help="embedding model: a folder, or a name on the hub or at the encoder")
    add("--encoder", help="address of a server that embeds, such as http://127.0.0.1:8080/v1")
    add("--query_prefix", help="text before a query (default: the model's own)")
    add("--passage_prefix", help="text before a passage (default: the model's own)")
    add("--vectors", type=Path, help=".npy of the passages' vectors by this model")
    kinds = "kind of index: flat, fp16, sq8, sq4, pq, ivfpq, hnsw, or a factory string of FAISS"
    add("--faiss", default=DenseOptions.faiss, help=kinds)
    add("--batch_size", type=whole(1, most), default=DenseOptions.batch_size, help="passages per batch")
    add("--device", help="torch device of the model (default: a GPU if there is one)")
    add("--rrf_k", type=whole(0), default=1, help="hybrid: scores 1 / (rrf_k + rank)")
    add("--depth", type=whole(1, most), default=100, help="hybrid: number of ranks used of each part")
    add("--restart", action="store_true", help="replace the index in the folder, finished or not")
    add("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_build)


def _build(arguments: argparse.Namespace) -> int:
    dense = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(DenseOptions)}
    others = ("k1", "b", "rrf_k", "depth", "restart")
    progress = Progress(quiet=arguments.quiet)
    try:
        manifest = build(
            arguments.corpus,
            arguments.out,
            arguments.backend,
            dense=DenseOptions(**dense),
            progress=progress,
            **{name: getattr(arguments, name) for name in others},
        )
    finally:
        progress.close()
    _print(manifest)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    manifest = read_manifest(arguments.index)
    (print_json if arguments.json else _print)(manifest)
    return 0


def _print(manifest: Manifest) -> None:
    print(f"{'backend':<12}{manifest.backend}")
    print(f"{'passages':<12}{manifest.passages:,}")
    print(f"{'corpus':<12}{', '.join(manifest.corpus['source'])}  {manifest.corpus['hash']}")
    for part, parameters in manifest.parameters.items():
        print(f"{part:<12}{', '.join(f'{key} {value}' for key, value in parameters.items())}")
    print(f"{'on disk':<12}{size(manifest.bytes)} in {len(manifest.files)} files")
    print(f"{'built':<12}{manifest.built_at}, in {duration(manifest.build_seconds)}")
    print(f"{'versions':<12}{', '.join(f'{name} {number}' for name, number in manifest.versions.items())}")
    print(f"{'hash':<12}{manifest.hash}")


def _verify(arguments: argparse.Namespace) -> int:
    manifest = read_manifest(arguments.index)
    for name in ("model", "device"):
        if manifest.backend == "bm25" and (value := getattr(arguments, name)) is not None:
            raise UserError(f"--{name} {value}: a bm25 index embeds nothing; leave it out")
    progress = Progress(quiet=not sys.stderr.isatty())
    progress.start("hashing", manifest.bytes)
    damaged = find_damage(arguments.index, manifest, progress.advance)
    progress.close()
    changed = "changed since the build: copy it again, or build the index again"
    checks = [
        Check(name, name not in damaged, changed if name in damaged else "as built")
        for name in manifest.files
    ]
    if not damaged:  # there is no point in searching a damaged index
        index = open_index(arguments.index, model=arguments.model, device=arguments.device)
        checks.append(check_recall(index, arguments.sample))
        index.close()
    if arguments.json:
        print_json({"checks": checks})
    else:
        print(describe_checks(checks, 28))
    return int(not all(check.passed for check in checks))


def check_recall(index: Index, sample: int, seed: int = 0) -> Check:
    """Search for sampled passages by their titles and first words. A passage counts as found if it, or one with the
    same text, is among the first ten hits. Passages of fewer than five words are left out. If more than a tenth are
    missed (for vectors, a fifth), the index is taken to be faulty. Raises ``UserError`` if no sampled passage has five
    words."""
    places = random.Random(seed).sample(range(len(index.passages)), min(sample, len(index.passages)))
    wanted = [one for one in map(index.passages.__getitem__, places) if len(one.text.split()) >= 5]
    if not wanted:
        raise UserError(f"none of {len(places)} sampled passages has five words to search by")
    queries = [" ".join(f"{one.title} {one.text}".split()[:QUERY_WORDS]) for one in wanted]
    hits = sum(
        any((hit.passage.title, hit.passage.text) == (one.title, one.text) for hit in found)
        for one, found in zip(wanted, index.search(queries, 10), strict=True)
    )
    share, least = hits / len(wanted), WANTED[index.manifest.backend]
    detail = f"{hits} of {len(wanted)} passages found by their first words ({share:.3f}; wanted {least})"
    return Check("self-recall", share >= least, detail)


if __name__ == "__main__":
    sys.exit(main())
