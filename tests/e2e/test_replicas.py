"""`vllm-ktx serve --replicas 2` with real vLLM servers: the same answers, merged counters, a killed engine survived."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed (pip install -e '.[ray]')")
pytest.importorskip("psutil")

from benchmarks.replicas import HEADER, Service, server_arguments

pytestmark = pytest.mark.e2e


def test_two_replicas_answer_and_survive_a_killed_engine(smollm2):
    arguments = [*server_arguments(128), "--additional-config", json.dumps({"ktx": {"format": "k4v4"}})]
    with Service(*arguments) as service:
        # The same question from many sessions, until both replicas have answered it.
        answers = {}
        for session in range(40):
            service.client.headers["x-session-id"] = str(session)
            answer = service.complete("One, two, three, four,")
            answers[answer.headers[HEADER]] = answer.json()["choices"][0]["text"]
            if len(answers) == 2:
                break
        del service.client.headers["x-session-id"]
        assert len(answers) == 2 and len(set(answers.values())) == 1 and "five" in answers.popitem()[1]
        assert service.stream("One, two, three, four,", 8)["end"] == "done"

        text = service.client.get("/metrics").text
        for name in service.names():
            assert f'vllm:prompt_tokens_total{{replica="{name}",' in text
        assert "KTX memory plan" in service.log_text() and "k4v4" in service.log_text()

        end = time.monotonic() + 20  # both have answered, but a list of processes made while some change can lack one
        while len(engines := service.engines()) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        assert len(engines) == 2 == len(service.names())
        with ThreadPoolExecutor(8) as pool:
            requests = [pool.submit(service.complete, f"Number {i}: " * 30, 24) for i in range(16)]
            while not any(request.done() for request in requests):
                time.sleep(0.02)
            os.kill(next(iter(engines.values())), signal.SIGKILL)
            assert [request.result().status_code for request in requests] == [200] * 16
