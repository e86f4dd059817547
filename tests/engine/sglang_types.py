"""Fetch the request types of SGLang, without SGLang: `python tests/engine/sglang_types.py FOLDER`.

They stand in single files of its wheel (40 MB), which is not installed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.5.23"
FILES = (
    "sglang/api/v1/api_types.py",
    "sglang/srt/managers/io_struct.py",
    "sglang/srt/entrypoints/http_server.py",
)


def pip(*words):
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)


def fetch(folder):
    """The FILES of the wheel in `folder`, and the library that the types are written with."""
    folder.mkdir(parents=True, exist_ok=True)
    pip("install", "--no-deps", "--upgrade", "--target", str(folder), "msgspec")
    with tempfile.TemporaryDirectory() as wheels:
        pip("download", "--no-deps", "--dest", wheels, f"sglang=={VERSION}")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                (folder / Path(name).name).write_bytes(archive.read(name))


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
