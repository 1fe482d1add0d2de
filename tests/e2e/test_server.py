"""`vllm serve --attention-backend ktx` as a user starts it, asked over HTTP."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def serving(model, folder: Path, ktx: dict, kv_bytes: int):
    """A server's address, log and process."""
    port, log = free_port(), folder / "log"
    (folder / "prometheus").mkdir()
    command = [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--served-model-name", "smollm2", "--attention-backend", "ktx"),
        *("--additional-config", json.dumps({"ktx": ktx})),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", "4"),
    ]
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(folder / "prometheus"),
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.time() + 240
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None and time.time() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", log, process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    with serving(smollm2, tmp_path_factory.mktemp("server"), {"format": "k4v4"}, 128 << 20) as (base, log, _):
        yield base, log


def ask(base: str, path: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps({"model": "smollm2", "temperature": 0, **body}).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120).read().decode()


CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_completion(server):
    answer = json.loads(ask(server[0], "/v1/completions", {"prompt": "One, two, three, four,", "max_tokens": 8}))
    assert "five" in answer["choices"][0]["text"]


def test_chat_and_stream_say_the_same(server):
    whole = json.loads(ask(server[0], "/v1/chat/completions", {"messages": CHAT, "max_tokens": 24}))
    text = whole["choices"][0]["message"]["content"]
    assert "Paris" in text
    lines = ask(server[0], "/v1/chat/completions", {"messages": CHAT, "max_tokens": 24, "stream": True}).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(events) > 3 and lines[-2 if lines[-1] == "" else -1] == "data: [DONE]"
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == text


def test_metrics_of_vllm_and_of_ktx(server):
    ask(server[0], "/v1/completions", {"prompt": "word " * 200, "max_tokens": 4})
    lines = ask(server[0], "/metrics").splitlines()
    assert any(line.startswith("vllm:prompt_tokens_total") for line in lines)
    values = {
        line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm_ktx:")
    }
    assert values["vllm_ktx:attention_calls_total"] > 0
    assert values["vllm_ktx:sealed_total"] >= 3


def test_start_up_log_states_plan_and_capacity(server):
    log = server[1].read_text()
    assert "KTX memory plan" in log and "k4v4 (keys per_channel, values per_token + Hadamard)" in log
    assert "KV cache size: " in log


@pytest.mark.parametrize("how", ["the worker is killed", "the server is told to end"])
def test_under_load_nothing_hangs_and_no_file_is_left(smollm2, tmp_path, how):
    """A request larger than the device, its pages on disk, when the end comes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    ktx = {"format": "k4v4", "window": 256, "min_pages": 2, "host_gib": 0.05, "disk_gib": 0.1, "disk_dir": str(disk)}
    with serving(smollm2, tmp_path, ktx, 10_000_000) as (base, log, process):
        assert "pages for each that the device holds" in log.read_text()
        every = psutil.Process(process.pid).children(recursive=True)
        (worker,) = [child for child in every if any(str(disk) in link for link in links(child.pid))]
        assert os.listdir(disk) == []
        body = {"prompt": "Count: " + " ".join(map(str, range(400))), "max_tokens": 500, "stream": True}
        data = json.dumps({"model": "smollm2", "temperature": 0, "ignore_eos": True, **body}).encode()
        request = urllib.request.Request(base + "/v1/completions", data, {"Content-Type": "application/json"})
        answer = urllib.request.urlopen(request, timeout=15)
        for _ in range(4):
            assert answer.readline()
        worker.kill() if how == "the worker is killed" else process.terminate()
        try:
            rest = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            rest = f"error: {error}"
        answer.close()  # told to end, vLLM's server waits for its clients
        assert "error" in rest or "[DONE]" not in rest, "a stream that was cut must not look complete"
        process.wait(60)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert os.listdir(disk) == []


def links(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
