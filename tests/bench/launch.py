"""The drawing of docs/deploy.md: the machines that docs/deploy/run.toml is on, and who talks to whom.

python tests/bench/launch.py
"""

import argparse
from pathlib import Path

import ideas
from ideas import BLUE, FAINT, GREEN, GREY, ORANGE, arrow, box, note

FILE = "launch.svg"
TITLE = "Rewards, engines and trainer on four machines: who talks to whom"


def machine(x, y, width, height, title):
    """A machine, with a name above it."""
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none" '
    frame += f'stroke="{FAINT}" stroke-dasharray="5 4"/>'
    return frame + note(x + 4, y - 8, title, size=13, fill=FAINT)


def main():
    """Write docs/pictures/launch.svg."""
    parts = [
        machine(24, 50, 160, 90, "node0: group 0"),
        box(40, 76, 128, 38, "rewards", fill=ORANGE),
        machine(24, 190, 160, 190, "node1: group 1"),
        *(box(40, 204 + 43 * i, 128, 33, f"engines-{i}", fill=GREEN) for i in range(4)),
        machine(440, 50, 290, 130, "node2: group 2"),
        box(460, 76, 250, 78, "trainer: torchrun, ranks 0 to 7", fill=BLUE),
        machine(440, 254, 290, 126, "node3: group 2"),
        box(460, 276, 250, 78, "trainer: torchrun, ranks 8 to 15", fill=BLUE),
        # requests go from the trainer to its servers
        arrow(460, 92, 170, 92),
        note(314, 84, "HTTP: texts, rewards", size=12, anchor="middle"),
        arrow(460, 140, 186, 232),
        note(300, 156, "HTTP: prompts, samples", size=12, anchor="middle"),
        note(330, 226, "NCCL: weights, of rank 0", size=12, anchor="middle"),
        arrow(460, 315, 186, 315),
        note(312, 306, "HTTP: prompts, samples", size=12, anchor="middle"),
        # ranks among themselves
        arrow(700, 154, 700, 276),
        arrow(700, 276, 700, 154),
        note(690, 206, "NCCL: gradients, shards", size=12, anchor="end"),
        note(690, 224, "TCP: rendezvous at {head}:{port}", size=12, anchor="end"),
        box(24, 410, 706, 34, "shared folder: model, checkpoints, rows, logs by role", fill=GREY, size=13),
    ]
    ideas.picture(FILE, TITLE, 460, *parts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
    print(Path(ideas.FOLDER) / FILE)
