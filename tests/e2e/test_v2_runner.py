"""KTX under vLLM's V2 model runner, the one of CUDA, on the CPU with vLLM's kernels in Triton's interpreter: every step
is planned from host copies and carried out as on a device. Started by `tests/attention_backends/test_triton.py`, in a
process with TRITON_INTERPRET=1.
"""

import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: tests/attention_backends/test_triton.py runs it", allow_module_level=True)
from triton.backends import backends


def _with_triton():
    """vLLM's CPU build runs the V2 runner where it finds a CPU backend of Triton's; the interpreter needs none."""
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm.triton_utils import HAS_TRITON

    del backends["cpu"]  # Inductor would ask it
    return HAS_TRITON


assert _with_triton()
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import CompilationConfig, CUDAGraphMode  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # noqa: E402

from tests.e2e.support import builder, engine, metric, prompts  # noqa: E402
from tests.e2e.test_tiers import corrupt  # noqa: E402
from vllm_ktx import _compat, plugin  # noqa: E402
from vllm_ktx.attention_backends.cpu.native import CpuKernels  # noqa: E402
from vllm_ktx.attention_backends.metadata import KTXMetadataBuilder  # noqa: E402
from vllm_ktx.kv_quant import PageLayout, parse_format  # noqa: E402
from vllm_ktx.metrics import snapshot  # noqa: E402

pytestmark = pytest.mark.e2e
SPARSE = {"format": "k4v4", "window": 64, "sinks": 64, "min_pages": 1, "max_pages": 2, "audit_rate": 0.5}
TIGHT = {"max_num_batched_tokens": 192, "max_num_seqs": 4, "max_model_len": 1024}


@pytest.fixture
def steps(monkeypatch):
    """Checks each step's host copies against the tensors that the step has: [real steps, dummy steps]."""
    build, seen = KTXMetadataBuilder.build, [0, 0]

    def checked(self, prefix, common, *rest):
        table = _compat.host_table(common)
        counts = np.diff(common.query_start_loc_cpu.numpy())
        assert (common.query_start_loc_cpu == common.query_start_loc).all()
        meta = build(self, prefix, common, *rest)
        if table is not None:
            rows = len(common.req_idx)  # others pad the batch
            assert (common.seq_lens_cpu_upper_bound == common.seq_lens).all()
            for row in range(rows):
                used = -(-int(common.seq_lens[row]) // self.layout.page_size)
                assert (table[row][:used] == common.block_table_tensor[row, :used].numpy()).all()
            assert (meta.context.numpy() == common.seq_lens.numpy() - counts).all()
            assert (meta.open_slot.numpy() == self._open_pages.slot_of).all()
            assert table.dummy == (table[np.arange(rows), 0] == 0).all()
            seen[table.dummy] += 1
        self._open_pages.check_integrity()
        return meta

    monkeypatch.setattr(KTXMetadataBuilder, "build", checked)
    return seen


def capture(runner):
    """As `capture_model` of vLLM's runner."""
    runner.cudagraph_manager.capture(
        runner.model, runner.model_state, runner.input_buffers, runner.intermediate_tensors, runner.block_tables,
        runner.attn_groups, runner.kv_cache_config,
    )  # fmt: skip


def said(monkeypatch, runner, model, ktx, ids, options, tokens=24):
    """Tokens, their logprobs, and what KTX counted."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    before = snapshot()
    with engine(model, ktx, **(TIGHT | options)) as llm:
        if ktx.get("cudagraph") == "full":
            capture(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
        outs = llm.generate(prompts(*ids), params, use_tqdm=False)
        outs += llm.generate(prompts(*ids[:2]), params, use_tqdm=False)  # their pages are cached
        preempted = metric(llm, "vllm:num_preemptions")
        if runner == "1":
            execute = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            execute._dummy_run(5)
        counted = {name: value - before[name] for name, value in snapshot().items()}
    steps = [step for o in outs for step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
    return [t for t, _ in steps], [step[t].logprob for t, step in steps], counted, preempted


IDS = [[i * i % m + 5 for i in range(n)] for m, n in ((90, 70), (97, 390), (89, 130), (83, 250), (79, 64))]


def test_v2_runs_the_same_steps_as_v1(retrieval_small, monkeypatch, steps):
    ktx = SPARSE | {"format": {"default": "k4v4", "layers": {"1": "k8v8"}}}  # two builders
    few = {"num_gpu_blocks_override": 17}  # blocks for all at once
    tokens, logprobs, counted, preempted = said(monkeypatch, "0", retrieval_small, ktx, IDS, few)
    assert steps == [0, 0], "V1's tables are read as they are"
    v2_tokens, v2_logprobs, v2_counted, v2_preempted = said(monkeypatch, "1", retrieval_small, ktx, IDS, few)
    assert steps[0] > 50 and steps[1] >= 2
    assert v2_tokens == tokens and v2_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert preempted == v2_preempted > 0
    exact = ("steps", "prefill_tokens", "decode_tokens", "context_tokens", "appended_tokens", "sealed", "sparse_rows")
    for name in (*exact, "sparse_pages_read", "audited_rows"):
        assert v2_counted[name] == counted[name] > 0, name
    for name in ("dropped_mass", "audited_recall", "audited_claim", "audited_error"):
        assert v2_counted[name] == pytest.approx(counted[name], rel=1e-4, abs=1e-4), name


def test_lost_pages_are_computed_again_under_v2_too(retrieval_small, monkeypatch, tmp_path):
    """The native kernels' tiers, every page of the file damaged between two requests."""
    below = {"overcommit": 4, "host_gib": 0, "disk_gib": 0.03, "disk_dir": str(tmp_path)}
    options = TIGHT | {"num_gpu_blocks_override": 68}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    said = []
    for runner, more in (("0", {}), ("1", below)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        with engine(retrieval_small, {"format": "k8v8", "attention": "dense"} | more, **options) as llm:
            ask = lambda: [list(o.outputs[0].token_ids) for o in llm.generate(  # noqa: E731
                prompts(*IDS, [i * i % 93 + 5 for i in range(900)]), params, use_tqdm=False)]  # fmt: skip
            said.append(ask())
            if more:
                pool, before = builder(llm).tiers.pool, snapshot()
                pool.flush()
                corrupt(pool._moves.store._disk)
                said.append(ask())
                gained = {name: value - before[name] for name, value in snapshot().items()}
                assert gained["tier_corrupt"] > 0 and gained["tier_faults"] > 0
    assert said[0] == said[1] == said[2]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_drafts_are_checked_alike(retrieval_small, monkeypatch, steps):
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):  # the n-gram kernel's are integers here
        method = getattr(InterpreterBuilder, name)

        def boolean(builder, *args, method=method, at=place):
            args[at].data = args[at].data.astype(bool)
            return method(builder, *args)

        monkeypatch.setattr(InterpreterBuilder, name, boolean)
    ids = [[5, 6, 7, 8] * 30, *IDS[:2]]
    plain = said(monkeypatch, "0", retrieval_small, SPARSE, ids, {})
    drafts = {"async_scheduling": False, "speculative_config": DRAFTS}
    v1 = said(monkeypatch, "0", retrieval_small, SPARSE, ids, drafts)
    v2 = said(monkeypatch, "1", retrieval_small, SPARSE, ids, drafts)
    assert v2[0] == v1[0] == plain[0] and v2[1] == pytest.approx(v1[1], abs=1e-4)
    for name in ("steps", "appended_tokens", "sealed", "sparse_rows", "sparse_pages_read"):
        assert v2[2][name] == v1[2][name] > 0, name
    assert v2[2]["steps"] < plain[2]["steps"], "drafts were taken"
    assert v2[2]["appended_tokens"] > plain[2]["appended_tokens"], "and others not"


@pytest.fixture
def full_graphs(monkeypatch):
    """vLLM captures decode steps of 1, 2 and 4 rows whole and replays them, in place of a CUDA graph by running the
    model again on what lasts from the capture: metadata, and tensors at their addresses. Steps replayed, by rows."""
    replayed = Counter()

    def capture(self, make_forward, *_):
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            make_forward(desc, warmup=True)(CUDAGraphMode.NONE)
            self.graphs[desc] = make_forward(desc, warmup=False)
        self._graphs_captured = True

    def replay(self, desc):
        replayed[desc.num_reqs] += 1
        self.graphs[desc](CUDAGraphMode.NONE)

    def resolve(config, support, *_, **__):
        asked = support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if asked else CUDAGraphMode.NONE
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [1, 2, 4], 4
        return config.cudagraph_mode

    def skipping(method, columns):
        """The native kernels take no padded lists, Triton's do."""

        def call(self, layout, k, v, *args, **more):
            keep = args[1] >= 0
            return method(self, layout, k, v, *(x[keep] for x in args[:columns]), *args[columns:], **more)

        return call

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", replay)
    monkeypatch.setattr(CompilationConfig, "resolve_cudagraph_mode_and_sizes", resolve)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda platform: None)
    monkeypatch.setattr(plugin, "unsupported", lambda config: [])  # of which there is only the CPU
    monkeypatch.setattr(CpuKernels, "append", skipping(CpuKernels.append, 3))
    monkeypatch.setattr(CpuKernels, "seal", skipping(CpuKernels.seal, 2))
    return replayed


def test_full_graphs_run_the_same_steps(retrieval_small, monkeypatch, steps, full_graphs):
    ktx = SPARSE | {"format": {"default": "k4v4", "layers": {"1": "k8v8"}}, "audit_rate": 0.0}
    few = {"num_gpu_blocks_override": 17}
    tokens, logprobs, counted, preempted = said(monkeypatch, "0", retrieval_small, ktx, IDS, few)
    assert not full_graphs
    ktx["cudagraph"] = "full"
    replayed = said(monkeypatch, "1", retrieval_small, ktx, IDS, few)
    assert replayed[0] == tokens and replayed[1] == pytest.approx(logprobs, abs=1e-4)
    assert replayed[3] == preempted > 0
    assert set(full_graphs) == {1, 2, 4} and sum(full_graphs.values()) > 40
    exact = ("steps", "prefill_tokens", "decode_tokens", "context_tokens", "appended_tokens", "sealed", "sparse_rows")
    for name in (*exact, "sparse_pages_read"):
        assert replayed[2][name] == counted[name] > 0, name
    assert replayed[2]["attention_calls"] == counted["attention_calls"] + 2, "those of the dummy run"
    assert replayed[2]["dropped_mass"] == pytest.approx(counted["dropped_mass"], rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_triton_kernels_under_v2(retrieval_small, monkeypatch, steps):
    ids, ktx = [IDS[0][:20], IDS[1]], SPARSE | {"audit_rate": 0.0}
    tokens, logprobs, counted, _ = said(monkeypatch, "0", retrieval_small, ktx, ids, {}, tokens=2)
    triton = said(monkeypatch, "1", retrieval_small, ktx | {"kernels": "triton"}, ids, {}, tokens=2)
    assert triton[0] == tokens and triton[1] == pytest.approx(logprobs, abs=1e-3)
    assert triton[2]["sparse_rows"] == counted["sparse_rows"] > 0 and steps[0] > 3


def schedule_ahead(monkeypatch):
    """Async scheduling, which vLLM switches off on CPUs: a step is scheduled before the last one's output is there."""
    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_update_config(cls, config):
        check(config)
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = "vllm_ktx.scheduler.AsyncLengthGroupedScheduler"

    monkeypatch.setattr(platform, "check_and_update_config", classmethod(check_and_update_config))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_prefixes_come_back_from_disk_and_what_is_damaged_is_computed_again(
    retrieval_small, monkeypatch, tmp_path, asynchronous
):
    """Four prompts of 6 pages over 16 places in host memory, three of them at once, of which two fit; the native
    kernels of V1 say what is right."""
    if asynchronous:
        schedule_ahead(monkeypatch)
    page = PageLayout(parse_format("k4v4"), 32, 1, 64).payload_bytes
    ids = [[i * i % m + 5 for i in range(165)] for m in (97, 89, 83, 79)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options = {"max_num_seqs": 3, "max_model_len": 192, "num_gpu_blocks_override": 64, "block_size": 32}
    below = {"overcommit": 4, "host_gib": 16.5 * 2 * page / 2**30, "disk_gib": 0.01, "disk_dir": str(tmp_path)}
    ktx, said = {"format": "k4v4", "attention": "dense"}, []

    def ask(llm, *which):
        outs = llm.generate(prompts(*(ids[i] for i in which)), params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outs]

    for runner, more in (("0", {}), ("1", {"kernels": "triton"} | below)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        with engine(retrieval_small, ktx | more, **options) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
            start = snapshot()
            said.append([*ask(llm, 0), *ask(llm, 1, 2, 3), *ask(llm, 0)])
            if more:
                places = builder(llm).device_tiers.places
                assert (places.table >= 0).sum() <= 16 == len(places.pool.slot_flags(0)[0])
                before = snapshot()
                assert before["tier_faults"] == start["tier_faults"], "who doesn't fit waits"
                assert before["tier_written_bytes"] > 0 and before["tier_evictions"] > 0, "cached prefixes went to disk"
                places.pool.flush()
                corrupt(places.pool._moves.store)
                assert ask(llm, 1, 2) == said[0][1:3]
                gained = {name: value - before[name] for name, value in snapshot().items()}
                assert gained["tier_corrupt"] > 0 and gained["tier_faults"] > 0
                assert metric(llm, "vllm:num_preemptions") > 0
    assert said[0] == said[1]
