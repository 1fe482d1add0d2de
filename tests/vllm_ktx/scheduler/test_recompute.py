"""Which requests are preempted when blocks are lost, over a stub of vLLM's scheduler."""

from types import SimpleNamespace

from vllm_ktx.scheduler.recompute import MOST_TRIES, RecomputesLostBlocks


class Request:
    def __init__(self, name: str) -> None:
        self.request_id, self.num_tokens = name, 100


class Stub:
    """Finds those affected as vLLM does: by lost blocks among the ones a request had before the step."""

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks, self.evicted, self.preempted = blocks, set(), []
        self.running = [Request(name) for name in blocks]
        self.requests = {request.request_id: request for request in self.running}
        self.grammar_compile_error_reqs: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (blocks[name],), evict_blocks=self.evicted.update
        )

    def _handle_invalid_blocks(self, lost, num_scheduled_tokens):
        return {request.request_id for request in self.running if lost & set(self.blocks[request.request_id])}

    def _preempt_request(self, request, now, drop_stale_output):
        assert drop_stale_output, "a step under way read what was lost"
        self.preempted.append(request.request_id)


class Scheduler(RecomputesLostBlocks, Stub):
    __init__ = Stub.__init__


def test_who_hit_what_was_computed_behind_a_lost_block_is_preempted_too():
    """`b` found another copy (8) of the lost block 2, and then 3, which `a` computed in this step without its context;
    `c` hit what `b` made of that; `d` has only what lies before."""
    scheduler = Scheduler({"d": [1, 9], "c": [1, 8, 3, 5, 6], "b": [1, 8, 3, 5], "a": [1, 2, 3, 4]})
    assert scheduler._handle_invalid_blocks({2}, {}) == {"a", "b", "c"}
    assert scheduler.preempted == ["a", "b", "c"] and [r.request_id for r in scheduler.running] == ["d"]
    assert scheduler.evicted == {2, 3, 4, 5, 6}


def test_the_last_try_starts_over_and_leaves_others_alone():
    scheduler = Scheduler({"a": [1, 2, 3], "d": [1, 9]})
    for tried in range(1, MOST_TRIES + 2):
        scheduler.running, scheduler.evicted = list(scheduler.requests.values()), set()
        scheduler.kv_cache_manager.evict_blocks = scheduler.evicted.update
        assert scheduler._handle_invalid_blocks({2}, {}) == {"a"}, "what d shares was computed before and is right"
        assert scheduler.evicted == ({1, 2, 3} if tried >= MOST_TRIES else {2, 3})
        assert scheduler.grammar_compile_error_reqs == ({"a"} if tried > MOST_TRIES else set())
