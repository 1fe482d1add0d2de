"""The backend where a device holds the block tables. Tensors of the device are torch's `meta` ones, without contents:
what reads one, or mixes it with host memory, fails. Numbers are checked on the CPU, step by step, against the path that
reads its tables.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ktx import _compat, metrics
from vllm_ktx.attention_backends import device_step, ktx, layer_memory, metadata
from vllm_ktx.attention_backends.device_step import Accounts, DeviceSlots, send

META, CPU = torch.device("meta"), torch.device("cpu")
SIZE, HEADS, KV_HEADS, DIM, BLOCKS = 64, 4, 2, 64, 40
WAITS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize", "is_nonzero"}


class OneWay(TorchDispatchMode):
    """No operation takes tensors of host and device, but what `_compat.upload` does."""

    uploads, open = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.dim()}
        assert self.open or len(found) <= 1, f"{func} takes tensors of {found}"
        return out

    def upload(self, data, device):
        self.uploads, self.open = self.uploads + 1, True
        try:
            return upload(data, CPU).to(device)  # vLLM's own copies to the CPU alone once a CPU worker ran
        finally:
            self.open = False


upload = _compat.upload


@pytest.fixture(scope="module")
def engine_config(retrieval_small):
    args = EngineArgs(
        str(retrieval_small), attention_backend="KTX", max_num_seqs=2, max_model_len=2048, dtype="float32"
    )
    return args.create_engine_config()


class Layers:
    """Two attention layers, their builder, and a smallest engine: rows of blocks by name."""

    def __init__(self, config, device, ktx_settings, mirrored=True):
        self.device, self.mirrored, self.rows = device, mirrored, {}
        config.additional_config = {"ktx": ktx_settings}
        config.compilation_config.static_forward_context = layers = {}
        with set_current_vllm_config(config):
            for i in range(2):
                impl = ktx.KTXImpl(HEADS, DIM, DIM**-0.5, KV_HEADS)
                name = f"model.layers.{i}.attn"
                layers[name] = SimpleNamespace(impl=impl, layer_name=name)
            spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
            self.bind(layers, ktx.KTXBackend.customize_spec(spec).page_size_bytes)
            self.builder = metadata.KTXMetadataBuilder(spec, list(layers), config, device)
        self.layers = list(layers.values())
        self.free = list(range(1, BLOCKS))
        self.host = np.zeros((8, BLOCKS), np.int32)

    def bind(self, layers, page_bytes):
        for layer in layers.values():
            layer.kv_cache = torch.zeros(BLOCKS, 1, SIZE, page_bytes // SIZE, dtype=torch.uint8, device=self.device)

    def common(self, counts):
        """A step of `counts` (row name -> fresh tokens) in vLLM's words; fills the rows' blocks."""
        context, index = [], []
        for name, count in counts.items():
            row = self.rows.setdefault(name, [len(self.rows), 0])
            index.append(row[0])
            context.append(row[1])
            row[1] += count
            for page in range(-(-row[1] // SIZE)):
                if not self.host[row[0], page]:
                    self.host[row[0], page] = self.free.pop()
        return self.batch(self.host, np.array(index), context, list(counts.values()))

    def batch(self, host, index, context, counts):
        cu_q = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lengths = torch.tensor(context, dtype=torch.int32) + cu_q.diff()
        table = torch.from_numpy(host[index]).to(self.device)
        if self.mirrored:
            table.ktx_host = host
        tokens = int(cu_q[-1])
        return CommonAttentionMetadata(
            cu_q.to(self.device), cu_q, lengths.to(self.device), len(counts), tokens, max(counts), int(lengths.max()),
            table, torch.zeros(tokens, dtype=torch.int64, device=self.device),
            is_prefilling=torch.tensor([n > 1 for n in counts]), seq_lens_cpu_upper_bound=lengths, req_idx=index,
        )  # fmt: skip

    def inputs(self, tokens, seed=0):
        gen = torch.Generator().manual_seed(seed)
        q = torch.randn(tokens, HEADS, DIM, generator=gen)
        k, v = (torch.randn(tokens, KV_HEADS, DIM, generator=gen) for _ in range(2))
        return [x.to(self.device) for x in (q, k, v, torch.zeros(tokens, HEADS * DIM))]

    def attend(self, meta, inputs):
        *qkv, out = inputs
        return [layer.impl.forward(layer, *qkv, layer.kv_cache, meta, out.clone()) for layer in self.layers]


SPARSE = {"format": "k8v4", "window": 64, "sinks": 64, "min_pages": 1, "max_pages": 2, "audit_rate": 1.0}
# Whole pages, a page filled, a selection, and more open rows than slots: evicted, and reopened when they come back.
STEPS = [{"a": 300}, {"a": 90, "b": 70}, {"b": 1}, *({row: 20} for row in "cdefg"), {"b": 3, "a": 1}, {"c": 2}]


@pytest.fixture
def device(engine_config, monkeypatch):
    """Layers on the device, their launches recorded, under a guard."""
    pytest.importorskip("triton")
    from vllm_ktx.attention_backends.triton.launch import TritonKernels

    launched = []

    def record(kernel, grid, *args, **constants):
        assert all(x.device == META for x in args if isinstance(x, torch.Tensor)), kernel
        launched.append(kernel.__name__)

    kernels = TritonKernels(launch=record)
    monkeypatch.setattr(ktx, "kernels_for", lambda *args: kernels)
    layers = Layers(engine_config, META, SPARSE)
    layers.guard, layers.launched = OneWay(), launched
    monkeypatch.setattr(_compat, "upload", layers.guard.upload)
    yield layers
    metrics.ON_DEVICE.clear()  # what these counted can't be read


@torch.inference_mode()
def test_no_step_reads_the_device(device):
    parts = set()
    for i, step in enumerate(STEPS * 2):
        common = device.common(step)
        inputs = device.inputs(common.num_actual_tokens)
        with device.guard:
            meta = device.builder.build(0, common)
            device.attend(meta, inputs)
        assert device.guard.uploads == i + 1, "one copy a step"
        parts |= {name for name in (*metadata._COLUMNS, "sparse") if getattr(meta, name) is not None}
    assert parts == {*metadata._COLUMNS, "sparse"}, "every kind of work was done"
    assert {"seal_pages", "append_rows", "choose_pages", "attend_split"} <= set(device.launched)


@torch.inference_mode()
def test_dummy_steps_touch_nothing(device):
    for step in STEPS[:3]:
        device.builder.build(0, device.common(step))
    pages = device.builder.bind()
    before = pages.slot_of.copy(), pages.fill.copy(), pages.dirty.copy(), pages.sealed_fill.copy()
    for context in ([0, 0], [500, 500]):  # with a context: how vLLM measures what a step costs
        common, inputs = device.batch(np.zeros_like(device.host), np.arange(2), context, [3, 3]), device.inputs(6)
        with device.guard:
            meta = device.builder.build(0, common)
            device.attend(meta, inputs)
        assert all(getattr(meta, name) is None for name in metadata._COLUMNS)
    after = pages.slot_of, pages.fill, pages.dirty, pages.sealed_fill
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert device.attend(None, device.inputs(6)), "what is measured before there is a cache"
    assert all(len(layer.impl._reserved) >= pages.capacity for layer in device.layers)


@torch.inference_mode()
def test_steps_that_a_graph_replays_read_nothing_either(device):
    """They fill the same memory each time, by one copy, and evict and reopen outside the graph."""
    dummy, inputs = device.batch(np.zeros_like(device.host), np.arange(2), [0, 0], [1, 1]), device.inputs(2)
    with device.guard:
        captured = device.builder.build_for_cudagraph_capture(dummy)
        device.attend(captured, inputs)
    launched = []
    for step in [*STEPS[:-2], {"b": 1, "a": 1}, {"c": 1, "d": 1}, {"b": 1}]:
        common, uploads = device.common(step), device.guard.uploads
        inputs = device.inputs(common.num_actual_tokens)
        del device.launched[:]
        with device.guard:
            meta = device.builder.build(0, common)
            launched += [list(device.launched)] * meta.replayed
            device.attend(meta, inputs)
        assert device.guard.uploads == uploads + 1
        assert meta.replayed == (set(step.values()) == {1} and len(step) == 2), "as many rows as were captured"
        if meta.replayed:
            for name in ("cu_q", "context", "append", "seal_open"):
                ours, theirs = (tree_leaves(getattr(x, name)) for x in (meta, captured))
                assert [x.untyped_storage()._cdata for x in ours] == [x.untyped_storage()._cdata for x in theirs], name
                assert [x.shape for x in ours] == [x.shape for x in theirs]
            assert meta.evict is meta.reopen is None and meta.sparse is not None and meta.audit is None
    assert launched == [["seal_pages"] * 2] * 2, "evicted before the replay, in both layers"


@torch.inference_mode()
def test_another_cache_starts_with_an_empty_map(device):
    common = device.common({"a": 100})
    device.attend(device.builder.build(0, common), device.inputs(100))
    first = device.builder.bind()
    for layer in device.layers:  # the real cache, after the one of profiling
        layer.kv_cache = torch.zeros(2 * BLOCKS, *layer.kv_cache.shape[1:], dtype=torch.uint8, device=META)
    device.rows.clear()
    meta = device.builder.build(0, device.common({"a": 100}))
    device.attend(meta, device.inputs(100))
    assert device.builder.bind() is not first and len(meta.open_slot) == 2 * BLOCKS
    assert all(layer.impl._memory.storage[1] == 2 * BLOCKS for layer in device.layers)
    config = device.builder.vllm_config
    metadata.KTXMetadataBuilder(device.builder.kv_cache_spec, device.builder.layer_names, config, META)
    assert all(layer.impl._memory is None for layer in device.layers), "a new builder lets go of the old cache"


def test_a_device_table_without_a_host_copy_is_refused(device):
    device.mirrored = False
    with pytest.raises(RuntimeError, match="no host copy of this step's block table"):
        device.builder.build(0, device.common({"a": 3}))


@torch.inference_mode()
def test_numbers_are_those_of_the_path_that_reads_its_tables(engine_config):
    paths = [Layers(engine_config, CPU, SPARSE, mirrored) for mirrored in (False, True)]
    gained = []
    for path in paths:
        before = metrics.snapshot()
        outs, memory = [], []
        for i, step in enumerate(STEPS * 2):
            common = path.common(step)
            outs += path.attend(path.builder.build(0, common), path.inputs(common.num_actual_tokens, seed=i))
        for layer in path.layers:
            memory += [layer.kv_cache, layer.impl._memory.open_pages[path.builder.bind().block_of >= 0]]
        path.seen = outs + [x.nan_to_num() for x in memory]
        gained.append({name: now - before[name] for name, now in metrics.snapshot().items()})
    assert all(torch.equal(x, y) for x, y in zip(paths[0].seen, paths[1].seen, strict=True))
    assert gained[0] == pytest.approx(gained[1], rel=1e-5)
    assert gained[0]["sparse_rows"] and gained[0]["audited_rows"] and gained[0]["reopened"]
    assert gained[0]["evicted_partial"]


def test_evicting_repeats_the_last_valid_token_and_reopening_brings_the_page_back(engine_config):
    layers = Layers(engine_config, CPU, {"format": "k8v8", "attention": "dense"})
    common = layers.common({"a": 10})
    layers.attend(layers.builder.build(0, common), layers.inputs(10))
    memory, kernels = layers.layers[0].impl._memory, layers.layers[0].impl.kernels
    slot, block = torch.tensor([0]), torch.tensor([5], dtype=torch.int32)
    was = memory.open_pages[0].clone()
    meta = SimpleNamespace(layout=layers.builder.layout)
    memory._evict(kernels, meta, slot, block, torch.tensor([7], dtype=torch.int32))
    assert torch.equal(memory.open_pages[0, :, :, :7], was[:, :, :7])
    assert torch.equal(memory.open_pages[0, :, :, 7:], was[:, :, 6:7].expand(-1, -1, SIZE - 7, -1))
    full = memory.open_pages[0].clone()
    memory.open_pages[0] = 0
    memory._reopen(kernels, meta, slot, block.long())
    assert (memory.open_pages[0] - full).abs().max() < 0.02 * full.abs().max()


def test_what_is_sent_arrives_whole_and_aligned():
    arrays = [np.arange(n, dtype=kind) for n, kind in ((3, np.int32), (0, np.int64), (5, np.int64), (1, np.int32))]
    for there, array in zip(send(arrays, CPU), arrays, strict=True):
        assert torch.equal(there, torch.from_numpy(array)) and there.dtype == torch.from_numpy(array).dtype
        assert (there.storage_offset() * there.element_size()) % device_step.ALIGNED == 0
    assert send([], CPU) == []


def test_the_devices_slot_map_follows():
    rng = np.random.default_rng(0)
    slots, slot_of = DeviceSlots(50, CPU), np.full(50, -1, np.int32)
    for _ in range(20):
        slot_of[rng.integers(0, 50, 4)] = rng.integers(-1, 9, 4)
        slots.apply(*map(torch.from_numpy, slots.changes(slot_of)))
        assert (slots.tensor.numpy() == slot_of).all()


class Late:
    """An event that passes when told to."""

    def __init__(self):
        self.passed = False

    def record(self): ...

    def synchronize(self):
        self.passed = True

    def query(self):
        return self.passed


def test_accounts_are_told_when_their_copy_has_arrived(monkeypatch):
    ours, expected = metrics.KtxStats(), metrics.KtxStats()
    monkeypatch.setattr(device_step, "STATS", ours)
    events = []
    monkeypatch.setattr(device_step, "Passed", lambda: events.append(Late()) or events[-1])
    accounts = Accounts([3, 1], KV_HEADS, CPU)
    gen = torch.Generator().manual_seed(0)
    for step in range(accounts.EVERY + 3):
        tokens = step % 5 + 1
        had = torch.randint(1, 9, (tokens,), generator=gen)
        accounts.begin_step(had)
        for layer in (1, 3)[: 1 + step % 2]:  # not each is called
            wrote = {name: torch.rand(tokens, KV_HEADS, generator=gen) for name in ("dropped", "depth")}
            wrote["pages_read"] = torch.randint(0, 10, (tokens, KV_HEADS), generator=gen, dtype=torch.int32)
            for name, to in accounts.of_layer(layer).items():
                to.copy_(wrote[name])
            expected.record_sparse(layer, context_pages=had, **wrote)
        outputs = [torch.rand(tokens, HEADS, DIM), torch.rand(tokens, HEADS)] * 2 + [wrote["dropped"]]
        accounts.audit(*outputs)
        expected.record_audit(*outputs)
    assert len(events) == 1 and ours.sparse_rows == ours.audited_rows == 0, "on its way, and not waited for"
    events[0].passed = True
    accounts.begin_step(None)
    assert 0 < ours.sparse_rows < expected.sparse_rows
    accounts.flush()
    accounts.flush()
    assert ours.snapshot() == pytest.approx(expected.snapshot(), rel=1e-5)
    assert ours.by_layer.keys() == expected.by_layer.keys()
    for layer, values in expected.by_layer.items():
        assert ours.by_layer[layer] == pytest.approx(values, rel=1e-5)


READERS = {Accounts.flush, Accounts._tell}  # of what has arrived, or outside of steps
HOT = [
    *(f for x in (Accounts, DeviceSlots) for f in vars(x).values() if inspect.isfunction(f)), send,
    *(getattr(layer_memory.LayerMemory, name) for name in ("apply", "_seal", "_seal_slots", "_evict", "_unseal")),
    ktx.KTXImpl.forward, ktx.KTXImpl._bind, metadata.KTXMetadataBuilder._send_step,
]  # fmt: skip


@pytest.mark.parametrize("function", [f for f in HOT if f not in READERS], ids=lambda f: f.__qualname__)
def test_hot_paths_never_wait_for_the_device(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & WAITS, names & WAITS
