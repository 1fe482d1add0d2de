"""The policy of length-grouped continuous batching: who is admitted next, and who gets how many tokens of a step.

It owns the order of the waiting requests and the plan of one step; it knows no model, no clock but the tokens that were
scheduled, and never touches KV memory. It doesn't import vLLM: the scheduler and the simulation in
`benchmarks/schedule.py` use the same object.

The parts, and where they come from:
- Chunked prefill in the same step as decodes is Sarathi-Serve's (Agrawal et al., 2024). Here a *long* prefill, one that
  doesn't fit a step, gets at most a share of a step's tokens while anything else wants to run.
- Waiting requests lie in length buckets, first come first served in each. Between buckets the earliest virtual deadline
  goes first (earliest-deadline-first over a work clock, as in virtual-clock packet scheduling, Zhang 1990):
  `deadline = clock at arrival + patience * bucket`, so shorter requests overtake longer ones, but not for ever.
- Ageing: a request past its deadline is *due*, and due requests go by arrival, before all others. So, whatever
  arrives, once `patience * bucket` tokens were scheduled since a request's arrival, nothing that arrived after it is
  admitted before it (a due long request may still see short ones admitted while an earlier long one has the lane).
- One long prefill runs at a time: the *lane*. A better ranked one (shorter, or due) may suspend its holder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Generic, NamedTuple, TypeVar

LENGTH_BUCKETS = tuple(1024 << i for i in range(8)) + (1 << 20,)  # 1K, 2K, ... 128K, 1M
DECODES_ONLY = 2  # a long prefill's share grows by this factor while no other prefill wants a part of the step
LANE_DEPTH = 2  # long prefills that may be under way at once, one of them suspended, until one is due

Item = TypeVar("Item", bound=Hashable)


class Rank(NamedTuple):
    """Smaller goes first. order: arrival of a due request, deadline of another."""

    priority: int
    not_preempted: bool
    not_due: bool
    order: int


class Row(NamedTuple):
    """A running request as a step's plan sees it.

    context: tokens whose keys and values exist. prefill: tokens still to compute before it decodes; 0: it decodes.
    """

    item: Any
    context: int
    prefill: int


@dataclass(eq=False)
class _Ticket(Generic[Item]):
    """What is remembered of a request from its arrival until it ends."""

    item: Item
    bucket: int
    priority: int
    arrival: int  # a running number
    deadline: int  # on the clock of scheduled tokens
    preempted: bool = False
    waiting: bool = True


def bucket_of(length: int) -> int:
    """The smallest length bucket that holds `length` tokens; the largest bucket for anything longer."""
    return next((bucket for bucket in LENGTH_BUCKETS if length <= bucket), LENGTH_BUCKETS[-1])


class LengthGroupedBatcher(Generic[Item]):
    """Waiting requests in length buckets, and the plan of each step. Items are any hashable objects.

    A step goes: `plan(running)`, then running requests take tokens in the order and within the `limit`s of the plan,
    then `peek`, `limit`, `pop` admit waiting ones while there is room, then `advance(tokens scheduled)`.

    token_budget: most tokens of a step.
    prefill_share: part of a step's tokens that a long prefill gets while other requests want to run; above 0, to 1.
    patience: tokens that may be scheduled after a request's arrival before it is due, as a multiple of its bucket.
    decode_spread, decode_stride: in steps without prefills, decoding rows that read more than `decode_spread` times
        the median row's tokens decode together, every `decode_stride`-th step, so that the steps between hold rows of
        like length. (Beside a prefill, whose chunk takes most of the step, waiting would only add to their latency.)
    read_tokens: tokens of context that a decoding row of that many tokens reads (all of them for dense attention).
    Raises ValueError, naming the setting, for values that can't be served.
    """

    def __init__(
        self,
        token_budget: int,
        prefill_share: float = 0.25,
        patience: float = 4.0,
        decode_spread: float = 16.0,
        decode_stride: int = 2,
        read_tokens: Callable[[int], int] | None = None,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget={token_budget}: a step needs at least 1 token")
        if not 0 < prefill_share <= 1:
            raise ValueError(f"prefill_share={prefill_share}: use a number above 0, to 1")
        if patience < 0 or decode_spread < 1 or decode_stride < 1:
            raise ValueError(
                f"patience={patience} (0 or more), decode_spread={decode_spread} (1 or more), "
                f"decode_stride={decode_stride} (1 or more): at least one is out of its range"
            )
        self.token_budget = token_budget
        self.prefill_share = prefill_share
        self.patience = patience
        self.decode_spread = decode_spread
        self.decode_stride = decode_stride
        self.read_tokens = read_tokens or (lambda context: context)
        self.clock = 0
        # Longest bucket that counts as short: it fits a step, or is the smallest there is.
        self.short = max([LENGTH_BUCKETS[0], *(b for b in LENGTH_BUCKETS if b <= token_budget)])
        self._arrivals = 0
        self._steps = 0
        self._tickets: dict[Item, _Ticket[Item]] = {}
        self._waiting: dict[Item, _Ticket[Item]] = {}
        # By priority: the preempted first, then a queue a bucket. Removed tickets stay until they come to a head.
        self._levels: dict[int, dict[int, deque[_Ticket[Item]]]] = {}
        self._lane: dict[Item, Rank] = {}  # long prefills under way
        self._cap: int | None = None
        self._limits: dict[Item, int] = {}

    # Waiting requests

    def add(self, item: Item, length: int, priority: int = 0) -> None:
        """A new request of `length` tokens to compute; a smaller `priority` goes first, as in vLLM."""
        bucket = bucket_of(length)
        deadline = self.clock + round(self.patience * bucket)
        self._arrivals += 1
        ticket = _Ticket(item, bucket, priority, self._arrivals, deadline)
        self._tickets[item] = self._waiting[item] = ticket
        self._queue(ticket).append(ticket)

    def put_back(self, item: Item, length: int, priority: int = 0, preempted: bool = False) -> None:
        """Returns a popped request to the head of its bucket, with its age; a preempted one to the head of all."""
        self._lane.pop(item, None)
        if item not in self._tickets:  # a request that was never seen here, such as one that waited elsewhere
            self.add(item, length, priority)
            self._queue(self._tickets[item]).pop()
        ticket = self._tickets[item]
        ticket.preempted |= preempted
        ticket.waiting = True
        self._waiting[item] = ticket
        self._queue(ticket).appendleft(ticket)

    def remove(self, item: Item) -> bool:
        """Forgets a waiting request; False if it wasn't waiting."""
        ticket = self._waiting.pop(item, None)
        if ticket is None:
            return False
        self._tickets.pop(item)
        ticket.waiting = False
        return True

    def peek(self) -> Item | None:
        """The request to admit next; None if there is none, or only long ones while the lane is taken."""
        ticket = self._best()
        return None if ticket is None else ticket.item

    def pop(self, runs: bool = True) -> Item:
        """Takes out what `peek` shows; `runs` false: it can't run yet, comes back, and doesn't take the lane.

        Raises IndexError if there is nothing to take.
        """
        ticket = self._best()
        if ticket is None:
            raise IndexError("pop from a batcher with nothing to admit")
        self._queue(ticket).popleft()
        del self._waiting[ticket.item]
        ticket.waiting = False
        if runs and ticket.bucket > self.short:
            self._lane[ticket.item] = self._rank(ticket)
        return ticket.item

    def __len__(self) -> int:
        """Waiting requests, admissible or not."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """Waiting requests, those that would go first in front if the lane were free."""
        return (t.item for t in sorted(self._waiting.values(), key=lambda t: (self._rank(t), t.arrival)))

    def is_due(self, item: Item) -> bool:
        """Whether the request, waiting or running, is past its deadline."""
        return self.clock >= self._tickets[item].deadline

    # Steps

    def plan(self, running: Sequence[Row]) -> list[Item]:
        """Plans the next step: returns the running requests in the order in which they take tokens.

        The first is the lane's holder, so that it advances in every step; then decoding rows and short prefills, each
        by priority and arrival; suspended long prefills come last (whoever preempts for memory takes from the end).
        """
        self._steps += 1
        self._tickets = {row.item: self._ticket_of(row) for row in running} | self._waiting
        self._limits, self._cap = {}, None
        long = [row for row in running if bucket_of(row.prefill) > self.short]
        long.sort(key=lambda row: self._rank(self._tickets[row.item]))
        self._lane = {row.item: self._rank(self._tickets[row.item]) for row in long}
        decoding = [row for row in running if not row.prefill]
        suspended = {row.item for row in long[1:]}
        self._limits = dict.fromkeys(suspended, 0)
        short = len(running) > len(long) + len(decoding) or any(t.bucket <= self.short for t in self._waiting.values())
        if short or decoding or (long and self.peek() is not None):
            share = round(min(1.0, self.prefill_share * (1 if short else DECODES_ONLY)) * self.token_budget)
            self._cap = max(1, min(share, self.token_budget - len(decoding)))
            if long:
                self._limits[long[0].item] = self._cap
        else:  # nothing else to run: the holder takes the whole step, the suspended what it leaves
            self._limits = {}
        if len(decoding) == len(running) and self.peek() is None:
            self._limits = self._held(decoding)

        holder = long[0].item if long else None
        return [
            row.item
            for row in sorted(
                running,
                key=lambda row: (
                    row.item != holder,
                    row.item in suspended,
                    row.prefill > 0,
                    self._tickets[row.item].priority,
                    self._tickets[row.item].arrival,
                ),
            )
        ]

    def limit(self, item: Item) -> int | None:
        """Most tokens that the request may take in the planned step; 0: none, None: as many as there are.

        Of a waiting request it is asked before `pop`.
        """
        ticket = self._waiting.get(item)
        return self._limits.get(item) if ticket is None else self._cap if ticket.bucket > self.short else None

    def advance(self, tokens: int) -> None:
        """Moves the clock by the tokens that a step scheduled."""
        self.clock += tokens

    def _held(self, decoding: Sequence[Row]) -> dict[Item, int]:
        """Decoding rows too long for this step's group."""
        if self.decode_stride == 1 or self._steps % self.decode_stride == 0 or len(decoding) < 2:
            return {}
        reads = {row.item: self.read_tokens(row.context) for row in decoding}
        most = self.decode_spread * max(1, median_low(reads.values()))
        return {item: 0 for item, read in reads.items() if read > most}

    def _ticket_of(self, row: Row) -> _Ticket[Item]:
        ticket = self._tickets.get(row.item)
        if ticket is None:  # admitted from another queue
            self._arrivals += 1
            ticket = _Ticket(row.item, bucket_of(row.prefill), 0, self._arrivals, self.clock, waiting=False)
        return ticket

    def _queue(self, ticket: _Ticket[Item]) -> deque[_Ticket[Item]]:
        level = self._levels.setdefault(ticket.priority, {})
        return level.setdefault(0 if ticket.preempted else ticket.bucket, deque())

    def _rank(self, ticket: _Ticket[Item]) -> Rank:
        due = self.clock >= ticket.deadline
        return Rank(ticket.priority, not ticket.preempted, not due, ticket.arrival if due else ticket.deadline)

    def _best(self) -> _Ticket[Item] | None:
        for priority in sorted(self._levels):
            heads = []
            for queue in self._levels[priority].values():
                while queue and not queue[0].waiting:
                    queue.popleft()
                if queue and self._admissible(queue[0]):
                    heads.append(queue[0])
            if heads:
                return min(heads, key=lambda ticket: (self._rank(ticket), ticket.arrival))
            if not any(self._levels[priority].values()):
                del self._levels[priority]
        return None

    def _admissible(self, ticket: _Ticket[Item]) -> bool:
        if ticket.bucket <= self.short or ticket.preempted or not self._lane:
            return True
        rank, holder = self._rank(ticket), min(self._lane.values())
        urgent = not rank.not_due or rank.priority < holder.priority
        return rank < holder and (urgent or len(self._lane) < LANE_DEPTH)
