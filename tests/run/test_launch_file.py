"""Files of roles: what `rft launch` reads of one, and how it refuses what is wrong in it."""

import socket

import pytest

from rft_fn.tools.launch import local_processes, ports, roles

GOOD = """
grace = 5
[roles.engines]
command = "serve --port {port} --number {replica} --name '{question} {a.b}'"
replicas = 2
ready = "/health"
[roles.rewards]
command = "score {port}"
ready = "http://127.0.0.1:{port}/other"
ready_within = 3.5
needs = ["engines"]
env = {GPU = "{replica}", JUDGE = "{engines.urls}"}
[roles.trainer]
command = "train --engines {engines.urls} --reward '{rewards.url}/score(batch=4)' --x \\"{engines.urls}\\""
needs = ["rewards"]
"""


def read(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return roles.read(file)


def test_addresses_are_put_into_commands_and_other_braces_stay(tmp_path):
    found = read(tmp_path, GOOD)
    assert roles.needed_ports(found) == {"engines": 2, "rewards": 1}
    made = roles.resolve(found, {"engines": [1001, 1002], "rewards": [1003]})
    assert [(x.name, x.level) for x in made] == [
        ("engines-0", 0), ("engines-1", 0), ("rewards", 1), ("trainer", 2)
    ]  # fmt: skip
    assert made[1].words == ["serve", "--port", "1002", "--number", "1", "--name", "{question} {a.b}"]
    assert made[1].ready == "http://127.0.0.1:1002/health"
    assert made[2].ready == "http://127.0.0.1:1003/other"
    both = "http://127.0.0.1:1001 http://127.0.0.1:1002"
    assert made[2].env == {"GPU": "0", "JUDGE": both}
    assert made[3].words == [
        "train", "--engines", *both.split(), "--reward", "http://127.0.0.1:1003/score(batch=4)", "--x", both
    ]  # fmt: skip


TRAINER = '[roles.trainer]\ncommand = "true"\n'
WRONG = {
    "command": ("[roles.trainer]\nneeds = []", "roles.trainer.command: expected a text, got none"),
    "empty": ('[roles.trainer]\ncommand = " "', "roles.trainer.command: expected a text that is not empty"),
    "quotes": ("[roles.trainer]\ncommand = \"a 'b\"", "roles.trainer.command: expected words as of a shell"),
    "no roles": ("", "roles: expected at least one, as [roles.trainer], got none"),
    "no table": ('roles = "a"', "roles: expected a table, got 'a'"),
    "no toml": ("[roles", "expected TOML: "),
    "a key": ("graze = 3\n" + TRAINER, "got 'graze'; did you mean grace?"),
    "a key of a role": (TRAINER + "need = []", "roles.trainer: expected keys of command, replicas, needs"),
    "main": ('[roles.a]\ncommand = "true"', "main: expected one of a, got 'trainer'"),
    "name": (TRAINER + '[roles."a/b"]\ncommand = "true"', "roles: expected names of letters"),
    "replicas": (TRAINER + "replicas = 0", "roles.trainer.replicas: expected an integer in [1, inf), got 0"),
    "needs": (TRAINER + 'needs = ["b"]', "roles.trainer.needs: expected some of trainer, got 'b'"),
    "no list": (TRAINER + 'needs = "b"', "roles.trainer.needs: expected a list of roles, got 'b'"),
    "itself": (TRAINER + 'needs = ["trainer"]', "expected no cycle, got trainer needs trainer"),
    "cycle": (
        TRAINER + 'needs = ["b"]\n[roles.b]\ncommand = "b"\nneeds = ["trainer"]',
        "roles.trainer.needs: expected no cycle, got trainer needs b needs trainer",
    ),
    "env": (TRAINER + "env = {A = 3}", "roles.trainer.env.A: expected a text, got 3"),
    "grace": ("grace = 0\n" + TRAINER, "grace: expected a number in (0, inf), got 0"),
    "ready": (TRAINER + 'ready = "health"', "roles.trainer.ready: expected a URL, or a path as /health"),
    "no port": (TRAINER + 'ready = "/health"', "roles.trainer.command: expected {port}, where ready is"),
    "whose": ('[roles.trainer]\ncommand = "a {b.url}"', "expected addresses of trainer, got {b.url}"),
    "no address": (
        '[roles.trainer]\ncommand = "a {b.url}"\n[roles.b]\ncommand = "b"',
        "roles.b.command: expected {port}, for roles.trainer.command has {b.url}, got none",
    ),
    "several": (
        '[roles.trainer]\ncommand = "a {b.url}"\n[roles.b]\ncommand = "b {port}"\nreplicas = 2',
        "roles.trainer.command: expected b.urls in braces, got {b.url} of 2 replicas",
    ),
    "what": (
        '[roles.trainer]\ncommand = "a {b.host}"\n[roles.b]\ncommand = "b {port}"',
        "roles.trainer.command: expected b.url or b.urls in braces, got {b.host} of 1 replicas",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line_that_names_the_place(tmp_path, case):
    text, line = WRONG[case]
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/run.toml: ") and line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_or_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.toml: expected a file of roles: No such file"):
        roles.read(tmp_path / "no.toml")
    (tmp_path / "run.toml").write_text('[roles.trainer]\ncommand = "not-there --x"')
    with pytest.raises(ValueError, match=r"trainer\.command: expected a program that is there, got not-th"):
        local_processes.launch(tmp_path / "run.toml")


def test_a_dry_run_prints_commands_and_writes_nothing(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace('"serve', '"echo').replace('"score', '"echo').replace('"train', '"echo'))
    assert local_processes.launch(file, dry_run=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"# logs in {tmp_path}/logs/run"
    assert [x for x in lines if x.endswith(("engines-0", "after engines", "after rewards"))] == [
        "# engines-0", "# rewards, after engines", "# trainer, after rewards"
    ]  # fmt: skip
    assert sum(x.startswith("echo --port 2") for x in lines) == 2
    assert any(x.startswith("env GPU=0 'JUDGE=http://127.0.0.1:2") for x in lines)
    assert [*tmp_path.iterdir()] == [file]


def test_ports_are_those_of_the_last_time(tmp_path):
    file = tmp_path / "ports.json"
    first = ports.find(file, {"a": 2, "b": 1})
    assert len({*first["a"], *first["b"]}) == 3
    ports.write(file, first)
    again = ports.find(file, {"a": 3, "b": 1})
    assert again["a"][:2] == first["a"] and again["b"] == first["b"] and len({*again["a"]}) == 3
    with socket.create_server(("127.0.0.1", first["b"][0])), pytest.raises(ValueError) as error:
        ports.find(file, {"a": 2, "b": 1})
    assert str(error.value).startswith(f"roles.b: expected port {first['b'][0]} of {file} to be free, got")
    file.write_text('{"a": "x"}')
    with pytest.raises(ValueError, match=r"ports\.json: expected ports by role, got something else"):
        ports.find(file, {"a": 1})
