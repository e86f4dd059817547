"""A server of a small model for tests: it speaks as vLLM's and SGLang's do, and fails as it is told.

Tokens are a function of the seed, by the same numbers as the hf engine draws from the same key.
"""

import base64
import copy
import json
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed.distributed_c10d as dist
from safetensors.torch import load_file
from torch import distributed as c10d

from rft_fn.engine import weight_folder
from rft_fn.engine.hf.draws import draw_token, uniform_numbers
from rft_fn.engine.requests import Row, Stop
from rft_fn.engine.weight_channel import Connect, Update
from rft_fn.engine.weight_receiver import Receiver
from rft_fn.logprob import process_logits
from rft_fn.types import Sampling

__all__ = ["FAULTS", "FakeServer", "serving"]

# in the middle of a rollout; "die" is a killed process, "stop" one that refuses from then on, "hostile" each
# of the next in turn
FAULTS = ("die", "stop", "hang", "trickle", "500", "garbage", "few", "many", "count", "empty", "nan", "other")
FAULTS += ("hostile",)
HOSTILE = (3.7, "3", True, 10**400, float("inf"), "brackets", "short", "endless", "elsewhere")

# the logits after some tokens, by (weights, tokens): test after test asks for the same
KNOWN = {}


def mapped_at(address):
    """The file without a name that is mapped there, and the place in it, or None."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, offset, _, inode, *name = line.split()
        start, end = (int(x, 16) for x in ends.split("-"))
        if start <= address < end:
            return (int(inode), address - start + int(offset, 16)) if "memfd" in "".join(name) else None
    return None


class FakeServer:
    """One server. Attributes may be changed at any time."""

    def __init__(self, lm, tokenizer, **options):
        self.lm = lm
        self.tokenizer = tokenizer
        self.fault = ""  # one of FAULTS
        self.after = 0  # samples that are answered well before it strikes
        self.ignores = ()  # options that are skipped in silence
        self.routes = ("generate", "dev")  # of vLLM: the better route, the development mode
        self.window = 128
        self.host = "127.0.0.1"
        self.device = "cpu"
        self.transfer = ""  # vLLM's backend of weight transfer; "rft" is ours. SGLang's is "torch"
        self.sessions = True  # whether SGLang wants one for weights
        self.extension = True  # of the worker
        self.world = 1  # workers of vLLM's
        self.receivers = []  # of that backend, one a worker
        self.seen = []  # what each worker got in the last phase of an update
        self.updating = False  # as vLLM's worker notes it
        self.room = None  # for adapters, as a worker tells of it: {"rank", "slots", "head"}
        self.loads_adapters = False  # whether there are the routes that do
        self.adapters = {}  # models with adapters, by name
        self.without_place = [[]]  # their layers that each worker lacks
        self.kept = None  # the last version, of a worker that takes differences
        self.folders = []  # that were loaded
        self.phase = None  # (path, function) that is called before that phase
        self.answering = 0  # phases under way
        self.load_problem = None  # the answer to a load
        self.forgets = False  # says that it has loaded, and has not
        self.deterministic = True
        self.drafts = {}  # of speculative decoding, as a server tells of it
        self.most_words = 20  # of each token of a prompt
        self.forces = False  # whether it takes vLLM's trace_decode_token_ids
        self.paused = ""  # the mode of a pause; requests that come in one wait
        self.before_token = lambda t: None  # called before token t of a sample
        self.busy = []  # (status, Retry-After or "") of the next requests that say that they come too early
        self.key = ""  # that requests have to have
        self.refusal = '{"error": "Unauthorized"}'  # of those that have another
        for name, value in options.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.label = "default"
        self.groups = {}  # of SGLang's, by name
        self.group = None  # of vLLM's backend nccl
        self.session = False
        self.asleep = False
        self.samples = 0
        self.calls = []  # (path, body)
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.http = None
        self.port = 0

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def begin(self):
        """Listen; again on the same port after `end`."""
        self.closing.clear()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.http = _Listener((self.host, self.port), handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def end(self):
        """Refuse connections from now on."""
        self.closing.set()
        http, self.http = self.http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    # ------------------------------------------------------------------------------ the model

    def weights(self, lm=None):
        """What tells the model's weights from others."""
        parts = (p.detach().contiguous().view(torch.uint8).numpy() for p in (lm or self.lm).parameters())
        return tuple(zlib.crc32(part) for part in parts)

    @torch.no_grad()
    def logits(self, weights, ids, lm=None):
        """[1, V]: the logits after some tokens, all of which are read."""
        key = weights, tuple(ids)
        if key not in KNOWN:
            KNOWN[key] = (lm or self.lm)(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        return KNOWN[key]

    def sample(self, ids, seed, sampling, max_new, ends, texts, lm=None):
        """(tokens, log-probs, labels of weights) by the definition: all tokens are read for each new one."""
        if "seed" in self.ignores or (not self.deterministic):
            seed = time.monotonic_ns()
        u = uniform_numbers([Row(seed, max_new, 0)], max_new, self.lm.config.vocab_size)[0]
        stop = Stop(self.tokenizer, frozenset(ends), texts)
        tokens, logp, labels, weights = [], [], [], ()
        for t in range(max_new):
            self.before_token(t)
            while self.paused == "keep":
                time.sleep(0.001)
            if self.paused == "abort":
                break
            with self.lock:
                if self.label not in labels[-1:]:
                    weights = self.weights(lm)
                labels.append(self.label)
                z = self.logits(weights, [*ids, *tokens], lm)
                token, p = draw_token(z, u[t : t + 1], sampling)
                if "processed" in self.ignores:
                    p = z.log_softmax(-1)[0, token]
                tokens.append(int(token))
                logp.append(float(p))
                if stop.ends(tokens) and "stop" not in self.ignores:
                    break
        return tokens, logp, labels

    def wait(self):
        """Hold a request that has come in a pause, for 20 s at most."""
        end = time.monotonic() + 20
        while self.paused and time.monotonic() < end:
            time.sleep(0.001)

    def prompt_logp(self, ids):
        return self.prompt_words(ids, 0)[0]

    @torch.no_grad()
    def prompt_words(self, ids, count, lm=None):
        """(log-probs of the tokens after the first, (log-prob, token) of the likeliest words there)."""
        with self.lock:
            z = (lm or self.lm)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        best = z.topk(count, -1)
        own = z.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return own, [
            list(zip(*pair, strict=True)) for pair in zip(best.values.tolist(), best.indices.tolist())
        ]

    def load(self, folder):
        """The number of tensors."""
        self.folders.append(Path(folder))
        return self.take(weight_folder.read(folder) if self.kept is None else self.kept.read(Path(folder)))

    @torch.no_grad()
    def take(self, weights):
        """The number of tensors."""
        places = dict(self.lm.named_parameters(remove_duplicate=False))
        count = 0
        with self.lock:
            for name, x in weights:
                count += 1
                if not self.forgets:
                    places[name].copy_(x)
        return count

    def put_on(self, name, folder):
        """Make a model with the adapters of a folder, as peft saves them."""
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        found = load_file(Path(folder) / "adapter_model.safetensors")
        lm = copy.deepcopy(self.lm)
        for key in found:
            path, is_a, _ = key.removeprefix("base_model.model.").partition(".lora_A.weight")
            if is_a and "adapter" not in self.ignores:
                a, b = found[key], found[key.replace("lora_A", "lora_B")]
                assert len(a) == config["r"] == b.shape[1]
                lm.get_submodule(path).weight.data += config["lora_alpha"] / config["r"] * b @ a
        self.adapters[name] = lm

    def strike(self):
        """The fault that this sample has."""
        self.samples += 1
        if self.fault == "hostile" and self.samples > self.after:
            return HOSTILE[(self.samples - self.after - 1) % len(HOSTILE)]
        if self.fault and self.samples > self.after:
            return self.fault
        return ""

    def options(self, given, names):
        """Sampling of a request's fields, without what is ignored."""
        found = {}
        for ours, theirs in names.items():
            if ours not in self.ignores and theirs in given:
                found[ours] = given[theirs]
        if found.get("top_k", 0) < 0:
            found["top_k"] = 0
        return Sampling(**found)

    # ------------------------------------------------------------------------------ vLLM

    def vllm(self, path, body):
        """(status, answer), None for a path that is not there."""
        if path == "/is_paused":
            return 200, {"is_paused": bool(self.paused)}
        if (path.startswith("/pause?mode=") or path == "/resume") and "dev" in self.routes:
            self.paused = path.partition("=")[2]
            return 200, {"status": "well"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "max_model_len": self.window}]}
        lm = self.lm
        if path in ("/inference/v1/generate", "/v1/completions"):
            self.wait()
        if path in ("/inference/v1/generate", "/v1/completions") and body["model"] != "tiny":
            lm = self.adapters.get(body["model"])
            if lm is None:
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if path == "/inference/v1/generate" and "generate" in self.routes:
            return self.vllm_generate(body, lm)
        if path == "/v1/completions":
            return self.vllm_completions(body, lm)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter") and self.loads_adapters:
            return self.vllm_adapter(path, body)
        if "dev" in self.routes:
            return self.vllm_dev(path, body)
        return None

    def vllm_adapter(self, path, body):
        """Load or unload adapters; a success is no JSON."""
        name = body["lora_name"]
        if not name or (path.startswith("/v1/load") and (not body["lora_path"] or name in self.adapters)):
            return 400, {"error": {"message": f"'{name}' has already been loaded, or is no name"}}
        if path.startswith("/v1/unload"):
            found = self.adapters.pop(name, None)
            return (200, Words("Success")) if found else (404, {"error": {"message": "cannot be found"}})
        if self.load_problem:
            return 500, {"error": {"message": self.load_problem}}
        if not Path(body["lora_path"]).is_dir():
            return 404, {"error": {"message": f"No adapter found for {body['lora_path']}"}}
        self.put_on(name, body["lora_path"])
        return 200, Words("Success")

    def vllm_sample(self, ids, given, lm):
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
        ends = given.get("stop_token_ids", [])
        texts = given.get("stop", [])
        sampling = self.options(given, names)
        most = given["max_tokens"]
        tokens, logp, labels = self.sample(ids, given.get("seed", 0), sampling, most, ends, texts, lm)
        return *_wrong(self.strike(), tokens, logp), labels

    def vllm_generate(self, body, lm):
        given = body["sampling_params"]
        if given.get("prompt_logprobs", 0) > self.most_words:
            return 400, {"error": f"more than {self.most_words} of sample logprobs"}
        trace = given.get("trace_decode_token_ids")
        if trace and not self.forces and "trace" not in self.ignores:
            return 400, {"error": {"message": "trace replay is not enabled"}}
        if trace and self.forces:
            return 200, {"choices": [self.traced(body["token_ids"], trace, given, lm)]}
        if "prompt_logprobs" in given:
            rows = self.rows(body["token_ids"], given["prompt_logprobs"], lm)
            return 200, {"prompt_logprobs": rows, "choices": [{}]}
        tokens, logp, labels = self.vllm_sample(body["token_ids"], given, lm)
        content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(tokens, logp, strict=False)]
        starts = [t for t, label in enumerate(labels) if label not in labels[max(t - 1, 0) : t]]
        ends = [*starts[1:], len(tokens)]
        spans = [{"version": labels[a], "start": a, "end": b} for a, b in zip(starts, ends, strict=False)]
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        return 200, {"choices": [choice][: len(tokens)]}

    def traced(self, ids, trace, given, lm):
        """The log-probs of given tokens by the distribution, a word that is cut at vLLM's floor."""
        sampling = Sampling(*(given[name] for name in ("temperature", "top_p", "top_k")))
        assert given["max_tokens"] == len(trace) and given["logprobs"] == 0 and "stop" not in given
        with self.lock:
            z = torch.cat([self.logits(self.weights(lm), [*ids, *trace[:t]], lm) for t in range(len(trace))])
        logp = process_logits(z, sampling).log_softmax(-1).gather(-1, torch.tensor(trace)[:, None])[:, 0]
        content = [{"token_id": t, "logprob": max(p, -9999.0)} for t, p in zip(trace, logp.tolist())]
        return {"token_ids": trace, "logprobs": {"content": content}}

    def vllm_completions(self, body, lm):
        if "prompt_logprobs" in body:
            rows = self.rows(body["prompt"], body["prompt_logprobs"], lm)
            return 200, {"choices": [{"prompt_logprobs": rows}]}
        tokens, logp, _ = self.vllm_sample(body["prompt"], body, lm)
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": logp}}
        if body.get("return_token_ids") and "return_token_ids" not in self.ignores:
            choice["token_ids"] = tokens
        return 200, {"choices": [choice][: len(tokens)]}

    def rows(self, ids, count, lm):
        """The token's own log-prob comes with the likeliest words, whether it is one or not."""
        own, best = self.prompt_words(ids, count, lm)
        found = [None]
        for t, p, words in zip(ids[1:], own, best, strict=True):
            entries = {t: p} | {word: x for x, word in words}
            found.append({str(t): {"logprob": p, "decoded_token": self.text(t)} for t, p in entries.items()})
        return found

    def text(self, token):
        return self.tokenizer.decode([token])

    def vllm_dev(self, path, body):
        phase = path.endswith(("_weight_transfer_engine", "_weight_update", "/update_weights"))
        if phase and self.transfer != "torch":
            self.answering += 1
            try:
                return self.vllm_phase(path, body)
            finally:
                self.answering -= 1
        if path.startswith("/server_info?"):
            found = {"backend": self.transfer} if self.transfer else None
            return 200, {"vllm_config": {"weight_transfer_config": found}}
        if path == "/get_world_size":
            return 200, {"world_size": self.world}
        if path == "/collective_rpc" and not self.extension:
            return 500, {"error": {"message": "CPUWorker has no attribute"}}
        if path == "/collective_rpc" and body["method"] == "rft_describe":
            about = {"device": self.device, "sleep": self.device != "cpu", "transfer": self.transfer}
            about |= {"differences": self.kept is not None, "adapters": self.room}
            return 200, {"results": [about | ({"speculative": self.drafts} if self.drafts else {})]}
        if path == "/collective_rpc" and body["method"] == "rft_without_place":
            return 200, {"results": self.without_place}
        if path == "/collective_rpc" and body["method"] == "rft_load":
            if self.load_problem:
                return 200, {"results": [self.load_problem]}
            try:
                return 200, {"results": [{"names": self.load(body["args"][0]), "short": []}]}
            except ValueError as error:
                return 200, {"results": [{"error": f"ValueError: {error}"}]}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, {"success": True}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path.startswith("/reset_prefix_cache"):
            return 200, {"success": "cache" not in self.ignores}
        if path.startswith("/sleep") or path == "/wake_up":
            self.asleep = path != "/wake_up" and "sleep" not in self.ignores
            return 200, {"status": "well"}
        if path == "/is_sleeping":
            return 200, {"is_sleeping": self.asleep}
        return None

    def vllm_phase(self, path, body):
        """A phase of weight transfer as vLLM's worker goes through it, with our own receiver."""
        if self.phase and self.phase[0] == path:
            self.phase[1]()
        try:
            if self.transfer == "nccl":
                return self.vllm_nccl(path, body)
            if self.transfer != "rft":
                raise RuntimeError("Weight transfer not configured.")
            self.receivers = self.receivers or [Receiver(rank, "cpu") for rank in range(self.world)]
            if path == "/init_weight_transfer_engine":
                self.together(lambda receiver: receiver.connect(Connect(**body["init_info"])))
            elif path == "/start_weight_update":
                if self.updating:
                    raise RuntimeError("start_weight_update called while a weight update is already active.")
                self.together(Receiver.start)
                self.updating = True
            elif path == "/update_weights":
                if not self.updating:
                    raise RuntimeError("start_weight_update must be called before update_weights.")
                self.updating = False
                self.together(lambda receiver: receiver.take(Update(**body["update_info"])))
                self.updating = True
            elif path == "/finish_weight_update":
                if not self.updating:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
                self.seen = self.together(self.finish)
                self.updating = False
                self.label = body.get("weight_version") or self.label
        except Exception as error:
            return 500, {"error": {"message": f"Call to {path[1:]} method failed: {error}"}}
        return 200, {"message": "well"}

    def together(self, act):
        """What each worker returns; they act beside each other."""
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(act, self.receivers))

    def finish(self, receiver):
        """Take what has arrived; returns {name: (where it is in memory, its bytes)}."""
        seen = {}

        def note(weights):
            for name, x in weights:
                seen[name] = mapped_at(x.data_ptr()), x.numpy().tobytes()
                yield name, x

        receiver.finish(lambda weights: self.take(note(weights)))
        return seen

    def vllm_nccl(self, path, body):
        """A phase as vLLM's own backend goes through it, by gloo: its tests make an id of an address."""
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            where = base64.b64decode(info["nccl_unique_id_b64"], validate=True).rstrip(b"\0").decode()
            host, port = where.split(":")
            store = c10d.TCPStore(host, int(port), is_master=False)
            limit = timedelta(seconds=10)
            self.group = c10d.ProcessGroupGloo(store, info["rank_offset"], info["world_size"], limit)
            self.group.allreduce([torch.zeros(1)]).wait()
        elif path == "/start_weight_update":
            if self.updating:
                raise RuntimeError("start_weight_update called while a weight update is already active.")
            self.updating = True
        elif path == "/update_weights":
            if not self.updating:
                raise RuntimeError("start_weight_update must be called before update_weights.")
            info = body["update_info"]
            self.updating = False
            found = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
            for name, kind, shape in found:
                x = torch.empty(shape, dtype=getattr(torch, kind))
                self.group.broadcast([x], c10d.BroadcastOptions()).wait()
                self.take([(name, x)])
            self.updating = True
        elif path == "/finish_weight_update":
            self.updating = False
        elif path == "/shutdown_weight_transfer_engine":
            self.group = None
        return 200, {"message": "well"}

    # ------------------------------------------------------------------------------ SGLang

    def sglang(self, path, body):
        """(status, answer), None for a path that is not there."""
        if path == "/model_info":
            return 200, {"served_model_name": "tiny", "weight_version": self.label}
        if path == "/server_info":
            about = {"max_context_length": self.window, "enable_memory_saver": self.device != "cpu"}
            about |= {"tp_size": 1, "device": self.device}
            if self.room is not None:
                about |= {"enable_lora": True, "max_lora_rank": self.room["rank"]}
            return 200, about | self.drafts
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            return self.sglang_adapter(path, body)
        if path == "/generate":
            self.wait()
            return self.sglang_generate(body)
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = "" if path == "/continue_generation" else body["mode"]
            return 200, {"status": "ok"}
        if path.endswith("_weight_update") and not self.sessions:
            return None
        phase = path.endswith(("_update_group", "_weight_update", "_from_distributed"))
        if phase and self.transfer == "torch":
            try:
                if self.phase and self.phase[0] == path:
                    self.phase[1]()
                done, message = self.sglang_group(path, body)
            except Exception as error:
                done, message = False, str(error)
            return 200 if done else 400, {"success": done, "message": message}
        if path == "/update_weights_from_disk":
            if self.load_problem:
                return 400, {"success": False, "message": str(self.load_problem)}
            self.load(body["model_path"])
            self.label = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded."}
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            self.asleep = path.startswith("/release")
            return 200, None
        return None

    def sglang_group(self, path, body):
        """(success, message) of a phase, by the functions of torch that SGLang calls."""
        name = body.get("group_name")
        if path == "/init_weights_update_group":
            where, world = f"tcp://{body['master_address']}:{body['master_port']}", body["world_size"]
            limit = timedelta(seconds=30)
            store = next(dist.rendezvous(where, body["rank_offset"], world, timeout=limit))[0]
            store.set_timeout(limit)
            made, _ = dist._new_process_group_helper(
                world,
                body["rank_offset"],
                [],
                dist.Backend(body["backend"]),
                dist.PrefixStore(name, store),
                group_name=name,
                timeout=limit,
            )
            dist._world.pg_group_ranks[made] = {rank: rank for rank in range(world)}
            self.groups[name] = made
        elif path == "/destroy_weights_update_group":
            if name not in self.groups:
                return False, "The group to be destroyed does not exist."
            dist.destroy_process_group(self.groups.pop(name))
        elif path == "/begin_weight_update":
            if self.session:
                return False, "a weight-update session is already open"
            self.session = True
        elif path == "/update_weights_from_distributed":
            if self.sessions and not self.session:
                return False, "must run between begin_weight_update() and end_weight_update()"
            found = [torch.empty(s, dtype=getattr(torch, d)) for d, s in zip(body["dtypes"], body["shapes"])]
            work = [dist.broadcast(x, src=0, group=self.groups[name], async_op=True) for x in found]
            for each in work:
                each.wait()
            self.take(zip(body["names"], found, strict=True))
        elif path == "/end_weight_update":
            if not self.session:
                return False, "no weight-update session is open"
            self.session = False
        return True, "well"

    def sglang_adapter(self, path, body):
        if self.load_problem:
            return 200, {"success": False, "error_message": self.load_problem}
        if path == "/load_lora_adapter":
            self.put_on(body["lora_name"], body["lora_path"])
        else:
            del self.adapters[body["lora_name"]]
        return 200, {"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "")}

    def sglang_generate(self, body):
        ids, given = body["input_ids"], body["sampling_params"]
        lm = self.adapters.get(body["lora_path"]) if body.get("lora_path") else self.lm
        if lm is None:
            return 400, {"error": {"message": "The following requested LoRA adapters are not loaded"}}
        if body.get("logprob_start_len") == 0:
            entries = [[None, ids[0], None]]
            own, best = self.prompt_words(ids, body.get("top_logprobs_num", 0), lm)
            shown = self.text if body.get("return_text_in_logprobs") else lambda token: None
            entries += [[p, t, shown(t)] for t, p in zip(ids[1:], own, strict=True)]
            about = {"input_token_logprobs": entries, "output_token_logprobs": [[-1.0, 3, None]]}
            about["input_top_logprobs"] = [None, *([[p, t, None] for p, t in words] for words in best)]
            finish = {"type": "length", "length": 1}
            return 200, {"output_ids": [3], "meta_info": about | {"finish_reason": finish}}
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
        sampling = self.options(given, names)
        ends, texts = given.get("stop_token_ids", []), given.get("stop", [])
        seed, most = given["sampling_seed"], given["max_new_tokens"]
        tokens, cut, _ = self.sample(ids, seed, sampling, most, ends, texts, lm)
        with self.lock:
            weights = self.weights(lm)
            z = torch.cat([self.logits(weights, [*ids, *tokens[:t]], lm) for t in range(len(tokens))])
        z = (z / (sampling.temperature or 1)).log_softmax(-1)
        plain = z.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        tokens, plain = _wrong(self.strike(), tokens, plain)
        about = {
            "output_token_logprobs": [[p, t, None] for t, p in zip(tokens, plain, strict=False)],
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": self.label,
        }
        if body.get("return_sampling_mask") and "mask" not in self.ignores:
            about["output_token_sampling_logprobs"] = cut
        return 200, {"output_ids": tokens, "meta_info": about}


class Words(str):
    """An answer that is no JSON."""


class _Struck(Exception):
    """A fault that has no answer of the usual form."""


def _wrong(fault, tokens, logp):
    """(tokens, log-probs) with a fault of the values, or _Struck."""
    if fault == "few":
        return tokens[:-1], logp[:-1]
    if fault == "many":
        return [*tokens, 3], [*logp, -1.0]
    if fault == "count":
        return tokens, logp[:-1]
    if fault == "empty":
        return [], []
    if fault == "nan":
        return tokens, [float("nan"), *logp[1:]]
    if fault == "other":
        return [10**6, *tokens[1:]], logp
    if fault == "3" or (fault and not isinstance(fault, str)):
        return [fault, *tokens[1:]], logp
    if fault:
        raise _Struck(fault)
    return tokens, logp


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *_):
        """Nothing on the terminal."""

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self.answer(json.loads(self.rfile.read(size) or "{}"))

    def answer(self, body):
        fake = self.fake
        fake.calls.append((self.path, body))
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self.send(401, fake.refusal.encode())
        if fake.busy:
            status, after = fake.busy.pop(0)
            return self.send(status, b'{"error": "try again"}', after)
        try:
            found = fake.vllm(self.path, body) or fake.sglang(self.path, body)
        except _Struck as struck:
            return self.strike(str(struck))
        if found is None:
            return self.send(404, b'{"detail": "Not Found"}')
        status, answer = found
        if isinstance(answer, Words):
            return self.send(status, answer.encode())
        self.send(status, b"" if answer is None else json.dumps(answer).encode())

    def strike(self, fault):
        """Break as a server does that is killed, hangs, fails, or talks nonsense."""
        fake = self.fake
        if fault == "500":
            return self.send(500, b'{"error": {"message": "EngineCore encountered an issue"}}')
        if fault == "garbage":
            return self.send(200, b"<html>It works!</html>")
        if fault == "brackets":
            return self.send(200, b"[" * 100_000)
        if fault == "elsewhere":
            return self.send(307, b"")
        if fault == "short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
        if fault == "hang":
            fake.closing.wait(60)
        elif fault == "endless":
            self.send_response(200)
            self.end_headers()
            while not fake.closing.is_set():
                self.wfile.write(b" " * (1 << 16))
        elif fault == "trickle":
            self.send_response(200)
            self.end_headers()
            while not fake.closing.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        elif fault in ("die", "stop"):
            threading.Thread(target=fake.end).start()
            fake.closing.wait(5)
            if fault == "stop":
                return self.send(503, b"shutting down")
        self.close_connection = True
        self.connection.close()

    def send(self, status, text, after=""):
        self.send_response(status)
        if after:
            self.send_header("Retry-After", after)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(*fakes):
    """The fakes, listening."""
    try:
        for fake in fakes:
            fake.begin()
        yield fakes
    finally:
        for fake in fakes:
            fake.end()
