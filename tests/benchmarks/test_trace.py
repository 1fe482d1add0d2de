"""What benchmarks.trace says of spans, and that a real engine's trace has all of their kinds."""

import json

import pytest

from benchmarks import trace


def span(name, tid, start, end, cat="compute"):
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "tid": tid,
        "ts": 1e4 * start,
        "dur": 1e4 * (end - start),
        "pid": 0,
        "args": {},
    }


def test_overlap_of_spans():
    names = [
        {"ph": "M", "tid": i, "args": {"name": n}} for i, n in enumerate(("MainThread", "ktx-fetch", "ktx-write-back"))
    ]
    events = [
        *names,
        span("attention", 0, 0, 100),
        span("wait for pages", 0, 40, 60, "stall"),
        span("fetch", 0, 45, 55, "host"),  # on the model's own thread: that is the stall
        span("fetch", 1, 10, 50, "host"),
        span("write back", 2, 30, 80, "host"),
    ]
    found = trace.overlap(events)
    assert found["attention_s"] == pytest.approx(1.0) and found["stall_s"] == pytest.approx(0.2)
    assert found["background_hidden_share"] == pytest.approx((70 - 20) / 70, abs=1e-3)


@pytest.mark.e2e
def test_a_real_trace_has_compute_fetches_and_write_backs(tmp_path, capsys):
    out = tmp_path / "trace.json"
    args = ["--model", "retrieval", "--tokens", "6000", "--decode", "8", "--out", str(out), "--json"]
    assert trace.main(args) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["attention_s"] > 0 and found["write_back_s"] > 0 and found["stall_s"] > 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {"attention", "fetch", "write back"} <= {e["name"] for e in events if e["ph"] == "X"}
