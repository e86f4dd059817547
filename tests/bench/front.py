"""The pictures of a step in the README: the way of data, wide and narrow, light and dark.

python tests/bench/front.py
"""

import argparse
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
TITLE = "One step: prompts, rollout, rewards, advantages, packs, gradients, update, the engine"

# (what it is, its shape, the calls that make it), in the order of a step
WAY = (
    ("prompts", "[N]", ("data.draw",)),
    ("Rollout", "[B, S]", ("collect.", "gather_and_generate")),
    ("reward", "[N, G]", ("collect.", "gather_and_judge")),
    ("adv, w", "[B, S]", ("advantage.grpo", "weight.token_mean")),
    ("Packed", "[T]", ("experience", "st.shard")),
    ("grad", "", ("st.grad", "loss_fn")),
    ("update", "", ("st.update",)),
    ("engine", "", ("st.export", "eng.load")),
)


class Theme(NamedTuple):
    """The colours of a drawing."""

    ground: str
    ink: str
    faint: str
    sampled: str  # what the engine does
    plain: str  # what pure functions make
    learned: str  # what the strategy does


LIGHT = Theme("#f8fafc", "#1f2937", "#566173", "#c5e8cf", "#e2e8f0", "#bfd7f5")
DARK = Theme("#161b22", "#e6edf3", "#a3adba", "#1f4d33", "#30363d", "#1c3f66")
FILLS = ("plain", "sampled", "sampled", "plain", "plain", "learned", "learned", "sampled")


def text(x, y, words, *, size, fill, weight="normal", family="DejaVu Sans, Verdana, sans-serif"):
    """A line of text around `x`."""
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" font-family="{family}"'
    return f'<text x="{x}" y="{y}" text-anchor="middle" {style}>{escape(words)}</text>'


def station(x, y, width, height, number, theme):
    """One box: what it is with its shape, and below it the calls."""
    name, shape, calls = WAY[number]
    fill = getattr(theme, FILLS[number])
    middle = x + width / 2
    mono = "DejaVu Sans Mono, Menlo, Consolas, monospace"
    size = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    parts = [f'<rect {size} rx="6" fill="{fill}" stroke="{theme.ink}"/>']
    heading = f"{name} {shape}".strip()
    parts.append(text(middle, y + 28, heading, size=17, fill=theme.ink, weight="bold"))
    for i, call in enumerate(calls):
        parts.append(text(middle, y + 51 + 18 * i, call, size=13, fill=theme.ink, family=mono))
    return "".join(parts)


def arrow(x0, y0, x1, y1, theme):
    """A line with a tip at its end."""
    ends = f'x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"'
    return f'<line {ends} stroke="{theme.ink}" stroke-width="2" marker-end="url(#tip)"/>'


def drawing(width, height, parts, theme):
    """The whole SVG."""
    tip = f'<path d="M0 0 10 5 0 10z" fill="{theme.ink}"/>'
    marker = '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
    marker += f'orient="auto">{tip}</marker>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="{theme.ground}"/>'
    lines = (start, f"<title>{escape(TITLE)}</title>", f"<defs>{marker}</defs>", ground, *parts, "</svg>\n")
    return "\n".join(lines)


def wide(theme):
    """Two rows of four: to the right, down, to the left, and up again with new weights."""
    box, gap, high, left, top, below = 178, 24, 84, 16, 16, 152
    at = [(left + i * (box + gap), top) for i in range(4)]
    at += [(left + i * (box + gap), below) for i in (3, 2, 1, 0)]
    parts = [station(x, y, box, high, i, theme) for i, (x, y) in enumerate(at)]
    for i in range(3):
        x = at[i][0] + box
        parts.append(arrow(x + 2, top + high / 2, x + gap - 2, top + high / 2, theme))
        parts.append(arrow(x + gap - 2, below + high / 2, x + 2, below + high / 2, theme))
    right, first = at[3][0] + box / 2, at[1][0]
    parts.append(arrow(right, top + high + 2, right, below - 2, theme))
    parts.append(arrow(left + box - 20, below - 2, first + 24, top + high + 2, theme))
    said = text(left + box / 2 - 4, 126, "new weights, next step", size=13, fill=theme.faint)
    return drawing(2 * left + 4 * box + 3 * gap, 252, [*parts, said], theme)


def narrow(theme):
    """Two columns of four, for a telephone: down on the left, up on the right."""
    box, gap, high, step, left, top = 168, 28, 84, 108, 10, 12
    right = left + box + gap
    at = [(left, top + i * step) for i in range(4)] + [(right, top + i * step) for i in (3, 2, 1, 0)]
    parts = [station(x, y, box, high, i, theme) for i, (x, y) in enumerate(at)]
    for i in range(3):
        y = at[i][1] + high
        parts.append(arrow(left + box / 2, y + 2, left + box / 2, y + step - high - 2, theme))
        parts.append(arrow(right + box / 2, y + step - high - 2, right + box / 2, y + 2, theme))
    across = at[3][1] + high / 2
    parts.append(arrow(left + box + 2, across, right - 2, across, theme))
    parts.append(arrow(right - 2, top + high - 12, left + box + 2, at[1][1] + 16, theme))
    return drawing(2 * left + 2 * box + gap, 2 * top + 3 * step + high, parts, theme)


def pictures():
    """{name of a file: its text}."""
    return {
        "way.svg": wide(LIGHT),
        "way_dark.svg": wide(DARK),
        "way_narrow.svg": narrow(LIGHT),
        "way_narrow_dark.svg": narrow(DARK),
    }


def main():
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, made in pictures().items():
        (FOLDER / name).write_text(made)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    main()
