"""The Triton kernels without a GPU: run in the interpreter (a process of its own), compiled for four cards, and kept
free of what would wait for the device.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.kv_quant import PageLayout, parse_format

pytest.importorskip("triton")
from triton._C.libtriton import ir

from vllm_ktx.attention_backends.triton import aot

TARGET = aot.GPUTarget("cuda", 90, 32)
PACKAGE = Path(aot.__file__).parent
ROOT = Path(__file__).parents[2]
KERNEL_TESTS = tuple(Path(__file__).with_name(f"test_triton_{name}.py") for name in ("kernels", "pages"))
GRAPH_TESTS = Path(__file__).with_name("test_triton_graph.py")


def in_the_interpreter(*options, tests=KERNEL_TESTS):
    """Runs `tests` with TRITON_INTERPRET=1, which Triton reads when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests), *options]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and "skipped" not in done.stdout, done.stdout
    return int(passed[1])


def test_kernels_match_the_oracle_in_the_interpreter():
    assert in_the_interpreter() >= 65


def test_full_graphs_replay_eager_steps_in_the_interpreter():
    assert in_the_interpreter(tests=[GRAPH_TESTS]) == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_match_the_oracle_in_the_interpreter_over_wider_shapes():
    assert in_the_interpreter("-m", "slow", tests=[*KERNEL_TESTS, GRAPH_TESTS]) >= 21


@pytest.mark.slow
@pytest.mark.e2e
def test_vllm_says_the_same_with_triton_kernels():
    assert in_the_interpreter(tests=[ROOT / "tests" / "e2e" / "test_triton.py"]) == 3


V2_TESTS = ROOT / "tests" / "e2e" / "test_v2_runner.py"


@pytest.mark.e2e
def test_vllms_v2_runner_runs_the_same_steps():
    assert in_the_interpreter(tests=[V2_TESTS]) == 4


@pytest.mark.slow
@pytest.mark.e2e
def test_vllms_v2_runner_says_the_same_with_triton_kernels():
    assert in_the_interpreter("-m", "slow", tests=[V2_TESTS]) == 3


def launches(name, dim, dtype=torch.bfloat16, q_heads=32, kv_heads=8):
    layout = PageLayout(parse_format(name), 64, kv_heads, dim)
    return aot.record(layout, q_heads, dtype, SparseSettings() if layout.fmt.quantized else None)


def check_fits(launch, arch):
    built = launch.compile(arch)
    assert built.spills == 0, f"{built}: registers are spilled"
    check_shared(built)
    allocated = -(-built.registers // 8) * 8 * 32 * built.warps  # registers come in eights a thread
    assert allocated <= 1 << 16, f"{built}: more registers than a block may use"


def check_shared(built):
    assert built.shared <= aot.SHARED_LIMIT[built.arch], f"{built}: more shared memory than a block may use"


@pytest.mark.parametrize(("dim", "q_heads", "kv_heads"), [(128, 32, 2), (256, 8, 1)])
def test_blocks_of_many_query_heads_fit_the_smallest_shared_memory(dim, q_heads, kv_heads):
    for launch in launches("k4v4", dim, q_heads=q_heads, kv_heads=kv_heads):
        if launch.label in ("score_headers x16", "probe_pages x16"):
            check_shared(launch.compile(86))


def test_every_kernel_takes_ones():
    """Triton makes a constant of an integer that is 1, which then can't be assigned anew (the interpreter doesn't)."""
    for launch in launches("k4v4", 64):
        source = launch.source
        ones = [name for name, kind in source.signature.items() if kind in ("i32", "i64")]
        signature = {**source.signature, **dict.fromkeys(ones, "constexpr")}
        constants = {**source.constants, **{(source.fn.arg_names.index(name),): 1 for name in ones}}
        attributes = {at: value for at, value in source.attrs.items() if at not in constants}
        backend, context = aot.nvidia.CUDABackend(TARGET), ir.context()
        options = backend.parse_options(dict(launch.options))
        ir.load_dialects(context)
        backend.load_dialects(context)
        aot.ASTSource(source.fn, signature, constants, attributes).make_ir(
            TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )


HOT = (
    "seal_pages", "attend_split CHOSEN", "attend_blocks CHOSEN", "score_headers x1", "choose_pages JOIN x1",
    "attend_split CHOSEN HAS_HOST", "find_slots", "fetch_pages",
)  # fmt: skip


@pytest.mark.parametrize("arch", aot.ARCHS)
def test_what_a_step_of_an_8b_model_launches_compiles_without_spills(arch):
    found = [launch for launch in launches("k4v4", 128) if launch.label in HOT]
    assert len(found) == len(HOT)
    for launch in found:
        check_fits(launch, arch)


def test_what_finds_pages_by_their_place_in_host_memory_compiles_without_spills():
    layout = PageLayout(parse_format("k4v4"), 64, 8, 128)
    found = aot.record(layout, 32, torch.bfloat16, SparseSettings(), with_disk=True)
    labels = {launch.label: launch for launch in found}
    attend = (f"{name} CHOSEN HAS_HOST" for name in ("attend_split", "attend_blocks"))
    for name in (*attend, "fetch_pages", "publish_pages", "read_pages"):
        check_fits(labels[name], 86)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize(("name", "dim"), [("k4v4", 128), ("k4v4", 64), ("k8v4", 128), ("k8v8", 64), ("none", 128)])
def test_all_kernels_compile_without_spills(name, dim, arch):
    for launch in launches(name, dim):
        check_fits(launch, arch)


def test_every_kernel_of_the_package_is_among_the_launches():
    kernels = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                kernels |= {node.name} if "program_id" in ast.unparse(node) else set()
    launched = {launch.label.split()[0] for launch in launches("k4v4", 128)}
    assert kernels | {"find_slots"} == launched  # which is one program


# What waits for the device, or reads from it.
WAITS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize", "is_nonzero"}
HOT_MODULES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "aot.py")


@pytest.mark.parametrize("path", HOT_MODULES, ids=lambda path: path.name)
def test_hot_paths_never_wait_for_the_device(path):
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & WAITS, f"{path.name}: {names & WAITS}"


def test_launches_follow_from_shapes_alone():
    """Recorded on tensors that have no contents at all, twice: the same kernels with the same constants."""
    some, others = launches("k4v4", 64), launches("k4v4", 64)
    assert [(x.label, x.source.signature, x.source.constants) for x in some] == [
        (x.label, x.source.signature, x.source.constants) for x in others
    ]
