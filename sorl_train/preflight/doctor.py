"""``sorl-doctor``: the checks of the dry run and those of this machine, with an exit status."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.commands.command import Parser, add_json_option, print_json, run_command
from sorl_env.errors import install_command

try:
    from sorl_train.config.options import parse
    from sorl_train.run.folder import settings_of
except ModuleNotFoundError as error:  # the core alone is installed
    raise SystemExit(f"sorl-doctor needs the package {error.name!r}: {install_command('train')}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command("sorl-doctor", _examine, argv)


def _examine(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="sorl-doctor",
        usage="sorl-doctor [--index DIR] [--json] [options of sorl-train]",
        description="Check what the run that these options of sorl-train describe needs, without starting it.",
        epilog="Exit status: 0 the run can start, 1 a check failed, 2 wrong usage.",
    )
    about = "the index folder that the server at search.url should serve"
    parser.add_argument("--index", type=Path, metavar="DIR", help=about)
    add_json_option(parser)
    own, rest = parser.parse_known_args(argv)
    arguments = parse(rest)
    config = settings_of(arguments)
    from sorl_train.preflight.inputs import PreflightContext
    from sorl_train.preflight.preflight import examine

    findings = []
    logging.disable(logging.WARNING)  # of libraries, for what a finding reports
    try:
        for finding in examine(
            PreflightContext(config, own.index, new=not (arguments.resume or arguments.overwrite))
        ):
            findings.append(finding)
            if not own.json:
                print(finding.as_text(), flush=True)
    finally:
        logging.disable(logging.NOTSET)
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if own.json:
        print_json({"checks": findings})
    elif failed:
        print(f"\n{failed} of {len(findings)} checks failed: the run would not work.")
    else:
        print(f"\nNothing stands in the way of the run{f'; {warned} warnings' if warned else ''}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
