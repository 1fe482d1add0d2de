"""vLLM's two schedulers with the policy of `LengthGroupedBatcher`, for `--scheduler-cls` and KTX's own choice.

Everything that moves memory, counts tokens or builds a step's output is vLLM's own. Three things differ: the class of
the waiting queue, the order of `running` when a step begins, and how many tokens a request may take in it. For the last
the hook is `_reserve_prefill_lookahead`, which vLLM asks about every request, running or waiting, with the tokens that
it means to give; fewer than asked, or none, are results that vLLM's own callers already handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from .._compat import selects_ktx
from ..plugin import ktx_config
from .batcher import LengthGroupedBatcher, Row
from .recompute import RecomputesLostBlocks


def tokens_read(vllm_config: Any) -> Callable[[int], int] | None:
    """How many tokens of its context a decoding row reads, given their number; None: all of them."""
    if not selects_ktx(vllm_config):
        return None
    config, cache = ktx_config(vllm_config), vllm_config.cache_config
    sparse = config.sparse_settings(config.kv_format(cache.cache_dtype), cache.block_size)
    if sparse is None:
        return None
    always = sparse.window + sparse.sinks
    if sparse.select == "global_ratio":
        return lambda context: min(context, always + int(sparse.global_ratio * context))
    most = always + (sparse.top_k if sparse.select == "top_k" else sparse.cap) * cache.block_size
    return lambda context: min(context, most)


class LengthGroupedQueue(RequestQueue):
    """vLLM's waiting queue over a batcher. It is falsy while no request may be admitted, though some may wait: that
    ends vLLM's round of admissions. `len` counts them all.

    by_priority: whether `request.priority` comes before the policy (vLLM's `--scheduling-policy priority`).
    uncomputed: tokens of a request that the prefix cache doesn't hold.
    """

    def __init__(
        self, batcher: LengthGroupedBatcher[Request], by_priority: bool, uncomputed: Callable[[Request], int]
    ) -> None:
        self._batcher = batcher
        self._by_priority = by_priority
        self._uncomputed = uncomputed
        self.asked: Request | None = None  # whose tokens were asked for since the last peek

    def add_request(self, request: Request) -> None:
        self._batcher.add(request, self._uncomputed(request), self._priority(request))

    def pop_request(self) -> Request:
        """vLLM also takes out what can't run yet (a grammar, an adapter, pages on their way), without asking for its
        tokens, and puts it back when the round is over."""
        return self._batcher.pop(runs=self.asked is not None and self.asked is self._batcher.peek())

    def peek_request(self) -> Request:
        self.asked, request = None, self._batcher.peek()
        if request is None:
            raise IndexError("peek from a queue with nothing to admit")
        return request

    def prepend_request(self, request: Request) -> None:
        preempted = request.status == RequestStatus.PREEMPTED
        self._batcher.put_back(request, request.num_tokens, self._priority(request), preempted)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        if not self._batcher.remove(request):
            raise ValueError(f"request {request.request_id} is not waiting")

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._batcher.remove(request)

    def __bool__(self) -> bool:
        return self._batcher.peek() is not None

    def __len__(self) -> int:
        return len(self._batcher)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._batcher)

    def _priority(self, request: Request) -> int:
        return request.priority if self._by_priority else 0


class _LengthGrouped(RecomputesLostBlocks, Scheduler):
    """What both schedulers add to vLLM's."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.batcher: LengthGroupedBatcher[Request] = LengthGroupedBatcher(
            self.max_num_scheduled_tokens,
            ktx_config(vllm_config).prefill_share,
            read_tokens=tokens_read(vllm_config),
        )
        self.waiting = LengthGroupedQueue(self.batcher, self.policy == SchedulingPolicy.PRIORITY, self._uncomputed)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        rows = [
            Row(r, r.num_computed_tokens, r.num_tokens - r.num_computed_tokens if r.is_prefill_chunk else 0)
            for r in self.running
        ]
        self.running[:] = self.batcher.plan(rows)
        output = super().schedule(throttle_prefills)
        self.batcher.advance(output.total_num_scheduled_tokens)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        self.waiting.asked = request
        limit = self.batcher.limit(request)
        if limit is not None:
            num_new_tokens = min(num_new_tokens, limit)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _uncomputed(self, request: Request) -> int:
        """A long prompt whose pages are cached is a short request."""
        if self.connector is not None or getattr(request, "kv_cache_report_mode", "") == "full":
            return request.num_tokens  # a lookup of these tells others of a hit
        return request.num_tokens - self.kv_cache_manager.get_computed_blocks(request)[1]


class LengthGroupedScheduler(_LengthGrouped):
    """Length-grouped continuous batching, one step at a time (vLLM's choice on CPU)."""


class AsyncLengthGroupedScheduler(_LengthGrouped, AsyncScheduler):
    """The same with asynchronous scheduling (vLLM's choice on CUDA)."""


class StockScheduler(RecomputesLostBlocks, Scheduler):
    """vLLM's own, for engines with pages off the device (`ktx.scheduler="stock"`)."""


class AsyncStockScheduler(RecomputesLostBlocks, AsyncScheduler):
    """vLLM's own asynchronous one, for engines with pages off the device."""
