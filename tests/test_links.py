"""Every link inside the repository leads somewhere, and every anchor to a heading."""

from pathlib import PurePosixPath

import pages
import pytest

pytestmark = pytest.mark.docs


def test_every_link_and_anchor_leads_to_one_place():
    """The second heading of a name has another anchor on the site than on GitHub."""
    headings = {page: pages.anchors(pages.read(page)) for page in pages.PAGES}
    offenders = []
    for page in pages.PAGES:
        for link in pages.links(pages.read(page)):
            path, _, anchor = link.partition("#")
            target = (pages.ROOT / PurePosixPath(page).parent / path).resolve() if path else pages.ROOT / page
            inside = target.exists() and pages.ROOT in (target, *target.parents)
            name = str(target.relative_to(pages.ROOT)) if inside else ""
            known = (
                headings[name] if name in headings else pages.anchors(target.read_text()) if anchor else []
            )
            if not inside or (anchor and known.count(anchor) != 1):
                offenders.append(f"{page}: {link}")
    assert not offenders, offenders


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
