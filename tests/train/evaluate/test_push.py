"""``sorl-push`` against a server on loopback that speaks the hub's protocol: create, preupload, LFS batch, commit."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

from sorl_env.trajectory import write_jsonl
from tests.trajectories import make_trajectory


class Hub(ThreadingHTTPServer):
    """Keeps the repositories that were made and their files; wants the token ``secret``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def do_GET(self) -> None:
        self._answer({"error": "none"}, 404)

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        if self.headers["Authorization"] != "Bearer secret":
            return self._answer({"error": "Invalid token"}, 401)
        if self.path == "/api/repos/create":
            made = json.loads(body)
            hub.repositories[made["name"]] = made
            return self._answer({"url": f"{hub.address}/me/{made['name']}", "name": f"me/{made['name']}"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in asked
            ]
            return self._answer({"files": modes})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            told = [
                o | {"actions": {"upload": {"href": f"{hub.address}/blob/{o['oid']}", "header": {}}}}
                for o in objects
            ]
            return self._answer({"transfer": "basic", "objects": told})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                if line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            url = f"{hub.address}{self.path.removeprefix('/api').replace('/commit/main', '/commit/' + 'a' * 40)}"
            return self._answer({"success": True, "commitUrl": url, "commitOid": "a" * 40})
        return self._answer({}, 200 if self.path.startswith("/api/validate-yaml") else 404)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


def push(*words: str | Path, endpoint: str, token: str | None = "secret", home: Path) -> tuple[int, str, str]:
    """``sorl-push`` in a process of its own, as the hub's library reads its variables at import."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")
    }
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "sorl_train.evaluate.push", *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def policy(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\ntags: [sorl]\n---\n# a card\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def test_a_policy_is_uploaded_with_its_card_and_weights(hub: Hub, tmp_path: Path) -> None:
    folder = policy(tmp_path / "policy_of_mine")
    status, said, wrong = push(folder, "me/agent", endpoint=hub.address, home=tmp_path)
    assert status == 0, wrong
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    made = hub.repositories["agent"]
    assert (
        made.get("private") is True or made.get("visibility") == "private"
    )  # before and since huggingface-hub 2
    assert said.startswith(hub.address)


def test_trajectories_become_a_data_set(hub: Hub, tmp_path: Path) -> None:
    write_jsonl(file := tmp_path / "step_000010.jsonl", [make_trajectory([0, 0, -1, 1])])
    status, _, wrong = push(file, "me/dialogues", endpoint=hub.address, home=tmp_path)
    assert status == 0, wrong
    assert hub.files == {"data/step_000010.jsonl": file.read_bytes()}
    assert hub.repositories["dialogues"]["type"] == "dataset"


def test_no_token_no_right_no_network_and_no_trajectories_are_one_clear_line(
    hub: Hub, tmp_path: Path
) -> None:
    folder = policy(tmp_path / "mine")
    (empty := tmp_path / "empty.jsonl").write_text("")
    for source, endpoint, token, says in (
        (folder, hub.address, None, "set HF_TOKEN"),
        (folder, hub.address, "wrong", "refused the upload"),
        (folder, "http://127.0.0.1:9", "secret", "cannot be reached"),
        (empty, hub.address, "secret", "has no trajectories"),
    ):
        status, said, wrong = push(source, "me/agent", endpoint=endpoint, token=token, home=tmp_path)
        assert (status, said) == (2, ""), wrong
        assert says in wrong and len(wrong.splitlines()) == 1, wrong
    assert not hub.files
