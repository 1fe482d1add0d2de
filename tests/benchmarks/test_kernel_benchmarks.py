"""The kernel benchmarks run end to end on a tiny context and print what other code reads."""

import json

import pytest

pytest.importorskip("vllm._custom_ops")

from benchmarks import decode, harness, prefill

KEYS = {"context", "format", "mode", "shape", "ms", "baseline_ms", "ratio_cpu_time", "ratio_wall", "rel_error"}
KEYS |= {"threads", "isa", "baseline_isa", "hardware", "torch", "vllm", "command"}
QUICK = ["--rounds", "1", "--seconds", "0", "--json"]


@pytest.mark.parametrize("fmt", ["k4v4", "k8v8", "none"])
def test_decode(capsys, fmt):
    decode.main(["--context", "200", "--format", fmt, "--shape", "smollm2", *QUICK])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert KEYS <= set(result)
    assert result["context"] == 200 and result["rel_error"] < 1e-2
    assert result["rel_error_unquantized"] < (0.3 if fmt == "k4v4" else 0.03)


@pytest.mark.parametrize(("benchmark", "scoring"), [(decode, "header"), (decode, "cascade"), (prefill, "header")])
def test_sparse(capsys, benchmark, scoring):
    arguments = ["--context", "3000", "--mode", "sparse", "--scoring", scoring, "--window", "256", "--shape", "smollm2"]
    benchmark.main([*arguments, *(["--chunk", "130"] if benchmark is prefill else []), *QUICK])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert KEYS | {"scoring", "pages_read", "dropped", "rel_error_dense", "ratio_to_own_dense"} <= set(result)
    assert result["rel_error"] < 1e-2, "against the same pages"
    assert 0 < result["dropped"] < 0.1 and 0 < result["dropped_true"] < (0.5 if scoring == "header" else 0.1)
    assert result["pages_read"] < 3000 / 64 and result["rel_error_dense"] > result["rel_error"]


@pytest.mark.parametrize("isa", ["auto", "torch"])
def test_prefill(capsys, monkeypatch, tmp_path, isa):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    arguments = ["--context", "130,64", "--chunk", "50", "--shape", "smollm2", "--isa", isa, "--save", "tiny", *QUICK]
    prefill.main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert KEYS <= set(result) and [row["context"] for row in result["results"]] == [130, 64]
    assert result["baseline_rel_error"] < 1e-2
    assert json.loads((tmp_path / "tiny.json").read_text()) == result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "sparser"], "--mode 'sparser' is unknown: use one of dense"),
        (["--format", "k3v3"], "--format 'k3v3'"),
        (["--context", "8K"], "--context '8K'"),
        (["--context", "0"], "--context 0: must be at least 1"),
        (["--mode", "sparse", "--scoring", "heads"], "ktx.scoring='heads': use one of header"),
        (["--mode", "sparse", "--window", "100"], "ktx.window=100 is not a multiple of the page size 64"),
    ],
)
def test_bad_settings_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        decode.main(arguments)
    assert message in capsys.readouterr().err
