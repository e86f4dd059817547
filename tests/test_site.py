"""The site as `make docs` builds it: strictly, for a machine without a network, and as a browser shows it."""

import importlib.util
import re
import subprocess
import sys

import headless
import pages
import pytest

import rft_fn as rft

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="mkdocs is not installed")
LOOKED_AT = [
    "index.html",
    "algorithms.html",
    "reference/advantage.html",
    "reference/index.html",
    "scripts.html",
    "models.html",
    "coming_from/lightrft.html",
    "source/train_scripts/grpo.py.html",
]
ROOMS = [name for name in rft.__all__ if hasattr(getattr(rft, name), "__all__")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a warning of any kind fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_there_and_has_its_place(site):
    """mkdocs.yml has no place for a page: the build fails; here, that none was left out."""
    text = (site / "index.html").read_text()
    for page in pages.PAGES:
        name = page.removeprefix("docs/")
        if name.endswith("README.md"):
            name = {"README.md": "readme.md", "kernels/README.md": "kernels.md"}.get(
                name, name.replace("README", "index")
            )
        name = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}.get(name, name)
        html = name.removesuffix(".md") + ".html"
        assert (site / html).exists(), page
        folder = html.rpartition("/")[0]
        assert f'href="{html}"' in text or f'href="{folder}/' in text, page


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_the_reference_has_every_public_name_with_its_docstring(site, room):
    text = (site / "reference" / f"{room or 'rft'}.html").read_text()
    names = [x for x in rft.__all__ if x not in ROOMS]
    if room:
        names = getattr(rft, room).__all__
    for name in names:
        found = re.search(rf'<h2 id="rft_fn\.[\w.]*\b{name}" class="doc doc-heading">', text)
        assert found, f"rft.{room}.{name}"


def test_the_reference_reads_as_the_docstring_does(site):
    """Equations are code, brackets and stars stand for themselves, and signatures have their types."""
    text = (site / "reference" / "advantage.html").read_text()
    assert "GRPO's advantages [N, G], normalised per group." in text.replace("&#39;", "'")
    assert "<code>(r - mean) / (std + eps)" in text
    losses = (site / "reference" / "loss.html").read_text()
    assert "They take and return [*], without average or mask." in losses


def test_nothing_is_loaded_from_elsewhere(site):
    outside = r"=\"?((?:https?:)?//[^\s\">]+)"
    for page in site.rglob("*.html"):
        text = page.read_text()
        loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc" + outside, text)
        loads += re.findall(r"<link\b(?![^>]*canonical)[^>]*\bhref" + outside, text)
        assert not loads, (page.name, loads)
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


class Watching(headless.Browser):
    """A browser that notes which requests fail."""

    failed: list

    def receive(self):
        message = super().receive()
        if message.get("method") == "Network.loadingFailed":
            self.failed.append(message["params"])
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not headless.BROWSER:
        pytest.skip("there is no browser")
    Watching.failed = []
    shown = Watching(tmp_path_factory.mktemp("browser"))
    shown.send("Network.enable")
    yield shown
    shown.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", LOOKED_AT)
def test_a_page_fits_its_window_and_loads_whole(site, browser, page, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    browser.errors.clear()
    browser.failed.clear()
    browser.open(site / page)
    assert browser.value("document.body.scrollWidth") <= width
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.querySelector('h1').getBoundingClientRect().width") > 0
    assert not browser.failed and not browser.errors
    assert browser.value("[...document.images].every(x => x.loading == 'lazy' || x.naturalWidth > 0)")


def test_the_search_finds_a_function_without_a_server(site, browser):
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    browser.open(site / "index.html")
    browser.value("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type("length_adaptive_lambda")
    browser.until("document.querySelectorAll('.md-search-result__item a').length > 0")
    found = browser.value("document.querySelector('.md-search-result__item a').href")
    assert "reference/advantage.html" in found
