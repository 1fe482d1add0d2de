"""What a scheduler does with blocks whose content is lost (`vllm_ktx.attention_backends.tiered`), beyond vLLM's own."""

from __future__ import annotations

import time
from typing import Any

from .._compat import limit_blocks_in_use, selects_ktx
from ..plugin import ktx_config
from ..tiering import engine_plan

MOST_TRIES = 3


def places_of_running(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """How many blocks running requests may hold: on a GPU with a disk, those that host memory holds. None: all."""
    if not selects_ktx(vllm_config) or ktx_config(vllm_config).disk_gib == 0:
        return None
    from ..attention_backends.metadata import page_layout

    (group,) = kv_cache_config.kv_cache_groups  # formats by layer keep all pages on the device
    config, cache_dtype = ktx_config(vllm_config), vllm_config.cache_config.cache_dtype
    layout = page_layout(group.kv_cache_spec, config, cache_dtype, vllm_config.model_config.dtype, None)
    plan = engine_plan(vllm_config, config, layout)
    layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    return plan.places(layout, layers) if plan.on_gpu and plan.overcommit > 1 else None


class RecomputesLostBlocks:
    """For a scheduler class of vLLM, before it in the bases.

    vLLM lets requests whose blocks a worker calls invalid compute those again in place, as often as that happens, while
    the prefix cache and other running requests go on using them. Here such a request is preempted instead: what
    lies before its first lost block comes from the prefix cache, the rest is computed into blocks of its own, and
    nobody ever reads a block that is half old. Without any progress it is tried `MOST_TRIES` times, the last time from
    its first token, and then ends with an error.
    """

    _tries: dict[str, tuple[int, int]] | None = None  # request -> tries since it had so many tokens

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        blocks = self.kv_cache_config.num_blocks
        places = places_of_running(vllm_config, self.kv_cache_config)
        if places is not None and places < blocks:
            limit_blocks_in_use(self.kv_cache_manager, places)

    def _handle_invalid_blocks(self: Any, lost: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        affected = super()._handle_invalid_blocks(lost, num_scheduled_tokens)  # type: ignore[misc]
        tries, void, now = self._tries or {}, set(lost), time.monotonic()
        spoilt: set[int] = set()  # computed behind a lost block, and maybe hit by another request in the same step
        others = {request: self.kv_cache_manager.get_block_ids(request.request_id)[0] for request in self.running}
        while hit := [r for r, own in others.items() if r.request_id in affected or not spoilt.isdisjoint(own)]:
            for request in hit:
                blocks = others.pop(request)
                before, tokens = tries.get(request.request_id, (0, -1))
                count = before + 1 if tokens == request.num_tokens else 1
                tries[request.request_id] = count, request.num_tokens
                first = next(i for i, block in enumerate(blocks) if block in lost or block in spoilt)
                spoilt.update(blocks[first:])
                void.update(blocks[0 if count >= MOST_TRIES else first :])
                affected.add(request.request_id)
                if count > MOST_TRIES:
                    self.grammar_compile_error_reqs.add(request.request_id)  # vLLM ends these with "error"
        preempted = [request for request in self.running if request.request_id in affected]
        self.kv_cache_manager.evict_blocks(void)
        self.running = [request for request in self.running if request.request_id not in affected]
        for request in reversed(preempted):  # each goes before the others that wait
            # A step that is under way reads the lost block too: what comes of it is dropped.
            self._preempt_request(request, now, drop_stale_output=True)
        self._tries = {req_id: seen for req_id, seen in tries.items() if req_id in self.requests}
        return affected
