"""Discrete-event simulation of continuous batching: vLLM's own order of things, and the length-grouped policy.

    done = simulate(trace, LengthGrouped(2048), Costs())    # a list of Done, one a request

One step at a time, as vLLM's scheduler goes: running requests take tokens of the step's budget, then waiting ones are
admitted while there is a slot, memory for their whole prompt, and budget. `Stock` is vLLM's first come first served
with chunked prefill; `LengthGrouped` asks the same `LengthGroupedBatcher` that the real scheduler asks. A step's time
comes from a cost model, so figures compare policies, not machines. Nothing is preempted: memory is reserved at
admission for prompt and output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ktx.scheduler import LengthGroupedBatcher, Row


@dataclass(frozen=True)
class Ask:
    """A request of a trace: seconds of its arrival, prompt tokens, tokens to generate."""

    at: float
    prompt: int
    output: int
    priority: int = 0


@dataclass
class Done:
    """What became of an `Ask`: seconds of each token, clock (scheduled tokens) at arrival and at admission."""

    ask: Ask
    tokens: list[float] = field(default_factory=list)
    arrived: int = -1
    admitted: int = -1

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.tokens[0] - self.ask.at


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: `step` + `token` for each token + `read` for each token of context that is read.

    A chunk of a prefill reads its context once for each `tile` of its tokens, a decoding row once. The defaults are
    chosen, not measured, to have about the proportions of an 8B model on a 24 GB card: 25 ms to read the weights, 6000
    tokens/s of prefill, 128K tokens of context read in 25 ms.
    """

    step: float = 0.025
    token: float = 1 / 6000
    read: float = 0.025 / 131072
    tile: int = 256

    def of(self, chunks: Iterable[tuple[int, int]]) -> float:
        """`chunks`: (tokens, context before them) of each request in the step."""
        return self.step + sum(n * self.token + -(-n // self.tile) * (c + n) * self.read for n, c in chunks)


class _Job:
    """A request in flight. Hashable by identity."""

    def __init__(self, done: Done) -> None:
        self.done, self.ask, self.computed = done, done.ask, 0

    @property
    def prefill(self) -> int:
        return max(0, self.ask.prompt - self.computed)

    @property
    def wants(self) -> int:
        return self.prefill or 1


class Stock:
    """vLLM's first come first served: running requests in the order of admission, each as much as the budget holds."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self._queue: deque[_Job] = deque()

    def add(self, job: _Job) -> None:
        self._queue.append(job)

    def plan(self, running: list[_Job]) -> list[_Job]:
        return running

    def limit(self, job: _Job) -> int | None:
        return None

    def peek(self) -> _Job | None:
        return self._queue[0] if self._queue else None

    def pop(self) -> _Job:
        return self._queue.popleft()

    def advance(self, tokens: int) -> None:
        pass


class LengthGrouped:
    """The policy of vllm_ktx.scheduler. Arguments are `LengthGroupedBatcher`'s."""

    def __init__(self, token_budget: int, **options: float) -> None:
        self.token_budget = token_budget
        self.batcher: LengthGroupedBatcher[_Job] = LengthGroupedBatcher(token_budget, **options)  # type: ignore[arg-type]
        self.limit, self.peek, self.pop = self.batcher.limit, self.batcher.peek, self.batcher.pop
        self.advance = self.batcher.advance

    def add(self, job: _Job) -> None:
        self.batcher.add(job, job.ask.prompt, job.ask.priority)

    def plan(self, running: list[_Job]) -> list[_Job]:
        return self.batcher.plan([Row(job, job.computed, job.prefill) for job in running])


Policy = Stock | LengthGrouped


def simulate(
    trace: Sequence[Ask],
    policy: Policy,
    costs: Costs | None = None,
    slots: int = 32,
    memory: int = 1 << 20,
    watch: Callable[[Ask], None] | None = None,
) -> list[Done]:
    """Serves `trace`; `slots`: most running requests, `memory`: tokens of KV cache, `watch`: called at each admission.

    Raises RuntimeError if a step schedules nothing while requests wait, which would go on for ever.
    """
    costs = costs or Costs()
    done = [Done(ask) for ask in trace]
    coming = deque(sorted((_Job(d) for d in done), key=lambda job: job.ask.at))
    running: list[_Job] = []
    now, clock, used, left = 0.0, 0, 0, len(done)
    while left:
        if coming and not running and policy.peek() is None:
            now = max(now, coming[0].ask.at)
        while coming and coming[0].ask.at <= now:
            job = coming.popleft()
            job.done.arrived = clock
            policy.add(job)
        chunks: dict[_Job, int] = {}
        budget = policy.token_budget
        running = policy.plan(running)
        for job in running:
            tokens = _allowed(policy, job, budget)
            if tokens:
                chunks[job] = tokens
                budget -= tokens
        while budget and len(running) < slots and (job := policy.peek()) is not None:
            size = job.ask.prompt + job.ask.output
            if used + size > memory:
                break
            chunks[job] = _allowed(policy, job, budget)  # vLLM asks for it before it takes the request out
            policy.pop()
            if watch:
                watch(job.ask)
            job.done.admitted = clock
            used += size
            running.append(job)
            budget -= chunks[job]
        if not chunks:
            raise RuntimeError("a step scheduled nothing")
        now += costs.of((tokens, job.computed) for job, tokens in chunks.items())
        clock += sum(chunks.values())
        policy.advance(sum(chunks.values()))
        for job, tokens in chunks.items():
            job.computed += tokens
            if job.computed >= job.ask.prompt:
                job.done.tokens.append(now)
                if len(job.done.tokens) == job.ask.output:
                    running.remove(job)
                    used -= job.ask.prompt + job.ask.output
                    left -= 1
    return done


def _allowed(policy: Policy, job: _Job, budget: int) -> int:
    limit = policy.limit(job)
    return min(job.wants, budget) if limit is None else min(job.wants, budget, limit)


def mixed_trace(
    requests: int, seconds: float, short: int = 1024, longest: int = 131072, long_share: float = 0.25, seed: int = 0
) -> list[Ask]:
    """Arrivals at random over `seconds`; prompts log-uniform from `short` / 4 to 2 `short`, and a `long_share` of them
    from 4 `short` to `longest` (traffic of long contexts is bimodal: chats beside documents); outputs of 16 to 128."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, seconds, requests))
    long = np.arange(requests) < round(long_share * requests)
    rng.shuffle(long)
    low, high = np.where(long, 4 * short, short / 4), np.where(long, longest, 2 * short)
    prompts = np.exp(rng.uniform(np.log(low), np.log(high))).astype(int)
    outputs = rng.integers(16, 129, requests)
    return [Ask(float(t), int(p), int(o)) for t, p, o in zip(at, prompts, outputs, strict=True)]


def summary(done: Sequence[Done], short: int) -> dict[str, float]:
    """Seconds: percentiles of TTFT (of prompts up to `short`, and of others) and of inter-token latency; tokens/s."""
    few = [d.ttft for d in done if d.ask.prompt <= short]
    many = [d.ttft for d in done if d.ask.prompt > short]
    gaps = np.concatenate([np.diff(d.tokens) for d in done])
    span = max(d.tokens[-1] for d in done) - min(d.ask.at for d in done)
    return {
        "ttft_short_p50": float(np.percentile(few, 50)),
        "ttft_short_p95": float(np.percentile(few, 95)),
        "ttft_long_p50": float(np.percentile(many, 50)) if many else 0.0,
        "ttft_long_max": max(many, default=0.0),
        "itl_p50": float(np.percentile(gaps, 50)),
        "itl_p99": float(np.percentile(gaps, 99)),
        "tokens_per_s": sum(d.ask.prompt + d.ask.output for d in done) / span,
    }
