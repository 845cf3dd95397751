"""The checks of ``sorl-doctor`` on what is searched: a corpus, an index, servers."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from sorl_env.errors import UserError
from sorl_env.task import ToolSettings
from sorl_env.tool import ToolUnavailableError
from sorl_tools.corpus import read_corpus
from sorl_tools.index.manifest import find_damage, read_manifest
from sorl_tools.search.http import TOKEN_VARIABLE, HttpSearch
from sorl_tools.search.http_cache import ReplyCache
from sorl_train.preflight.finding import Finding, Run
from sorl_train.preflight.inputs import UNASKED

HASHED = 20_000_000_000  # the most bytes of an index that are read to compare hashes
PROBE_S = 5.0  # seconds to wait for a server


def check_corpus(run: Run) -> Iterator[Finding]:
    """``search.corpus``: whether the corpus can be read to its end, or the index folder is whole."""
    if run.config.search.corpus is None:
        return
    path = Path(run.config.search.corpus).expanduser()
    if path.is_dir():
        yield _index_folder("corpus", path)
        return
    count = sum(1 for _ in read_corpus(path))
    if count == 0:
        yield Finding("corpus", "fail", f"{path} holds no passages", "name another --search.corpus")
    else:
        yield Finding("corpus", "ok", f"{count:,} passages in {path}")


def check_tools(run: Run) -> Iterator[Finding]:
    """Whether the task takes the corpus or server that it is given, and searches more than a sample."""
    search, task = run.config.search, run.task
    if task is None or not callable(task.tools):
        return
    given = search.corpus is not None or search.url is not None
    if not given and not task.embedded_is_sample:
        return  # the task generates what it searches, which may take a while
    try:  # with an address even for a corpus, as that would be indexed now
        tools = task.tools(ToolSettings(search_url=(search.url or UNASKED) if given else None))
    except OSError:
        return  # a tool that asks its server at once; the run itself will report it
    if any(getattr(tool, "is_sample", False) for tool in tools):
        detail = "the run would search the few passages of the task's embedded sample"
        fix = "give --search.corpus PASSAGES, or --search.url with the address of a sorl-serve"
        yield Finding("search", "warn", detail, fix)
    for tool in tools:
        getattr(tool, "close", lambda: None)()


def check_replies(run: Run) -> Iterator[Finding]:
    """``search.cache``: whether it is a file of replies, or a new one can be made."""
    if run.config.search.cache is None:
        return
    path = Path(run.config.search.cache).expanduser()
    if path.is_file():
        ReplyCache(path=path).close()
        yield Finding("replies", "ok", f"{path}: {path.stat().st_size / 1e6:,.1f} MB of replies")
        return
    folder = next(part for part in path.absolute().parents if part.exists())
    if path.exists() or not os.access(folder, os.W_OK):
        raise UserError(f"{path}: no file can be made there")
    yield Finding("replies", "ok", f"{path} will be made")


def check_index(run: Run) -> Iterator[Finding]:
    """``--index``: whether the folder that the server should serve is whole."""
    if run.index is not None:
        yield _index_folder("index", run.index.expanduser())


def _index_folder(name: str, folder: Path) -> Finding:
    """Compare the files of an index with their hashes, or a large index with its sizes alone."""
    manifest = read_manifest(folder)
    if manifest.bytes > HASHED:
        detail = f"{folder}: files of the right size, not hashed"
        return Finding(name, "ok", detail, f"sorl-index verify {folder} reads all")
    if damaged := find_damage(folder, manifest):
        detail = f"{folder}: {', '.join(damaged)} changed since the build"
        return Finding(name, "fail", detail, "build it again")
    return Finding(name, "ok", f"{folder}: {manifest.backend}, {manifest.passages:,} passages")


def check_server(run: Run) -> Iterator[Finding]:
    """``search.url``: whether every server listens, is a retrieval server, and serves the right index."""
    if run.config.search.url is None:
        return
    search = HttpSearch(run.config.search.url, run.config.search.top_k, PROBE_S)
    search.close()
    fingerprints: dict[str, Any] = {}
    for url in search.urls:
        yield _one_server(run, url, fingerprints)
    known = {url: told for url, told in fingerprints.items() if told is not None}
    if len(set(known.values())) > 1:
        told = "; ".join(f"{url}: {fingerprint}" for url, fingerprint in known.items())
        yield Finding("servers", "fail", f"they hold different indexes: {told}", "start them on the same one")


def _one_server(run: Run, url: str, fingerprints: dict[str, Any]) -> Finding:
    address = httpx.URL(url)
    host, port = address.host, address.port or (443 if address.scheme == "https" else 80)
    health: dict[str, Any] = {}
    search = HttpSearch(url, run.config.search.top_k, PROBE_S)
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
        health = _health(address)
        search("the")
    except ToolUnavailableError as error:
        fix = (
            f"read that server's log; if another program has port {port}, start the server on another port with "
            "sorl-serve INDEX_OR_CORPUS --port N, and give its address as --search.url"
        )
        return Finding("server", "fail", textwrap.shorten(str(error), 110), fix)
    except ValueError as error:
        fix = f"set {TOKEN_VARIABLE}" if "401" in str(error) else "correct --search.url"
        return Finding("server", "fail", textwrap.shorten(str(error), 110), fix)
    except OSError as error:
        fix = f"start one there: sorl-serve INDEX_OR_CORPUS --port {port}"
        return Finding("server", "fail", f"nothing listens at {host}:{port} ({error})", fix)
    finally:
        search.close()
    told = fingerprints[url] = health.get("fingerprint")
    if told is None:
        return Finding("server", "ok", f"{url} answers; it does not say which index it holds")
    if run.index is not None and told != (wanted := read_manifest(run.index.expanduser()).hash):
        detail = f"{url} holds {told}, and {run.index} is {wanted}"
        return Finding("server", "fail", detail, f"sorl-serve {run.index}")
    return Finding("server", "ok", f"{url} answers: {health.get('passages', '?'):,} passages, {told}")


def _health(address: httpx.URL) -> dict[str, Any]:
    """The health report of a ``sorl-serve``; empty for any other server."""
    try:
        path = address.path.rpartition("/")[0] + "/health"
        said = httpx.get(address.copy_with(path=path), timeout=PROBE_S).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
