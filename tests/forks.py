"""Python processes that have torch and transformers from the start: forks of a server that imported them.

    forks.Popen([sys.executable, "script.py", ...], env=..., stdout=...)       as subprocess.Popen
    forks.run([sys.executable, "-m", "module", ...], capture_output=True)      as subprocess.run

A fork is a process as any other: arguments, environment, folder and streams of its own, files that it is
passed, exit codes, signals, a parent that may be gone. One difference: once all exit handlers have run, it is
gone. Python would first free torch object by object, which takes over a second; with WHOLE in its environment
a fork does that too.

Two servers with other seeds of hash() take turns, so processes that have to agree see sets in other orders.
The workers of torchrun are forks too, and with CHILDREN in its environment the Python processes that a fork
starts, engines among them; those that a test's own process starts are with the fixture `forked_children`. A
command of another program, or one with an environment that a library reads at its import, starts as ever.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import inspect
import itertools
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from functools import cache
from pathlib import Path

import plain_runs

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])  # PYTHONPATH of a process that may be a fork
ADDRESSES = "RFT_FN_TEST_FORKS"  # of the servers, for the workers of torchrun
TORCHRUN = ["-m", "torch.distributed.run"]
# None of these starts a thread at its import.
LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.run",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "transformers.integrations.accelerate",
    "peft",
    "tyro._backends._tyro_backend",
    "typeguard",
    "rich.progress",
    "safetensors.torch",
    "matplotlib.pyplot",
    "plotext",
    "hypothesis",
    "pytest",
    "rft_fn",
    "rft_fn.strategy.fsdp2",
    "rft_kernels",
)
# transformers imports the first to save a model, wherever it is installed; an engine of ZeRO imports the
# second at its start, and with it torch's inductor
OPTIONAL = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
# read when Python or a library starts; everything else of an environment is a fork's own
EARLY = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "CUDA_", "TRITON_", "HF_", "TRANSFORMERS_")
LATE = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
WHOLE = {"RFT_FN_TEST_WHOLE_EXIT": "1"}  # for tests of what happens while an interpreter ends
PIDS = "RFT_FN_TEST_PIDS"  # a folder where the ranks of torchrun write their ids: forks are nobody's children
CHILDREN = {"RFT_FN_TEST_FORK_CHILDREN": "1"}  # for scripts that start themselves again
PLAIN = {"RFT_FN_TEST_PLAIN": "1"}  # for scripts whose pictures, forecasts and canaries no test looks at


def early(env):
    """The variables that are read too early for a fork to have its own."""
    return {name: x for name, x in env.items() if name.startswith(EARLY) and name not in LATE}


# ---------- the side of the tests


@cache
def servers():
    """The addresses of two servers, which end with this process."""
    if ADDRESSES in os.environ:
        return os.environ[ADDRESSES].split(",")
    started = []
    for _ in range(2):
        address = f"rft-fn-{os.getpid()}-{random.SystemRandom().randrange(2**32)}"
        env = os.environ | {"PYTHONPATH": PATH}
        env |= {"PYTHONHASHSEED": str(random.SystemRandom().randrange(1, 2**32)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append((address, subprocess.Popen(command, env=env, **pipes)))
    for _, process in started:
        assert process.stdout.readline() == b"ready\n"
        atexit.register(process.wait)
        atexit.register(process.stdin.close)
    return [address for address, _ in started]


TURNS = itertools.count()


def can_fork(argv, env, given):
    """Whether a fork would be what a new interpreter is."""
    plain = sys.platform == "linux" and len(argv) > 1 and argv[0] == sys.executable
    plain = plain and (not argv[1].startswith("-") or argv[1] in ("-c", "-m", "-u"))
    own = given["preexec_fn"] is None and not given["shell"] and given["process_group"] in (-1, 0)
    mine = early(os.environ | {"OMP_NUM_THREADS": "1"})
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    return plain and own and early(env) == mine and str(ROOT) in paths


class Popen(subprocess.Popen):
    """subprocess.Popen, by a fork of a server where that is the same."""

    connection = None

    def _execute_child(self, *args):
        names = list(inspect.signature(super()._execute_child).parameters)
        given = dict(zip(names, args))
        argv = [os.fspath(x) for x in given["args"]]
        env = dict(os.environ if given["env"] is None else given["env"])
        if not can_fork(argv, env, given):
            return super()._execute_child(*args)
        self.ask(argv, env, given)
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))

    def ask(self, argv, env, given):
        """Have a server fork, and learn the process's id."""
        addresses = servers()
        if argv[1:3] == TORCHRUN or CHILDREN.items() <= env.items():
            env[ADDRESSES] = ",".join(addresses)
        request = {"argv": argv[1:], "env": env, "cwd": given["cwd"] or os.getcwd()}
        request |= {"session": given["start_new_session"], "group": given["process_group"] == 0}
        request |= {"parent": os.getpid(), "passed": list(given["pass_fds"])}
        memory = os.memfd_create("request")
        os.write(memory, pickle.dumps(request))
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if own != -1 else number for number, own in enumerate(streams)]
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(f"\0{addresses[next(TURNS) % 2]}")
        socket.send_fds(self.connection, [b"?"], [memory, *streams, *given["pass_fds"]])
        os.close(memory)
        self.pid, self._child_created = int(self.connection.recv(16)), True

    def ended(self, seconds):
        return bool(select.select([self.connection], [], [], seconds)[0])

    def status(self):
        said = self.connection.recv(16)
        self.connection.close()
        return int(said or signal.SIGKILL)

    def _internal_poll(self, *args, **kwargs):
        if self.connection is None:
            return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self.ended(0):
            self.returncode = os.waitstatus_to_exitcode(self.status())
        return self.returncode

    def _try_wait(self, flags):
        if self.connection is None:
            return super()._try_wait(flags)
        if flags & os.WNOHANG and not self.ended(0):
            return 0, 0
        return self.pid, self.status()


def run(command, *, capture_output=False, timeout=None, check=False, **options):
    """As subprocess.run."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# ---------- the server's side


def serve(address):
    """Fork for every connection; in a fork, what it has to run. Ends with the process that holds stdin."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{address}")
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a fork copies the memory that it writes to, and a collection writes to all
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end
    os.write(1, b"ready\n")
    running = {}  # what becomes readable when a fork ends -> its id, and who asked for it
    while True:
        ready, _, _ = select.select([listener, 0, *running], [], [])
        for ended in running.keys() & ready:
            tell(*running.pop(ended))
            os.close(ended)
        if 0 in ready:
            return None
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        _, fds, _, _ = socket.recv_fds(connection, 1, 16)
        pid = os.fork()
        if pid == 0:
            close(listener, *running, *(asked for _, asked in running.values()))
            return begin(connection, *fds)
        running[os.pidfd_open(pid)] = pid, connection
        close(*fds)


def close(*files):
    """Close sockets and file descriptors."""
    for file in files:
        os.close(file if isinstance(file, int) else file.detach())


def tell(pid, connection):
    """Send the status of a fork that has ended to the process that asked for it, if that is still there."""
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    connection.close()


def begin(connection, memory, *files):
    """Become the process of a request: everything that a new interpreter would have of its own."""
    request = pickle.loads(os.pread(memory, os.fstat(memory).st_size, 0))
    os.close(memory)
    if request["session"]:
        os.setsid()
    if request["group"]:
        os.setpgid(0, 0)
    connection.send(str(os.getpid()).encode())
    connection.close()
    take([0, 1, 2, *request["passed"]], files)
    os.getppid = parent(request["parent"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if PIDS in os.environ and "RANK" in os.environ:
        Path(os.environ[PIDS], os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.modules["numpy"].random.seed()
    return request["argv"]


def parent(pid):
    """A getppid that gives the process which asked for this fork, and 1 once that has ended.

    The system's gives the server.
    """
    alive = os.pidfd_open(pid)
    return lambda: 1 if select.select([alive], [], [], 0)[0] else pid


def take(numbers, files):
    """Move received files to the given numbers."""
    above = max(numbers) + 1  # so that no file lies where another one goes
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in files]
    for fd in files:
        os.close(fd)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def become(argv):
    """Run a script, a module or code as the main program."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:3] = ["", *dict.fromkeys(filter(None, paths))]  # for this file's folder and two of the server
    sys.orig_argv[1:] = argv
    if argv[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        argv = argv[1:]
    if argv[:2] == TORCHRUN:
        handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        importlib.import_module(handler).Popen = Popen
    if CHILDREN.items() <= os.environ.items():
        subprocess.Popen = Popen
    if PLAIN.items() <= os.environ.items():
        plain_runs.leave_out()
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        code = compile(argv[1], "<string>", "exec")
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        main.__file__ = argv[0]
        code = compile(Path(argv[0]).read_bytes(), argv[0], "exec")
    exec(code, vars(main))


def end(argv):
    """Run it, and end this process as an interpreter would, but for its last step."""
    code = 0
    try:
        become(argv)
    except SystemExit as error:
        code = error.code
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120  # Python's, for output that could not be written
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) & 0xFF)


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    gc.disable()  # imports leave no garbage, and looking for it takes a quarter of their time
    for library in LIBRARIES:
        importlib.import_module(library)
    for library in OPTIONAL:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(library)
    # loading a model needs this table, whose first use compiles a thousand regular expressions
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    sys.stdout.flush()
    os.dup2(answers, 1)
    os.close(answers)
    asked = serve(sys.argv[1])
    if asked and WHOLE.items() <= os.environ.items():
        become(asked)
    elif asked:
        end(asked)
