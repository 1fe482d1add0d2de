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
from vllm_ktx.attention_backends.triton import aot

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
    assert in_the_interpreter(tests=[V2_TESTS]) == 3


@pytest.mark.slow
@pytest.mark.e2e
def test_vllms_v2_runner_says_the_same_with_triton_kernels():
    assert in_the_interpreter("-m", "slow", tests=[V2_TESTS]) == 1


def launches(name, dim, dtype=torch.bfloat16, q_heads=32, kv_heads=8):
    layout = PageLayout(parse_format(name), 64, kv_heads, dim)
    return aot.record(layout, q_heads, dtype, SparseSettings() if layout.fmt.quantized else None)


def check_fits(launch, arch):
    built = launch.compile(arch)
    assert built.spills == 0, f"{built}: registers are spilled"
    assert built.shared <= aot.SHARED_LIMIT[arch], f"{built}: more shared memory than a block may use"


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
