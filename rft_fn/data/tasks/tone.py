"""Hearing the pitch of a tone, or counting beeps."""

import base64
import io
import random
import wave

import numpy as np

from rft_fn.data.tasks.task import Task, TaskRow, exact, row_random

__all__ = ["TONE"]

_RATE = 16_000  # samples per second, those of Whisper's features
_PITCHES = 6
_LOWEST = 300.0  # Hz
_STEP = 1.5  # ratio of neighbouring pitches
_SECONDS = 0.4  # of a tone
_SLOT = 0.08  # seconds of a beep and the silence behind it
_BEEP = 0.05  # seconds of a beep


def _tone(seed: int, index: int, level: int) -> dict[str, str]:
    """A tone of 0.4 s, and which of 6 pitches it has.

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

    # beeps in some of the slots, with silence behind each
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
    """A tone in [-0.9, 0.9], detuned, of any phase and loudness."""
    hertz *= random_.uniform(0.97, 1.03)
    phase = random_.uniform(0, 2 * np.pi)
    t = np.arange(round(seconds * _RATE)) / _RATE
    return random_.uniform(0.4, 0.9) * np.sin(2 * np.pi * hertz * t + phase)


def _wav(random_: random.Random, samples: np.ndarray, name: str) -> str:
    """A WAV file of 16 bits as a data URI, with noise."""
    noise = np.random.default_rng(random_.getrandbits(64)).normal(0, 0.01, samples.shape)
    whole = np.clip(samples + noise, -1, 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        out.writeframes(np.round(whole * 32767).astype("<i2").tobytes())
    return f"data:audio/wav;name={name};base64,{base64.b64encode(file.getvalue()).decode()}"


def _tone_chance(level: int) -> float:
    """1 / 6 by a guess of the pitch; 1 / (level + 3) of the number of beeps."""
    if level == 1:
        return 1 / _PITCHES
    return 1 / (level + 3)


def _tone_guess(random_: random.Random, row: TaskRow) -> str:
    level = int(row["level"])
    if level == 1:
        return str(random_.randint(1, _PITCHES))
    return str(random_.randint(0, level + 2))


TONE = Task("tone", _tone, exact, _tone_chance, _tone_guess)
