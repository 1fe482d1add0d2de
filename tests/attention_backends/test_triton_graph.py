"""Full CUDA graphs without a GPU: a step is recorded as vLLM captures it, without requests; later steps fill what lasts
between steps and run the recorded calls again, on the same tensors, in Triton's interpreter.

Started by `test_triton.py`, in a process with TRITON_INTERPRET=1.
"""

import copy
import os
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)
pytest.importorskip("triton")
from tests.attention_backends import test_device_step
from vllm_ktx import metrics
from vllm_ktx.attention_backends import ktx, metadata
from vllm_ktx.attention_backends.device_step import Accounts
from vllm_ktx.attention_backends.triton.launch import TritonKernels, launch
from vllm_ktx.kv_quant import KVCacheQuantizer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked lanes
torch.set_num_threads(1)
CPU, SIZE, WIDTH, ROWS = torch.device("cpu"), 32, 24, 4
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


def storages(*tree):
    return {x.untyped_storage()._cdata for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()}


class Graph(TorchDispatchMode):
    """The calls of a step in order: kernels, which aren't run while recording, and torch's operations. All that they
    take must be among `lasting` or made by one of them."""

    def __init__(self, *lasting):
        super().__init__()
        self.calls, self.known, self.lasting = [], storages(lasting), lasting

    def check(self, name, *arguments):
        assert storages(arguments) <= self.known, f"{name} takes a tensor that doesn't outlive the step"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not any(name in str(func) for name in WAITS), f"{func} waits for the device"
        self.check(func, args, kwargs)
        out = func(*args, **kwargs)
        self.known |= storages(out)
        self.calls.append((func, args, kwargs, out))
        return out

    def launch(self, kernel, grid, *args, **options):
        assert all(isinstance(n, int) for n in grid)
        self.check(kernel.__name__, args)
        self.calls.append((kernel, grid, args, options))

    def replay(self):
        for call, args, more, result in self.calls:
            if not isinstance(call, torch._ops.OpOverload):
                launch(call, args, *more, **result)
            elif "empty" in str(call):
                result.view(torch.uint8).fill_(0x7F)  # NaN, or a large number: nobody may count on it
            elif call._schema.is_mutable:
                call(*args, **more)
            elif not storages(result) & storages(args, more):  # no view
                for old, new in zip(tree_leaves(result), tree_leaves(call(*args, **more)), strict=True):
                    old.copy_(new)


class Layers(test_device_step.Layers):
    """Two layers as vLLM runs them: tables and inputs lie where they did in the last step. `graphs`: by rows."""

    def __init__(self, config, settings, graphs, running):
        self.run, self.graphs = launch, {}
        running.append(TritonKernels(launch=lambda *args, **options: self.run(*args, **options)))
        config = copy.copy(config)
        config.compilation_config = copy.copy(config.compilation_config)  # where the layers are
        super().__init__(config, CPU, settings)
        self.host = np.zeros((ROWS, WIDTH), np.int32)
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        shape = (test_device_step.HEADS, test_device_step.KV_HEADS, test_device_step.KV_HEADS)
        self.qkv = [torch.zeros(ROWS, heads, test_device_step.DIM) for heads in shape]
        self.out = torch.zeros(len(self.layers), ROWS, test_device_step.HEADS * test_device_step.DIM)
        for rows in sorted(graphs, reverse=True):
            self.capture(rows)

    def capture(self, rows):
        meta = self.builder.build_for_cudagraph_capture(self.step([], [], [], rows))
        self.forward(meta, self.qkv)
        meta = self.builder.build_for_cudagraph_capture(self.step([], [], [], rows))
        memory = [vars(layer.impl._memory) for layer in self.layers]
        pages = [vars(m["pages"]) for m in memory if m["pages"] is not None]
        builder, caches = self.builder, [layer.kv_cache for layer in self.layers]
        of_steps = builder._device_slots.tensor, builder._captured[rows][1], *builder._accounts._lasting.values()
        self.graphs[rows] = graph = Graph(memory, pages, caches, self.table, self.qkv, self.out, *of_steps)
        self.run = graph.launch
        with graph:
            self.forward(meta, self.qkv)
        self.run = launch

    def step(self, index, context, counts, padded=None):
        """The step in vLLM's words; `padded`: replayed, with so many rows (none given: as vLLM captures)."""
        rows, real = padded or len(index), len(index)
        capturing = padded and not real
        lengths, ends = np.zeros(rows, np.int32), np.full(rows + 1, sum(counts), np.int32)
        lengths[:real] = np.add(context, counts)
        ends[: real + 1] = [0, *np.cumsum(counts, dtype=np.int32)]
        host = np.zeros_like(self.host) if capturing else self.host
        if capturing:
            lengths[:], ends, index = 1, np.arange(rows + 1, dtype=np.int32), np.arange(rows)
        self.table[:rows] = 0
        self.table[: len(index)] = torch.from_numpy(host[index])
        table = self.table[:rows]
        table.ktx_host, table.ktx_dummy = host, bool(capturing)
        ends, lengths = torch.from_numpy(ends), torch.from_numpy(lengths)
        tokens = padded or int(ends[-1])
        return CommonAttentionMetadata(
            ends.clone(), ends, lengths.clone(), rows, tokens, max(counts, default=1), WIDTH * SIZE, table,
            torch.zeros(tokens, dtype=torch.int64), is_prefilling=torch.tensor([n > 1 for n in counts]),
            seq_lens_cpu_upper_bound=lengths, req_idx=np.asarray(index, np.intp),
        )  # fmt: skip

    def forward(self, meta, qkv, outs=None):
        for layer, out in zip(self.layers, self.out if outs is None else outs, strict=True):
            layer.impl.forward(layer, *qkv, layer.kv_cache, meta, out)

    def run_step(self, index, context, counts, qkv, padded=None, attends=True):
        """Outputs by layer. `attends`: if not only pages are written, which is what later steps see of this one."""
        tokens = sum(counts)
        meta = self.builder.build(0, self.step(index, context, counts, padded))
        assert meta.replayed == (padded is not None)
        if padded is None:
            outs = torch.zeros(len(self.layers), tokens, self.out.shape[-1])
            self.run = launch if attends else self.write
            self.forward(meta, qkv, outs)
            self.run = launch
            return meta, outs
        for there, x in zip(self.qkv, qkv, strict=True):
            there.fill_(float("nan"))
            there[:tokens] = x
        self.out.fill_(7.0)
        self.graphs[padded].replay()
        assert (self.out[:, tokens:] == 7.0).all(), "padding writes nothing"
        return meta, self.out[:, :tokens].clone()

    @staticmethod
    def write(kernel, *args, **options):
        if kernel.__name__ in ("append_rows", "seal_pages", "publish_pages", "read_pages"):
            launch(kernel, *args, **options)

    def content(self):
        """What pages hold: of open ones that are used, and of all sealed ones."""
        pages, found = self.builder._open_pages, []
        used, sealed = np.flatnonzero(pages.block_of >= 0), torch.from_numpy(np.flatnonzero(pages.sealed_fill))
        there = torch.arange(SIZE) < torch.from_numpy(pages.fill[used])[:, None]
        for layer in self.layers:
            memory = layer.impl._memory
            found.append(torch.where(there[:, None, None, :, None], memory.open_pages[used], 0.0))
            payload = (memory.payload if memory.pages is None else memory.pages.host)[sealed]
            found += [memory.headers[sealed], *KVCacheQuantizer(self.builder.layout).unseal(payload, torch.float32)]
        return found


class History:
    """Requests that come, are decoded, preempted, resumed and end, at lengths around the ends of pages."""

    def __init__(self, seed, blocks):
        self.random, self.free = random.Random(seed), list(range(1, blocks))
        self.rows, self.host, self.idle = {}, np.zeros((12, WIDTH), np.int32), list(range(12))

    def reserve(self, row, tokens):
        pages = -(-tokens // SIZE)
        have = int((self.host[row] > 0).sum())
        for page in range(have, pages):
            self.host[row, page] = self.free.pop(0)

    def end(self, row):
        self.free += [int(block) for block in self.host[row] if block]
        self.host[row] = 0
        self.idle.append(row)
        return self.rows.pop(row)

    def steps(self, count):
        """Rows, their contexts, their fresh tokens."""
        for at in range(count):
            for row in [row for row, length in self.rows.items() if length > 23 * SIZE]:
                self.end(row)
            new = []
            if at % 5 == 4:  # preempted: computed again from its first token
                new = [self.end(self.random.choice(sorted(self.rows)))]
            elif len(self.rows) < 10:
                new = [self.random.choice([1, 2, 6, 22]) * SIZE - self.random.choice([0, 1, 2, 5]) for _ in range(2)]
            decoded = self.random.sample(
                sorted(self.rows), min(len(self.rows), self.random.randint(1, ROWS - len(new)))
            )
            fresh = dict.fromkeys(decoded, 1)
            for tokens in new:
                row = self.idle.pop(0)
                self.rows[row], fresh[row] = 0, tokens
            for row, tokens in fresh.items():
                self.reserve(row, self.rows[row] + tokens)
            yield list(fresh), [self.rows[row] for row in fresh], list(fresh.values())
            for row, tokens in fresh.items():
                self.rows[row] += tokens


@pytest.fixture
def small(monkeypatch):
    for name, value in {"SIZE": SIZE, "HEADS": 2, "KV_HEADS": 1, "DIM": 16, "BLOCKS": 240}.items():
        monkeypatch.setattr(test_device_step, name, value)


@pytest.fixture
def config(retrieval_small, small):
    args = EngineArgs(str(retrieval_small), attention_backend="KTX", max_num_seqs=ROWS, max_model_len=SIZE * WIDTH,
                      block_size=SIZE, dtype="float32")  # fmt: skip
    return args.create_engine_config()


SPARSE = {"format": "k4v4", "window": 32, "sinks": 32, "min_pages": 1, "max_pages": 2, "residual_pages": 0}
TIERED = {"overcommit": 4.0, "host_gib": 1.0}


SETTINGS = [
    SPARSE | {"dense_layers": 1},
    SPARSE | TIERED | {"scoring": "header"},
    {"format": "k8v8", "attention": "dense", "rotate_keys": True},
]
RUNS = [pytest.param(settings, *run, marks=slow) for settings in SETTINGS for run, slow in
        (((7, 15), ()), ((11, 40), pytest.mark.slow))]  # fmt: skip


@pytest.mark.parametrize(("settings", "seed", "steps"), RUNS)
@torch.inference_mode()
def test_replayed_steps_are_eager_steps(config, monkeypatch, settings, seed, steps):
    running = []  # kernels for layers of the path that is made
    monkeypatch.setattr(ktx, "kernels_for", lambda *args: running[-1])
    monkeypatch.setattr(Accounts, "EVERY", 1000)  # told path by path, at the end
    paths = [
        Layers(config, settings, (), running),
        Layers(config, settings | {"cudagraph": "full"}, (1, 2, 4), running),
    ]
    history = History(seed, test_device_step.BLOCKS)
    done = dict.fromkeys(("replayed", "padded", "sealed", "settled", "chosen", "short"), 0)
    for path in paths:
        path.host = history.host
    for at, (index, context, counts) in enumerate(history.steps(steps)):
        gen = torch.Generator().manual_seed(at)
        qkv = [torch.randn(sum(counts), x.shape[1], x.shape[2], generator=gen) for x in paths[1].qkv]
        padded = None if max(counts) > 1 else next(n for n in (1, 2, ROWS) if n >= len(index))
        eager, want = paths[0].run_step(index, context, counts, qkv, attends=padded is not None)
        meta, got = paths[1].run_step(index, context, counts, qkv, padded, attends=False)
        if (eager.sparse is None) == (meta.sparse is None):
            assert torch.equal(got, want), at
        else:  # rows too short to choose: read densely by the kernels of either kind
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(paths[1].content(), paths[0].content(), strict=True):
            assert torch.equal(ours, theirs), at
        if padded:
            done["replayed"] += 1
            done["padded"] += padded > len(index)
            done["sealed"] += eager.seal_open is not None
            done["settled"] += eager.evict is not None or eager.reopen is not None
            done["chosen" if eager.sparse is not None else "short"] += 1
    assert all(done[name] for name in ("replayed", "padded", "sealed", "settled")), done
    assert settings.get("attention") == "dense" or (done["chosen"] and done["short"]), done
    counts = []
    metrics.ON_DEVICE.clear()
    for path in paths:
        before = metrics.snapshot()
        path.builder._accounts.flush()
        counts.append({name: metrics.snapshot()[name] - before[name] for name in metrics.SPARSE})
    assert counts[0] == pytest.approx(counts[1], rel=1e-5)


def test_support_is_declared_where_it_is_asked_for(config):
    for ktx_settings, support in (
        ({}, AttentionCGSupport.NEVER),
        ({"cudagraph": "full"}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
    ):
        config.additional_config = {"ktx": ktx_settings}
        with set_current_vllm_config(config):
            assert metadata.KTXMetadataBuilder.get_cudagraph_support(config, None) == support
