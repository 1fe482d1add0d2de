"""The growth benchmark on tiny contexts: every part is there, the plot is written, stock stops where it is told to."""

import json

import pytest

pytest.importorskip("vllm._custom_ops")
pytest.importorskip("matplotlib")

from benchmarks import growth, harness
from vllm_ktx.attention_backends.cpu import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="native kernels not built")


def test_growth(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(growth, "FLUSH", 1024)
    monkeypatch.setattr(harness, "read_bandwidth", lambda: 1.0)
    arguments = ["--contexts", "6000,8192", "--prefill-contexts", "5000", "--chunk", "100", "--shape", "smollm2"]
    growth.main([*arguments, "--stock-up-to", "6000", "--rounds", "1", "--json", "--save"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    small, large = document["decode"]
    assert small["stock_ms"] > 0 and large["stock_ms"] is None
    assert all(row[f"{part}_ms"] >= 0 for row in (small, large) for part in growth.PARTS)
    assert document["prefill"][0]["ms_per_token"] > 0
    assert json.loads((tmp_path / "growth.json").read_text()) == document
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.parametrize("arguments", [["--contexts", "8K"], ["--contexts", ""]])
def test_bad_contexts_are_named(capsys, arguments):
    with pytest.raises(SystemExit):
        growth.main(arguments)
    assert "--contexts" in capsys.readouterr().err
