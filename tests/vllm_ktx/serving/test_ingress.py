"""The public side with made-up replicas: retries, broken streams, limits, merged metrics. No Ray, no server."""

import asyncio
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from vllm_ktx.serving.ingress import Ingress
from vllm_ktx.serving.options import ServeOptions
from vllm_ktx.serving.wire import Head, ReplicaLost

STREAM = {"content-type": "text/event-stream; charset=utf-8"}
EVENTS = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b"}]}\n\n']
DONE = b"data: [DONE]\n\n"


class Replicas:
    """Answers from a script: one list a try, of Heads, bytes and exceptions."""

    def __init__(self, *tries):
        self.tries, self.seen, self.closed = list(tries), [], 0

    async def forward(self, request):
        self.seen.append(request)
        try:
            for part in self.tries.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1

    async def healthy(self):
        return ["a", "b"]

    async def metrics(self):
        return {"a": "# TYPE x gauge\nx 1\n", "b": "# TYPE x gauge\nx 2\n"}


def ask(replicas, method="POST", path="/v1/completions", options=None, **request):
    ingress = Ingress(replicas, options or ServeOptions(("m",), max_body_mib=1))

    async def send():
        app = Starlette(routes=[Route("/{path:path}", ingress.handle, methods=["GET", "POST"])])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send()), ingress


def lost(name="a"):
    return ReplicaLost("connection reset", name)


def test_an_answer_passes_with_its_status_headers_and_replica():
    replicas = Replicas([Head(418, {"x-request-id": "7", "content-type": "application/json"}, "b"), b'{"a": 1}'])
    headers = {"Authorization": "Bearer key", "Connection": "keep-alive"}
    answer, _ = ask(replicas, path="/v1/completions?x=1", json={"prompt": "hello"}, headers=headers)
    assert (answer.status_code, answer.json(), answer.headers["x-request-id"]) == (418, {"a": 1}, "7")
    assert answer.headers["x-ktx-replica"] == "b"
    (seen,) = replicas.seen
    assert (seen.method, seen.target, seen.path) == ("POST", "/v1/completions?x=1", "/v1/completions")
    assert seen.headers["authorization"] == "Bearer key" and "connection" not in seen.headers
    assert json.loads(seen.body) == {"prompt": "hello"} and b"hello" in seen.ask.key


def test_retries_elsewhere_before_the_first_byte():
    replicas = Replicas([lost("a")], [Head(200, STREAM, "b"), lost("b")], [Head(200, STREAM, "c"), *EVENTS, DONE])
    answer, ingress = ask(replicas, json={"prompt": "x", "stream": True})
    assert answer.content == b"".join(EVENTS) + DONE and answer.headers["x-ktx-replica"] == "c"
    assert [r.failed for r in replicas.seen] == [(), ("a",), ("a", "b")]
    assert ingress.counters["retries"] == 2 and replicas.closed == 3


def test_gives_up_with_a_clear_error():
    answer, ingress = ask(Replicas(*[[lost()]] * 3), json={"prompt": "x"})
    assert answer.status_code == 503 and "3 replicas were lost" in answer.json()["error"]["message"]
    assert ingress.counters["failed"] == 1 and ingress.counters["retries"] == 2


@pytest.mark.parametrize("end", [[lost()], []], ids=["replica lost", "stream cut"])
def test_a_broken_stream_ends_with_an_error_event(end):
    replicas = Replicas([Head(200, STREAM, "a"), EVENTS[0], EVENTS[1][:20], *end])
    answer, ingress = ask(replicas, json={"prompt": "x", "stream": True})
    *_, last, rest = answer.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert rest == "" and (error["code"], error["type"]) == (502, "replica_lost")
    assert "incomplete" in error["message"] and "[DONE]" not in answer.text
    assert ingress.counters["streams_broken"] == 1 and len(replicas.seen) == 1, "a started stream is not retried"


def test_streams_of_other_kinds_need_no_done():
    answer, _ = ask(Replicas([Head(200, STREAM, "a"), b"event: response.completed\n\n"]), path="/v1/responses", json={})
    assert "error" not in answer.text


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_is_refused_unread(chunked):
    body = b"x" * ((1 << 20) + 1)

    async def parts():
        for i in range(0, len(body), 1 << 16):
            yield body[i : i + (1 << 16)]

    answer, ingress = ask(Replicas(), content=parts() if chunked else body)
    assert answer.status_code == 413 and "--max-body-mib" in answer.json()["error"]["message"]
    assert ingress.counters["too_large"] == 1 and ingress.counters["requests"] == 0


def test_health_and_metrics():
    answer, _ = ask(Replicas(), "GET", "/health")
    assert answer.status_code == 200 and answer.json() == {"replicas": ["a", "b"]}
    answer, _ = ask(Replicas(), "GET", "/metrics")
    assert 'x{replica="a"} 1\nx{replica="b"} 2\n' in answer.text and "vllm_ktx:ingress_retries_total 0" in answer.text
    nobody = Replicas()
    nobody.healthy = lambda: asyncio.sleep(0, [])
    assert ask(nobody, "GET", "/health")[0].status_code == 503
