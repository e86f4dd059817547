"""Mistakes in the arguments of a script, which it shows in one line."""

import pytest

import rft_fn as rft

__all__ = ["check_one_line"]


def check_one_line(module, args, message, folder, monkeypatch, capsys):
    """A script ends with code 2 and one line with `message`, without a model loaded or a folder made."""
    monkeypatch.setattr("sys.argv", [module.__name__, *args, "--out", str(folder)])
    monkeypatch.setattr(rft.model, "load", None)
    with pytest.raises(SystemExit) as end:
        rft.run.cli(module.main, module.Config)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1 and message in line
    assert not folder.exists()
