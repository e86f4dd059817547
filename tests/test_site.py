"""The site as `make docs` builds it: strictly, for a machine without a network, and as a browser shows it."""

import html
import importlib.util
import inspect
import json
import re
import subprocess
import sys

import headless
import pages
import pytest

import rft_fn as rft

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="mkdocs is not installed"),
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
            name = {"README.md": "index.md", "kernels/README.md": "kernels.md"}.get(
                name, name.replace("README", "index")
            )
        name = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}.get(name, name)
        file = name.removesuffix(".md") + ".html"
        assert (site / file).exists(), page
        folder = file.rpartition("/")[0]
        assert f'href="{file}"' in text or f'href="{folder}/' in text, page


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_the_reference_has_every_public_name_with_its_docstring(site, room):
    text = (site / "reference" / f"{room or 'rft'}.html").read_text()
    names = [x for x in rft.__all__ if x not in ROOMS]
    if room:
        names = getattr(rft, room).__all__
    for name in names:
        found = re.search(rf'<h2 id="rft_fn\.[\w.]*\b{name}" class="doc doc-heading">', text)
        assert found, f"rft.{room}.{name}"
        said = text[found.end() :].partition('<h2 id="')[0]
        value = getattr(getattr(rft, room) if room else rft, name)
        assert bare(first_line(value)) in bare(re.sub(r"<[^>]+>", "", said)), f"rft.{room}.{name}"


def first_line(value):
    """The first line of what a name says of itself; empty for a plain value, whose type has the docstring."""
    if not (inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)):
        return ""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def bare(text):
    """A text without spaces and marks, which a page may set otherwise."""
    return re.sub(r"[\s`*]", "", html.unescape(text))


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


# what is wrong with the page that is shown: [] where all is well
FAULTS = """
(() => {
  const found = [];
  const width = Math.max(document.body.scrollWidth, document.documentElement.scrollWidth);
  if (width > document.documentElement.clientWidth) found.push(`${width} pixels wide`);
  if (!document.querySelector("h1")?.getBoundingClientRect().width) found.push("no heading");
  for (const image of document.images) {
    const late = image.loading == "lazy" && !image.complete;
    if (!late && !image.naturalWidth) found.push(`no picture ${image.src}`);
  }
  return found;
})()
"""


class Watching(headless.Browser):
    """A browser that notes which requests fail."""

    failed: list

    def window(self, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

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


def test_every_page_fits_its_window_and_loads_whole(site, browser):
    """In a wide and in a narrow window; 404.html has the addresses of a server, and opens from no disk."""
    found = {}
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        browser.errors.clear()
        browser.failed.clear()
        browser.window(1280)
        browser.open(page)
        faults = browser.value(FAULTS)
        browser.window(400)
        faults += browser.value(FAULTS)
        faults += browser.failed + browser.errors
        if faults:
            found[str(page.relative_to(site))] = faults
    assert not found, json.dumps(found, indent=1)[:3000]


# how many cells end right of the page's own text
CUT = """
(() => {
  const end = document.querySelector(".md-content__inner").getBoundingClientRect().right;
  const cells = [...document.querySelectorAll("td, th")];
  return cells.filter((x) => x.getBoundingClientRect().right > end + 1).length;
})()
"""


def test_no_table_of_options_is_cut_off(site, browser):
    """Those of pages for newcomers have long names, and notes in the last column, which is to be seen."""
    pages_of_options = sorted((site / "coming_from").glob("*.html"))
    assert len(pages_of_options) > 4
    browser.window(1280)
    for page in pages_of_options:
        browser.open(page)
        assert browser.value(CUT) == 0, page.name


def test_the_search_finds_a_function_without_a_server(site, browser):
    browser.window(1280)
    browser.open(site / "index.html")
    browser.value("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type("length_adaptive_lambda")
    browser.until("document.querySelectorAll('.md-search-result__item a').length > 0")
    found = browser.value("document.querySelector('.md-search-result__item a').href")
    assert "reference/advantage.html" in found
