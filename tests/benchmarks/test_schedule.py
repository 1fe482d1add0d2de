"""The scheduling benchmark on small traces: both engines serve the same requests, and all answers are right."""

import json

import pytest

from benchmarks import harness, schedule


def test_simulation(capsys):
    assert schedule.main(["--simulate"]) == 0
    rows = json.loads(capsys.readouterr().out)["simulation"]
    assert {(row["costs"], row["load"]) for row in rows} == {(c, n) for c in ("gpu", "cpu") for n in (0.5, 1.0)}
    for row in rows:
        assert row["worst"]["ttft_short_p95_gain"] >= 2 and row["worst"]["throughput_ratio"] >= 0.95


@pytest.mark.e2e
def test_real_engines_take_turns(retrieval, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    small = ["--requests", "10", "--traces", "1", "--seconds", "0.5", "--longest", "6000", "--cache-mib", "128"]
    schedule.main([*small, "--save"])
    document = json.loads(capsys.readouterr().out)
    (trace,) = document["real"]["traces"]
    assert trace["stock"]["right"] == trace["length_grouped"]["right"] == 10
    assert trace["gains"]["throughput_ratio"] > 0.5
    assert json.loads((tmp_path / "schedule.json").read_text()) == document
