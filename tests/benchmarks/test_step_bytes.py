"""Bytes of a decode step: from counters to bytes, by the page format's sizes."""

from types import SimpleNamespace

import pytest

from benchmarks.retrieval import step_bytes
from vllm_ktx.kv_quant import PageLayout, parse_format

LAYOUT = PageLayout(parse_format("k4v4"), 64, 2, 128)
CONTEXT, STEPS, ROWS = 6400, 4, 4 * 3 * 2  # rows: steps x layers x kv heads


def engine(ktx):
    layer = SimpleNamespace(impl=SimpleNamespace(layout=LAYOUT, num_kv_heads=2))
    config = SimpleNamespace(
        additional_config={"ktx": ktx},
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(("0", "1", "2"), layer)),
    )
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_reads_headers_probed_planes_and_pages(share):
    counted = {
        "steps": STEPS,
        "sparse_rows": ROWS,
        "sparse_pages_context": ROWS * 100,
        "sparse_pages_read": ROWS * 30,
        "probed_share": ROWS * share,
        "context_tokens": STEPS * CONTEXT,
    }
    llm = engine({"format": "k4v4", "window": 1024})
    found = step_bytes(llm, counted, CONTEXT)
    parts = found["bytes_per_step"]
    assert parts["headers"] == 3 * 100 * LAYOUT.header_bytes
    candidates = 100 - 16 - 1  # window and sinks left out
    assert parts["plane0"] == 3 * share * candidates * LAYOUT.scoring_bytes
    assert parts["pages"] == 3 * (28 * LAYOUT.payload_bytes + 2 * LAYOUT.dense_bytes)  # one open, one residual
    assert parts["bf16_dense"] == 3 * CONTEXT * 2 * 2 * 128 * 2
    assert found["bytes_ratio"] == pytest.approx(parts["bf16_dense"] / parts["all"], abs=0.01)
    assert step_bytes(llm, {**counted, "sparse_rows": ROWS - 1}, CONTEXT) == {}, "a row of a step was dense"
