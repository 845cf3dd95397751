"""``sorl-train``: a config, a run folder, a training run.

The parser is argparse built from the config dataclasses rather than tyro: the two open mappings (``--task_args.hops``),
the per-algorithm sections and the shared YAML reading of values do not fit a static type, and the help shows the
values of the chosen config beside the paper's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sorl_env.errors import UserError
from sorl_train.config import TrainConfig
from sorl_train.config_io import DEFAULT_CONFIG, fields, load_config, value_from_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = _parser().parse_args(argv)
    overrides = {n: value_from_text(n, v) for n, v in vars(arguments).items() if v is not None and n in _NAMES}
    try:
        config = load_config(arguments.config or DEFAULT_CONFIG, overrides)
    except UserError as error:
        print(f"sorl-train: {error}", file=sys.stderr)
        return 2
    return _train(config, arguments)


_NAMES = [name for name, _, _ in fields()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sorl-train", allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    for name in _NAMES:
        parser.add_argument(f"--{name}", dest=name)
    return parser


def _train(config: TrainConfig, arguments: argparse.Namespace) -> int:
    from sorl_train.display import PlainDisplay
    from sorl_train.run_dir import RunDir

    path = config.run_dir or f"runs/{arguments.config or DEFAULT_CONFIG}-{config.algo}-s{config.seed}"
    if arguments.resume:
        run_dir, _ = RunDir.resume(path, config)
    else:
        run_dir = RunDir.create(path, config, overwrite=arguments.overwrite)
    display = PlainDisplay()
    if config.stage == "sft":
        from sorl_train.sft import run
    else:
        from sorl_train.engines.local.trainer import run
    run(config, run_dir, display, arguments.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
