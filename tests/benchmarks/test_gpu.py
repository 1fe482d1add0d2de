"""The GPU benchmark, as far as it goes without one: it says so, and the published table is the committed result."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import gpu
from benchmarks.problem import SHAPES, make_problem
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.triton import aot

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "gpu-compile.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert gpu.main(["--all"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_the_documents_table_is_the_committed_result():
    assert gpu.compile_markdown(ROWS) in (ROOT / "docs" / "gpu.md").read_text()


def test_the_committed_result_covers_every_kernel_and_card_without_a_spill():
    by_card = {arch: {row["label"] for row in ROWS if row["arch"] == arch} for arch in aot.ARCHS}
    assert len(by_card[80]) >= 17 and all(labels == by_card[80] for labels in by_card.values())
    for row in ROWS:
        assert row["spills"] == 0 and row["shared"] <= aot.SHARED_LIMIT[row["arch"]], row


def test_bytes_of_a_step_follow_the_page_format():
    problem = make_problem(SHAPES["llama-3.1-8b"], "k4v4", 8191, 1)
    settings = SparseSettings(scoring="header")
    found = gpu.bytes_read(problem, settings, pages_read=70)
    layout = problem.layout
    assert found["sparse_bytes"] == 127 * layout.header_bytes + 70 * layout.payload_bytes
    assert found["bf16_bytes"] == 8191 * 2 * 8 * 128 * 2
