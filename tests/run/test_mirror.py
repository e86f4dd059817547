"""A run's folder at an address: whole or absent there, and back in an empty folder."""

import json
import shutil
import threading

import pytest

from rft_fn.run import mirror


def step(folder, number):
    """Write a checkpoint, and rows up to it."""
    path = folder / "checkpoints" / f"step_{number:08d}"
    path.mkdir(parents=True)
    (path / "rank_00000.safetensors").write_bytes(bytes(range(number)) * 100)
    (path / "meta.json").write_text(f'{{"step": {number}}}')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(number)))
    (folder / ".lock").write_text("")
    return path


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def begin(folder, address):
    mirror.fetch(folder, address)
    return mirror.Mirror(folder, address)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return (folder, address), of a mirror that looks often."""
    monkeypatch.setattr(mirror, "_LOOK", 0.01)
    monkeypatch.setattr(mirror, "_AGAIN", 0.0)
    return tmp_path / "run", f"file://{tmp_path}/there"


def seen(there, wanted):
    """Wait until complete.json names a checkpoint."""
    for _ in range(3000):
        if there.exists() and json.loads(there.read_text())["step"] == wanted:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"no {wanted}")


def test_what_is_sent_comes_back_into_an_empty_folder(place, tmp_path):
    folder, address = place
    sending = begin(folder, address)
    gone = step(folder, 2)
    seen(tmp_path / "there" / "complete.json", "step_00000002")
    shutil.rmtree(gone)
    step(folder, 4)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    sending.close()
    there = files(tmp_path / "there")
    assert {name for name in there if name.startswith("checkpoints")} == {
        "checkpoints/step_00000004/meta.json",
        "checkpoints/step_00000004/rank_00000.safetensors",
    }
    assert ".lock" not in there and not list(folder.glob(".mirror_sent*"))

    mine = {name: x for name, x in files(folder).items() if name != ".lock"}
    shutil.rmtree(folder)
    begin(folder, address).close()
    assert files(folder) == mine


def test_a_checkpoint_that_breaks_off_is_absent_and_the_next_one_arrives(place, tmp_path, monkeypatch, capfd):
    from fsspec.implementations.local import LocalFileSystem

    folder, address = place
    step(folder, 2)
    mirror.fetch(folder, address)
    begin(folder, address).close()
    put, fails = LocalFileSystem.put_file, threading.Event()

    def broken(self, source, target, **how):
        if target.endswith("00000004/rank_00000.safetensors") and not fails.is_set():
            shutil.rmtree(folder / "checkpoints" / "step_00000004")  # rotated away while it is sent
            step(folder, 6)
            fails.set()
            raise OSError("the link is cut")
        put(self, source, target, **how)

    monkeypatch.setattr(LocalFileSystem, "put_file", broken)
    sending = begin(folder, address)
    step(folder, 4)
    assert fails.wait(30)
    seen(tmp_path / "there" / "complete.json", "step_00000006")
    sending.close()
    assert [p.name for p in (tmp_path / "there" / "checkpoints").iterdir()] == ["step_00000006"]
    assert "step_00000004 is not at" in (said := capfd.readouterr().err) and "the link is cut" in said


def test_a_checkpoint_that_is_deleted_while_it_is_sent_arrives(place, tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    folder, address = place
    put = LocalFileSystem.put_file

    def slow(self, source, target, **how):
        shutil.rmtree(folder / "checkpoints" / "step_00000002", ignore_errors=True)
        put(self, source, target, **how)

    mirror.fetch(folder, address)
    whole = files(step(folder, 2))
    monkeypatch.setattr(LocalFileSystem, "put_file", slow)
    mirror.Mirror(folder, address).close()
    assert files(tmp_path / "there" / "checkpoints" / "step_00000002") == whole


def another(folder, address):
    begin(folder.with_name("other"), address).close()
    step(folder.with_name("third"), 2)
    begin(folder.with_name("third"), address).close()


def newer(folder, address):
    step(folder, 2)
    begin(folder, address).close()
    old = step(folder, 4)
    begin(folder, address).close()
    shutil.rmtree(old)


def short(folder, address):
    another(folder, address)
    (folder.with_name("there") / "checkpoints" / "step_00000002" / "meta.json").write_text("{")
    shutil.rmtree(folder, ignore_errors=True)


def foreign(text):
    def write(folder, address):
        folder.with_name("there").mkdir()
        (folder.with_name("there") / "complete.json").write_text(text)

    return write


REFUSED = {
    "another run's": (lambda f, a: (step(f, 2), another(f, a)), "expected the run of .*, got another one"),
    "newer there": (newer, r"has step_00000004, and .* has step_00000002: delete the checkpoints"),
    "cut short": (short, r"cannot be read: step_00000002/meta.json: expected 11 bytes, got 1"),
    "no JSON": (foreign("{"), "complete.json cannot be read"),
    "a path": (foreign('{"run": "a", "step": "step_2", "files": {"../x": 1}}'), "expected names of files"),
    "no step": (foreign('{"run": "a", "step": "../..", "files": {}}'), "expected step_N"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case, place):
    folder, address = place
    make, line = REFUSED[case]
    make(folder, address)
    before = files(folder / "checkpoints") if folder.exists() else {}
    with pytest.raises(ValueError, match=f"^mirror: .*{line}") as error:
        mirror.fetch(folder, address)
    assert "\n" not in str(error.value) and files(folder / "checkpoints") == before


@pytest.mark.parametrize(("address", "line"), [("fool://x", "not known"), ("file:///proc/x", "No such file")])
def test_an_address_that_cannot_be_written_is_refused(address, line):
    with pytest.raises(ValueError, match=f"^mirror: {address} cannot be written: .*{line}"):
        mirror.check(address)
