"""A server of vLLM on this machine, in a process group that ends with `kill`."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from rft_fn import model

__all__ = ["Server"]

ROOT = Path(__file__).resolve().parents[2]
LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


class Server:
    """A process of vLLM's server, in a group of its own."""

    def __init__(self, log, served="tiny", *, threads=1, window=128, rank=0, transfer=True, more=()):
        """`rank` is the largest of adapters that may come alone; 0: none may. `more` are options of vLLM."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        own = [ROOT, ROOT / "kernels", Path(__file__).parent / "taking_turns"]
        path = os.pathsep.join([*map(str, own), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {
            "PYTHONPATH": path,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        options = f"--dtype float32 --enforce-eager --block-size 32 --max-model-len {window} "
        options += "--enable-scale-out --logprobs-mode processed_logprobs --host 127.0.0.1 "
        options += "--worker-extension-cls rft_fn.engine.worker.WeightsFromFolder "
        if transfer:
            options += '--weight-transfer-config {"backend":"rft"} '
        if rank:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
            options += f"--enable-lora --max-lora-rank {rank} --max-loras 2 --lora-target-modules {LAYERS} "
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(self.port)]
        command += ["--model", model.resolve(served), *options.split(), *more]
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds=420):
        """Until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2)
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    def kill(self):
        """All of its processes at once, as a machine that is gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
