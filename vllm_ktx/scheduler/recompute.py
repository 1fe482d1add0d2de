"""What a scheduler does with blocks whose content is lost (`vllm_ktx.attention_backends.tiered`), beyond vLLM's own."""

from __future__ import annotations

from typing import Any

MOST_TRIES = 3


class RecomputesLostBlocks:
    """For a scheduler class of vLLM, before it in the bases.

    vLLM computes requests again whose blocks a worker calls invalid, as often as that happens, leaves those blocks in
    the prefix cache, and lets a running request that shares one go on before it is there. Here a request ends with an
    error after `MOST_TRIES` times, nobody else finds the blocks meanwhile, and all that share one compute it again.
    """

    _tries: dict[str, int] | None = None

    def _handle_invalid_blocks(self: Any, lost: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        affected = super()._handle_invalid_blocks(lost, num_scheduled_tokens)  # type: ignore[misc]
        tries = self._tries or {}
        void: set[int] = set()
        for req_id in affected:
            request, (blocks,) = self.requests[req_id], self.kv_cache_manager.get_block_ids(req_id)
            first = next(i for i, block in enumerate(blocks) if block in lost)
            request.num_computed_tokens = min(request.num_computed_tokens, first * self.block_size)
            void.update(blocks[first:])
            tries[req_id] = tries.get(req_id, 0) + 1
            if tries[req_id] > MOST_TRIES:
                self.grammar_compile_error_reqs.add(req_id)  # vLLM ends these with finish_reason "error"
        self.kv_cache_manager.evict_blocks(void)
        self._tries = {req_id: count for req_id, count in tries.items() if req_id in self.requests}
        return affected
