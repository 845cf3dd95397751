"""Whole builds: killed ones, repeated ones, refused ones; manifest, verify and estimate; the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage
from sorl_tools.index import cli, open_index
from sorl_tools.index.build import bm25 as bm25_build
from sorl_tools.index.build.build import build
from sorl_tools.index.build.estimate import estimate
from sorl_tools.index.build.journal import Journal
from sorl_tools.index.manifest import hash_file, read_manifest
from sorl_tools.index.postings import DATA
from sorl_tools.progress import Progress, duration

from ....waiting import wait_until
from ...corpora import made_up, write_jsonl

# A build with small chunks, in which each of them takes a while.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from sorl_tools.index.build import bm25 as bm25_build
from sorl_tools.index.build import build as module
from sorl_tools.index.build import journal
module.CHUNK = bm25_build.CHUNK = 64
bm25_build.BLOCK = 500
add = journal.Journal.add
journal.SYNC_S = 0
def slow_add(self, record, now=False):
    add(self, record, now)
    time.sleep(0.05)
journal.Journal.add = slow_add
print(module.build([Path(sys.argv[1])], Path(sys.argv[2])).hash)
"""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25_build, "CHUNK", 64)
    monkeypatch.setattr("sorl_tools.index.build.build.CHUNK", 64)
    monkeypatch.setattr(bm25_build, "BLOCK", 500)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("stage", ["passages", "block"])
def test_a_killed_build_goes_on_and_ends_the_same(tmp_path: Path, stage: str) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl.gz", made_up(600))
    whole = build([corpus], tmp_path / "whole")
    out = tmp_path / "index"
    journal = out / "building" / "journal.jsonl"
    child = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, str(corpus), str(out)])

    def has_begun() -> bool:
        assert child.poll() is None
        return journal.is_file() and journal.read_text().count(f'"stage": "{stage}"') >= 3

    wait_until(has_begun)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(UserError, match="the build was not finished"):
        open_index(out)
    # what a kill may leave behind a record: half a chunk, and half a record
    with (out / "building" / "docs.bin").open("ab") as file:
        file.write(b"torn")
    with journal.open("ab") as file:
        file.write(b'{"stage": "pass')
    records = journal.read_text().count(f'"stage": "{stage}"')
    resumed = build([corpus], out)
    assert records >= 3  # and so this was not a build from the start
    assert (resumed.hash, resumed.passages) == (whole.hash, 600)
    assert not (out / "building").exists()


@pytest.mark.usefixtures("small_chunks")
def test_a_resumed_build_reads_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(300))
    added: list[dict[str, object]] = []
    add = Journal.add

    def stop_at_third(self: Journal, record: dict[str, object], now: bool = False) -> None:
        added.append(record)
        if [r.get("stage") for r in added].count("passages") == 3 and record.get("stage") == "passages":
            raise KeyboardInterrupt
        add(self, record, now)

    monkeypatch.setattr(Journal, "add", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        build([corpus], tmp_path / "index")
    added.clear()
    monkeypatch.setattr(
        Journal, "add", lambda self, record, now=False: added.append(record) or add(self, record, now)
    )
    build([corpus], tmp_path / "index")
    assert [r["passages"] for r in added if r.get("stage") == "passages"] == [192, 256, 300]


def test_an_unfinished_build_of_another_request_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(30))
    with monkeypatch.context() as patch:
        patch.setattr("sorl_tools.index.build.build.write_postings", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            build([corpus], tmp_path / "index")
    write_jsonl(corpus, made_up(40))
    with pytest.raises(UserError, match="with another corpus; continue that build with its own command"):
        build([corpus], tmp_path / "index")
    assert build([corpus], tmp_path / "index", restart=True).passages == 40


def _interrupt(*arguments: object) -> None:
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
    assert build([corpus], out, restart=True).files == first.files
    assert (out / "notes.txt").read_text() == "kept"


def test_one_process_builds_at_a_time(tmp_path: Path) -> None:
    corpus, out = write_jsonl(tmp_path / "c.jsonl", made_up(300)), tmp_path / "index"
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(corpus), str(out)], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (out / "building" / "journal.jsonl").is_file():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process is building there"):
        build([corpus], out)
    child.kill()
    child.wait()


def test_a_disk_that_is_full_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, out = write_jsonl(tmp_path / "c.jsonl", made_up(300)), tmp_path / "index"

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sorl_tools.index.build.bm25.np.save", no_space)
        with pytest.raises(
            UserError, match=r"No space left on device; correct this, then the same command continues"
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
    assert (
        read.bytes
        == sum(path.stat().st_size for path in (tmp_path / "index").rglob("*.*"))
        - (tmp_path / "index" / "manifest.json").stat().st_size
    )
    assert read.parameters["bm25"]["stemmer"] == "english"
    # another format of the same passages is the same index
    write_jsonl(tmp_path / "c.jsonl.gz", made_up(30))
    assert build([tmp_path / "c.jsonl.gz"], tmp_path / "again").hash == manifest.hash
    assert build([write_jsonl(tmp_path / "d.jsonl", made_up(31))], tmp_path / "other").hash != manifest.hash


def test_damage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "index"
    build([write_jsonl(tmp_path / "c.jsonl", made_up(300))], out)
    assert cli.main(["verify", str(out), "--sample", "50"]) == 0
    assert "all 10 checks passed" in capsys.readouterr().out
    data = out / "bm25" / DATA
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert cli.main(["verify", str(out)]) == 1
    assert f"FAIL  bm25/{DATA}" in capsys.readouterr().out
    data.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=f"{DATA}: {len(whole) - 4} bytes, but {len(whole)} in the manifest"):
        open_index(out)
    data.unlink()
    with pytest.raises(UserError, match="is missing"):
        open_index(out)
    manifest = out / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": 99, "files": {}}))
    with pytest.raises(UserError, match="format 99"):
        open_index(out)
    manifest.write_text("{}")
    with pytest.raises(UserError, match="not a manifest"):
        open_index(out)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="sorl-index build"):
            open_index(missing)


def test_verify_notices_an_index_of_other_passages(tmp_path: Path) -> None:
    """Hashes that fit do not make an index that finds: here the lists belong to another corpus."""
    from sorl_tools.index.verify import check_recall

    build([write_jsonl(tmp_path / "a.jsonl", made_up(300))], tmp_path / "a")
    build([write_jsonl(tmp_path / "b.jsonl", made_up(300, seed=7)[::-1])], tmp_path / "b")
    index = open_index(tmp_path / "b")
    assert check_recall(index, tmp_path / "b", 100).passed
    assert not check_recall(index, tmp_path / "a", 100).passed
    with pytest.raises(UserError, match="--sample 0"):
        check_recall(index, tmp_path / "b", 0)
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
    command = [
        sys.executable,
        "-m",
        "sorl_tools.index.cli",
        "build",
        str(corpus),
        "--out",
        str(tmp_path / "i"),
    ]
    # a shell's background jobs, and what they start, ignore Ctrl-C
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    journal = tmp_path / "i" / "building" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not journal.is_file():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "the same command goes on where this one stopped" in errors


def test_estimates_are_near_a_build(shared_data: Path, tmp_path: Path) -> None:
    """Disk within a quarter, for wiki's passages of 88 words; memory and time are in benchmarks/search/scale.py."""
    with (tmp_path / "part.jsonl").open("wb") as part:
        import gzip

        with gzip.open(shared_data / "corpus" / "wiki.jsonl.gz") as lines:
            part.writelines(line for line, _ in zip(lines, range(8000), strict=False))
    manifest = build([tmp_path / "part.jsonl"], tmp_path / "index")
    words = sum(len(p.text.split()) for p in open_index(tmp_path / "index").passages) / 8000  # type: ignore[attr-defined]
    guess = estimate(8000, words=words)
    assert guess.disk == pytest.approx(manifest.bytes, rel=0.25)
    assert guess.build_seconds < 60


def test_estimates_add_up() -> None:
    small, large = estimate(1_000_000), estimate(21_000_000)
    assert small.build_memory < 4e9 and large.build_memory < 4e9
    assert 15 < large.disk / small.disk < 21  # words come again: the vocabulary grows more slowly
    flat = estimate(1000, "dense", dim=768).disk - estimate(1000, "dense", dim=384).disk
    assert flat == 1000 * 384 * 4
    by_kind = {
        kind: estimate(1_000_000, "dense", dim=384, faiss=kind).disk
        for kind in ("flat", "sq8", "pq", "ivfpq", "OPQ96,PQ96")
    }
    text = by_kind["flat"] - 1536e6
    assert {kind: round((size - text) / 1e6) for kind, size in by_kind.items()} == {
        "flat": 1536,
        "sq8": 384,
        "pq": 192,
        "ivfpq": 200,
        "OPQ96,PQ96": 96,
    }
    for bad in (
        {"passages": 0},
        {"passages": 5, "words": 0},
        {"passages": 5, "backend": "dense", "faiss": "LSH"},
    ):
        with pytest.raises(UserError):
            estimate(**bad)  # type: ignore[arg-type]


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 20.0, 21.0, 30.0])
    monkeypatch.setattr("sorl_tools.progress.time.monotonic", lambda: next(clock))
    progress = Progress()
    progress.start("vectors", 1000, 100)
    progress.advance(100)  # 5/s, 800 to go
    progress.advance(1)  # too soon to say more
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "vectors: 200 of 1,000 (20%), 5/s, 3 min to go",
        "vectors: 201 of 1,000 (20%), 3/s, 4 min to go",
    ]
    assert [duration(s) for s in (45, 300, 9000, 8e6)] == ["45 s", "5 min", "2.5 h", "93 days"]
