"""The documentation site: what its strict build refuses, and the built site in a browser without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ..train.report.browser import PROGRAM, Browser

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "docs/site"))
site = pytest.importorskip("build", reason="needs the extra docs")
sys.path.pop()


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, REPOSITORY / "docs/site/build.py", "--docs", docs, "--out", out]
    return subprocess.run(call, capture_output=True, text=True, check=False)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    return tmp_path / "docs"


def write(page: Path, text: str) -> None:
    page.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")


@pytest.mark.slow
def test_broken_links_end_the_build(docs: Path, tmp_path: Path) -> None:
    write(docs / "design.md", "\n[gone](gone.md), [nowhere](search.md#nowhere)\n")
    done = build(docs, tmp_path / "out")
    assert done.returncode == 1
    assert "page does not exist" in done.stderr
    assert "anchor does not exist" in done.stderr
    assert done.stderr.count("design.md:") == 2, done.stderr


@pytest.mark.slow
def test_an_orphan_page_ends_the_build(docs: Path, tmp_path: Path) -> None:
    (docs / "tutorials/orphan.md").write_text("# Orphan\n", encoding="utf-8")
    done = build(docs, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == "make docs: pages that docs/site/mkdocs.yml does not name: tutorials/orphan.md\n"


def test_an_undocumented_public_name_is_found(tmp_path: Path) -> None:
    (tmp_path / ".ci/typings").mkdir(parents=True)
    for package, folder in site.PACKAGES.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text('"""A package."""\n', encoding="utf-8")
        if package != folder:
            (tmp_path / ".ci/typings" / package).symlink_to(tmp_path / folder)
    assert site.undocumented(tmp_path) == []
    source = "class Bare:\n    pass\n\n\ndef said():\n    'Says.'\n\n\ndef _own():\n    pass\n"
    (tmp_path / "tools/new.py").write_text(source, encoding="utf-8")
    assert site.undocumented(tmp_path) == ["sorl_tools.new", "sorl_tools.new.Bare"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a ratio $w_k$ and $\\hat{A}_t$ .", 2),
        ("```math\nw_k = \\exp(x)\n```\n", 1),
        ("`$HOME` and `$w$`, $5 and $6\n\n    echo $A $B\n", 0),
    ],
)
def test_formulas_become_mathml(text: str, count: int) -> None:
    made = site.with_formulas(text)
    assert made.count("<math") == count
    assert count or made == text
    with pytest.raises(site.Refused, match="no MathML"):
        site.with_formulas("$\\unknowncommand x$")


def test_links_of_the_repository_become_links_of_the_site() -> None:
    move: Callable[[str], str] = partial(
        site.site_links, origin="CONTRIBUTING.md", here="about/contributing.md"
    )
    assert move("[a](docs/design.md#words)") == "[a](../design.md#words)"
    assert move("[a](CHANGELOG.md) [b](https://x.org/y)") == "[a](changelog.md) [b](https://x.org/y)"
    assert move("[the licence](LICENSE)") == "the licence"
    assert move("[a](docs/tutorials/two_minutes.ipynb)") == "[a](../tutorials/two_minutes.md)"
    assert move("[gone](gone.md)") == "[gone](gone.md)"  # for the strict build to refuse


def test_notebooks_and_the_method_in_one_file_are_pages() -> None:
    tutorials = REPOSITORY / "docs/tutorials"
    page = site.code_page(tutorials / "two_minutes.ipynb")
    assert page.startswith("# Two minutes of training\n") and page.count("```python") == 5
    assert "<svg" in page and "clipped 0." in page
    method = (tutorials / "so_grpo.py").read_text(encoding="utf-8")
    assert f"```python\n{method}```" in site.code_page(tutorials / "so_grpo.py")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site behind a plain file server."""
    out = tmp_path_factory.mktemp("site")
    done = build(REPOSITORY / "docs", out)
    assert done.returncode == 0, done.stderr

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(out / "site")))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[Browser]:
    """A browser to which no name resolves and that reaches this machine alone. The site keeps the colours of the first
    visit, so each test has a browser of its own."""
    if PROGRAM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    started = Browser(tmp_path, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    yield started
    started.process.terminate()
    started.process.wait(timeout=30)


# the search box keeps its elements in a shadow tree
RESULTS = """[...document.querySelectorAll('*')]
  .flatMap((e) => e.shadowRoot ? [...e.shadowRoot.querySelectorAll('a[role=option]')] : [])"""


@pytest.mark.slow
def test_search_and_navigation_without_a_network(address: str, offline: Browser) -> None:
    offline.open(f"{address}/index.html")
    offline.wait_for("document.querySelector('.md-tabs a[href*=settings]') !== null")
    seen = offline.requests()
    offline.open(offline.run("document.querySelector('.md-tabs a[href*=settings]').href"))
    assert offline.texts("[id='update.trust_kl']")
    offline.run("document.querySelector('.md-search__button').click()")
    offline.wait_for(
        "[...document.querySelectorAll('*')].some((e) => e.shadowRoot && e.shadowRoot.querySelector('input'))"
    )
    for character in "own vllm server":
        offline.key(character)
    offline.wait_for(f"{RESULTS}.some((a) => a.href.includes('how_to.html'))")
    seen += offline.requests()
    assert not [one for one in seen if not one.startswith((address, "data:", "blob:"))]
    assert not offline.complaints()
    found = offline.run(f"{RESULTS}.find((a) => a.href.includes('how_to.html')).href")
    offline.open(found)
    assert found.endswith("#how-do-i-train-on-my-own-vllm-server")
    assert offline.texts("#how-do-i-train-on-my-own-vllm-server")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_their_window(address: str, offline: Browser, width: int, scheme: str) -> None:
    """Nothing but a table's own box scrolls sideways, and text stands out from what is behind it."""
    colours = {"light": "default", "dark": "slate"}[scheme]
    for (
        name
    ) in "index tutorials/first_agent algorithms stability reference/settings reference/sorl_env".split():
        offline.open(f"{address}/{name}.html", width=width, scheme=scheme)
        offline.wait_for(f"document.body.dataset.mdColorScheme === '{colours}'")
        assert offline.run("document.documentElement.scrollWidth") <= width, name
        assert offline.contrast("article p") > 4.5, name


@pytest.mark.slow
def test_llms_txt_names_pages_that_are_there(address: str, offline: Browser) -> None:
    offline.open(f"{address}/llms.txt")
    text = offline.texts("pre")[0]
    paths = site.re.findall(r"\]\(([^)]+\.md)\)", text)
    assert {"index.md", "tutorials/trl.md", "reference/settings.md", "about/changelog.md"} <= {*paths}
    for path in paths:
        assert offline.run(f"fetch({path!r}).then((reply) => reply.status)") == 200, path
