"""docs/howto, and the drawings of docs/ideas.md and the README: nothing is left out, nothing is stale."""

import dataclasses
import http.server
import json
import os
import re
import socketserver
import sys
import textwrap
import threading

import forks
import pytest
from pages import as_module, blocks, indented, read
from test_house import ROOT
from test_pages import check

from rft_fn.tools.launch import roles

pytestmark = pytest.mark.docs

HOWTO = ROOT / "docs" / "howto"


def test_the_index_has_every_page():
    index = (HOWTO / "README.md").read_text()
    pages = {page.name for page in HOWTO.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == pages


def test_the_drawings_are_those_of_their_script(tmp_path, monkeypatch):
    ideas = as_module(ROOT / "tests" / "bench" / "ideas.py")
    monkeypatch.setattr(ideas, "FOLDER", tmp_path)
    ideas.main()
    committed = ROOT / "docs" / "pictures"
    written = sorted(tmp_path.glob("*.svg"))
    assert [x.name for x in written] == [f"idea{i}.svg" for i in range(1, 6)]
    for file in written:
        assert file.read_text() == (committed / file.name).read_text(), file.name


def test_the_drawing_of_several_machines_is_that_of_its_script(tmp_path, monkeypatch):
    drawing = as_module(ROOT / "tests" / "bench" / "launch.py")
    monkeypatch.setattr(drawing.ideas, "FOLDER", tmp_path)
    drawing.main()
    assert (tmp_path / drawing.FILE).read_text() == (ROOT / "docs" / "pictures" / drawing.FILE).read_text()
    names = re.findall(r">(\w+)-?\d?[^<]*</text>", (tmp_path / drawing.FILE).read_text())
    assert set(roles.read(ROOT / "docs" / "deploy" / "run.toml").roles) <= set(names)


def test_the_pictures_of_the_readme_are_those_of_their_script():
    front = as_module(ROOT / "tests" / "bench" / "front.py")
    for name, made in front.pictures().items():
        assert made == (ROOT / "docs" / "pictures" / name).read_text(), name
    code = (ROOT / "README.md").read_text()
    for _, _, lines in front.WAY:
        for call in " ".join(lines).replace(". ", ".").split():
            assert f"{call}(" in code or call == "loss_fn", call


def test_the_edits_of_a_copied_script_run(tmp_path):
    """Those of the pages about a loss and an advantage, in one copy, at the lines that the pages name."""
    text = (ROOT / "train_scripts" / "grpo.py").read_text()
    texts = {name: (HOWTO / f"own_{name}.md").read_text() for name in ("loss", "advantage")}
    (loss,) = re.findall(r"^    (algo = .*)$", texts["loss"], re.M)
    (advantage,) = re.findall(r"^    (adv = .*)$", texts["advantage"], re.M)
    made = "    algo = rft.run.objective(cfg.algorithm, cfg, advantage=cfg.advantage)\n"
    assert text.count(made) == 1
    text = text.replace(made, f"{made}    {loss}\n")
    text, count = re.subn(r"adv = algo\.advantage\(.*\)", advantage, text)
    assert count == 1
    own = "".join(re.search(r"```python\n(.*?)```", page, re.S)[1] for page in texts.values())
    text = text.replace("\ndef main(", f"\n{own}\n\ndef main(")
    (tmp_path / "my_grpo.py").write_text(text)
    env = forks.early(os.environ) | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    env |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    small = ["--steps", "1", "--warmup", "1", "--prompts", "4", "--group", "4", "--eval-prompts", "4"]
    command = [sys.executable, "my_grpo.py", *small, "--out", "run"]
    done = forks.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert '"trust": ' in row  # the metric of the page's loss


def test_the_role_files_of_pages_are_read_and_their_commands_understood(tmp_path):
    page = (HOWTO / "launch.md").read_text()
    files = [block.text for block in blocks(page) if block.language == "toml"]
    assert len(files) == 4
    files += [block.text for block in blocks((HOWTO / "plan.md").read_text()) if block.language == "toml"]
    assert len(files) == 5
    for text in files:
        (tmp_path / "run.toml").write_text(text)
        found = roles.read(tmp_path / "run.toml")
        counts = roles.needed_ports(found).items()
        made = roles.resolve(found, {name: range(20000, 20000 + count) for name, count in counts})
        assert len(made) >= 2 and made[-1].role == "trainer"
        for x in made:
            check(x.words)
    keys = {f.name for f in dataclasses.fields(roles.Role)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == keys


@pytest.mark.parametrize(
    ("told", "posted", "error"),
    [
        ({"reward": 0.5}, [({"reward": 0.5}, "Bearer key")], ""),
        ({"error": "no such task"}, [], "no such task"),
    ],
)
def test_the_program_that_asks_a_host_posts_its_reward_or_ends_with_its_error(tmp_path, told, posted, error):
    page = read("docs/howto/agents.md")
    (program,) = (textwrap.dedent(x) for x in indented(page) if "import http.client" in x)
    (tmp_path / "task.json").write_text(json.dumps({"prompt": "3", "messages": []}))
    got, asked = [], []

    class Host(socketserver.StreamRequestHandler):
        def handle(self):
            asked.append(json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps(told).encode() + b"\n")

    class Rewards(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((json.loads(content), self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    here = "127.0.0.1", 0
    with socketserver.TCPServer(here, Host) as host, http.server.HTTPServer(here, Rewards) as rewards:
        for server in (host, rewards):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{rewards.server_port}"
        env = {"OPENAI_BASE_URL": "http://policy/v1", "RFT_TASK": str(tmp_path / "task.json")}
        env |= {"RFT_REWARD_URL": f"{url}/reward", "RFT_REWARD_TOKEN": "key"}
        command = [sys.executable, "-S", "-E", "-c", program, str(host.server_address[1])]
        done = forks.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        host.shutdown()
        rewards.shutdown()
    assert asked == [{"url": "http://policy/v1", "prompt": "3"}] and got == posted
    assert done.returncode == bool(error) and done.stderr.strip() == error


@pytest.mark.parametrize("page", sorted(HOWTO.glob("[!R]*.md")), ids=lambda page: page.stem)
def test_a_page_says_when_it_is_needed_what_goes_wrong_and_where_to_read_on(page):
    text = page.read_text()
    assert "**When**:" in text and "More: " in text
    assert "Pitfalls" in text or page.stem == "does_not_learn"
    assert 40 <= len(text.splitlines()) <= 125
