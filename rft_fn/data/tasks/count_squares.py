"""Counting the squares of a colour in an image."""

import base64
import io
import json
import random

from rft_fn.data.tasks.task import Task, TaskRow, exact, row_random

__all__ = ["COUNT_SQUARES"]

_COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 240)}
_GROUND = (15, 15, 15)
_SIDE = 4  # cells in a row of the image
_CELL = 4  # pixels of a cell
_MOST = 5  # squares of one colour


def _count_squares(seed: int, index: int, level: int) -> dict[str, str]:
    """An image of 16 x 16 pixels, and how many squares of a colour are in it: 0 to 5.

    From level 2 on there are as many images as the level, and the question is which of them has the most;
    there is always one. The counts of other colours tell nothing.
    """
    random_ = row_random("count_squares", seed, index, level)
    colour = random_.choice(list(_COLOURS))
    name = f"count_squares-{level}-{seed}-{index}"
    if level == 1:
        count = random_.randint(0, _MOST)
        return {
            "question": f"How many {colour} squares are in the image?",
            "short": f"{colour}=",
            "answer": str(count),
            "image": _image(random_, colour, count, f"{name}.png"),
            "level": "1",
        }

    # the most squares are in one image, fewer in all others
    most = random_.randint(1, _MOST)
    counts = [random_.randrange(most) for _ in range(level)]
    winner = random_.randrange(level)
    counts[winner] = most
    images = [_image(random_, colour, n, f"{name}-{i}.png") for i, n in enumerate(counts, 1)]
    return {
        "question": f"Which of the {level} images has the most {colour} squares?",
        "short": f"most:{colour}=",
        "answer": str(winner + 1),
        "images": json.dumps(images),
        "level": str(level),
    }


def _image(random_: random.Random, colour: str, count: int, name: str) -> str:
    """A PNG as a data URI: `count` squares of a colour, and up to 5 of each other one in the cells left."""
    from PIL import Image

    cells = random_.sample(range(_SIDE * _SIDE), _SIDE * _SIDE)
    squares = [(cells.pop(), colour) for _ in range(count)]
    for other in _COLOURS:
        if other != colour:
            squares += [(cells.pop(), other) for _ in range(random_.randint(0, _MOST))]

    image = Image.new("RGB", (_SIDE * _CELL, _SIDE * _CELL), _GROUND)
    for cell, name_of in squares:
        y, x = divmod(cell, _SIDE)
        left, top = x * _CELL, y * _CELL
        image.paste(_COLOURS[name_of], (left, top, left + _CELL - 1, top + _CELL - 1))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;name={name};base64,{base64.b64encode(file.getvalue()).decode()}"


def _chance(level: int) -> float:
    """1 / 6 by a guess of the count; 1 / level of the image."""
    return 1 / _answers(level)


def _answers(level: int) -> int:
    if level == 1:
        return _MOST + 1
    return level


def _guess(random_: random.Random, row: TaskRow) -> str:
    level = int(row["level"])
    return str(random_.randrange(_answers(level)) + int(level > 1))


COUNT_SQUARES = Task("count_squares", _count_squares, exact, _chance, _guess)
