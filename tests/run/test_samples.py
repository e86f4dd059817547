"""The picture of responses to prompts with media, and the names of media in trajectories."""

import json

import numpy as np
import torch
from PIL import Image

from rft_fn.data.medium import Medium
from rft_fn.data.prompts import Prompt
from rft_fn.data.tasks import TASKS
from rft_fn.reward import Judged
from rft_fn.run import sample_pictures, samples
from rft_fn.run.pictures import Pictures
from rft_fn.run.sample_pictures import spectrogram


def prompts():
    """A prompt with an image, one with two, one with audio, one whose file is gone, and one of text."""
    found = []
    for i, (task, level) in enumerate((("count_squares", 1), ("count_squares", 2), ("tone", 1))):
        row = TASKS[task].generate(0, i, level)
        if "images" in row:
            media = tuple(Medium("image", x) for x in json.loads(row["images"]))
        elif "image" in row:
            media = (Medium("image", row["image"]),)
        else:
            media = (Medium("audio", row["audio"]),)
        names = tuple(f"{task}-{k}" for k in range(len(media)))
        found.append(Prompt([1], row["question"], row, i, media={}, media_names=names, sources=media))
    gone = (Medium("image", "gone.png"),)
    found.append(Prompt([1], "q", {}, 3, media={}, media_names=("gone.png",), sources=gone))
    return [*found, Prompt([1], "text", {}, 4)]


def judged():
    return Judged(torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.5]]), {}, ["2", "1", "3", "4", "5"])


def test_rows_of_trajectories_name_the_media_of_their_prompts():
    rows = samples.rows(0, prompts(), judged(), count=5, split="train")
    assert rows[1]["media"] == ["count_squares-0", "count_squares-1"] and "media" not in rows[4]
    assert [row["response"] for row in rows] == ["2", "1", "3", "4", "5"]


def test_samples_are_drawn_where_there_are_media_and_at_the_end(tmp_path):
    out = tmp_path / "samples.png"
    pictures = Pictures(tmp_path, tmp_path, every=0)
    pictures.note_samples(0, prompts()[4:], judged(), count=4)
    assert not out.exists()
    pictures.note_samples(0, prompts(), judged(), count=5)
    assert np.asarray(Image.open(out)).std() > 5
    first = out.read_bytes()
    pictures.note_samples(1, prompts()[:2], judged(), count=5)
    assert out.read_bytes() == first  # drawn a moment ago
    pictures.draw()
    assert out.read_bytes() != first


def test_a_picture_is_as_wide_as_its_texts_and_names_an_empty_response(tmp_path):
    """The longest line of a short response is its name's, of a long one it is filled up to."""
    one = prompts()[0]
    texts = {"empty": "", "short": "2", "long": "many words " * 20}
    made = {}
    for name, text in texts.items():
        sample = sample_pictures.Sample(one.sources, one.media_names, "q", text, 1.0, "2")
        made[name] = np.asarray(Image.open(sample_pictures.draw([sample], tmp_path / f"{name}.png")))
    assert made["empty"].shape[1] == made["short"].shape[1] < made["long"].shape[1] - 100
    lines = sample_pictures._text(sample_pictures.Sample((), (), "q", "", 0.5)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt", "response", "reward"]


def test_a_spectrogram_is_loudest_at_the_pitch_of_a_tone():
    """1,000 Hz are row 25 of rows of 40 Hz, by the definition's sum."""
    t = np.arange(1600) / 16000
    x = np.sin(2 * np.pi * 1000 * t)
    found = spectrogram(x)
    assert found.shape == (201, 8) and set(found.argmax(0)) == {25}
    n = np.arange(400)
    want = abs((np.hanning(400) * x[160:560] * np.exp(-2j * np.pi * 25 * n / 400)).sum())
    assert abs(found[25, 1] - 20 * np.log10(want)) < 1e-9
