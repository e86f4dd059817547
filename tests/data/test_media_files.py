"""Images and audio of rows: read, decoded, placed and refused; every reader against its definition."""

import base64
import io
import json
import subprocess
import sys
import wave

import numpy as np
import pytest
import ref
import torch
from each_case import each
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rft_fn.data.decode import image, resample, sound, video
from rft_fn.data.medium import Medium, columns_of, digest, media_of_turns, name_of, part_of, placed, read
from rft_fn.data.processing import Cache, Encoded

SETTINGS = settings(deadline=None, derandomize=True, max_examples=12)


def png(size=(6, 4), colour=(255, 0, 0)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def wav(samples, *, rate=16000, width=2, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        scaled = np.round(np.asarray(samples) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
        if width == 1:
            scaled += 128
        raw = b"".join(int(x).to_bytes(width, "little", signed=width > 1) for x in scaled.ravel())
        out.writeframes(raw)
    return file.getvalue()


def test_every_form_of_a_source_gives_the_same_image(tmp_path):
    """Paths, bytes, datasets' objects, data URIs, images of PIL and arrays."""
    content = png()
    (tmp_path / "a.png").write_bytes(content)
    array = np.asarray(Image.open(io.BytesIO(content)))
    text = base64.b64encode(content).decode()
    forms = [
        "a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "a.png"}, {"image": "a.png"}, {"url": f"data:image/png;base64,{text}"},
        f"data:image/png;name=x.png;base64,{text}", Image.open(io.BytesIO(content)), array,
        torch.from_numpy(array.copy()), array / 255, array.transpose(2, 0, 1).copy(),
    ]  # fmt: skip
    for form in forms:
        found, note = image(read(Medium("image", form, tmp_path)))
        assert np.array_equal(np.asarray(found), array) and not note, form


def test_a_medium_has_the_name_of_its_file_or_else_of_its_content():
    uri = f"data:image/png;name=x.png;base64,{base64.b64encode(png()).decode()}"
    named = [Medium("image", x) for x in (uri, {"bytes": png(), "path": "b.png"}, "c/d.png")]
    assert [name_of(m, png()) for m in named] == ["x.png", "b.png", "c/d.png"]
    one, other = (name_of(Medium("image", x), x) for x in (png(), png(colour=(0, 0, 1))))
    assert one != other and one == f"image-{digest(png())[:12]}"


@each("width", [1, 2, 3, 4])
@each("channels", [1, 2])
def test_wav_files_of_every_width_hold_the_samples_that_were_written(width, channels):
    """Within one step of the width; channels are averaged."""
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (50, channels))
    found, note = sound(wav(samples, width=width, channels=channels), rate=16000)
    # the writer's full scale is 2^(bits-1) - 1, the reader's 2^(bits-1)
    assert np.abs(found - samples.mean(1)).max() < 2.0 / 2 ** (8 * width - 1) + 1e-6
    assert found.dtype == np.float32 and not note


@SETTINGS
@given(rate=st.sampled_from([8, 12, 44, 48]), new=st.sampled_from([8, 16, 24]), size=st.integers(1, 50))
def test_resampling_is_its_definition(rate, new, size):
    x = np.random.default_rng(size).normal(size=size)
    found = resample(torch.from_numpy(x), rate, new).numpy()
    assert found.shape == ref.resample(x, rate, new).shape
    assert np.abs(found - ref.resample(x, rate, new)).max() < 1e-12


@pytest.mark.parametrize(
    ("rate", "new", "size"),
    [(44_101, 16_000, 9), (16_000, 44_101, 9), (7, 16_000, 2), (2**24, 16_000, 3_000)],
)
def test_rates_whose_offsets_hardly_repeat_are_resampled_by_the_same_definition(rate, new, size):
    x = np.random.default_rng(size).normal(size=size)
    found = resample(torch.from_numpy(x), rate, new).numpy()
    assert found.shape == ref.resample(x, rate, new).shape
    assert np.abs(found - ref.resample(x, rate, new)).max() < 1e-9  # the offsets reach 10^4 samples


def test_audio_of_an_odd_rate_takes_no_more_memory_than_a_few_times_its_own():
    """A second, in a process whose memory is limited: all filters of these rates would be gigabytes."""
    code = """
import resource
import numpy as np
from rft_fn.data.decode import sound
sound((np.zeros(8), 44_101), rate=16000)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
for rate in (44_101, 96_001, 15_999):
    found = sound((np.sin(2 * np.pi * 440 * np.arange(rate) / rate), rate), rate=16000)[0]
    want = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16000)
    assert len(found) == 16000 and np.abs(found - want)[200:-200].max() < 1e-2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rate", "new"), [(8000, 16000), (44100, 16000), (48000, 16000)])
def test_a_resampled_sine_is_the_sine_at_the_new_rate(rate, new):
    """Away from the ends, where silence comes in."""
    t = np.arange(rate // 4) / rate
    found, note = sound((np.sin(2 * np.pi * 440 * t), rate), rate=new)
    want = np.sin(2 * np.pi * 440 * np.arange(len(found)) / new)
    assert np.abs(found - want)[200:-200].max() < 1e-2
    assert note == f"{rate} Hz are resampled to {new} Hz"


GREY = np.array([[0, 1000, 32768, 65535]])  # of 16 bits, and 0, 3, 128 and 255 of 8


def saved(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@each(
    "content",
    [
        Image.fromarray(GREY.astype(np.uint16)),
        Image.fromarray(GREY.astype(np.int32)),
        Image.fromarray((GREY * 2**15).astype(np.int32)),
        Image.fromarray((GREY / 65535).astype(np.float32)),
        GREY.astype(np.uint16),
        GREY.astype(np.uint32) * 65537,
        GREY / 65535,
        *(
            saved(Image.fromarray(GREY.astype(np.uint16)), kind)
            for kind in ("PNG", "TIFF", "PPM", "JPEG2000")
        ),
        saved(Image.fromarray((GREY * 2**15).astype(np.int32)), "TIFF"),
        saved(Image.fromarray((GREY / 65535).astype(np.float32)), "TIFF"),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'mode', getattr(x, 'dtype', ''))}",
)
def test_grey_of_more_than_8_bits_is_scaled_by_its_mode(content):
    found = np.asarray(image(content)[0]).astype(int)
    assert np.abs(found - np.array([0, 3, 128, 255])[None, :, None]).max() <= 1
    assert found[0, 0, 0] == 0 and found[0, 3, 0] == 255


def test_a_dark_file_of_16_bits_stays_dark():
    """Its numbers are below 256, and PIL opens it in a mode of 32 bits."""
    assert not np.asarray(image(saved(Image.fromarray(GREY.astype(np.uint16) // 999), "PPM"))[0]).any()


def test_what_is_transparent_is_put_on_white():
    half = Image.new("RGBA", (2, 1), (255, 0, 0, 128))
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    for content in (half, saved(half, "PNG"), saved(half, "TIFF")):
        found = np.asarray(image(content)[0]).astype(int)
        assert np.abs(found - [255, 127, 127]).max() <= 1
    holes = [
        clear, saved(clear, "PNG"), saved(clear, "WEBP", lossless=True), saved(clear, "GIF"),
        clear.quantize(), saved(clear.quantize(), "PNG"), *(clear.convert(mode) for mode in ("LA", "RGBa")),
        saved(Image.new("RGB", (2, 1), (5, 6, 7)), "PNG", transparency=(5, 6, 7)),
        saved(Image.new("L", (2, 1), 9), "PNG", transparency=9),
        saved(Image.fromarray(np.full((1, 2), 900, np.uint16)), "PNG", transparency=900),
    ]  # fmt: skip
    for content in holes:
        assert (np.asarray(image(content)[0]) == 255).all()


def test_colours_of_other_modes_are_those_that_pillow_knows():
    for mode in ("1", "L", "P", "RGBX", "CMYK", "YCbCr", "HSV"):
        picture = Image.new("RGB", (2, 1), (255, 255, 255)).convert(mode)
        assert np.abs(np.asarray(image(picture)[0]).astype(int) - 255).max() <= 1, mode


def test_a_large_image_is_shrunk_to_the_limit_and_says_so():
    found, note = image(png((200, 100)), max_pixels=5000)
    assert found.size == (100, 50)
    assert note == "200 x 100 pixels are shrunk to 100 x 50 for --max-pixels 5000"
    assert image(png((200, 100)), max_pixels=20000)[0].size == (200, 100)
    assert image(png((200, 100)))[0].size == (200, 100)


def test_a_video_is_its_frames(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    for source in (["a.png", png(colour=(0, 255, 0))], np.zeros((2, 4, 6, 3), np.uint8)):
        frames, _ = video(read(Medium("video", source, tmp_path)))
        assert [frame.size for frame in frames] == [(6, 4), (6, 4)]


BROKEN = [
    (b"", "it is empty, 0 bytes"),
    (b"not an image", "expected an image, got 12 bytes that begin with b'not an i'"),
    (png()[:-30], "expected an image, got"),
    ("gone.png", "gone.png: No such file or directory"),
    ("../out.png", "../out.png is outside of the data's folder"),
    ("/etc/passwd", "/etc/passwd is outside of the data's folder"),
    ("https://a.b/c.png", "https://a.b/c.png is a URL, which is not fetched without --media-urls"),
    ("data:image/png;base64,%%", "expected base64"),
    ({"name": 1}, "expected an object with 'bytes' or 'path', got one with 'name'"),
    (np.zeros((2, 3, 5)), "expected an image [height, width, 3], got an array of shape [2, 3, 5]"),
    (np.full((2, 2, 3), 7.0), "expected an image of bytes or in [0, 1], got floats in [7, 7]"),
    (3, "expected a path, bytes or an array, got int"),
    ({"base64": 5}, "expected base64, got int"),
    ("a\0.png", r"expected a path, got 'a\x00.png'"),
    (b"BLP2" + bytes(200), "expected an image, got 204 bytes that begin with b'BLP2"),
    (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "no AVIF, BMP, GIF, JPEG, JPEG2000, PNG, PPM, TIFF",
    ),
    (Image.new("LAB", (2, 1)), "mode LAB, of which no colours are known; save it as RGB"),
    (
        Image.fromarray(np.array([[0, 255]], np.int32)),
        "a known white, got mode I in [0, 255]; save it as uint8",
    ),
    (
        Image.fromarray(np.array([[0, -5]], np.int32)),
        "a known white, got mode I in [-5, 0]; save it as uint8",
    ),
    (Image.fromarray(np.array([[0, 255]], np.float32)), "in [0, 1], got floats in [0, 255]"),
    (np.array([[0, 255]]), "a known white, got mode int64 in [0, 255]; save it as uint8"),
    (np.array([["a"]]), "expected an image of numbers, got an array of <U1"),
    ([[10**400]], "expected an array of numbers, got a list of other things"),
]


@each(("source", "message"), BROKEN)
def test_an_image_that_cannot_be_read_says_why(source, message, tmp_path):
    with pytest.raises(ValueError) as error:
        image(read(Medium("image", source, tmp_path)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    (other / "a.png").write_bytes(png())
    (data / "b.png").write_bytes(png())
    (data / "file.png").symlink_to(other / "a.png")
    (data / "folder").symlink_to(other)
    (data / "inside.png").symlink_to("b.png")
    (tmp_path / "linked").symlink_to(data)
    for name in ("file.png", "folder/a.png"):
        with pytest.raises(ValueError, match=f"{name} is a link to {other}/a.png, outside of the data"):
            read(Medium("image", name, data))
    assert read(Medium("image", "inside.png", data)) == read(Medium("image", "b.png", tmp_path / "linked"))


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 16000.5, "fast", [8], 10**400, "1" * 5000])
def test_a_rate_that_is_no_whole_number_is_refused(rate):
    with pytest.raises(ValueError, match=r"^expected 'sampling_rate' as a whole number of Hz, got .{3,42}$"):
        read(Medium("audio", {"array": [0.0], "sampling_rate": rate}))
    for same in (16000, 16000.0, np.int64(16000), "16000"):
        assert read(Medium("audio", {"array": [0.0], "sampling_rate": same}))[1] == 16000


SILENT = [
    (b"ID3 something", "expected a WAV file of integers, got 13 bytes that begin with b'ID3 some'"),
    (wav([0.1] * 9)[:-4], "a WAV file that Python cannot read"),
    (wav([]), "a WAV file that Python cannot read"),
    (np.zeros(8, np.float32), "{'array', 'sampling_rate'}: an array has no rate"),
    (([], 16000), "expected samples [n], got shape [0]"),
    (([float("nan")], 16000), "expected finite samples"),
    (([0.0], 0), "expected a sampling rate of 1 to 16,777,216 Hz, got 0"),
    (([0.0], 2**32 - 1), "expected a sampling rate of 1 to 16,777,216 Hz, got 4294967295"),
    ((np.zeros(100_000), 1), "expected at most 67,108,864 samples at 16000 Hz, got 100,000 samples at 1 Hz"),
]


@each(("content", "message"), SILENT)
def test_audio_that_cannot_be_read_says_why(content, message):
    with pytest.raises(ValueError) as error:
        sound(content, rate=16000)
    assert message in str(error.value) and "\n" not in str(error.value)


ALL = ("image", "video", "audio")


def user(content):
    return [{"role": "user", "content": content}]


def shapes(turns):
    """Each content as text, with the sources in the places."""
    found = []
    for turn in turns:
        parts = turn["content"]
        if isinstance(parts, str):
            found.append(parts)
        else:
            found.append("".join(p.get("text") or f"[{p[p['type']].source}]" for p in parts))
    return found


def test_columns_hold_one_or_several_also_as_json_text():
    assert columns_of({"image": "a", "audios": ["b", "c"], "video": ["d"], "text": "e"}) == {
        "image": ["a"],
        "video": [["d"]],
        "audio": ["b", "c"],
    }
    assert columns_of({"images": json.dumps(["a", "b"])}) == {"image": ["a", "b"]}
    assert columns_of({"image": None, "images": [], "audio": "", "videos": {"bytes": None}}) == {}
    with pytest.raises(ValueError, match="one of the columns 'image' and 'images', got both"):
        columns_of({"image": "a", "images": ["b"]})
    with pytest.raises(ValueError, match="column 'images': expected a list, got str; one is 'image'"):
        columns_of({"images": "a.png"})


def test_media_go_into_their_places_in_order():
    """Marks, typed parts, parts with sources, and no place at all."""
    row = {"images": ["a", "b"], "audio": "c"}
    assert shapes(placed(user("<image>x<audio><image>y"), row, ALL, None)) == ["[a]x[c][b]y"]
    parts = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image", "image": "z"}]
    assert shapes(placed(user(parts), {"image": "a"}, ALL, None)) == ["[a]x[z]"]
    talk = [{"role": "system", "content": "s"}, *user("q"), {"role": "assistant", "content": "<image>"}]
    assert shapes(placed(talk, row, ALL, None)) == ["s", "[a][b][c]q", "<image>"]
    assert placed(user("q"), {}, ALL, None) == user("q")


def test_marks_of_media_that_the_model_does_not_read_are_text():
    assert placed(user("<video>x"), {}, ("image",), None) == user("<video>x")


@SETTINGS
@given(st.lists(st.sampled_from(["<image>", "<audio>", "word "]), max_size=8), st.data())
def test_as_many_media_as_marks_fill_them_in_order_and_others_are_refused(words, data):
    counts = {kind: words.count(f"<{kind}>") for kind in ("image", "audio")}
    row = {f"{kind}s": [f"{kind}{i}" for i in range(n)] for kind, n in counts.items()}
    turns = placed(user("".join(words) or "q"), row, ALL, None)
    media = media_of_turns(turns)
    assert [m.kind for m in media] == [word[1:-1] for word in words if word != "word "]
    for kind in counts:
        assert [m.source for m in media if m.kind == kind] == row[f"{kind}s"]
    if sum(counts.values()):
        kind = data.draw(st.sampled_from(["image", "audio"]))
        with pytest.raises(ValueError, match=f"as many places as {kind}s"):
            placed(user("".join(words)), row | {f"{kind}s": [*row[f"{kind}s"], "more"]}, ALL, None)


@pytest.mark.parametrize(
    ("row", "kinds", "message"),
    [
        ({"image": "a"}, (), "the row has images, and the model reads text alone"),
        ({"audio": "a"}, ("image",), "the row has audios, and the model reads text and images alone"),
        ({"images": ["a", "b"], "q": "<image>"}, ALL, "expected as many places as images, got 1 and 2"),
        ({"q": "<image><image>"}, ALL, "expected as many places as images, got 2 and 0"),
    ],
)
def test_media_that_do_not_fit_are_refused(row, kinds, message):
    with pytest.raises(ValueError, match=message):
        placed(user(row.get("q", "q")), row, kinds, None)


@pytest.mark.parametrize(
    ("part", "want"),
    [
        ({"type": "image"}, {"type": "image"}),
        ({"type": "image", "image": "a", "text": None}, {"type": "image", "image": "a"}),
        ({"type": "image", "url": "a"}, {"type": "image", "image": "a"}),
        ({"type": "image_url", "image_url": {"url": "a"}}, {"type": "image", "image": {"url": "a"}}),
        (
            {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}},
            {"type": "audio", "audio": {"data": "a", "format": "wav"}},
        ),
        ({"image": "a"}, {"type": "image", "image": "a"}),
        ({"type": "text", "text": "a"}, None),
    ],
)
def test_the_forms_of_parts(part, want):
    assert part_of(part) == want


def test_the_cache_keeps_the_last_in_memory_and_all_in_its_folder(tmp_path):
    made = [Encoded([i], {"x": torch.full((10,), float(i))}, (f"{i}.png",), ("shrunk",)) for i in range(3)]
    kept = Cache(memory=80)
    stored = Cache(tmp_path, memory=80)
    for i, encoded in enumerate(made):
        kept.put(str(i), encoded)
        stored.put(str(i), encoded)
    assert kept.get("0") is None and kept.get("2") is made[2]
    found = stored.get("0")
    assert found is not None and (found.ids, found.names, found.notes) == ([0], ("0.png",), ("shrunk",))
    assert torch.equal(found.media["x"], made[0].media["x"])
    (tmp_path / "1.safetensors").write_bytes(b"broken")
    assert Cache(tmp_path).get("1") is None
