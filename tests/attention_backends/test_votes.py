"""The votes for `eviction='attention'` cost the selection's size, not that of the context."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from vllm_ktx.attention_backends.ktx import KTXImpl
from vllm_ktx.attention_backends.metadata import KTXMetadata
from vllm_ktx.attention_backends.selection import SparseSettings

HEADS, PAGES = 2, 600


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_pages": 40}, 40),
        ({"select": "top_k", "top_k": 7}, 7),
        ({"select": "global_ratio", "global_ratio": 0.01}, 6),
        ({"coverage": 1.0}, PAGES),
    ],
)
def test_lists_are_as_long_as_a_selection_and_rows_without_one_are_not_read(settings, most):
    tokens, table = 130, torch.stack((torch.arange(PAGES), torch.arange(PAGES) + 1000)).int()
    meta = SimpleNamespace(
        num_tokens=tokens, cu_q=torch.tensor([0, 0, 129, 130], dtype=torch.int32), block_table=table[[0, 0, 1]],
        open_slot=torch.full((2000,), -1, dtype=torch.int32), sparse=SparseSettings(**settings),
        context_pages=torch.full((tokens,), PAGES), audit=None, accounts=None, tiers=SimpleNamespace(weighs=True),
    )  # fmt: skip
    meta.count_votes = partial(KTXMetadata.count_votes, meta)
    widths = []

    def attend(out, chosen, dropped, pages_read, depth, **more):
        widths.append(chosen.shape[-1])
        chosen[..., 1:] = 599  # what was never touched may hold anything
        for token, head, pages in ((0, 0, [3, 4]), (64, 1, [4, 599]), (129, 0, [5])):
            chosen[token, head] = torch.tensor(pages + [-1] * (most - len(pages)), dtype=torch.int32)
        for counter in (dropped, pages_read, depth):
            counter.zero_()

    impl = SimpleNamespace(num_heads=HEADS, num_kv_heads=HEADS)
    memory = SimpleNamespace(headers=None)
    votes = KTXImpl._attend_sparse(impl, attend, None, memory, meta, 0)
    assert widths == [most]
    assert {int(b): int(votes[b]) for b in votes.nonzero()} == {3: 1, 4: 2, 599: 1, 1005: 1}

    meta.context_pages.zero_()  # the first chunk of a prompt
    none = KTXImpl._attend_sparse(impl, lambda out, pages_read, **more: pages_read.zero_(), None, memory, meta, 0)
    assert not none.any()
