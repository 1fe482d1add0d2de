"""The compression table, the ablation and the seal cost: what their rows say of made-up measurements."""

import json

import numpy as np
import pytest

from benchmarks import ablation, compression, harness, quality, seal_cost
from benchmarks.engine import Ran, Scores
from benchmarks.needles import Answers, Haystack
from benchmarks.sparsity import Work
from vllm_ktx.config import KtxConfig

WORK = Work([[0] * 101], [None], [Haystack(64, [0] * 64, [0.0, 0.25, 0.5, 0.75, 1.0], [(1, 2)] * 5)])


def measured(shift=0.0, device=9570.0, right=5):
    rng = np.random.default_rng(0)
    logprobs = -np.sort(rng.exponential(size=(100, 20)), 1) - 1
    scores = Scores(1 + shift + 0.01 * rng.standard_normal(100), np.tile(np.arange(20), (100, 1)), logprobs - shift)
    answers = [Answers([0.5] * 5, [i < right for i in range(5)])]
    return Ran(compression.Measured([scores], answers, 20.0, device, [(3, 64, 64)] * 30), {}, "avx2", 1.0)


def figures(row, ran):
    return compression.figures(row, ran, measured().value, WORK)


def test_every_row_is_a_setting_of_ktx_or_waits_for_one():
    names = [row.label for row in compression.served()]
    assert names[:4] == [row.label for row in compression.ROWS[:4]]
    for row in compression.served():
        KtxConfig.parse(row.ktx).kv_format()
    waiting = [row for row in compression.ROWS if row not in compression.served()]
    assert all("paging" in row.label and "overcommit" in row.ktx for row in waiting)


def test_a_row_knows_its_bytes_and_what_it_misses():
    row = compression.ROWS[2]
    found = figures(row, measured(shift=0.003))
    assert found["bytes"] == found["device_bytes"] == 9570 and found["ratio"] == pytest.approx(23040 / 9570)
    assert found["perplexity"]["change"] == pytest.approx(np.exp(0.003) - 1) and found["missed"] == []
    assert figures(row, measured(shift=0.02))["missed"] == ["perplexity"]
    assert figures(row, measured(device=12000))["missed"] == ["ratio"]
    assert figures(row, measured(right=3))["needles"] == 0.6
    assert figures(compression.ROWS[0], measured())["ratio"] == 1


def test_the_table_marks_the_choice_of_auto_and_misses(monkeypatch, tmp_path):
    runs = iter([measured(device=46080), *(measured(0.002 * i, 12000 - 1000 * i) for i in range(9))])
    monkeypatch.setattr(compression.engine, "run", lambda *a: next(runs))
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rows = compression.run(tmp_path, WORK, 102, lambda label, call: call())
    (chosen,) = [row for row in rows if row["auto"]]
    assert chosen["ktx"].keys() == {"format", "attention"}
    text = compression.markdown({"rows": rows})
    assert text.count("chosen by `auto`") == 1 and "**misses" in text and "| bf16 (stock vLLM) |" in text
    document = {"model": "m", "context": 100, "rows": rows}
    compression.plot(document, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 1000
    json.dumps(document)


def test_the_ablations_rows_change_one_thing_and_conclude(smollm2):
    base = ablation.settings(ablation.DEFAULT)
    for row in ablation.ROWS:
        KtxConfig.parse(ablation.settings(row)).kv_format()
        assert row is ablation.DEFAULT or row.change or row.page_size != 64
        assert {**base, **row.change} == ablation.settings(row)
    assert ablation.bytes_per_token(ablation.DEFAULT, smollm2) == pytest.approx(6690, rel=0.001)
    default = {"kl": 0.005, "bytes": 100.0}
    assert ablation.conclusion(default, default) == "the default"
    assert ablation.conclusion({"kl": 0.5, "bytes": 100.0}, default) == "a trap: 100 times the divergence, same bytes"
    assert ablation.conclusion({"kl": 0.0049, "bytes": 95.0}, default) == "no difference within noise, -5 % bytes"
    assert ablation.conclusion({"kl": 0.001, "bytes": 143.0}, default) == "0.20 times the divergence, +43 % bytes"


def test_the_seal_costs_rows_are_settings_and_say_what_is_over():
    for ktx in seal_cost.ROWS:
        KtxConfig.parse(ktx).kv_format()
    row = {"ktx": {"format": "k8v4"}, "kernels": "avx2", "share": 0.04, "us_per_page": 9.0, "met": False}
    assert "| format=k8v4 | avx2 | 4.00 % (**over 3 %**) | 9.0 |" in seal_cost.markdown([row])


def test_table_settings(capsys):
    args = quality.parse(["--table"])
    assert (args.context, args.needles) == (4096, 1)
    with pytest.raises(SystemExit):
        ablation.main(["--rows", "keys,sizes"])
    assert "'sizes' is unknown: use some of keys, values, residual, pages, layers" in capsys.readouterr().err


def test_the_documents_tables_are_the_results():
    text = (harness.RESULTS.parents[1] / "docs" / "quantization.md").read_text()

    def load(name):
        return json.loads((harness.RESULTS / f"{name}.json").read_text())

    for name in ("smollm2", "smollm2-8192", "smollm2-s32"):
        assert compression.markdown(load(f"quality-table-{name}")) in text
    assert seal_cost.markdown(load("seal-cost-smollm2")["rows"]) in text
    for model in ("smollm2", "smollm2-s32"):
        assert ablation.markdown(load(f"ablation-{model}")["rows"]) in text, model
