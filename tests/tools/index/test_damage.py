"""Damaged and foreign indexes are refused when they are opened: none is searched, and none is read beyond its end."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sorl_env.errors import UserError
from sorl_tools.index import cli, open_index
from sorl_tools.index.build.build import build
from sorl_tools.index.build.dense import DenseOptions
from sorl_tools.index.index import Manifest, hash_file, read_manifest, write_manifest

from ..corpora import made_up, write_jsonl

QUERIES = ["aaword0", "beword1 aaword20", "Title 7"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("good")
    corpus = write_jsonl(folder / "c.jsonl", made_up(60))
    build([corpus], folder / "index", "hybrid", dense=DenseOptions(model=str(tiny_model), faiss="sq8"))
    return folder / "index"


def test_a_flipped_bit_or_a_cut_in_any_file_is_refused(good: Path, tmp_path: Path) -> None:
    wanted = open_index(good).search(QUERIES, 3)
    draw = random.Random(0)
    for name in [*read_manifest(good).files, "manifest.json"]:
        path = tmp_path / "index" / name
        for change in ("flip", "flip", "flip", "cut", "grow", "gone"):
            shutil.copytree(good, tmp_path / "index", dirs_exist_ok=True)
            data = bytearray(path.read_bytes())
            if change == "flip":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data[:-1] if change == "cut" else data + b"x" if change == "grow" else data)
            if change == "gone":
                path.unlink()
            try:
                found = open_index(tmp_path / "index").search(QUERIES, 3)
            except UserError as error:
                assert "again" in str(error) or "sorl-index build" in str(error)
            else:  # white space at the end of the manifest
                assert name == "manifest.json" and found == wanted


@pytest.mark.parametrize("part", [("hybrid", "rrf_k"), ("hybrid", "depth"), ("dense", "query_prefix")])
def test_whatever_changes_answers_changes_the_hash(good: Path, part: tuple[str, str]) -> None:
    manifest, (section, name) = read_manifest(good), part
    changed = {**manifest.parameters, section: {**manifest.parameters[section], name: "other"}}
    assert dataclasses.replace(manifest, parameters=changed).hash != manifest.hash
    assert dataclasses.replace(manifest, built_at="later").hash == manifest.hash


def test_files_of_another_index_are_refused(good: Path, tmp_path: Path, tiny_model: Path) -> None:
    corpus = write_jsonl(tmp_path / "c.jsonl", made_up(60, seed=1))
    build([corpus], tmp_path / "other", "hybrid", dense=DenseOptions(model=str(tiny_model), faiss="sq8"))
    for name in [*read_manifest(good).files, "manifest.json"]:
        shutil.copytree(good, tmp_path / "index", dirs_exist_ok=True)
        shutil.copy(tmp_path / "other" / name, tmp_path / "index" / name)
        if (tmp_path / "index" / name).read_bytes() != (good / name).read_bytes():
            with pytest.raises(UserError, match="again"):
                open_index(tmp_path / "index")


def _edit(change: Callable[[np.ndarray], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        array = np.load(path)
        changed = change(array)
        np.save(path, array if changed is None else changed)

    return edit


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bm25/indices.csc.index.npy", _edit(lambda array: array.put(0, 60))),
        ("bm25/indices.csc.index.npy", _edit(lambda array: array.put(0, -1))),
        ("bm25/indices.csc.index.npy", _edit(lambda array: array.astype(np.int64))),
        ("bm25/indptr.csc.index.npy", _edit(lambda array: array.put(-1, 10**9))),
        ("bm25/indptr.csc.index.npy", _edit(lambda array: array.put(1, 10**9))),
        ("bm25/data.csc.index.npy", _edit(lambda array: array[:0])),
        ("bm25/vocab.index.json", lambda path: path.write_text('{"word": 1000000}')),
        ("bm25/vocab.index.json", lambda path: path.write_text("[")),
        ("bm25/params.index.json", lambda path: path.write_text("{}")),
        ("offsets.npy", _edit(lambda array: array.put(5, 10**12))),
        ("offsets.npy", _edit(lambda array: array[:-1])),
        ("dense/index.faiss", lambda path: path.write_bytes(b"IxFI" + bytes(100))),
    ],
)  # fmt: skip
def test_an_index_made_to_point_outside_is_refused(
    good: Path, tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    """With hashes that fit, as in an index that another program wrote."""
    shutil.copytree(good, tmp_path / "index")
    change(tmp_path / "index" / name)
    manifest = read_manifest(good)
    path = tmp_path / "index" / name
    entry = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    fields = {field: getattr(manifest, field) for field in manifest.__dataclass_fields__}
    write_manifest(Manifest(**fields | {"files": {**manifest.files, name: entry}}), tmp_path / "index")
    with pytest.raises(UserError, match=r"build the index again|FAISS cannot read it"):
        open_index(tmp_path / "index")


def test_damage_is_named(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "index"
    shutil.copytree(good, out)
    assert cli.main(["verify", str(out), "--sample", "50"]) == 0
    assert "all 9 checks passed" in capsys.readouterr().out
    data = out / "bm25" / "data.csc.index.npy"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert cli.main(["verify", str(out)]) == 1
    assert f"FAIL  bm25/{data.name}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"bm25/{data.name} changed since the build"):
        open_index(out)
    data.write_bytes(whole[:-4])
    assert cli.main(["verify", str(out)]) == 2
    shown = capsys.readouterr().err
    assert f"{data.name}: missing, or not of {len(whole)} bytes; copy it again" in shown
    data.unlink()
    with pytest.raises(UserError, match="missing, or not of"):
        open_index(out)
    manifest = out / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format": 99, "files": {}}))
    with pytest.raises(UserError, match=r"format 99, .*build CORPUS --out .*--restart"):
        open_index(out)
    manifest.write_text(json.dumps({**content, "backend": "dense"}))
    with pytest.raises(UserError, match=r"not a manifest .it was changed since the build"):
        open_index(out)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match="sorl-index build"):
            open_index(missing)
