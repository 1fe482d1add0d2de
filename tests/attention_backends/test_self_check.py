"""The check before serving: passes for kernels that are right, names what is wrong of those that aren't."""

import pytest
import torch

from tests.attention_backends.cases import GROUPS
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.self_check import KernelError, self_check
from vllm_ktx.attention_backends.torch_kernels import TorchKernels
from vllm_ktx.kv_quant import PageLayout, parse_format

CPU = torch.device("cpu")
HEADER = {"scoring": "header"}
built = native.load()
needs_kernels = pytest.mark.skipif(built is None, reason="native kernels not built")


def check(kernels, fmt="k4v4", page_size=64, kv_heads=2, group=4, dim=64, dtype=torch.bfloat16, sparse=None, **more):
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    settings = SparseSettings(**(sparse or {})) if fmt.quantized else None
    layout = PageLayout(fmt, page_size, kv_heads, dim, dtype.itemsize)
    return self_check(kernels, layout, kv_heads * group, dtype, CPU, settings, **more)


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"fmt": "none", "dtype": torch.float16, "kv_heads": 3, "group": 3},
        {"fmt": "k8v4", "page_size": 32, "dim": 96, "dtype": torch.float32, "softcap": 20.0},
        {"fmt": GROUPS[0], "page_size": 128, "group": 8, "kv_heads": 1, "sparse": {"select": "top_k", "top_k": 99}},
        {"fmt": GROUPS[1], "dim": 96, "sparse": {**HEADER, "select": "global_ratio", "global_ratio": 0.2}},
        {"page_size": 32, "sparse": {"coverage": 1.0}},
        {"dim": 256, "dtype": torch.float16, "sparse": {"scoring": "codes", "sinks": 0}},
    ],
)
def test_kernels_that_are_right_pass(shape):
    found = check(built, **shape)
    assert found["dense attention"] < 0.005 and found.get("sparse attention", 0.0) < 0.005
    assert ("sparse attention" in found) == (shape.get("fmt") != "none")


def test_the_fallback_passes():
    assert set(check(TorchKernels())) == {"sealing", "headers", "appending", "dense attention"}


class Broken:
    """The native kernels with one fault."""

    name, pages = "broken", True

    def __init__(self, fault):
        self.fault = fault

    def seal(self, layout, *args):
        built.seal(layout, *args)
        if self.fault == "sealing":
            args[5][:, :64] ^= 3  # codes of each page
        if self.fault == "headers":
            args[4][:, :8] += 1

    def append(self, layout, k, v, token, slot, offset, open_pages):
        built.append(layout, k, v, token, slot, offset, open_pages)
        if self.fault == "appending":
            open_pages[int(slot[-1]), 1, 0, int(offset[-1])] = 0

    def attention(self, layout, *, sparse=None, dropped=None, pages_read=None, chosen=None, out, **inputs):
        if self.fault == "dense attention" and sparse is None:
            inputs["context"] = inputs["context"] - (inputs["context"] > layout.page_size).int()  # the newest is missed
        more = {"dropped": dropped, "pages_read": pages_read, "chosen": chosen}
        built.attention(layout, out=out, sparse=sparse, **more, **inputs)
        if self.fault == "sparse attention" and sparse is not None:
            out[-3] = out[-4]
        if self.fault == "unread mass" and dropped is not None:
            dropped.zero_()
        if self.fault == "pages taken" and chosen is not None:
            pages_read += 2
        if self.fault == "nan":
            out[0] = torch.nan


@needs_kernels
@pytest.mark.parametrize(
    "fault", ["sealing", "headers", "appending", "dense attention", "sparse attention", "unread mass", "pages taken"]
)
def test_a_fault_is_named(fault):
    with pytest.raises(KernelError, match=f"broken kernels are wrong on this CPU: .*{fault} is off by"):
        check(Broken(fault))


@needs_kernels
def test_a_result_that_is_no_number_is_wrong():
    with pytest.raises(KernelError, match="attention is off by nan"):
        check(Broken("nan"))
    assert check(Broken("none"))
