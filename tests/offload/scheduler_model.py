"""Steps as vLLM's scheduler makes them, at random: freed blocks keep their hash until they are taken again and are hit
until then, also in the step that computes them; who finds no block preempts the newest row; rows carry drafts, some of
which are accepted; rows are left out of steps. A token is a number that says its kind and position.
"""

import random
from dataclasses import dataclass, field

PAGE = 32
PROMPT, OWN, SAID, DRAFT = (kind * 10**6 for kind in (1, 2, 3, 4))


@dataclass(eq=False)
class Row:
    tokens: list[int]
    longest: int
    prompt: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, rng: random.Random, num_blocks: int, rows: int, in_step: int, speculative: int) -> None:
        """`rows` run at most, of which `in_step` take part in a step."""
        self.rng, self.most, self.in_step, self.speculative = rng, rows, in_step, speculative
        self.free, self.users = list(range(1, num_blocks)), [0] * num_blocks
        self.block_of: dict[tuple, int] = {}
        self.hash_of: list[tuple | None] = [None] * num_blocks
        self.running: list[Row] = []
        self.waiting: list[Row] = []
        self.chunk = rng.choice([7, PAGE, PAGE + 5, 100])
        self.preempted = self.hits = self.accepted = 0

    def schedule(self) -> list[tuple[Row, int]]:
        """The rows of a step and how many tokens each computes, drafts included."""
        if self.rng.random() < 0.3 and len(self.waiting) < 3:
            self.waiting.append(self._request())
        budget, step = self.chunk * self.rng.choice([1, 2]), {}
        for row in list(self.running):
            count = min(len(row.tokens) + len(row.drafts) - row.computed, budget)
            if row not in self.running or count <= 0 or len(step) == self.in_step or self.rng.random() < 0.15:
                continue
            while not self._extend(row, count):
                last = self.running.pop()
                self._release(last)
                last.computed, last.drafts = 0, []
                self.waiting.insert(0, last)
                self.preempted += 1
                step.pop(last, None)
                if last is row:
                    break
            else:
                step[row], budget = count, budget - count
        while self.waiting and len(self.running) < self.most and len(step) < self.in_step and budget > 0:
            row = self.waiting[0]
            row.blocks = self._prefix(row)
            hit, count = len(row.blocks) * PAGE, min(len(row.tokens) - len(row.blocks) * PAGE, budget)
            if len(row.blocks) + len(set(self.free) - set(row.blocks)) < -(-(hit + count + self.speculative) // PAGE):
                row.blocks = []
                break
            for block in row.blocks:
                if not self.users[block]:
                    self.free.remove(block)
                self.users[block] += 1
            self.hits += bool(row.blocks)
            row.computed = hit
            self._extend(row, count)
            self.running.append(self.waiting.pop(0))
            step[row], budget = count, budget - count
        return self.rng.sample(list(step.items()), len(step))

    def finish(self, step: list[tuple[Row, int]]) -> None:
        """The step is done: drafts are accepted or not, tokens sampled, rows end."""
        for row, count in step:
            row.computed += count
            if row.computed < len(row.tokens):
                continue
            drafted = row.computed - len(row.tokens)
            accepted = self.rng.randint(0, drafted) if self.rng.random() < 0.7 else drafted
            self.accepted += accepted
            row.computed -= drafted - accepted
            row.tokens += row.drafts[:accepted]
            row.tokens.append(SAID + 1000 * self.rng.randrange(2) + len(row.tokens))
            more = self.rng.randint(0, self.speculative)
            row.drafts = [DRAFT + 1000 * self.rng.randrange(9) + len(row.tokens) + i for i in range(more)]
            if len(row.tokens) >= row.longest or self.rng.random() < 0.02:
                self.running.remove(row)
                self._release(row)

    def _request(self) -> Row:
        rng = self.rng
        shared, own = rng.choice([0, 10, PAGE, 2 * PAGE, 70, 150]), rng.choice([1, 3, 40, 80])
        base, kind = PROMPT + 1000 * rng.randrange(2), OWN + 1000 * rng.randrange(3)
        tokens = [base + i for i in range(shared)] + [kind + i for i in range(shared, shared + own)]
        return Row(tokens, len(tokens) + rng.choice([3, 40, 80]), len(tokens))

    def _prefix(self, row: Row) -> list[int]:
        found = []
        for page in range((len(row.tokens) - 1) // PAGE):
            block = self.block_of.get(tuple(row.tokens[: (page + 1) * PAGE]))
            if block is None:
                break
            found.append(block)
        return found

    def _extend(self, row: Row, count: int) -> bool:
        """Blocks for `count` tokens and drafts behind them; full ones can be hit from now on."""
        need = -(-(row.computed + count + self.speculative) // PAGE) - len(row.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            block = self.free.pop(0)
            if self.block_of.get(self.hash_of[block]) == block:
                del self.block_of[self.hash_of[block]]
            self.hash_of[block], self.users[block] = None, 1
            row.blocks.append(block)
        for page in range(min(row.computed + count, len(row.tokens)) // PAGE):
            if self.hash_of[row.blocks[page]] is None:
                self.hash_of[row.blocks[page]] = key = tuple(row.tokens[: (page + 1) * PAGE])
                self.block_of.setdefault(key, row.blocks[page])
        return True

    def _release(self, row: Row) -> None:
        for block in reversed(row.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        row.blocks = []
