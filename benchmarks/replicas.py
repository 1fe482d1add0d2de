"""Two replicas behind `vllm-ktx serve --replicas 2`: affinity, spill, and 60 requests while one engine is killed.

    python -m benchmarks.replicas --save

SmolLM2-135M on CPU. Parts: (1) requests with common heads: how many go where their head went before, and what the
replicas' prefix caches say; (2) many requests of one head at once: how many spill; (3) requests and streams while the
engine process of one replica gets SIGKILL: how many are answered, how streams end, when a replacement serves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from vllm_ktx.serving import exposition
from vllm_ktx.serving.server import free_port

from . import corpus, harness, models

HEADER = "x-ktx-replica"


class Service:
    """`vllm-ktx serve` in a process of its own; a context manager. `log`: what it printed."""

    def __init__(self, *arguments: str, replicas: int = 2) -> None:
        self.port, self.replicas = free_port(), replicas
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        code = "import sys; from vllm_ktx.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "serve", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--replicas", str(replicas)]
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=300)

    def __enter__(self) -> Service:
        try:
            self.wait(self.replicas, 400)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            for process in reversed(self._descendants()):
                process.kill()
            self.process.kill()
        self.client.close()

    def names(self) -> list[str]:
        """Of the healthy replicas."""
        try:
            answer = self.client.get("/health")
            return answer.json().get("replicas", [])
        except (httpx.HTTPError, ValueError):
            return []

    def wait(self, replicas: int, seconds: float, but: str = "") -> list[str]:
        """Until so many are healthy, `but` not among them. Raises RuntimeError, with the log's end, if not in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            names = self.names()
            if len(names) == replicas and but not in names:
                return names
            time.sleep(0.3)
        raise RuntimeError(f"no {replicas} replicas in {seconds:.0f} s\n{self.log_text()[-4000:]}")

    def log_text(self) -> str:
        return Path(self.log.name).read_text()

    def complete(self, prompt: str, tokens: int = 8, **more: Any) -> httpx.Response:
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.client.post("/v1/completions", json=body | more)

    def stream(self, prompt: str, tokens: int, seen: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Reads a stream to its end: `end` is `done`, `error` or, never, `short`; `replica`, `tokens`."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        count, end, replica = 0, "short", ""
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            replica = answer.headers.get(HEADER, "")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    end = "done" if end != "error" else end
                elif line.startswith("data: "):
                    if "error" in json.loads(line[6:]):
                        end = "error"
                    else:
                        count += 1
                        seen()
        return {"end": end, "replica": replica, "tokens": count}

    def total(self, name: str) -> float:
        """A counter, over all replicas."""
        return sum(value for _, value in exposition.values(self.client.get("/metrics").text, name))

    def engines(self) -> dict[str, int]:
        """Process ids of the engines, by the port of their server."""
        found = {}
        for process in self._descendants():
            if "EngineCore" in " ".join(process.cmdline()):
                command = process.parent().cmdline()
                found[command[command.index("--port") + 1]] = process.pid
        return found

    def _descendants(self) -> list[Any]:
        import psutil

        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def heads(count: int, chars: int) -> list[str]:
    """Different beginnings of prompts, English."""
    text = corpus.text()
    return [f"Chapter {i}. " + text[i * chars : (i + 1) * chars] for i in range(count)]


def asked_about(args: argparse.Namespace, word: str) -> list[str]:
    """`--requests` prompts, each head's in turn."""
    beginnings = heads(args.heads, args.chars)
    return [f"{beginnings[i % args.heads]}\n{word} {i}:" for i in range(args.requests)]


def affinity(service: Service, args: argparse.Namespace) -> dict[str, Any]:
    prompts = asked_about(args, "Question")
    queries, hits = (service.total(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(service.complete, prompts))
    went: dict[str, Counter] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        went.setdefault(prompt[:12], Counter())[answer.headers[HEADER]] += 1
    asked = service.total("vllm:prefix_cache_queries_total") - queries
    return {
        "requests": len(prompts),
        "answered": sum(answer.status_code == 200 for answer in answers),
        "same_replica_share": round(sum(max(c.values()) for c in went.values()) / len(prompts), 4),
        "heads_by_replica": sorted(Counter(max(c, key=c.__getitem__) for c in went.values()).values()),
        "prefix_hit_share": round((service.total("vllm:prefix_cache_hits_total") - hits) / asked, 4),
        "prefix_hit_share_possible": round(1 - args.heads / len(prompts), 4),
    }


def spill(service: Service, args: argparse.Namespace) -> dict[str, Any]:
    (head,) = heads(1, args.chars)
    service.complete(head, 1)
    with ThreadPoolExecutor(args.burst) as pool:
        answers = list(pool.map(lambda i: service.complete(f"{head}\n{i}", 16), range(args.burst)))
    share = Counter(answer.headers[HEADER] for answer in answers)
    return {
        "requests_at_once": args.burst,
        "answered": sum(a.status_code == 200 for a in answers),
        "home": max(share.values()),
        "spilled": args.burst - max(share.values()),
    }


def chaos(service: Service, args: argparse.Namespace) -> dict[str, Any]:
    """60 requests and 6 streams, 8 at a time; after a quarter of the answers one engine gets SIGKILL."""
    before = service.names()
    prompts, streaming = asked_about(args, "After"), threading.Semaphore(0)
    with ThreadPoolExecutor(8 + args.streams) as pool, ThreadPoolExecutor(8) as few:
        streams = [
            pool.submit(service.stream, f"{head}\nOn and on", 200, streaming.release)
            for head in heads(args.streams, args.chars)
        ]
        for _ in range(3 * args.streams):
            streaming.acquire(timeout=120)
        requests = [few.submit(service.complete, prompt) for prompt in prompts]
        while sum(r.done() for r in requests) < args.requests // 4:
            time.sleep(0.05)
        victim = sorted(service.engines().items())[0]
        os.kill(victim[1], signal.SIGKILL)
        killed_at = time.monotonic()
        answered = [r.result() for r in requests]
        all_answered = time.monotonic() - killed_at
        ends = Counter(s.result()["end"] for s in streams)
        deadline = time.monotonic() + 300
        names: list[str] = []
        while time.monotonic() < deadline and not (len(names) == 2 and set(names) != set(before)):
            time.sleep(0.3)
            names = service.names()
        replaced = time.monotonic() - killed_at
    new = (set(names) - set(before)).pop() if set(names) - set(before) else ""
    served = any(service.complete(f"After it {i}. " * 40, 1).headers[HEADER] == new for i in range(30))
    return {
        "requests": args.requests,
        "answered": sum(a.status_code == 200 and len(a.json()["choices"]) == 1 for a in answered),
        "retries": service.total("vllm_ktx:ingress_retries_total"),
        "all_answered_s": round(all_answered, 1),
        "streams": {"done": ends["done"], "error_event": ends["error"], "silently_short": ends["short"]},
        "replacement_healthy_s": round(replaced, 1),
        "replacement_serves": served,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--heads", type=int, default=12, help="different beginnings of prompts")
    parser.add_argument("--chars", type=int, default=2400, help="of a beginning")
    parser.add_argument("--burst", type=int, default=24, help="requests of one head at once")
    parser.add_argument("--streams", type=int, default=6, help="streams that run when the engine is killed")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/replicas.json")
    args = parser.parse_args(argv)
    started = time.monotonic()
    with Service(*server_arguments()) as service:
        document: dict[str, Any] = {"start_s": round(time.monotonic() - started, 1)}
        for part in (affinity, spill, chaos):
            document[part.__name__] = part(service, args)
            print(f"[replicas] {part.__name__}: {document[part.__name__]}", file=sys.stderr, flush=True)
    document |= harness.environment()
    print(json.dumps(document, indent=1))
    if args.save:
        (harness.RESULTS / "replicas.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def server_arguments(cache_mib: int = 192) -> list[str]:
    """Of vLLM, for SmolLM2 on a small machine."""
    return [
        *(str(models.path("smollm2")), "--served-model-name", "model", "--enforce-eager", "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(cache_mib << 20), "--max-num-seqs", "8"),
    ]


if __name__ == "__main__":
    sys.exit(main())
