"""Python processes that have torch and transformers from the start: forks of multiprocessing's fork server.

    forks.Popen([sys.executable, "script.py", ...], env=..., stdout=...)       as subprocess.Popen
    forks.run([sys.executable, "-m", "module", ...], capture_output=True)      as subprocess.run

Importing them takes 5 seconds, and the slow tests start a thousand processes. A fork has arguments,
environment, folder, streams, exit code and signals like any other process. One difference: once all exit
handlers have run, it is gone, and Python does not first free torch object by object. The Python processes
that a fork starts are forks too: workers of torchrun, engines. A command of another program, or one with an
environment that a library reads at its import, starts as ever.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import inspect
import itertools
import multiprocessing
import operator
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import types
from functools import cache
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from unittest import mock

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])  # PYTHONPATH of a process that may be a fork
# What a server imports; none starts a thread then.
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
    "rft_fn.collect",
    "rft_fn.run",
    "rft_fn.strategy.fsdp2",
    "rft_fn.tools.commands",
    "rft_kernels",
    "script_runs",
)
# transformers imports the first to save a model, wherever it is installed; an engine of ZeRO imports the
# second at its start, and with it torch's inductor
OPTIONAL = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
# read when Python or a library starts; everything else of an environment is a fork's own
EARLY = ("PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "CUDA_", "TRITON_", "HF_", "TRANSFORMERS_")
LATE = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
PLAIN = {"RFT_FN_TEST_PLAIN": "1"}  # for scripts whose pictures, forecasts and canaries no test looks at
# the environment of a server that starts
SERVER = {"RFT_FN_TEST_SERVER": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PATH}:{ROOT / 'tests'}"}
STARTS, TURNS = threading.Lock(), itertools.count()
ADDRESSES = []  # of the servers, in a fork


def early(env):
    """Return the variables that are read too early for a fork to have its own."""
    return {name: x for name, x in env.items() if name.startswith(EARLY) and name not in LATE}


def can_fork(argv, env, given):
    """Whether a fork would be what a new interpreter is."""
    plain = sys.platform == "linux" and len(argv) > 1 and argv[0] == sys.executable
    plain = plain and (not argv[1].startswith("-") or argv[1] in ("-c", "-m", "-u"))
    own = given["preexec_fn"] is None and not given["shell"] and given["process_group"] in (-1, 0)
    mine = early(os.environ | {"OMP_NUM_THREADS": "1"})
    return plain and own and early(env) == mine and str(ROOT) in env.get("PYTHONPATH", "").split(os.pathsep)


@cache
def servers(*addresses):
    """Start two fork servers, in which sets have other orders, or connect to those at the addresses."""
    found = [forkserver.ForkServer(), forkserver.ForkServer()]
    for server, address in zip(found, addresses):
        server._forkserver_address = address
        server._forkserver_alive_fd = forkserver._forkserver._forkserver_alive_fd
        server.ensure_running = resource_tracker.ensure_running
    if not addresses:
        with mock.patch.dict(os.environ, SERVER):
            for server in found:
                server.set_forkserver_preload(["forks"])
                server.ensure_running()
    return found


class File:
    """A file descriptor that is sent with a process; there it is a number."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return operator.methodcaller("detach"), (reduction.DupFd(self.number),)


class Popen(subprocess.Popen):
    """subprocess.Popen, by a fork where that is the same."""

    process = None

    def _execute_child(self, *args):
        given = dict(zip(inspect.signature(super()._execute_child).parameters, args))
        argv = [os.fspath(x) for x in given["args"]]
        env = dict(os.environ if given["env"] is None else given["env"])
        if not can_fork(argv, env, given):
            return super()._execute_child(*args)
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if own == -1 else own for number, own in enumerate(streams)]
        two = servers(*ADDRESSES)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=begin,
            args=(argv[1:], env, given["cwd"] or os.getcwd()),
            kwargs={
                "files": [File(number) for number in (*streams, *given["pass_fds"])],
                "numbers": [0, 1, 2, *given["pass_fds"]],
                "session": given["start_new_session"],
                "group": given["process_group"] == 0,
                "parent": os.getpid(),
                "addresses": [server._forkserver_address for server in two],
            },
        )
        # multiprocessing would import a script once more in its forks, and wait for them at its end
        with STARTS:
            main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
            forkserver.connect_to_new_process = two[next(TURNS) % 2].connect_to_new_process
            try:
                self.process.start()
            finally:
                sys.modules["__main__"] = main
        multiprocessing.process._children.discard(self.process)
        self.pid, self._child_created = self.process.pid, True
        self._close_pipe_fds(
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _internal_poll(self, *args, **options):
        if self.process is None:
            return super()._internal_poll(*args, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                self.returncode = self.process._popen.poll()
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, flags):
        if self.process is None:
            return super()._try_wait(flags)
        code = self.process._popen.poll(flags)
        return (0, 0) if code is None else (self.pid, code << 8 if code >= 0 else -code)


def run(command, **options):
    """As subprocess.run."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(command, **options)


# ---------- in a server and in its forks


def preload():
    """Import what forks need; no collection of garbage writes to it, for a fork copies what is written to."""
    gc.disable()  # imports leave no garbage, and looking for it takes a quarter of their time
    for library in LIBRARIES:
        importlib.import_module(library)
    for library in OPTIONAL:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(library)
    # loading a model needs this table, whose first use compiles a thousand regular expressions
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports what is not collected at the end


def begin(argv, env, folder, *, files, numbers, session, group, parent, addresses):
    """Become the process of a command, run it, and end as an interpreter would, but for its last step."""
    if session:
        os.setsid()
    if group:
        os.setpgid(0, 0)
    ADDRESSES.extend(addresses)
    take(files, numbers)
    alive = os.pidfd_open(parent)
    os.getppid = lambda: 1 if select.select([alive], [], [], 0)[0] else parent  # the system's is the server
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.modules["numpy"].random.seed()
    subprocess_handler.Popen = subprocess.Popen = Popen
    if PLAIN.items() <= os.environ.items():
        sys.modules["script_runs"].leave_out()
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
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
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


def take(files, numbers):
    """Move received files to the given numbers, and files of multiprocessing out of their way."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in files]
    for owner, name in (
        (forkserver._forkserver, "_forkserver_alive_fd"),
        (resource_tracker._resource_tracker, "_fd"),
    ):
        setattr(owner, name, fcntl.fcntl(getattr(owner, name), fcntl.F_DUPFD_CLOEXEC, above))
    for fd in files:
        os.close(fd)
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


def become(argv):
    """Run a script, a module or code as the main program."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = ["", *dict.fromkeys([*paths, *installed])]
    sys.orig_argv[1:] = argv
    if argv[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        argv = argv[1:]
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


if SERVER.items() <= os.environ.items():
    preload()
