"""Prefill by xformers, with its three functions in plain torch: gathering, masks and join against the sparse oracle.

Runs in Triton's interpreter: `test_xformers.py` starts it.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_xformers.py runs it", allow_module_level=True)
from tests.attention_backends import test_triton_kernels, test_triton_pages
from tests.attention_backends.cases import GROUPS, make_format
from tests.attention_backends.partials import Counted
from tests.attention_backends.test_triton_kernels import SMALL, check, small_batch
from vllm_ktx.attention_backends.selection import SparseSettings

pytest.importorskip("triton")
from vllm_ktx.attention_backends.triton.launch import TritonKernels
from vllm_ktx.attention_backends.triton.xformers_prefill import Functions, XformersPrefill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
torch.set_num_threads(1)


@pytest.fixture
def counted(monkeypatch):
    """Has `check` of the kernels' tests run with xformers' prefill."""
    functions = Counted()
    prefill = XformersPrefill(Functions(functions.local, functions.listed, functions.merge))
    monkeypatch.setattr(test_triton_kernels, "kernels", TritonKernels(prefill=prefill))
    return functions


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([(66, 330)], {}),  # one block; the two tokens behind it choose for themselves
        ([(193, 330)], {"dtype": torch.float16}),  # a chunk longer than the window: the edge reaches its own tokens
        # Decode beside; a prompt shorter than the window, and one that just reaches it: query 0 has nothing listed.
        ([(65, 417), (1, 500), (65, 40), (66, 64)], {}),
        ([(65, 503)], {"page_size": 64, "q_heads": 6, "kv_heads": 2, "dim": 80}),
        ([(65, 611)], {"page_size": 96, "q_heads": 1, "fmt": make_format(8, 8), "settings": {"window": 192}}),
        ([(65, 420)], {"fmt": make_format(4, 8, v_method="per_channel", v_rotate=False), "seal_tail": True}),
        ([(65, 330)], {"fmt": make_format(k_method="per_token", v_method="per_head"), "scoring": "header"}),
        ([(65, 500)], {"fmt": GROUPS[0], "page_size": 64, "dim": 96}),
        ([(65, 420)], {"fmt": GROUPS[1], "dim": 64, "scoring": "header"}),
        ([(129, 300)], {"settings": {"sinks": 0, "select": "top_k", "top_k": 1}, "scattered_slots": False}),
    ],
)
def test_join_matches_the_oracle(rows, changes, counted):
    more = {"coverage": 0.8, **changes.pop("settings", {}), "scoring": changes.pop("scoring", "cascade")}
    check(small_batch(rows, **{"q_heads": 2, **changes}), SparseSettings(**{**SMALL, **more}), 0.9)
    assert counted.lengths, "xformers' functions were not called"


def test_pages_beyond_the_device_are_gathered_where_they_lie(counted, monkeypatch):
    monkeypatch.setattr(test_triton_pages, "kernels", test_triton_kernels.kernels)
    batch = test_triton_pages.small_batch([(66, 330)], q_heads=2)
    test_triton_pages.check(batch, SparseSettings(**SMALL, coverage=0.8), (3,), steps=1)
    assert counted.lengths, "xformers' functions were not called"


def test_a_wave_holds_a_unit_at_least_and_units_do_not_depend_on_it(counted, monkeypatch):
    from vllm_ktx.attention_backends.triton import xformers_prefill

    monkeypatch.setattr(xformers_prefill, "BUFFER_BYTES", 1)
    check(small_batch([(129, 330)], q_heads=2), SparseSettings(**SMALL, coverage=0.8), 0.9)
    assert [len(lengths) for lengths in counted.lengths] == [1, 1]


def test_a_window_that_no_context_exceeds_leaves_blocks_to_triton(counted):
    batch = small_batch([(70, 60)], q_heads=2)
    test_triton_kernels.run(batch, SparseSettings(window=1024))
    assert not counted.lengths
