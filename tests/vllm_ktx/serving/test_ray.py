"""Ray Serve with two replicas whose servers are stubs: affinity, spill, deaths around first bytes, drain."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed (pip install -e '.[ray]')")

from vllm_ktx.serving import app
from vllm_ktx.serving.options import ServeOptions
from vllm_ktx.serving.server import free_port

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    once = tmp_path_factory.mktemp("once") / "once"
    options = ServeOptions(
        ("some-model", "--api-key", "secret", "--once", str(once), "--full", f"{once}-full"),
        replicas=2,
        host="127.0.0.1",
        port=free_port(),
        max_body_mib=1,
        start_seconds=60,
        drain_seconds=20,
        command=(sys.executable, str(Path(__file__).with_name("stub_server.py"))),
    )
    app.start(options)
    with httpx.Client(base_url=f"http://127.0.0.1:{options.port}", headers=KEY, timeout=60) as client:
        wait_for(client, 2)
        yield client, once
    app.stop()


def wait_for(client, replicas: int, but: str = "") -> list[str]:
    deadline = time.time() + 60
    while time.time() < deadline:
        answer = client.get("/health")
        names = answer.json().get("replicas", [])
        if answer.status_code == 200 and len(names) == replicas and but not in names:
            return names
        time.sleep(0.2)
    raise AssertionError(f"no {replicas} healthy replicas in time: {names}")


def complete(client, prompt: str, **more):
    return client.post("/v1/completions", json={"prompt": prompt, **more})


def test_same_head_same_replica_and_both_are_used(served):
    client, _ = served
    homes = {}
    for head in range(12):
        found = {complete(client, f"{head} " * 2000 + str(i)).headers["x-ktx-replica"] for i in range(3)}
        assert len(found) == 1, "the same head goes to the same replica"
        homes[head] = found.pop()
    assert len(set(homes.values())) == 2
    sessions = {
        client.post("/v1/completions", json={"prompt": str(i)}, headers={"x-session-id": "s"}).headers["x-ktx-replica"]
        for i in range(6)
    }
    assert len(sessions) == 1


def test_long_prompts_go_where_the_cache_has_room(served):
    """One of the two says that its cache is full; the other has room for 48,000 tokens."""
    client, _ = served
    deadline = time.time() + 30
    while time.time() < deadline:
        found = {complete(client, f"{head} " * 55_000).headers["x-ktx-replica"] for head in range(10, 20)}
        if len(found) == 1:
            break
    assert len(found) == 1, "what replicas publish reaches the router"
    short = {complete(client, f"{head} " * 500).headers["x-ktx-replica"] for head in range(10, 30)}
    assert len(short) == 2


def test_load_spills_and_keys_limits_errors_pass(served):
    client, _ = served
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: complete(client, "slow", max_tokens=i), range(24)))
    assert [a.status_code for a in answers] == [200] * 24
    share = Counter(a.headers["x-ktx-replica"] for a in answers)
    assert len(share) == 2 and min(share.values()) >= 6, share
    bare = httpx.post(f"{client.base_url}/v1/completions", json={"prompt": "x"})
    assert bare.status_code == 401
    assert complete(client, "x" * (2 << 20)).status_code == 413
    assert complete(client, "error").json() == {"error": {"message": "a bug"}}, "a healthy server's 500 is not retried"


def test_merged_metrics(served):
    client, _ = served
    text = client.get("/metrics").text
    names = wait_for(client, 2)
    assert all(f'stub:requests_total{{replica="{name}"}}' in text for name in names)
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1 and "vllm_ktx:ingress_requests_total" in text


@pytest.mark.parametrize("prompt", ["die at once", "dead engine"])
def test_a_request_survives_its_replica_which_is_replaced(served, prompt):
    client, once = served
    once.unlink(missing_ok=True)
    wait_for(client, 2)
    answer = complete(client, prompt)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == f"echo {prompt}"
    assert once.exists(), "one of them died"
    wait_for(client, 2)


def test_a_started_stream_ends_with_an_error_event(served):
    client, _ = served
    names = wait_for(client, 2)
    with client.stream("POST", "/v1/completions", json={"prompt": "die", "stream": True}) as answer:
        text = "".join(answer.iter_text())
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert [e["choices"][0]["text"] for e in events[:-1]] == [f"token {i}" for i in range(5)]
    assert events[-1]["error"]["type"] == "replica_lost" and "[DONE]" not in text
    assert wait_for(client, 2, but=answer.headers["x-ktx-replica"]) != names


def test_a_killed_server_is_replaced_while_requests_go_on(served):
    client, once = served
    once.touch()
    wait_for(client, 2)
    victim = complete(client, "who are you").json()["pid"]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, client, f"slow {i % 5}") for i in range(16)]
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        assert [a.result().status_code for a in answers] == [200] * 16
    wait_for(client, 2)


def test_streams_pass_as_they_come_and_running_ones_are_drained(served):
    """The last test: it takes the application down while a stream runs."""
    client, _ = served
    lines, first = [], []

    def read():
        with client.stream("POST", "/v1/completions", json={"prompt": "slow", "stream": True}) as answer:
            for line in answer.iter_lines():
                first.append(time.time())
                lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    while not first:
        time.sleep(0.01)
    begun = first[0]
    app.stop()
    reader.join(30)
    assert [line for line in lines if line][-1] == "data: [DONE]" and len([x for x in lines if x]) == 11
    assert first[-1] - begun > 0.6, "token by token, not at the end"


RUN = "import sys; from vllm_ktx.serving.app import *; sys.exit(main(ServeOptions(**eval(sys.argv[1]))))"
STUCK = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def run(log: Path, **options) -> subprocess.Popen:
    options = {"replicas": 1, "host": "127.0.0.1", "start_seconds": 600, "drain_seconds": 20} | options
    with log.open("w") as out:
        return subprocess.Popen([sys.executable, "-c", RUN, repr(options)], stdout=out)


def read_with(file: Path, text: str = "") -> str:
    deadline = time.time() + 120
    while not (file.exists() and (found := file.read_text()) and text in found):
        assert time.time() < deadline, f"no {text!r} in {file}"
        time.sleep(0.1)
    return found


def test_ctrl_c_ends_a_start_and_what_it_started(tmp_path):
    stuck = (sys.executable, "-c", STUCK, str(tmp_path / "pid"))
    process = run(tmp_path / "log", arguments=(), port=free_port(), command=stuck)
    try:
        server = int(read_with(tmp_path / "pid"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    for _ in range(200):
        if not Path(f"/proc/{server}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("its server still runs")


def test_sigterm_drains(tmp_path):
    port, stub = free_port(), (sys.executable, str(Path(__file__).with_name("stub_server.py")))
    process = run(tmp_path / "log", arguments=("some-model",), port=port, command=stub)
    try:
        read_with(tmp_path / "log", f"1 replicas serve on http://127.0.0.1:{port}")
        body = {"prompt": "slow", "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
