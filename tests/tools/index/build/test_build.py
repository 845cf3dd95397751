"""Whole builds: killed ones, repeated ones, refused ones; manifest and verify; the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index import cli, open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.index import hash_file, read_manifest

from ....waiting import wait_until
from ...corpora import made_up, write_jsonl

# A build that takes a while: when it counts words, or between its manifest and the removal of its request.
SLOW_BUILD = """
import pathlib, sys, time
from sorl_tools.index.build import bm25, build
def slowly(function):
    def run(*arguments):
        result = function(*arguments)
        pathlib.Path(sys.argv[2] + ".reached").touch()
        time.sleep(60)
        return result
    return run
if sys.argv[3] == "passages":
    bm25.PostingsBuilder.add = slowly(bm25.PostingsBuilder.add)
else:
    build.write_manifest = slowly(build.write_manifest)
build.build([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2]))
"""


def start_build(corpus: Path, out: Path, stage: str) -> subprocess.Popen[bytes]:
    """A build that has reached a stage and waits there."""
    child = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(corpus), str(out), stage])

    def has_reached() -> bool:
        assert child.poll() is None
        return Path(f"{out}.reached").exists()

    wait_until(has_reached)
    return child


@pytest.mark.parametrize("stage", ["passages", "manifest"])
def test_a_killed_build_is_finished_by_the_same_command(tmp_path: Path, stage: str) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl.gz", made_up(600))
    whole = build([corpus], tmp_path / "whole")
    out = tmp_path / "index"
    child = start_build(corpus, out, stage)
    with pytest.raises(UserError, match="another process is building there"):
        build([corpus], out)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    if stage == "passages":
        with pytest.raises(UserError, match="the build was not finished"):
            open_index(out)
    else:
        assert open_index(out).manifest.hash == whole.hash
    assert build([corpus], out).hash == whole.hash
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


def test_an_unfinished_build_of_another_request_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    with monkeypatch.context() as patch:
        patch.setattr("sorl_tools.index.build.bm25.PostingsBuilder.write", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            build([corpus], tmp_path / "index")
    write_jsonl(corpus, made_up(40))
    with pytest.raises(UserError, match=r"unfinished build of another corpus, .* finish that build"):
        build([corpus], tmp_path / "index")
    assert build([corpus], tmp_path / "index", restart=True).passages == 40


def test_a_build_killed_before_it_wrote_its_request_is_begun_again(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "request.json").touch()
    assert build([corpus], tmp_path / "index").passages == 30


def _interrupt(*arguments: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "passages.jsonl").write_text("precious")
    for restart in (False, True):
        with pytest.raises(UserError, match="holds other files"):
            build([corpus], theirs, restart=restart)
    assert (theirs / "passages.jsonl").read_text() == "precious"
    with pytest.raises(UserError, match="it is a file"):
        build([corpus], corpus)
    out = tmp_path / "index"
    first = build([corpus], out)
    with pytest.raises(UserError, match=r"it holds a finished bm25 index of 30 passages"):
        build([corpus], out)
    (out / "notes.txt").write_text("kept")
    (out / "passages.jsonl").unlink()
    with pytest.raises(UserError, match=r"passages.jsonl: missing, or .*replace it with --restart"):
        build([corpus], out)
    assert build([corpus], out, restart=True).files == first.files
    assert (out / "notes.txt").read_text() == "kept"


def test_a_disk_that_is_full_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, out = write_jsonl(tmp_path / "c.jsonl", made_up(300)), tmp_path / "index"

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("bm25s.np.save", no_space)
        with pytest.raises(
            UserError, match=r"No space left on device.; when it can, give the same command again"
        ):
            build([corpus], out)
    assert build([corpus], out).passages == 300


@pytest.mark.parametrize(
    ("passages", "message"),
    [([], "the corpus has no passages"), ([Passage("0", "", "of the")], "1 passages without a word")],
)
def test_nothing_to_search(tmp_path: Path, passages: list[Passage], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build([write_jsonl(tmp_path / "c.jsonl", passages)], tmp_path / "index")


def test_manifest_says_what_was_built(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    manifest = build([corpus], tmp_path / "index")
    read = read_manifest(tmp_path / "index")
    assert read == manifest
    assert read.hash == manifest.hash
    stored = tmp_path / "index" / "passages.jsonl"
    assert read.corpus == {"source": [str(corpus)], "hash": f"sha256:{hash_file(stored)}"}
    assert read.parameters["bm25"]["stemmer"] == "english"
    # another format of the same passages is the same index
    write_jsonl(tmp_path / "c.jsonl.gz", made_up(30))
    assert build([tmp_path / "c.jsonl.gz"], tmp_path / "again").hash == manifest.hash
    assert build([write_jsonl(tmp_path / "d.jsonl", made_up(31))], tmp_path / "other").hash != manifest.hash


def test_verify_notices_an_index_of_other_passages(tmp_path: Path) -> None:
    """Hashes that fit do not make an index that finds: here the lists belong to another corpus."""
    from sorl_tools.index.cli import check_recall

    build([write_jsonl(tmp_path / "a.jsonl", made_up(300))], tmp_path / "a")
    build([write_jsonl(tmp_path / "b.jsonl", made_up(300, seed=7)[::-1])], tmp_path / "b")
    index = open_index(tmp_path / "b")
    assert check_recall(index, 100).passed
    index.words = open_index(tmp_path / "a").words
    assert not check_recall(index, 100).passed
    index.close()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = write_jsonl(tmp_path / "c.jsonl", made_up(30)), tmp_path / "index"
    assert cli.main(["build", str(corpus), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "passages: 30" in shown.err
    assert cli.main(["info", str(out)]) == 0
    assert capsys.readouterr().out == shown.out
    assert read_manifest(out).hash in shown.out
    assert cli.main(["build", str(corpus), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("sorl-index: --out")
    assert cli.main(["info", str(tmp_path)]) == 2
    assert cli.main(["build", str(corpus)]) == 2


def test_interrupt_from_the_keyboard(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(20_000))
    command = [sys.executable, *"-m sorl_tools.index.cli build".split(), corpus, "--out", tmp_path / "i"]
    # a shell's background jobs, and what they start, ignore Ctrl-C
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    begun = tmp_path / "i" / "passages.jsonl"
    wait_until(begun.is_file)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "the same command finishes the build" in errors
