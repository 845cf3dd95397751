"""``sorl-doctor``: the checks of the dry run and those of this machine, with an exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sorl_env.command import Parser, add_json_option, print_json, run_command

try:
    from sorl_train.config.files import DEFAULT_CONFIG, load_config
    from sorl_train.config.options import parse
except ModuleNotFoundError as error:  # the core alone is installed
    raise SystemExit(f"sorl-doctor needs the package {error.name!r}: pip install 'sorl[train]'") from error

if TYPE_CHECKING:
    from sorl_train.preflight.finding import Finding


def _parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="sorl-doctor",
        usage="sorl-doctor [--index DIR] [--json] [options of sorl-train]",
        description="Check what the run that these options of sorl-train describe needs, without starting it.",
        epilog="Exit status: 0 the run can start, 1 a check failed, 2 wrong usage.",
    )
    parser.add_argument(
        "--index",
        type=Path,
        metavar="DIR",
        help="the index folder that the server at search.url should serve",
    )
    add_json_option(parser)
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command("sorl-doctor", _examine, argv)


def _examine(argv: Sequence[str]) -> int:
    own, rest = _parse_args(argv)
    arguments = parse(rest)
    config = load_config(arguments.config or DEFAULT_CONFIG, arguments.overrides)
    from sorl_train.preflight.checks import examine
    from sorl_train.preflight.finding import Run

    findings: list[Finding] = []
    with _only_errors_logged():
        for finding in examine(Run(config, own.index, new=not (arguments.resume or arguments.overwrite))):
            findings.append(finding)
            if not own.json:
                print(finding.as_text(), flush=True)
    if own.json:
        print_json({"checks": findings})
    else:
        print(_verdict(findings))
    return 1 if any(finding.status == "fail" for finding in findings) else 0


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Silence library warnings that a finding already reports."""
    loggers = [logging.getLogger(name) for name in ("sorl_env", "sorl_tools", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _verdict(findings: Sequence[Finding]) -> str:
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if failed:
        return f"\n{failed} of {len(findings)} checks failed: the run would not work."
    return f"\nNothing stands in the way of the run{f'; {warned} warnings' if warned else ''}."


if __name__ == "__main__":
    sys.exit(main())
