# A script without a `__main__` guard: it starts an engine's process, names it, and ends as its argument says.
import signal
import sys
import threading

import faulty

import rft_fn as rft
from rft_fn.engine import EngineConfig, own_process

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
engine = own_process(faulty.build, EngineConfig(), "", None)
pid = engine.generate.__self__.core.process.pid
busy = threading.Thread(target=lambda: engine.generate([[1]], [0], sampling=rft.Sampling()), daemon=True)
if sys.argv[1] == "close":
    engine.close()
print(pid, flush=True)
if sys.argv[1] == "exception":
    busy.start()
    raise RuntimeError("an error of the script")
if sys.argv[1] == "wait":
    engine.generate([[1]], [0], sampling=rft.Sampling())
