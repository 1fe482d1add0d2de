"""The policy of length-grouped batching alone: order, lane, shares, ageing, and whole traces in simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.batching import Ask, Costs, LengthGrouped, Stock, mixed_trace, simulate, summary
from vllm_ktx.scheduler import LENGTH_BUCKETS, LengthGroupedBatcher, Row, bucket_of

K = 1024


def drain(batcher: LengthGroupedBatcher) -> list:
    """What is admitted in one step with room for all."""
    taken = []
    while batcher.peek() is not None:
        assert batcher.peek() == (item := batcher.pop()), "peek and pop agree"
        taken.append(item)
    return taken


def test_buckets_double_up_to_128k_and_end_at_1m():
    assert LENGTH_BUCKETS == (K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, K * K)
    assert [bucket_of(n) for n in (0, 1, K, K + 1, 128 * K, 128 * K + 1, 5 * K * K)] == [
        *(K, K, K, 2 * K, 128 * K, K * K, K * K)
    ]


def test_short_requests_first_and_arrival_order_within_a_bucket():
    batcher = LengthGroupedBatcher(2 * K)
    for name, length in [("d", 2 * K), ("a", 900), ("e", 1500), ("b", 10), ("c", 1000)]:
        batcher.add(name, length)
    assert list(batcher) == drain(batcher) == ["a", "b", "c", "d", "e"]
    assert len(batcher) == 0
    with pytest.raises(IndexError):
        batcher.pop()


def test_one_long_prefill_at_a_time_and_short_ones_pass_it():
    batcher = LengthGroupedBatcher(2 * K)
    batcher.add("long", 64 * K)
    batcher.add("longer", 128 * K)
    batcher.add("short", K)
    assert drain(batcher) == ["short", "long"] and len(batcher) == 1
    batcher.plan([Row("long", 2 * K, 62 * K)])
    assert batcher.peek() is None, "the lane is taken"
    batcher.plan([Row("long", 62 * K, 2 * K)])
    assert batcher.peek() == "longer", "a remainder that fits a step leaves the lane"


def test_a_long_request_that_cannot_run_leaves_the_lane_to_others():
    batcher = LengthGroupedBatcher(2 * K)
    batcher.add("blocked", 64 * K)
    batcher.add("other", 64 * K)
    assert [batcher.pop(runs=False), batcher.pop(), batcher.peek()] == ["blocked", "other", None]
    batcher.put_back("blocked", 64 * K)
    assert batcher.peek() is None, "the other has the lane"
    batcher.put_back("other", 64 * K)
    assert drain(batcher) == ["other"], "given back with the request"


def test_a_shorter_long_prefill_suspends_a_longer_one_and_no_more_than_one():
    batcher = LengthGroupedBatcher(2 * K)
    for name, length in [("128K", 128 * K), ("32K", 32 * K), ("8K", 8 * K)]:
        batcher.add(name, length)
        if name != "8K":
            assert batcher.pop() == name
    rows = [Row("128K", K, 127 * K), Row("32K", K, 31 * K)]
    assert batcher.plan(rows) == ["32K", "128K"]
    assert batcher.limit("32K") is None and batcher.limit("128K") is None, "nothing else wants to run: no limits"
    assert batcher.peek() is None, "two are under way"
    assert batcher.plan([*rows, Row("d", K, 0)]) == ["32K", "d", "128K"]
    assert batcher.limit("128K") == 0 and batcher.limit("32K") == K and batcher.limit("d") is None


@pytest.mark.parametrize(("share", "with_short"), [(0.25, 512), (0.5, 1024), (1.0, 2047)])
def test_a_long_prefill_is_capped_to_its_share_while_others_want_to_run(share, with_short):
    batcher = LengthGroupedBatcher(2 * K, prefill_share=share)
    batcher.add("long", 64 * K)
    batcher.plan([])
    batcher.pop()
    assert batcher.limit("long") is None
    long, decode, short = Row("long", 2 * K, 62 * K), Row("decode", K, 0), Row("short", 0, K)
    batcher.plan([long])
    assert batcher.limit("long") is None
    batcher.plan([long, decode])
    assert batcher.limit("long") == min(2 * with_short, 2047)
    assert batcher.plan([long, short, decode]) == ["long", "decode", "short"]
    assert batcher.limit("long") == with_short
    batcher.add("waiting", 10)
    batcher.plan([long, decode])
    assert batcher.limit("long") == with_short and batcher.limit("waiting") is None
    batcher.add("later", 64 * K)
    batcher.plan([decode])
    assert batcher.limit("later") == with_short, "before it is popped, when vLLM asks"


def test_the_holder_advances_beside_any_number_of_decoding_rows():
    batcher = LengthGroupedBatcher(64)
    batcher.plan([Row("long", 0, 64 * K), *(Row(i, 10, 0) for i in range(64))])
    assert batcher.limit("long") == 1


def test_a_due_request_goes_before_all_that_came_later():
    batcher = LengthGroupedBatcher(2 * K, patience=4)
    batcher.add("long", 32 * K)
    batcher.advance(4 * 31 * K - 1)
    batcher.add("short", 10)
    assert batcher.peek() == "short", "due after 4K tokens, the long one a token later"
    batcher.advance(4 * K)
    assert batcher.is_due("short") and not batcher.is_due("long") and batcher.peek() == "short"
    batcher.advance(1)
    assert batcher.is_due("long") and batcher.peek() == "long"


def test_an_aged_request_takes_the_lane():
    batcher = LengthGroupedBatcher(2 * K, patience=1)
    batcher.add("old", 128 * K)
    assert batcher.pop() == "old"
    batcher.advance(127 * K)
    batcher.add("new", 8 * K)
    batcher.plan([Row("old", K, 127 * K)])
    assert batcher.peek() is None, "its deadline is later than the holder's"
    batcher.advance(K)
    assert batcher.plan([Row("new", K, 7 * K), Row("old", K, 127 * K)])[0] == "old"


def test_preempted_requests_go_first_and_skipped_ones_keep_their_place():
    batcher = LengthGroupedBatcher(2 * K)
    for name in ("a", "b", "c"):
        batcher.add(name, 100)
    batcher.add("long", 64 * K)
    assert [batcher.pop() for _ in range(4)] == ["a", "b", "c", "long"]
    batcher.put_back("b", 100)
    batcher.put_back("a", 100)
    batcher.put_back("long", 64 * K, preempted=True)
    assert drain(batcher) == ["long", "a", "b"]


def test_priority_comes_before_length_and_age():
    batcher = LengthGroupedBatcher(2 * K)
    batcher.add("late", 10, priority=1)
    batcher.advance(1 << 30)
    batcher.add("urgent", 2 * K, priority=-5)
    batcher.add("normal", 20)
    assert drain(batcher) == ["urgent", "normal", "late"]


def test_a_long_prefill_of_higher_priority_takes_the_lane():
    batcher = LengthGroupedBatcher(2 * K)
    batcher.add("low", 64 * K, priority=1)
    assert batcher.pop() == "low"
    low = Row("low", K, 63 * K)
    batcher.add("lower", 64 * K, priority=2)
    batcher.plan([low])
    assert batcher.peek() is None
    batcher.add("high", 64 * K, priority=0)
    batcher.plan([low])
    assert drain(batcher) == ["high"]
    assert batcher.plan([low, Row("high", K, 63 * K)]) == ["high", "low"]


def test_removed_requests_are_gone_and_may_come_back_under_the_same_name():
    batcher = LengthGroupedBatcher(2 * K)
    batcher.add("a", 10)
    batcher.add("b", 10)
    assert batcher.remove("a") and not batcher.remove("a") and len(batcher) == 1
    batcher.add("a", 10)
    assert drain(batcher) == ["b", "a"]


def test_rows_of_like_length_decode_together():
    rows = [*(Row(i, K, 0) for i in range(4)), Row("long", 100 * K, 0)]
    batcher = LengthGroupedBatcher(2 * K, decode_spread=16, decode_stride=3)
    held = []
    for _ in range(6):
        batcher.plan(rows)
        assert all(batcher.limit(i) is None for i in range(4))
        held.append(batcher.limit("long") == 0)
    assert held == [True, True, False] * 2
    near = LengthGroupedBatcher(2 * K, read_tokens=lambda context: min(context, 8 * K))
    for _ in range(4):
        near.plan(rows)
        assert near.limit("long") is None, "sparse attention reads few tokens of a long row: nothing to hold"
    beside = LengthGroupedBatcher(2 * K)
    for _ in range(4):
        beside.plan([*rows, Row("prefill", 0, K)])
        assert beside.limit("long") is None


@pytest.mark.parametrize(
    "bad", [{"token_budget": 0}, {"prefill_share": 0}, {"prefill_share": 1.1}, {"patience": -1}, {"decode_stride": 0}]
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LengthGroupedBatcher(**({"token_budget": 2048} | bad))


CPU = Costs(step=0.04, token=1 / 1500, read=0.2 / 131072)  # dense attention is dear, as on a CPU


@pytest.mark.parametrize("costs", [Costs(), CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("load", [0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_trace_short_ones_first_at_little_cost(costs, load, seed):
    """60 requests of 256 to 128K tokens that arrive over as long as stock needs to prefill them (or twice that)."""
    alone = sum(simulate([ask], Stock(2 * K), costs)[0].ttft for ask in mixed_trace(60, 0, seed=seed))
    trace = mixed_trace(60, alone / load, seed=seed)
    stock, ours = (summary(simulate(trace, p, costs), 2 * K) for p in (Stock(2 * K), LengthGrouped(2 * K)))
    assert stock["ttft_short_p95"] >= 2 * ours["ttft_short_p95"]
    assert ours["tokens_per_s"] >= 0.95 * stock["tokens_per_s"]
    assert ours["itl_p99"] <= 1.05 * stock["itl_p99"]
    assert ours["ttft_long_max"] <= 2 * stock["ttft_long_max"]


asks = st.lists(
    st.builds(
        Ask,
        at=st.floats(0, 30),
        prompt=st.integers(1, 6000) | st.integers(1, 140_000),
        output=st.integers(1, 40),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    trace=asks, slots=st.integers(1, 8), memory=st.sampled_from([150_000, 1 << 20]), patience=st.sampled_from([0, 1, 4])
)
def test_nobody_starves(trace, slots, memory, patience):
    """Whatever arrives, and however tight slots and memory are:

    - nothing is admitted past an earlier request that is due, but for a long one whose lane an earlier one holds;
    - on the clock of scheduled tokens, a request waits until it is due (`patience * bucket`) and then for the work of
      those that came before it or were admitted by then: once, and once more for each step in which it waits for the
      lane, whose holder gets at least `share` of a step.
    """
    policy = LengthGrouped(2 * K, patience=patience)
    batcher = policy.batcher

    def watch(admitted):
        arrival = next(t.arrival for t in batcher._tickets.values() if t.item.ask is admitted)
        for waiting in batcher._waiting.values():
            if batcher.clock >= waiting.deadline and waiting.arrival < arrival:
                assert waiting.bucket > batcher.short and min(batcher._lane.values()) < batcher._rank(waiting)

    trace.sort(key=lambda ask: ask.at)
    done = simulate(trace, policy, Costs(step=0.01, token=1e-4, read=1e-8), slots, memory, watch)
    for i, d in enumerate(done):
        assert len(d.tokens) == d.ask.output
        due = d.arrived + patience * bucket_of(d.ask.prompt)
        before = sum(e.ask.prompt + e.ask.output for j, e in enumerate(done) if j < i or (j > i and e.admitted <= due))
        lane = before / batcher.prefill_share if bucket_of(d.ask.prompt) > batcher.short else 0
        assert d.admitted <= due + before + lane + 2 * K


def test_starvation_bound_against_an_endless_stream_of_short_requests():
    """Short requests arrive faster than they can be served; one of 64K waits its patience in tokens and no longer."""
    stream = [Ask(i * 0.05, 1000, 2) for i in range(800)]
    long = Ask(1.0, 64 * K, 4)
    done = simulate([*stream, long], LengthGrouped(2 * K, patience=1), slots=4)
    waited = done[-1].admitted - done[-1].arrived
    assert waited <= 64 * K + 2 * K
    last = [d.tokens[-1] for d in done[:-1]]
    assert done[-1].tokens[-1] < np.percentile(last, 90), "it was done well before the stream was"
