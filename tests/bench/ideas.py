"""The drawings of docs/ideas.md, as SVG on a light ground that reads on light and dark pages.

python tests/bench/ideas.py
"""

import argparse
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
WIDTH = 760
INK, FAINT, GROUND = "#1f2937", "#6b7280", "#f8fafc"
BLUE, GREEN, ORANGE, GREY, RED = "#bfd7f5", "#c5e8cf", "#fbd9b0", "#e2e8f0", "#f6c4c4"
HEAD = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 10 5 0 10z" fill="#1f2937"/></marker></defs>'
)


def box(x, y, width, height, text="", fill=GREY, size=14):
    """A rectangle with a text in its middle."""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{INK}"/>'
    return shape + note(x + width / 2, y + height / 2 + size * 0.35, text, size=size, anchor="middle")


def cells(x, y, texts, fills, width=46, height=30):
    """Boxes side by side, one for each text."""
    return "".join(box(x + i * width, y, width, height, t, f) for i, (t, f) in enumerate(zip(texts, fills)))


def note(x, y, text, *, size=14, anchor="start", fill=INK, weight="normal"):
    """A line of text."""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def arrow(x0, y0, x1, y1):
    """A line with a tip at its end."""
    ends = f'x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"'
    return f'<line {ends} stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'


def picture(name, title, height, *parts):
    """Write one drawing."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
    start += f'height="{height}" font-family="DejaVu Sans, Verdana, sans-serif" role="img">'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{GROUND}"/>'
    body = "\n".join((start, f"<title>{escape(title)}</title>", HEAD, ground, *parts, "</svg>\n"))
    (FOLDER / name).write_text(body)


def normalisation():
    """One batch, cut in two ways."""
    parts = [note(24, 32, "w = 1 / 5 on each of the batch's 5 tokens, before anything is cut", weight="bold")]
    rows = [("w·1", "w·2", "w·3", "w·4"), ("w·10", "", "", "")]
    for i, row in enumerate(rows):
        fills = [BLUE if text else "none" for text in row]
        parts.append(cells(24, 54 + 40 * i, row, fills))
    cuts = [
        ("one pack", [(0, 5)]),
        ("a pack for each row", [(0, 4), (4, 5)]),
        ("two processes", [(0, 2), (2, 5)]),
    ]
    flat = ("w·1", "w·2", "w·3", "w·4", "w·10")
    for i, (label, ranges) in enumerate(cuts):
        y = 50 + 52 * i
        parts.append(note(300, y + 20, label, fill=FAINT, size=13))
        for j, (start, end) in enumerate(ranges):
            fill = (BLUE, GREEN)[j]
            parts.append(cells(440 + 46 * start + 10 * j, y, flat[start:end], [fill] * 5, height=28))
        parts.append(note(690, y + 20, "Σ = 4", weight="bold"))
    last = "The mean of the means of the two rows is 6.25: another objective, decided by a cut."
    parts.append(note(24, 218, last, fill=FAINT, size=13))
    picture("idea1.svg", "Any cut of the weighted losses has the same sum", 238, *parts)


def alignments():
    """Token-aligned rows, the bridge, and a label-aligned pack."""
    parts = [note(24, 32, "Rollout, Experience [B, S]: numbers are about their own token", weight="bold")]
    tokens, fills = ("6", "1", "=", "1", "6", "end"), [GREY] * 3 + [GREEN] * 3
    parts.append(note(24, 70, "tokens", fill=FAINT) + cells(110, 50, tokens, fills, width=56))
    logp = ("", "", "", "-0.1", "-0.3", "-0.0")
    parts.append(
        note(24, 110, "logp", fill=FAINT) + cells(110, 90, logp, ["none"] * 3 + [GREEN] * 3, width=56)
    )
    parts.append(
        note(470, 70, "grey: prompt", fill=FAINT) + note(470, 110, "green: sampled, in the mask", fill=FAINT)
    )
    parts.append(arrow(278, 126, 278, 164) + note(292, 150, "packing.pack: the only shift by one", size=14))
    parts.append(note(24, 192, "Packed [T]: numbers are about the target", weight="bold"))
    parts.append(
        note(24, 230, "tokens", fill=FAINT) + cells(110, 210, tokens[:-1], [GREY] * 3 + [GREEN] * 2, width=56)
    )
    target = ("1", "=", "1", "6", "end")
    target_fills = [GREY] * 2 + [GREEN] * 3
    parts.append(note(24, 270, "target", fill=FAINT) + cells(110, 250, target, target_fills, width=56))
    logp = ("0", "0", "-0.1", "-0.3", "-0.0")
    parts.append(
        note(24, 310, "logp", fill=FAINT) + cells(110, 290, logp, ["none"] * 2 + [GREEN] * 3, width=56)
    )
    parts.append(note(470, 310, "0 outside the mask", fill=FAINT))
    picture("idea2.svg", "Rows are aligned with tokens, packs with targets", 340, *parts)


def keys():
    """The same samples from one process and from two."""
    parts = [note(24, 32, "key = fold_in(seed, step, prompt, sample)", weight="bold")]
    parts.append(note(24, 76, "one process", fill=FAINT))
    samples = [f"{prompt}.{sample}" for prompt in "ab" for sample in "12"]
    fills = [BLUE, BLUE, GREEN, GREEN]
    parts.append(box(150, 56, 80, 30, "rank 0", "none") + arrow(230, 71, 268, 71))
    parts.append(cells(272, 56, samples, fills, width=70))
    parts.append(note(24, 138, "two processes", fill=FAINT))
    for i in range(2):
        y = 112 + 40 * i
        parts.append(box(150, y, 80, 30, f"rank {i}", "none") + arrow(230, y + 15, 268 + 140 * i, y + 15))
        parts.append(cells(272 + 140 * i, y, samples[2 * i : 2 * i + 2], fills[2 * i :], width=70))
    parts.append(note(24, 224, "another order", fill=FAINT))
    order = [3, 0, 2, 1]
    parts.append(box(150, 204, 80, 30, "server", "none") + arrow(230, 219, 268, 219))
    parts.append(cells(272, 204, [samples[i] for i in order], [fills[i] for i in order], width=70))
    parts.append(note(572, 126, "b.1 is the same", fill=FAINT, size=13))
    parts.append(note(572, 146, "tokens everywhere", fill=FAINT, size=13))
    picture("idea3.svg", "A sample depends on its key and on nothing else", 256, *parts)


def states():
    """The values of one update."""
    parts = [note(24, 32, "values go in, values come out, and nothing is hidden in an object", weight="bold")]
    parts.append(box(24, 64, 130, 44, "packs", GREY) + box(24, 128, 130, 44, "state", BLUE))
    parts.append(arrow(154, 86, 222, 104) + arrow(154, 150, 222, 122))
    parts.append(box(226, 90, 120, 46, "grad", "none", size=16) + arrow(346, 113, 394, 113))
    parts.append(box(398, 90, 110, 46, "gradients", ORANGE) + arrow(508, 113, 556, 113))
    parts.append(box(560, 90, 110, 46, "update", "none", size=16) + arrow(615, 136, 615, 184))
    parts.append(box(550, 188, 130, 44, "new state", BLUE))
    parts.append(note(226, 160, "the only backward", fill=FAINT, size=13))
    parts.append(box(24, 188, 130, 44, "old state", RED) + arrow(89, 172, 89, 186))
    parts.append(note(170, 206, "taken by update: reading it", fill=FAINT, size=13))
    parts.append(note(170, 224, "raises UseAfterDonate", fill=FAINT, size=13))
    picture("idea4.svg", "One update as values: state and packs, gradients, new state", 256, *parts)


def rows():
    """Three rows of the table, and a changed one."""
    heads = ("row", "advantage", "loss", "weight")
    table = [
        ("grpo", "(r - mean) / std", "ppo_clip", "seq_mean", GREY),
        ("dr_grpo", "r - mean", "ppo_clip", "constant", GREY),
        ("gspo", "(r - mean) / std", "gspo", "seq_mean", GREY),
        ("yours", "(r - mean) / std", "your function", "seq_mean", GREEN),
    ]
    places, widths = (24, 150, 350, 540), (116, 190, 180, 180)
    parts = [note(x + 6, 34, text, weight="bold") for x, text in zip(places, heads)]
    for i, (*texts, fill) in enumerate(table):
        fills = [fill if texts[0] != "yours" or j in (0, 2) else GREY for j in range(4)]
        for x, width, text, colour in zip(places, widths, texts, fills):
            parts.append(box(x, 48 + 40 * i, width, 32, text, colour))
    last = 'TABLE["grpo"]._replace(loss=your_function)'
    parts.append(f'<g font-family="monospace">{note(24, 232, last)}</g>')
    picture("idea5.svg", "Algorithms are rows of three functions", 252, *parts)


def main():
    """Write all five."""
    FOLDER.mkdir(exist_ok=True)
    for draw in (normalisation, alignments, keys, states, rows):
        draw()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # for --help
    main()
