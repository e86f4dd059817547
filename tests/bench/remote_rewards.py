"""Rewards over HTTP under load: `python tests/bench/remote_rewards.py`.

Batches of 64 completions, 161 kB, are sent to train_scripts/serve_reward.py, and in turn to two servers that
do less: a bare starlette that reads the JSON and answers zeros, and the standard library's, which has the
same reward.
Then the library's own client asks while a server is killed and restarted, with a second host and without.
Writes docs/results/remote.json and the tables in docs/rewards.md.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
from record import processor, put

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "remote.json"
ROWS = 64
LENGTH = 1000  # characters of a prompt, and of a completion
REWARD = "def same(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"


def body(rows=ROWS, length=LENGTH):
    """A request of which every second completion is right."""
    answers = [f"{i:05d}" + "x" * (length - 5) for i in range(rows)]
    completions = [a if i % 2 else a[::-1] for i, a in enumerate(answers)]
    prompts = ["p" * (length - length // 2)] * rows
    made = {"prompts": prompts, "completions": completions, "columns": {"answer": answers}}
    return json.dumps(made).encode(), [float(i % 2) for i in range(rows)]


# ------------------------------------------------------------------------------------------- the servers


def bare(port):
    """Starlette and uvicorn with nothing around: read the JSON, answer zeros."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def score(request):
        return JSONResponse({"rewards": [0.0] * len((await request.json())["completions"])})

    app = Starlette(routes=[Route("/score", score, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning")


def standard(port):
    """The standard library's server, a thread for each connection, with the same reward."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pairs = zip(made["completions"], made["columns"]["answer"])
            data = json.dumps({"rewards": [float(c == a) for c, a in pairs]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # 5 would reset connections

    Server(("127.0.0.1", port), Handler).serve_forever()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def begin(kind, port, folder):
    """A server of a kind, once it listens."""
    if kind == "serve_reward.py":
        command = [
            str(ROOT / "train_scripts" / "serve_reward.py"),
            "--reward",
            "same.py:same",
            "--port",
            str(port),
        ]
    else:
        command = [str(Path(__file__).resolve()), "--serve", kind, "--port", str(port)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{kind} did not start")


@contextmanager
def running(kind, folder):
    port = free_port()
    process = begin(kind, port, folder)
    try:
        yield f"http://127.0.0.1:{port}/score"
    finally:
        process.kill()
        process.wait()


# ----------------------------------------------------------------------------------------------- the load


async def load(url, requests, clients):
    """(requests per s, the seconds of each) for so many clients that ask one after the other."""
    data, _ = body()
    left = iter(range(requests))
    took = []
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:

        async def ask():
            for _ in left:
                began = time.perf_counter()
                found = await client.post(url, content=data)
                assert len(found.json()["rewards"]) == ROWS
                took.append(time.perf_counter() - began)

        await client.post(url, content=data)  # the connection, and what is loaded late
        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return requests / (time.perf_counter() - began), took


def loads(folder, requests, rounds):
    """{kind: {clients: numbers}}: the kinds in turn, since the load of a machine changes."""
    kinds = ("serve_reward.py", "bare starlette", "standard library")
    found = {kind: {n: ([], []) for n in (1, 16)} for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            with running(kind, folder) as url:
                for clients, (rates, took) in found[kind].items():
                    print(f"{kind}, {clients} at a time", file=sys.stderr)
                    rate, seconds = asyncio.run(load(url, requests, clients))
                    rates.append(rate)
                    took += seconds
    return {kind: {str(n): numbers(*x) for n, x in of.items()} for kind, of in found.items()}


def numbers(rates, took):
    cuts = statistics.quantiles(took, n=100)
    return {
        "requests_per_s": round(statistics.median(rates), 1),
        "rounds": [round(x, 1) for x in rates],
        "p50_ms": round(1e3 * cuts[49], 1),
        "p99_ms": round(1e3 * cuts[98], 1),
    }


def killed(folder, hosts, calls):
    """Calls of 256 completions of the library's client, while the first host is killed and restarted."""
    import rft_fn as rft  # not at the head: the servers that do less start without it

    ports = [free_port() for _ in range(hosts)]
    servers = [begin("serve_reward.py", port, folder) for port in ports]
    where = [f"http://127.0.0.1:{port}/score" for port in ports]
    fn = rft.reward.served_at(where, batch=16, connections=8)
    score = rft.reward.weighted(same=(fn, 1.0))
    made = json.loads(body(256, 100)[0])
    prompts = [str(i) for i in range(256)]
    right = [float(i % 2) for i in range(256)]
    wrong, took, gone = 0, [], 0.0

    def restart():
        nonlocal gone
        servers[0].send_signal(signal.SIGKILL)
        servers[0].wait()
        began = time.perf_counter()
        servers[0] = begin("serve_reward.py", ports[0], folder)
        gone = time.perf_counter() - began

    threads = []
    for i in range(calls):
        if i == calls // 3:
            threads.append(threading.Thread(target=restart))
            threads[0].start()
        began = time.perf_counter()
        found = score(prompts, made["completions"], made["columns"]).total.tolist()
        took.append(time.perf_counter() - began)
        wrong += sum(a != b for a, b in zip(found, right, strict=True))
    threads[0].join()
    for server in servers:
        server.kill()
    return {
        "rewards": 256 * calls, "wrong_or_lost": wrong, "host_gone_s": round(gone, 1),
        "median_call_ms": round(1e3 * statistics.median(took)), "longest_call_s": round(max(took), 2),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- the tables


def tables(found):
    """The tables of the page."""
    lines = [
        "| server | clients | requests/s | of bare starlette | p50, ms | p99, ms |",
        "|---|---|---|---|---|---|",
    ]
    for kind, of in found["load"].items():
        for clients, x in of.items():
            base = found["load"]["bare starlette"][clients]["requests_per_s"]
            share = f"{x['requests_per_s'] / base:.2f}"
            lines.append(
                f"| {kind} | {clients} | {x['requests_per_s']} | {share} | {x['p50_ms']} | {x['p99_ms']} |"
            )
    lines += [
        "",
        "| a host is killed | rewards | wrong or lost | host gone, s | median call, ms | longest, s |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, x in found["killed"].items():
        lines.append(
            f"| {name} | {x['rewards']} | {x['wrong_or_lost']} | {x['host_gone_s']} | {x['median_call_ms']} "
            f"| {x['longest_call_s']} |"
        )
    lines += ["", f"{found['machine']}, {found['date']}."]
    return "\n".join(lines)


def machine():
    busy = ""
    if hasattr(os, "getloadavg"):
        busy = f", shared with other work (load {os.getloadavg()[0]:.0f})"
    return f"{os.cpu_count()} cores of {processor()}{busy}, Python {platform.python_version()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=["bare starlette", "standard library"])
    parser.add_argument("--port", type=int)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=40)
    args = parser.parse_args()
    if args.serve:
        {"bare starlette": bare, "standard library": standard}[args.serve](args.port)
        return
    about = {"date": date.today().isoformat(), "machine": machine()}
    about |= {"requests": args.requests, "rounds": args.rounds, "bytes": len(body()[0])}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "same.py").write_text(REWARD)
        found = about | {"load": loads(folder, args.requests, args.rounds)}
        cases = {"with a second host": 2, "the only host": 1}
        found["killed"] = {name: killed(folder, hosts, args.calls) for name, hosts in cases.items()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    put("docs/rewards.md", {"load": tables(found)})
    print(tables(found))


if __name__ == "__main__":
    main()
