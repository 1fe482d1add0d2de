"""Ray Serve's request router with the policy of `affinity`. It runs in the ingress's process, where the handle is."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Ask, Candidate, Policy


class AffinityRouter(RequestRouter):
    """Ranks replicas for the `Forward` that a request carries. Load is what this ingress has under way on each.

    It is no FIFOMixin: with that, a request could take the replica that was chosen for another one.
    """

    _policy = Policy()

    def initialize_state(self, long_tokens: int = Policy.long_tokens, **_: Any) -> None:
        self._policy = Policy(long_tokens=long_tokens)
        self._loads: dict[str, float] = {}
        self._under_way: dict[str, tuple[str, float]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = pending_request.args[0] if pending_request and pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [
            Candidate(name, self._loads.get(name, 0.0), (replica.routing_stats or {}).get("free_tokens"))
            for name, replica in by_name.items()
        ]
        ask: Ask = getattr(request, "ask", Ask(b""))
        ranked = self._policy.rank(ask, candidates, getattr(request, "failed", ()))
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        ask: Ask = getattr(pending_request.args[0], "ask", Ask(b"")) if pending_request.args else Ask(b"")
        name = replica_id.unique_id
        self._loads[name] = self._loads.get(name, 0.0) + ask.load
        self._under_way[pending_request.metadata.internal_request_id] = name, ask.load

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name, load = self._under_way.pop(internal_request_id, (replica_id.unique_id, 0.0))
        left = self._loads.get(name, 0.0) - load
        if left > 1e-9:
            self._loads[name] = left
        else:
            self._loads.pop(name, None)  # also how replicas that are gone leave
