"""The checks of ``sorl-doctor`` on what is searched: a corpus, an index, servers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from sorl_env.task import ToolSettings
from sorl_env.tool import ToolUnavailableError
from sorl_tools.corpus import read_corpus
from sorl_tools.index.manifest import find_damage, read_manifest
from sorl_tools.search.http import TOKEN_VARIABLE, HttpSearch
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
    elif count := sum(1 for _ in read_corpus(path)):
        yield Finding("corpus", "ok", f"{count:,} passages in {path}")
    else:
        yield Finding("corpus", "fail", f"{path} holds no passages", "name another --search.corpus")


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


def check_server(run: Run) -> Iterator[Finding]:
    """``search.url``: whether every server listens, is a retrieval server, and serves the right index."""
    if run.config.search.url is None:
        return
    with closing(HttpSearch(run.config.search.url, run.config.search.top_k, PROBE_S)) as search:
        urls = search.urls
    fingerprints: dict[str, str] = {}
    for url in urls:
        yield _one_server(run, url, fingerprints)
    if len(set(fingerprints.values())) > 1:
        told = "; ".join(f"{url}: {fingerprint}" for url, fingerprint in fingerprints.items())
        yield Finding("servers", "fail", f"they hold different indexes: {told}", "start them on the same one")


def _one_server(run: Run, url: str, fingerprints: dict[str, str]) -> Finding:
    address = httpx.URL(url)
    host, port = address.host, address.port or (443 if address.scheme == "https" else 80)
    try:
        health = _health(address)
        with closing(HttpSearch(url, run.config.search.top_k, PROBE_S)) as search:
            search("the")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        fix = f"start one there: sorl-serve INDEX_OR_CORPUS --port {port}"
        return Finding("server", "fail", f"nothing listens at {host}:{port} ({error})", fix)
    except (ToolUnavailableError, ValueError) as error:
        fix = (
            f"correct --search.url, set {TOKEN_VARIABLE} if the server wants its token, or read that server's log; if "
            f"another program has port {port}, start the server on another one: sorl-serve INDEX_OR_CORPUS --port N"
        )
        return Finding("server", "fail", textwrap.shorten(str(error), 110), fix)
    told = health.get("fingerprint")
    if told is None:
        return Finding("server", "ok", f"{url} answers; it does not say which index it holds")
    fingerprints[url] = told
    if run.index is not None and told != (wanted := read_manifest(run.index.expanduser()).hash):
        detail = f"{url} holds {told}, and {run.index} is {wanted}"
        return Finding("server", "fail", detail, f"sorl-serve {run.index}")
    return Finding("server", "ok", f"{url} answers: {health.get('passages', '?'):,} passages, {told}")


def _health(address: httpx.URL) -> dict[str, Any]:
    """The health report of a ``sorl-serve``; empty for any other server. Raises httpx's errors of the connection."""
    try:
        path = address.path.rpartition("/")[0] + "/health"
        said = httpx.get(address.copy_with(path=path), timeout=PROBE_S).json()
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise
    except (httpx.HTTPError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
