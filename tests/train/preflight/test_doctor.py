"""``sorl-doctor`` finds planted faults, and only those."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sorl_tools.index.build.build import build
from sorl_train.config.files import load_config
from sorl_train.preflight import doctor
from sorl_train.preflight import preflight as doctor_checks
from sorl_train.run.folder import RunDir

from ...tools.loopback import LoopbackServer

FREE = 64_000_000_000
Examine = Callable[[list[str]], tuple[int, dict[str, str]]]
Serve = Callable[..., str]


class World(NamedTuple):
    """A run that lacks nothing: files, and the options that name them."""

    folder: Path
    options: dict[str, str]

    def __call__(self, **changes: str) -> list[str]:
        options = {**self.options, **{name.replace("__", "."): value for name, value in changes.items()}}
        return [part for name, value in options.items() for part in (f"--{name}", value)]


@pytest.fixture
def world(tmp_path: Path, tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor_checks, "_free_memory", lambda: FREE)
    shutil.copytree(tiny_folder, tmp_path / "model")
    rows = [{"id": str(i), "question": f"who {i}?", "golden_answers": ["x"]} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text('{"id": "t", "question": "what?", "golden_answers": ["y"]}\n')
    passages = [{"id": str(i), "contents": f'"T{i}"\nthe word{i} river'} for i in range(9)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    return World(
        tmp_path,
        {
            "task": "nq",
            "model": str(tmp_path / "model"),
            "data": str(tmp_path / "data.jsonl"),
            "eval_data": str(tmp_path / "test.jsonl"),
            "search.corpus": str(tmp_path / "corpus.jsonl"),
            "run_dir": str(tmp_path / "runs" / "one"),
            "rollout.batch_size": "4",
            "update.mini_batch_size": "4",
        },
    )


@pytest.fixture
def index(world: World) -> Path:
    build([world.folder / "corpus.jsonl"], world.folder / "index")
    return world.folder / "index"


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    """Exit status, and the findings that are not ok: name to text."""

    def run(argv: list[str]) -> tuple[int, dict[str, str]]:
        status = doctor.main(argv)
        said = capsys.readouterr()
        found: dict[str, str] = {}
        for line in said.out.splitlines():
            word, _, rest = line.partition(" ")
            if word in ("ok", "warn", "fail"):
                name = rest.lstrip()[:10].strip()
                if word != "ok":
                    found[name] = line
            elif found and line.startswith(" ") and name in found:
                found[name] += " " + line.strip()
        return status, found

    return run


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts stand-ins for retrieval servers."""
    running: list[LoopbackServer] = []

    def start(
        fingerprint: str | None = None,
        status: int = 200,
        body: bytes = b'{"result": [[]]}',
        passages: int | None = 9,
    ) -> str:
        running.append(LoopbackServer(lambda request: (status, body)))
        if fingerprint is not None:
            running[-1].health = 200, json.dumps({"fingerprint": fingerprint, "passages": passages}).encode()
        return running[-1].address

    yield start
    for server in running:
        server.close()


def without(world: World, ending: str, **more: str) -> list[str]:
    """Options without those whose names end so, and with more."""
    options = {name: value for name, value in world.options.items() if not name.endswith(ending)}
    return World(world.folder, options)(**more)


def with_server(world: World, url: str) -> list[str]:
    return without(world, "search.corpus", search__url=url)


def test_a_run_that_lacks_nothing(world: World, examine: Examine) -> None:
    status, found = examine(world())
    assert (status, found) == (0, {})


def test_the_quickstart(examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, found = examine([])
    assert status == 0 and not found
    assert list(tmp_path.iterdir()) == []  # it changes nothing


def test_a_resume_is_checked_with_the_settings_of_its_run(world: World, examine: Examine) -> None:
    folder = world.folder / "runs" / "one"
    whole = {"rollout.batch_size": 4, "update.mini_batch_size": 4}
    RunDir.create(folder, load_config("quickstart", world.options | whole))
    (world.folder / "data.jsonl").unlink()
    status, found = examine(["--resume", "--run_dir", str(folder)])
    assert status == 1 and "data.jsonl" in found["data"]


@pytest.mark.parametrize(
    ("files", "appended", "check", "says"),
    [
        ("model/*", "", "model", "-> give --model a transformers folder or a hub name"),
        ("model/*.safetensors", "", "weights", "holds no weights -> copy its *.safetensors"),
        ("model/tokenizer*", "", "model", "no tokenizer could be loaded from the folder"),
        ("corpus.jsonl", '{"id": "9", "cont', "corpus", "corpus.jsonl:10: not valid JSON"),
        ("data.jsonl", '{"id": "4", "question": "who?"}\n', "data", "data.jsonl:5: no column 'golden"),
        ("test.jsonl", "{'question': 1}", "eval data", "test.jsonl:2: not valid JSON"),
    ],
)
def test_a_planted_fault(
    world: World, examine: Examine, files: str, appended: str, check: str, says: str
) -> None:
    """Files that are gone, or a line more in one."""
    for file in world.folder.glob(files):
        if appended:
            file.write_text(file.read_text() + appended)
        else:
            file.unlink()
    status, found = examine(world())
    assert status == 1 and says in found[check]


def test_a_tiny_policy_for_a_task_without_an_expert(world: World, examine: Examine) -> None:
    assert "which nq does not have -> give --model" in examine(world(model="tiny"))[1]["model"]


@pytest.mark.parametrize(
    ("lacking", "check", "says"),
    [
        ("eval_data", "eval data", "the training questions, too -> give --eval_data"),
        ("search.corpus", "search", "embedded sample -> give --search.corpus PASSAGES"),
        ("data", "data", "embedded sample, not the benchmark -> give --data a file or a folder"),
    ],
)
def test_a_warning(world: World, examine: Examine, lacking: str, check: str, says: str) -> None:
    status, found = examine(without(world, lacking))
    assert status == 0 and says in found[check]


CHECKS = "sorl_train.preflight.preflight"


@pytest.mark.parametrize(
    ("place", "value", "engine", "check", "says"),
    [
        (
            "sorl_train.openrlhf.engine_limits.installed",
            lambda name: "0.1",
            "openrlhf",
            "versions",
            "ray 2.55.0",
        ),
        (f"{CHECKS}._free_memory", lambda: 10**8, "local", "memory", "0.10 GB free -> sorl-train --dry_run"),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6), "local", "disk", "-> give a --run_dir"),
        (f"{CHECKS}.cache_folder", lambda: Path("/proc/no"), "local", "cache", "-> set SORL_CACHE"),
    ],
)
def test_what_this_machine_lacks(
    world: World,
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    value: Any,
    engine: str,
    check: str,
    says: str,
) -> None:
    monkeypatch.setattr(place, value)
    status, found = examine(world(engine=engine))
    assert status == 1 and says in found[check]


def test_a_task_that_takes_no_corpus(examine: Examine, world: World) -> None:
    status, found = examine(["--search.corpus", world.options["search.corpus"]])
    assert status == 1 and "minihop searches the world it generates" in found["search"]
    assert "-> leave out --search.corpus and --search.url" in found["search"]


def test_an_index_as_it_was_built_and_a_damaged_one(world: World, index: Path, examine: Examine) -> None:
    assert examine(world(search__corpus=str(index))) == (0, {})
    file = index / "passages.jsonl"
    file.write_bytes(file.read_bytes().replace(b"word3", b"werd3"))
    status, found = examine(world(search__corpus=str(index)))
    assert status == 1 and "passages.jsonl changed since the build" in found["corpus"]
    file.unlink()
    status, found = examine([*world(), "--index", str(index)])
    assert status == 1 and "passages.jsonl: missing" in found["index"]


def test_nobody_listens(world: World, examine: Examine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    status, found = examine(with_server(world, f"http://127.0.0.1:{port}"))
    assert status == 1 and f"-> start one there: sorl-serve INDEX_OR_CORPUS --port {port}" in found["server"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"body": b"<html>It works!</html>"}, "if another program has port"),
        ({"status": 404, "body": b"no"}, "answered 404"),
        ({"status": 401, "body": b"no"}, "set SORL_SEARCH_TOKEN if the server wants"),
        ({"status": 500, "body": b"no"}, "answered 500"),
    ],
)
def test_a_server_that_is_none(
    world: World, examine: Examine, serve: Serve, answer: dict[str, Any], message: str
) -> None:
    status, found = examine(with_server(world, serve(**answer)))
    assert status == 1 and message in found["server"]


def test_a_server_of_another_make(world: World, examine: Examine, serve: Serve) -> None:
    status, found = examine(with_server(world, serve()))
    assert status == 0 and not found
    assert examine(with_server(world, serve("sha256:beef", passages=None))) == (0, {})


def test_a_server_that_holds_another_index(world: World, index: Path, examine: Examine, serve: Serve) -> None:
    from sorl_tools.index.index import read_manifest

    wrong, right = serve("sha256:beef"), serve(read_manifest(index).hash)
    status, found = examine([*with_server(world, wrong), "--index", str(index)])
    assert status == 1
    assert "holds sha256:beef" in found["server"] and f"-> sorl-serve {index}" in found["server"]
    status, found = examine([*with_server(world, right), "--index", str(index)])
    assert status == 0
    status, found = examine(with_server(world, f"{wrong},{right}"))
    assert status == 1 and "they hold different indexes" in found["servers"]
