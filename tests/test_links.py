"""Every link inside the repository leads somewhere, and every anchor to a heading."""

from pathlib import PurePosixPath

import pages
import pytest


@pytest.mark.parametrize("page", pages.PAGES)
def test_every_link_and_anchor_of_a_page_is_there(page):
    lost = []
    for link in pages.links(pages.read(page)):
        path, _, anchor = link.partition("#")
        target = pages.ROOT / page
        if path:
            target = (pages.ROOT / PurePosixPath(page).parent / path).resolve()
        inside = target.exists() and pages.ROOT in (target, *target.parents)
        if not inside or (anchor and anchor not in pages.anchors(target.read_text())):
            lost.append(link)
    assert not lost, f"{page}: {lost} lead nowhere"


@pytest.mark.parametrize("page", pages.PAGES)
def test_an_anchor_that_is_linked_to_is_one_heading(page):
    """The second heading of a name has another anchor on the site than on GitHub."""
    known = pages.anchors(pages.read(page))
    for other in pages.PAGES:
        for link in pages.links(pages.read(other)):
            path, _, anchor = link.partition("#")
            here = not path and other == page
            if here or (path and (pages.ROOT / other).parent.joinpath(path).resolve() == pages.ROOT / page):
                assert not anchor or known.count(anchor) == 1, (other, link)


@pytest.mark.parametrize(
    ("heading", "want"),
    [
        ("A loss", "a-loss"),
        ("Pairs, and what they cost", "pairs-and-what-they-cost"),
        ("`rft.loss` and [its page](x.md)", "rftloss-and-its-page"),
        ("k_1 - k_2", "k_1---k_2"),
    ],
)
def test_the_rule_of_anchors(heading, want):
    assert pages.slug(heading) == want


def test_what_is_a_link():
    text = "[a](b.md#c) ![p](q.png) `[no](x)` [w](https://x.y)\n```\n[no](y)\n```\n[e](#f)\n"
    assert pages.links(text) == ["b.md#c", "q.png", "#f"]
