"""``sorl-data prepare``: a published data set as files, and which of its train questions are in test files, too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.commands.command import Parser, run_command
from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_train.prepare.build import MANIFEST, PAIRS, choose_sources, prepare
from sorl_train.prepare.recipes import RECIPES, find_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0 done, 2 wrong usage, 130 interrupted."""
    return run_command("sorl-data", lambda words: _prepare(_parser().parse_args(words)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="sorl-data", description="Prepare published data sets.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("prepare", help="write a published data set as train.jsonl and test.jsonl")
    add = make.add_argument
    add("name", metavar="NAME", help=", ".join(RECIPES))
    where = "a file (SPLIT=FILE), a folder, or hf:owner/name[:config]; repeatable (default: where it is published)"
    add("--source", action="append", default=[], metavar="[SPLIT=]WHERE", help=where)
    out = "a new folder, or one that was prepared before"
    add("--out", type=Path, required=True, metavar="FOLDER", help=out)
    add("--revision", help="commit or tag of the hub data set")
    test_ids = "JSON list of the test questions' ids, or object with them"
    add("--test_ids", type=Path, metavar="FILE", help=test_ids)
    drop = "exact: leave out train questions that are in test, too (default: none, only report them)"
    add("--drop", choices=("none", "exact"), default="none", help=drop)
    against = "files with test questions of other data sets to check train against"
    add("--against", type=Path, nargs="+", default=[], metavar="FILE", help=against)
    add("--skip_unreadable", action="store_true", help="leave out and count rows that cannot be read")
    return parser


def _prepare(arguments: argparse.Namespace) -> int:
    recipe = find_recipe(arguments.name)
    out = arguments.out
    manifest = prepare(
        recipe,
        choose_sources(recipe, arguments.source),
        out,
        drop=arguments.drop,
        skip_unreadable=arguments.skip_unreadable,
        test_ids=_read_ids(arguments.test_ids),
        revision=arguments.revision,
        against=arguments.against,
    )
    for name, entry in manifest["files"].items():
        left_out = "; ".join(f"{count:,} {reason}" for reason, count in entry["dropped"].items())
        print(f"{out / name}: {entry['rows']:,} questions" + (f" (left out: {left_out})" if left_out else ""))
    overlap = manifest.get("overlap", {"with": {}})
    found = {name: counts["test"] for name, counts in overlap["with"].items() if counts["test"]}
    for name, count in found.items():
        print(f"{name}: {count:,} of its questions are in train word for word", file=sys.stderr)
    if found:
        hint = "; --drop exact leaves them out of train" if overlap["dropped"] == "none" else ""
        print(f"see {out / PAIRS}{hint}", file=sys.stderr)
    print(f"{out / MANIFEST}: licence {manifest['licence']}, origin, counts, hashes")
    return 0


def _read_ids(path: Path | None) -> frozenset[str] | None:
    if path is None:
        return None
    try:
        content = read_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"--test_ids {path}: {error}; give a JSON list of ids") from error
    if not isinstance(content, (list, dict)) or not content:
        raise UserError(
            f"--test_ids {path}: it must be a JSON list of ids, or an object with the ids as keys"
        )
    return frozenset(map(str, content))


if __name__ == "__main__":
    sys.exit(main())
