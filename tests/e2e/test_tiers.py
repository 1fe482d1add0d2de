"""Requests larger than the device through real vLLM: the same tokens as with everything resident, wherever the pages
are, and what happens when they can't be had.
"""

import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from vllm import SamplingParams

from benchmarks import tasks
from tests.e2e.support import builder, engine, metric, prompts, texts
from tests.e2e.test_selection import OFFLINE, tiny
from tests.e2e.test_serving import VOCAB, english
from tests.e2e.test_sparse import budget
from tests.offload.faulty import FaultyTier
from vllm_ktx.metrics import STATS
from vllm_ktx.offload import DiskTier

pytestmark = pytest.mark.e2e
SPARSE = {"format": "k4v4", "window": 256, "min_pages": 2}
LONG = {"max_model_len": 8320, "max_num_batched_tokens": 1000, "max_num_seqs": 4}
DEVICE = 400_000  # bytes of retrieval-small's cache: 43 pages of a layer, were all of them resident
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@contextmanager
def counting():
    """What the counters gain over the block, filled in at its end; those of the last step come with a step after it."""
    before, gained = STATS.snapshot(), {}
    yield gained
    gained |= {name: now - before[name] for name, now in STATS.snapshot().items()}


@contextmanager
def paged(model, ktx=None, **options):
    """An engine whose device holds a small part of its pages, in host memory unless `ktx` says else."""
    ktx = {**SPARSE, "host_gib": 0.02, **(ktx or {})}
    with engine(model, ktx, **{**LONG, "kv_cache_memory_bytes": DEVICE, **options}) as llm:
        found = builder(llm)
        assert found.tier_plan.overcommit > 1 and found.tiers.pool.wave < 60
        yield llm


def asked(length=8000, queries=12, seed=4):
    """Prompts that ask one context for keys of many depths, and the answers."""
    recall = tasks.dense_recall(length, VOCAB, queries=queries, seed=seed)
    context = recall.ids[: recall.positions[0] - 1]
    return [[*context, *recall.ids[p - 1 : p + 1]] for p in recall.positions], recall.answers


def generate(llm, ids, params=GREEDY):
    outs = llm.generate(prompts(*ids), params, use_tqdm=False)
    return texts(outs), [out.num_cached_tokens for out in outs]


@pytest.fixture(scope="module")
def resident(retrieval_small):
    """The questions, the answers, and what an engine says whose device holds everything."""
    ids, answers = asked()
    with engine(retrieval_small, SPARSE, **LONG) as llm:
        return ids, answers, [generate(llm, [x])[0][0] for x in ids]


# --- the same tokens --------------------------------------------------------------------------------------------------


def places(folder):
    return {
        "host": {},
        "disk": {"host_gib": 0, "disk_gib": 0.05, "disk_dir": str(folder)},
        "disk behind a small host": {"host_gib": 0.003, "disk_gib": 0.05, "disk_dir": str(folder)},
        "host, the rest on disk": {"host_gib": 0.005, "disk_gib": 0.004, "disk_dir": str(folder), "overcommit": 12},
    }


@pytest.mark.parametrize("where", list(places("")))
def test_same_tokens_as_resident_wherever_pages_are(retrieval_small, resident, tmp_path, where):
    ids, answers, want = resident
    with counting() as gained, paged(retrieval_small, places(tmp_path)[where]) as llm:
        assert generate(llm, ids[:1])[0] == want[:1]
        got, cached = generate(llm, ids)  # a batch, on the cached prefix
        assert got == want and min(cached) > 7800
        assert [x[0] for x in got] == answers
        alone = [generate(llm, [x])[0][0] for x in ids[:3]]
        assert alone == want[:3]
        builder(llm).tiers.pool.flush()
        builder(llm).tiers.pool.check_integrity()
        assert (builder(llm).tiers.layers[0].scoring is None) == (where == "disk")
    assert gained["tier_fetched_bytes"] > 1_000_000 and gained["tier_written_bytes"] > 500_000
    assert gained["tier_faults"] == gained["tier_lost"] == 0
    assert os.listdir(tmp_path) == [], "no file is left, and none has a name"


DENSE = {"attention": "dense", "window": None, "min_pages": None}


@pytest.mark.parametrize(
    ("eviction", "ktx"), [("lru", DENSE), ("clock", {}), ("attention", {}), ("attention", {"format": "k8v8"})]
)
def test_same_tokens_by_any_eviction_and_dense(retrieval_small, eviction, ktx):
    ids, answers = asked(3000, 4, seed=9)
    ktx = {name: value for name, value in {**SPARSE, **ktx}.items() if value is not None}
    with engine(retrieval_small, ktx, **LONG) as llm:
        want = generate(llm, ids)[0]
    assert [x[0] for x in want] == answers
    small = {"host_gib": 0.02, "eviction": eviction, "overcommit": 6}
    options = {**LONG, "max_model_len": 3072, "kv_cache_memory_bytes": 320_000 if ktx["format"] == "k8v8" else 175_000}
    with counting() as gained, engine(retrieval_small, {**ktx, **small}, **options) as llm:
        assert builder(llm).tiers.pool.wave < 30
        assert generate(llm, ids)[0] == want
        assert generate(llm, ids)[0] == want
    assert gained["tier_misses"] > 0


def test_real_model_same_text_as_resident_in_any_chunks(smollm2):
    """16 slots a layer, the fewest there may be, for 32 pages."""
    ids, ktx = english(smollm2, 2000), {"format": "k4v4", "window": 256, "min_pages": 2}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"max_model_len": 2048, "max_num_batched_tokens": 1000, "max_num_seqs": 2}

    def speak(llm):
        found = []
        for chunk in (1000, 100):
            budget(llm, chunk)
            llm.reset_prefix_cache()
            found += generate(llm, [ids], params)[0]
        return found

    with engine(smollm2, ktx, **options) as llm:
        want = speak(llm)
    slots = {"host_gib": 0.1, "overcommit": 4.5}
    with counting() as gained, engine(smollm2, {**ktx, **slots}, kv_cache_memory_bytes=8_000_000, **options) as llm:
        assert len(builder(llm).tiers.pool.slot_flags(0)[0]) < 20
        assert speak(llm) == want
    assert gained["tier_misses"] > 1000


def test_mixed_batch_of_long_and_short_and_parallel_samples(retrieval_small, resident):
    ids, _, want = resident
    mixed = [tasks.needle(n, VOCAB, depth, seed=n) for n, depth in ((200, 0.5), (1500, 0.0), (4000, 0.7))]
    with paged(retrieval_small) as llm:
        got, _ = generate(llm, [ids[0], *(m.prompt(0) for m in mixed), ids[1]])
        assert got == [want[0], *(m.answers for m in mixed), want[1]]
        params = SamplingParams(n=3, temperature=0.01, seed=1, max_tokens=5, ignore_eos=True)
        assert texts(llm.generate(prompts(ids[2]), params, use_tqdm=False))[0][0] == want[2][0]


def test_preempted_and_aborted_requests_leave_nothing_wrong(retrieval_small, resident):
    ids, _, _ = resident
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    options = {"num_gpu_blocks_override": 128, "enable_prefix_caching": False, "max_model_len": 4416}
    with paged(retrieval_small, {"overcommit": 8}, **options) as llm:
        found = [tasks.needle(3900, VOCAB, depth, seed=i) for i, depth in enumerate((0.1, 0.5, 0.9))]
        outs = generate(llm, [n.prompt(0) for n in found], params)[0]
        assert metric(llm, "vllm:num_preemptions") > 0
        assert [x[:5] for x in outs] == [n.answers for n in found]
        core = llm.llm_engine
        core.add_request("gone", {"prompt_token_ids": ids[3][:4000]}, params)
        for _ in range(4):
            core.step()
        core.abort_request(["gone"])
        assert generate(llm, [n.prompt(0) for n in found[:1]])[0] == [found[0].answers]


def test_a_chat_goes_on_from_turns_that_are_on_disk(retrieval_small, tmp_path):
    """Twenty turns, and other users' contexts in between that push the early turns out of the device and host
    memory."""
    recall = tasks.dense_recall(7600, VOCAB, queries=20, seed=21)
    context = recall.ids[: recall.positions[0] - 1]
    disk = {"host_gib": 0.002, "disk_gib": 0.08, "disk_dir": str(tmp_path)}
    turns = np.linspace(1200, len(context), 20).astype(int) // 4 * 4
    with paged(retrieval_small, disk) as llm:
        cached_before = 0
        for turn, length in enumerate(turns.tolist()):
            ids, answers = asked(2500, 1, seed=100 + turn)
            assert generate(llm, ids)[0][0][0] == answers[0]
            said = context[:length]
            out = llm.generate(prompts(said), GREEDY, use_tqdm=False)[0]
            assert out.num_cached_tokens >= cached_before, "an earlier turn was computed again"
            cached_before = length // 64 * 64 - 64
        fetched = STATS.tier_fetched_bytes
        got, cached = generate(llm, [[*context, *recall.ids[p - 1 : p + 1]] for p in recall.positions])
        assert [x[0] for x in got] == recall.answers and min(cached) > 7000
        assert STATS.tier_fetched_bytes > fetched


# --- admission and settings -------------------------------------------------------------------------------------------


def test_stock_and_resident_refuse_what_tiers_admit(retrieval_small, resident):
    ids, _, want = resident
    for options in ({"backend": None}, {"ktx": SPARSE}):
        refused = pytest.raises(Exception, match=r"(?s)(max seq len|KV cache).*8320|larger than the")
        with refused, engine(retrieval_small, kv_cache_memory_bytes=DEVICE // 2, **LONG, **options):
            pass
    with paged(retrieval_small, kv_cache_memory_bytes=DEVICE // 2) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * 64 > 8320
        assert generate(llm, ids[:1])[0] == want[:1]


@pytest.mark.parametrize(
    ("ktx", "message"),
    [
        ({"overcommit": 8}, "ktx.overcommit=8 keeps pages off the device: set ktx.host_gib, or ktx.disk_gib and"),
        ({"overcommit": 0.5}, "ktx.overcommit=0.5: use 'auto' or a number from 1 up"),
        ({"overcommit": "lots"}, "ktx.overcommit='lots': use 'auto' or a number from 1 up"),
        ({"disk_gib": 1}, "ktx.disk_gib=1 needs ktx.disk_dir"),
        ({"disk_dir": "/tmp"}, "ktx.disk_dir='/tmp' needs ktx.disk_gib"),
        ({"host_gib": -1}, "ktx.host_gib=-1: use a number of GiB"),
        ({"eviction": "fifo", "host_gib": 1}, "ktx.eviction='fifo': use one of lru, clock, attention"),
        ({"overcommit": 90, "host_gib": 0.1, "few": True}, "ktx.overcommit=90 leaves .* at least 16 are needed: lower"),
        ({"overcommit": 50, "host_gib": 0.001}, "raise ktx.disk_gib to .* or ktx.host_gib to"),
        ({"host_gib": 100000}, "ktx.host_gib=100000 is more than the .* GiB that .* leaves: lower ktx.host_gib to"),
        ({"disk_gib": 0.1, "disk_dir": "/nowhere"}, "ktx.disk_dir='/nowhere': no file can be made there"),
        ({"kernels": "torch", "host_gib": 0.01}, "ktx.overcommit needs the native kernels, and these are torch"),
    ],
)
def test_bad_settings_fail_at_start_up_and_name_the_fix(tmp_path, ktx, message):
    options = {**OFFLINE, "kv_cache_memory_bytes": 40_000 if ktx.pop("few", False) else 4_000_000}
    with pytest.raises(Exception, match=f"(?s){message}"), engine(tiny(tmp_path), {"format": "k4v4", **ktx}, **options):
        pass


# --- faults -----------------------------------------------------------------------------------------------------------


def corrupt(disk: DiskTier) -> None:
    """Flips a bit in the middle of every page of the file."""
    file = os.open(f"/proc/self/fd/{disk.fd}", os.O_RDWR)
    for page in range(disk.spec.num_pages):
        at = page * disk.stride + disk.spec.page_bytes // 2
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 16]), at)
    os.fsync(file)
    os.close(file)


def on_disk(folder):
    return {"host_gib": 0, "disk_gib": 0.03, "disk_dir": str(folder)}


def test_flipped_bits_are_found_and_computed_again(retrieval_small, resident, tmp_path):
    ids, _, want = resident
    with paged(retrieval_small, on_disk(tmp_path)) as llm:
        assert generate(llm, ids[:1])[0] == want[:1]
        tiers = builder(llm).tiers
        tiers.pool.flush()
        corrupt(tiers.store._disk)
        with counting() as gained:
            short = tasks.needle(500, VOCAB, 0.3)
            got, _ = generate(llm, [ids[1], short.prompt(0)])
            assert got == [want[1], short.answers]
            assert generate(llm, ids[2:5])[0] == want[2:5]
        assert gained["tier_corrupt"] > 0 and gained["tier_faults"] > 0


def test_unreadable_pages_end_their_request_and_no_other(retrieval_small, resident, tmp_path):
    """The pages of a request lie where the disk can't be read any more: it is tried again there a few times, then
    ends."""
    ids, _, want = resident
    with paged(retrieval_small, on_disk(tmp_path)) as llm:
        assert generate(llm, ids[:1])[0] == want[:1]
        pool = builder(llm).tiers.pool
        pool.flush()
        faulty = pool._moves.store = FaultyTier(pool._moves.store)
        faulty.bad_reads = set(np.flatnonzero(pool._table.stored).tolist())
        short = tasks.needle(900, VOCAB, 0.5)
        with counting() as gained:
            outs = llm.generate(prompts(ids[1], short.prompt(0)), GREEDY, use_tqdm=False)
        assert outs[0].outputs[0].finish_reason == "error" and texts(outs[1:]) == [short.answers]
        assert gained["tier_io_errors"] > 0 and gained["tier_faults"] > 0
        faulty.bad_reads.clear()
        assert generate(llm, ids[:2])[0] == want[:2], "the engine goes on"


def test_a_disk_that_refuses_writes_loses_pages_and_no_answer(retrieval_small, resident, tmp_path):
    """Half of the pages can't be written: they are given up when their slots are needed, missed, and computed again."""
    ids, answers, want = resident
    with paged(retrieval_small, on_disk(tmp_path)) as llm:
        moves = builder(llm).tiers.pool._moves
        faulty = moves.store = FaultyTier(moves.store)
        faulty.bad_writes = set(range(0, moves.spec.num_pages, 2))
        with counting() as gained:
            outs = llm.generate(prompts(ids[0]), GREEDY, use_tqdm=False)
        assert outs[0].outputs[0].finish_reason == "error" or texts(outs) == want[:1]
        assert gained["tier_lost"] > 0 and gained["tier_io_errors"] > 0
        faulty.bad_writes.clear()
        assert generate(llm, ids[:2])[0] == want[:2]


def test_a_slow_disk_only_takes_longer(retrieval_small, resident, tmp_path):
    ids, _, want = resident
    with counting() as gained, paged(retrieval_small, on_disk(tmp_path)) as llm:
        moves = builder(llm).tiers.pool._moves
        faulty = moves.store = FaultyTier(moves.store)
        read = faulty.read

        def slowly(*args):
            threading.Event().wait(0.002)
            read(*args)

        faulty.read = slowly
        assert generate(llm, ids[:2])[0] == want[:2]
    assert gained["tier_stall_seconds"] > 0.05 and gained["tier_faults"] == 0


def test_threads_and_descriptors_end_with_the_engine(retrieval_small, tmp_path):
    def ours():
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("ktx-"))

    def files():
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.exists(link) and str(tmp_path) in os.readlink(link)]

    before = ours()
    with paged(retrieval_small, on_disk(tmp_path)) as llm:
        generate(llm, [tasks.needle(900, VOCAB, 0.5).prompt(0)])
        assert ours() != before
    assert ours() == before and not files()
