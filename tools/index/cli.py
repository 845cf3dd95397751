"""``sorl-index``: build a search index over a corpus; look at one, or check it."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.check import describe_checks
from sorl_env.command import Parser, add_json_option, number, print_json, run_command, whole
from sorl_env.errors import UserError
from sorl_env.figures import duration, size
from sorl_env.interrupts import interrupt_on
from sorl_tools.index.build.build import BACKENDS, build
from sorl_tools.index.build.options import Bm25Options, DenseOptions, HybridOptions
from sorl_tools.index.index import open_index
from sorl_tools.index.manifest import Manifest, read_manifest
from sorl_tools.index.verify import check_files, check_recall
from sorl_tools.progress import Progress


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
    parser = Parser(
        prog="sorl-index",
        description="Build a search index over a corpus; look at one, or check it.",
    )
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
    bm25, dense, hybrid = Bm25Options(), DenseOptions(), HybridOptions()
    parser.add_argument(
        "corpus", type=Path, nargs="+", help="files (.jsonl, .tsv, .parquet, .txt, .md) or folders"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the index")
    parser.add_argument("--backend", choices=BACKENDS, default="bm25")
    parser.add_argument("--k1", type=number(0, 1000), default=bm25.k1, help=f"of BM25 (default: {bm25.k1})")
    parser.add_argument("--b", type=number(0, 1), default=bm25.b, help=f"of BM25 (default: {bm25.b})")
    parser.add_argument(
        "--model", default="", help="embedding model: a folder, or a name on the hub or at the encoder"
    )
    parser.add_argument("--encoder", help="address of a server that embeds, such as http://127.0.0.1:8080/v1")
    parser.add_argument("--query_prefix", help="text before a query (default: the model's own)")
    parser.add_argument("--passage_prefix", help="text before a passage (default: the model's own)")
    parser.add_argument("--vectors", type=Path, help=".npy of the passages' vectors by this model")
    parser.add_argument(
        "--faiss",
        default=dense.faiss,
        help="kind of index: flat, fp16, sq8, sq4, pq, ivfpq, hnsw, or a factory string of FAISS",
    )
    parser.add_argument(
        "--batch_size", type=whole(1, 1_000_000), default=dense.batch_size, help="passages per batch"
    )
    parser.add_argument("--device", help="torch device of the model (default: a GPU if there is one)")
    parser.add_argument(
        "--rrf_k", type=whole(0), default=hybrid.rrf_k, help="hybrid: scores 1 / (rrf_k + rank)"
    )
    parser.add_argument(
        "--depth",
        type=whole(1, 1_000_000),
        default=hybrid.depth,
        help="hybrid: number of ranks used of each part",
    )
    parser.add_argument(
        "--restart", action="store_true", help="replace the index in the folder, finished or not"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=_build)


def _build(arguments: argparse.Namespace) -> int:
    def take(kind: type[Bm25Options] | type[DenseOptions] | type[HybridOptions]) -> dict[str, object]:
        return {field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)}

    progress = Progress(quiet=arguments.quiet)
    try:
        manifest = build(
            arguments.corpus,
            arguments.out,
            arguments.backend,
            bm25=Bm25Options(**take(Bm25Options)),  # type: ignore[arg-type]
            dense=DenseOptions(**take(DenseOptions)),  # type: ignore[arg-type]
            hybrid=HybridOptions(**take(HybridOptions)),  # type: ignore[arg-type]
            restart=arguments.restart,
            progress=progress,
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
    checks = check_files(arguments.index, manifest, Progress(quiet=not sys.stderr.isatty()))
    if all(check.passed for check in checks):  # there is no point in searching a damaged index
        index = open_index(arguments.index, model=arguments.model, device=arguments.device)
        checks.append(check_recall(index, arguments.sample))
        index.close()
    if arguments.json:
        print_json({"checks": checks})
    else:
        print(describe_checks(checks, 28))
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(main())
