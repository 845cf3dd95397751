"""``sorl-push``: uploads a policy or trajectories to the hub, the one at ``HF_ENDPOINT`` if that is set."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.commands.command import Parser, run_command
from sorl_env.errors import UserError, install_command
from sorl_env.trajectory import iter_jsonl

try:
    from sorl_train.evaluate.find_policy import find_policy
except ModuleNotFoundError as missing:  # the core alone is installed
    raise SystemExit(f"sorl-push needs the package {missing.name!r}: {install_command('train')}") from missing


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0 done, 2 wrong usage or not uploaded, 130 interrupted."""
    return run_command("sorl-push", _push, argv)


def _push(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="sorl-push", description="Upload a policy with its card, or trajectories, to the hub."
    )
    what = "a run (its best policy), a checkpoint, a model folder, or a .jsonl file of trajectories"
    parser.add_argument("source", metavar="SOURCE", help=what)
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository; it is made if there is none")
    parser.add_argument(
        "--public", action="store_true", help="make a new repository public (default: private)"
    )
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.repo):
        raise UserError(f"{arguments.repo!r} is not the name of a hub repository: give OWNER/NAME")
    source = Path(arguments.source).expanduser()
    if source.is_file():
        if sum(1 for _ in iter_jsonl(source)) == 0:
            raise UserError(f"{source} has no trajectories; give a file of a run's folder trajectories/")
        print(_upload(source, arguments.repo, "dataset", private=not arguments.public))
        return 0
    folder = Path(find_policy(arguments.source).folder)
    if not folder.is_dir():
        raise UserError(
            f"{arguments.source} is on the hub already, or mistyped: give a folder of this machine"
        )
    print(_upload(folder, arguments.repo, "model", private=not arguments.public))
    return 0


def _upload(source: Path, repo: str, kind: str, *, private: bool) -> str:
    """Make the repository if there is none, upload a file or a folder as one commit, and return its address. Raises
    ``UserError`` without a token, a connection or the right to write."""
    from huggingface_hub import HfApi, constants, errors, get_token

    if get_token() is None:
        raise UserError("the hub wants a token that may write: set HF_TOKEN, or run hf auth login")
    # the library's HTTP client differs between its versions: httpx, then httpx2
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    api, where = HfApi(), f"{repo} at {constants.ENDPOINT}"
    try:
        name = str(api.create_repo(repo, repo_type=kind, private=private, exist_ok=True).repo_id)
        if source.is_dir():
            return str(api.upload_folder(repo_id=name, folder_path=source, repo_type=kind))
        return str(
            api.upload_file(
                repo_id=name, path_or_fileobj=source, path_in_repo=f"data/{source.name}", repo_type=kind
            )
        )
    except errors.HfHubHTTPError as error:
        said = str(error).strip().splitlines()[0]
        raise UserError(
            f"{where} refused the upload ({said}); check the name, and that the token may write"
        ) from error
    except (http_error, OSError) as error:
        raise UserError(
            f"{where} cannot be reached ({error}); check the connection, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
