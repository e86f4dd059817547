"""Exports to the hub, whose client is a fake here: what is refused before any work, and what is uploaded."""

import shutil
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError
from test_house import ROOT, load_script

import rft_fn as rft

export = load_script("export")


class Hub:
    """The client, and what it was asked."""

    public = False  # the repository is there, and everybody can read it
    refused = ""  # the method that the hub answers with 403

    def __init__(self):
        self.asked = []

    def answer(self, method, name, **how):
        self.asked.append((method, name, how))
        if method == self.refused:
            raise HfHubHTTPError("403 Forbidden", response=SimpleNamespace(headers={}, request=None))

    def create_repo(self, name, **how):
        self.answer("create_repo", name, **how)

    def repo_info(self, name):
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = sorted(path.name for path in folder_path.iterdir())
        self.answer("upload_folder", repo_id, files=files, message=commit_message)
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch):
    """The fake client, with a token and a hub that can be reached."""
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", type("HfApi", (), {"__new__": lambda cls: made}))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(rft.hub, "unreachable", lambda: "")
    return made


@pytest.fixture
def run(tmp_path):
    """The folder of a short run with adapters."""
    return shutil.copytree(ROOT / "tests" / "ckpt" / "data" / "run_0_1_0", tmp_path / "run")


def test_a_model_with_its_card_goes_to_the_hub(hub, run, tmp_path, capsys):
    export.main(export.Config(run=str(run), merge=False, push_to_hub="me/sums", private=True))
    (_, name, how), (_, to, sent) = hub.asked
    assert name == to == "me/sums" and how == {"private": True, "exist_ok": True}
    assert {"README.md", "adapter_model.safetensors", "tokenizer.json"} <= set(sent["files"])
    assert sent["message"] == "run, step 2"
    assert capsys.readouterr().out.splitlines()[-1] == f"{run / 'model'} on the hub: https://hub/me/sums"
    card = (run / "model" / "README.md").read_text()
    assert "Low-rank adapters, fine-tuned with rft_fn" in card and "grpo, 2 steps" in card

    export.main(export.Config(run=str(run), out=str(tmp_path / "merged")))
    assert len(hub.asked) == 2
    assert "A model, fine-tuned with rft_fn" in (tmp_path / "merged" / "README.md").read_text()


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_try_again(hub, run):
    hub.refused = "upload_folder"
    with pytest.raises(ValueError, match=r"push_to_hub: 403 .*is whole, and hf upload me/sums "):
        export.main(export.Config(run=str(run), push_to_hub="me/sums"))
    assert (run / "model" / "model.safetensors").exists()


TO = {"push_to_hub": "me/sums"}


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        ({"push_to_hub": "sums"}, {}, "push_to_hub: expected OWNER/NAME, got 'sums'"),
        ({"push_to_hub": "me/a/b"}, {}, "push_to_hub: expected OWNER/NAME, got 'me/a/b'"),
        ({"private": True}, {}, "private: expected it with --push-to-hub OWNER/NAME, got no"),
        (TO, {"library": None}, "push_to_hub: expected huggingface_hub, got none; pip"),
        (TO, {"token": None}, "push_to_hub: expected a token of the hub, got none; run hf auth"),
        (TO, {"why": "HF_HUB_OFFLINE is set"}, "push_to_hub: HF_HUB_OFFLINE is set"),
        (TO, {"refused": "create_repo"}, "push_to_hub: me/sums cannot be written: 403 Forbidden"),
        (TO | {"private": True}, {"public": True}, "private: me/sums is there already, and public"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_any_work(options, world, message, hub, run, monkeypatch):
    hub.refused, hub.public = world.get("refused", ""), world.get("public", False)
    monkeypatch.setattr(rft.hub, "unreachable", lambda: world.get("why", ""))
    monkeypatch.setattr(rft.model, "load", lambda *args, **how: pytest.fail("a model was loaded"))
    if "token" in world:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    if "library" in world:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=message):
        export.main(export.Config(run=str(run), **options))
    assert not (run / "model").exists()
