"""Tasks with media: counting squares in an image, hearing a pitch or counting beeps."""

import base64
import io
import json
import random
import wave

import numpy as np

from rft_fn.data.tasks.task import Task, TaskRow, exact, row_random

__all__ = ["COUNT_SQUARES", "TONE"]


# ---------- counting the squares of a colour in an image


_COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 240)}
_GROUND = (15, 15, 15)
_SIDE = 4  # cells in a row of the image
_CELL = 4  # pixels of a cell
_MOST = 5  # squares of one colour


def _count_squares(seed: int, index: int, level: int) -> dict[str, str]:
    """Return an image of 16 x 16 pixels, and how many squares of a colour are in it: 0 to 5.

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
    """Return a PNG as a data URI: `count` squares of a colour, and up to 5 of each other colour."""
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


def _answers(level: int) -> int:
    """Return the number of possible answers: counts at level 1, else images."""
    return _MOST + 1 if level == 1 else level


def _guess(random_: random.Random, row: TaskRow) -> str:
    level = int(row["level"])
    return str(random_.randrange(_answers(level)) + int(level > 1))


COUNT_SQUARES = Task("count_squares", _count_squares, exact, lambda level: 1 / _answers(level), _guess)


# ---------- hearing the pitch of a tone, or counting beeps


_RATE = 16_000  # samples per second, as Whisper's features have
_PITCHES = 6
_LOWEST = 300.0  # Hz
_STEP = 1.5  # ratio of neighbouring pitches
_SECONDS = 0.4  # of a tone
_SLOT = 0.08  # seconds of a beep and the silence after it
_BEEP = 0.05  # seconds of a beep


def _tone(seed: int, index: int, level: int) -> dict[str, str]:
    """Return a tone of 0.4 s, and which of 6 pitches it has.

    Pitch 1 is 300 Hz, and each next one 1.5 times that before.

    From level 2 on it is a row of beeps, and the question is how many: 0 to level + 2. Loudness, phase, noise
    and a detuning of up to 3 % tell nothing.
    """
    random_ = row_random("tone", seed, index, level)
    name = f"tone-{level}-{seed}-{index}.wav"
    if level == 1:
        pitch = random_.randrange(_PITCHES)
        samples = _sine(random_, _SECONDS, _LOWEST * _STEP**pitch)
        return {
            "question": f"Which of {_PITCHES} pitches has the tone? 1 is the lowest. Answer with its number.",
            "short": "pitch=",
            "answer": str(pitch + 1),
            "audio": _wav(random_, samples, name),
            "level": "1",
        }

    # beeps in some of the slots, with silence after each
    count = random_.randint(0, level + 2)
    slots = random_.sample(range(level + 4), count)
    samples = np.zeros(round((level + 4) * _SLOT * _RATE))
    hertz = _LOWEST * _STEP ** random_.randrange(_PITCHES)
    for slot in slots:
        beep = _sine(random_, _BEEP, hertz)
        start = round(slot * _SLOT * _RATE)
        samples[start : start + len(beep)] = beep
    return {
        "question": "How many beeps are in the audio?",
        "short": "beeps=",
        "answer": str(count),
        "audio": _wav(random_, samples, name),
        "level": str(level),
    }


def _sine(random_: random.Random, seconds: float, hertz: float) -> np.ndarray:
    """Return a tone in [-0.9, 0.9], detuned, of any phase and loudness."""
    hertz *= random_.uniform(0.97, 1.03)
    phase = random_.uniform(0, 2 * np.pi)
    t = np.arange(round(seconds * _RATE)) / _RATE
    return random_.uniform(0.4, 0.9) * np.sin(2 * np.pi * hertz * t + phase)


def _wav(random_: random.Random, samples: np.ndarray, name: str) -> str:
    """Return a WAV file of 16 bits as a data URI, with noise."""
    noise = np.random.default_rng(random_.getrandbits(64)).normal(0, 0.01, samples.shape)
    whole = np.clip(samples + noise, -1, 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        out.writeframes(np.round(whole * 32767).astype("<i2").tobytes())
    return f"data:audio/wav;name={name};base64,{base64.b64encode(file.getvalue()).decode()}"


def _tone_guess(random_: random.Random, row: TaskRow) -> str:
    level = int(row["level"])
    return str(random_.randint(1, _PITCHES) if level == 1 else random_.randint(0, level + 2))


# a guess of the pitch, or of the number of beeps
TONE = Task(
    name="tone",
    generate=_tone,
    verify=exact,
    chance=lambda level: 1 / _PITCHES if level == 1 else 1 / (level + 3),
    guess=_tone_guess,
)
