"""vLLM's own V2 block tables and their copy in host memory: any history of requests is planned the same from both."""

from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import block_table, buffer_utils

from tests.offload.test_open_pages import PAGE, Engine
from vllm_ktx import _compat
from vllm_ktx.offload import OpenPages

ROWS, REQUESTS = 4, 5


class Kernel:
    """What vLLM's kernel does, on the CPU."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return self.run


@Kernel
def apply_write(output, stride, index, start, contents, ends, groups, **constants):
    begin = 0
    for i, (at, end) in enumerate(zip(index.tolist(), ends.tolist(), strict=True)):
        output[at, start[i] : start[i] + end - begin] = contents[begin:end]
        begin = end


@pytest.fixture
def make_tables(monkeypatch):
    monkeypatch.setattr(buffer_utils, "UvaBuffer", UvaBuffer)
    monkeypatch.setattr(buffer_utils, "_apply_write_kernel", apply_write)
    for name in ("__init__", "gather_block_tables", "get_dummy_block_tables"):
        monkeypatch.setattr(block_table.BlockTables, name, getattr(block_table.BlockTables, name))
    _compat.mirror_block_tables()
    _compat.mirror_block_tables()

    def make(max_pages):
        tables = block_table.BlockTables([PAGE], REQUESTS, 512, [max_pages], torch.device("cpu"))

        def gather(index, source, out, strides, num_blocks, *rest, **constants):
            for row, request in enumerate(index.tolist()):
                used = int(num_blocks[0, request])
                tables.input_block_tables[0][row, :used] = tables.block_tables[0].gpu[request, :used]

        monkeypatch.setattr(block_table, "_gather_block_tables_kernel", Kernel(gather))
        return tables

    return make


class Twins(OpenPages):
    """Plans each step three times: from the scheduler's table, from the device's, and from the host's copy of it."""

    def follow(self, tables, *args):
        self.tables, self.twins = tables, [OpenPages(*args), OpenPages(*args)]
        self.held, self.used = {}, {}  # blocks of each request's row, and when it was last scheduled
        self.did = Counter()

    def _request(self, blocks, taken):
        """Who holds the beginning of `blocks`, else somebody new, if need be in the row of one that is preempted."""
        for request, held in self.held.items():
            if request not in taken and held and held == blocks[: len(held)]:
                self.did["grew"] += len(blocks) > len(held)
                self.tables.append_block_ids(request, (blocks[len(held) :],), overwrite=False)
                return request
        free = [r for r in range(REQUESTS) if r not in self.held]
        self.did["new" if free else "preempted"] += 1
        request = free[-1] if free else min(set(self.held) - taken, key=self.used.get)
        self.tables.append_block_ids(request, (blocks,), overwrite=True)
        return request

    def plan(self, cu_q, context, table, prefilling=None):
        plan = super().plan(cu_q, context, table, prefilling)
        index = []
        for row, end in enumerate(context + np.diff(cu_q)):
            blocks = table[row][: -(-end // PAGE)].tolist()
            index.append(self._request(blocks, set(index)))
            self.held[index[-1]], self.used[index[-1]] = blocks, self.step
        self.tables.apply_staged_writes()
        (device,) = self.tables.gather_block_tables(torch.tensor(index), len(index))
        host = _compat.host_table(SimpleNamespace(block_table_tensor=device, req_idx=np.array(index)))
        for twin, where in zip(self.twins, (device.numpy(), host), strict=True):
            same = twin.plan(cu_q, context, where, prefilling)
            for field in fields(plan):
                assert (getattr(plan, field.name) == getattr(same, field.name)).all()
            assert (twin.slot_of == self.slot_of).all()
        return plan


def history(make_tables, seed):
    """Random requests; what became of their rows."""
    rng = np.random.default_rng(seed)
    residual, speculative = seed % 2, (0, 0, 4)[seed % 3]
    engine = Engine(num_blocks=60, rows=ROWS, residual=residual, speculative=speculative)
    args = (60, engine.pages.capacity, PAGE, residual, speculative)
    engine.pages = Twins(*args)
    engine.pages.follow(make_tables(engine.max_pages), *args)
    for _ in range(60):
        row = int(rng.integers(ROWS))
        match rng.choice(["start", "stop", "step"], p=[0.15, 0.05, 0.8]):
            case "start":
                engine.start(row, int(rng.integers(ROWS)), int(rng.integers(4)))
            case "stop":
                engine.stop(row)
            case _:
                counts = {r: int(rng.choice([1, 1, 1, 2, 7, PAGE, PAGE + 1, 2 * PAGE])) for r in range(ROWS)}
                counts = {r: n for r, n in counts.items() if rng.random() < 0.7}
                engine.step(counts, {r: speculative for r, n in counts.items() if n == 1 and speculative})
    return engine.pages.did


def test_any_history_is_planned_the_same_from_the_copy(make_tables):
    did = sum((history(make_tables, seed) for seed in range(20)), Counter())
    assert min(did[kind] for kind in ("new", "grew", "preempted")) >= 20, did


def test_dummy_tables_are_block_0_on_the_host_too(make_tables):
    tables = make_tables(8)
    tables.append_block_ids(2, ([5, 6],), overwrite=True)
    (dummy,) = tables.get_dummy_block_tables(3)
    host = _compat.host_table(SimpleNamespace(block_table_tensor=dummy, req_idx=np.arange(3)))
    assert host.dummy and not host[np.arange(3), 0].any() and not host[2].any()


def test_writes_to_the_null_block_are_copied_as_such(make_tables):
    """vLLM's elastic expert parallelism warms up so."""
    tables = make_tables(8)
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(1, ([5, 6],), overwrite=True)
    assert not tables.block_tables[0].ktx_host.any()


def test_a_table_without_a_copy_is_known_as_such():
    assert _compat.host_table(SimpleNamespace(block_table_tensor=torch.zeros(1, 4))) is None
