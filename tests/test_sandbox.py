"""Programs in the sandbox: what they may do, and what becomes of attacks; in both of its modes."""

import os
import platform
import struct
import sys
import time
from pathlib import Path

import pytest

from rft_fn import sandbox
from rft_fn.sandbox import program, system_calls

QUICK = sandbox.Limits(seconds=1.0, memory=256 << 20, file_size=1 << 20, disk=4 << 20, output=1 << 16)


def run(code, stdin="", limits=QUICK):
    return sandbox.run([sys.executable, "-I", "main.py"], stdin, limits, files={"main.py": code})


@pytest.fixture(scope="module")
def namespaces():
    """Whether this machine allows them."""
    refused = program._refused
    program._refused = ""
    _, found = program._launched([sys.executable, "-V"], b"", QUICK, {}, namespaces=True)
    program._refused = refused
    return not found


@pytest.fixture(params=["namespaces", "limits alone"])
def mode(request, monkeypatch, namespaces):
    if request.param == "namespaces" and not namespaces:
        pytest.skip("this machine allows no namespaces")
    monkeypatch.setattr(program, "_refused", "" if request.param == "namespaces" else "a test")
    return request.param


@pytest.fixture
def apart(monkeypatch, namespaces):
    if not namespaces:
        pytest.skip("this machine allows no namespaces")
    monkeypatch.setattr(program, "_refused", "")


def left(mark):
    """The processes that have a mark on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path)
        except OSError:
            pass
    return found


def test_a_program_has_its_input_its_folder_and_nothing_of_this_environment(mode, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    found = run(
        "import os, sys\n"
        "print(sys.stdin.read(), sorted(set(os.environ) - {'LC_CTYPE'}), os.getcwd() == os.environ['HOME'])\n"
        "open('a', 'w').write('x'); print(os.getcwd(), file=sys.stderr); sys.exit(3)",
        "some\ninput",
    )
    names = {"HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "TMPDIR"}
    names |= {"PATH", "LANG"} & set(os.environ)
    assert (found.ended, found.code, found.ok) == ("exit", 3, False)
    assert found.stdout.decode() == f"some\ninput {sorted(names)} True\n"
    assert not Path(found.stderr.decode().strip(), "a").exists()


ATTACKS = {
    "endless loop": ("while True: pass", "late"),
    "sleep, SIGTERM ignored": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
        "late",
    ),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    "memory": ("x = bytearray(1 << 30)", "exit 1"),
    "a large file": ("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 18))", "exit 1"),
    "its streams closed": ("import os, time\nfor i in range(3): os.close(i)\ntime.sleep(60)", "late"),
    "exit at once": ("import os\nos._exit(0)", "exit 0"),
    "a signal to itself": ("import os\nos.kill(os.getpid(), 11)", "signal 11"),
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_limits_end_what_takes_more(mode, attack):
    code, expected = ATTACKS[attack]
    begun = time.monotonic()
    found = run(code)
    assert expected in (found.ended, f"{found.ended} {found.code}")
    assert len(found.stdout) <= QUICK.output and len(found.stderr) <= QUICK.output
    assert time.monotonic() - begun < 4
    assert run("print(1)").stdout == b"1\n"


@pytest.mark.slow
def test_what_a_program_has_started_ends_with_it(mode):
    mark = f"mark_{os.getpid()}_{mode[:5]}"
    found = run(
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', 'import time; time.sleep(50) # {mark}']\n"
        "for own in (True, False): subprocess.Popen(command, start_new_session=own)\n"
        "print(1)"
    )
    assert found.ok and found.stdout == b"1\n" and not left(mark)


@pytest.mark.slow
def test_a_fork_bomb_has_few_processes_and_ends(apart):
    found = run(
        "import os, signal\nn = 0\n"
        "while n < 1000:\n"
        "    try:\n        if os.fork() == 0: signal.pause()\n"
        "    except OSError: break\n"
        "    n += 1\n"
        "print(n)"
    )
    assert int(found.stdout) == QUICK.processes - 1
    assert run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass").ended == "late"


APART = {
    "another process": "import os\nassert len([x for x in os.listdir('/proc') if x.isdigit()]) == 2",
    "a signal to all": "import os\ntry: os.kill(-1, 0)\nexcept OSError: pass\n"
    "for n in (9, 15, 19):\n    try: os.kill(1, n)\n    except OSError: pass",
    "memory of the first process": "open('/proc/1/mem', 'rb')",
    "input of the first process": "open('/proc/1/fd/0', 'rb')",
    "a host": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "a file of this user": "open(SECRET)",
    "a new file among the system's": "open('/usr/a', 'w')",
    "a root of its own": "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
    "assert c.unshare(0x10000000) == 0",
    "a mount": "import ctypes\nassert ctypes.CDLL(None).umount2(b'/proc', 2) == 0",
    "many files": "for i in range(100): open(str(i), 'wb').write(bytes(1 << 19))",
    "many empty files": "for i in range(20000): open(str(i), 'wb')",
    "memory of many": "import os, time\nfor i in range(3): os.fork()\nx = bytearray(100 << 20)\n"
    "time.sleep(9)",
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", APART)
def test_a_namespace_has_nothing_to_attack(apart, attack, tmp_path):
    import socket

    (tmp_path / "secret").write_text("x")
    tmp_path.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = APART[attack].replace("PORT", str(server.getsockname()[1]))
        found = run(code.replace("SECRET", repr(str(tmp_path / "secret"))) + "\nprint('done')")
    if attack in ("another process", "a signal to all"):
        assert found.stdout == b"done\n", found.stderr
    elif attack == "memory of many":
        assert found.ended == "memory"
    else:
        assert (found.ended, found.code, found.stdout) == ("exit", 1, b""), found.stderr


CALL = (
    "import ctypes, errno\nc = ctypes.CDLL(None, use_errno=True)\n"
    "print(c.syscall({}) < 0 and errno.errorcode[ctypes.get_errno()])"
)
CALLS = {  # that namespaces do not stop, with arguments with which they do something
    "ptrace": "0, 0, None, None",
    "add_key": "b'user', b'note', b'4', 1, -3",  # to the keys of the session that this process is of
    "keyctl": "0, -3, 1",
    "bpf": "0, None, 0",
    "io_uring_setup": "1, None",
}


def numbers(machine):
    column = ("x86_64", "aarch64").index(machine)
    return {name: found[column] for name, found in system_calls.REFUSED.items()}


@pytest.fixture
def filtering():
    if not system_calls.filter_of():
        pytest.skip("there is no filter for this machine")
    program._warn_unfiltered.cache_clear()


@pytest.mark.parametrize("call", CALLS)
def test_the_kernel_refuses_calls_that_namespaces_do_not_stop(mode, filtering, call):
    code = CALL.format(f"{numbers(platform.machine())[call]}, {CALLS[call]}")
    assert run(code).stdout == b"EPERM\n"


def test_a_machine_without_a_filter_is_told_once_and_the_calls_are_open(mode, filtering, monkeypatch):
    monkeypatch.setattr(program, "filter_of", lambda: b"")
    code = CALL.format(f"{numbers(platform.machine())['add_key']}, {CALLS['add_key']}")
    with pytest.warns(UserWarning, match=r"sandbox: expected a filter of system calls, got none") as told:
        found = run(code)
        run("")
    assert len(told) == 1
    if found.stdout == b"EPERM\n":
        pytest.skip("this machine has such a filter around it")
    assert found.stdout == b"False\n"


@pytest.mark.parametrize(("machine", "name"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_a_filter_refuses_its_calls_and_other_interfaces_and_nothing_else(machine, name):
    code = list(struct.iter_unpack("=HBBI", system_calls.filter_of(machine)))

    def answer(number, architecture):
        at, held = 0, 0
        while True:
            kind, then, other, value = code[at]
            if kind == 0x20:
                held = {0: number, 4: architecture}[value]
            elif kind == 0x06:
                return value
            else:
                at += then if (held == value if kind == 0x15 else held >= value) else other
            at += 1

    refused = set(numbers(machine).values())
    assert {x for x in range(1024) if answer(x, name) != 0x7FFF0000} == refused
    assert answer(0, name ^ 1) == answer(1 << 30, name) == answer(min(refused), name) == 0x50001
    assert system_calls.filter_of("riscv64") == b""


def test_a_machine_without_namespaces_is_told_once(monkeypatch):
    real = program._launched
    monkeypatch.setattr(program, "_refused", "")

    def refusing(*args, namespaces):
        return (None, "unshare: EPERM") if namespaces else real(*args, namespaces=False)

    monkeypatch.setattr(program, "_launched", refusing)
    with pytest.warns(UserWarning, match="unshare: EPERM.*reach the network") as told:
        assert run("print(1)").ok and run("print(2)").stdout == b"2\n"
    assert len(told) == 1


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"^sandbox: expected a file name without a folder, got '\.\./a'$"):
        sandbox.run(["true"], files={"../a": ""})
    with pytest.raises(ValueError, match=r"^sandbox: expected a command, got none$"):
        sandbox.run([])


def test_a_command_that_is_not_there_is_an_exit(mode):
    found = sandbox.run(["no_such_command"])
    assert found.code == 127 and b"no_such_command" in found.stderr
