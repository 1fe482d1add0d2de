"""Ray Serve's request router with the policy of `affinity`. It runs in the ingress's process, where the handle is."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import Candidate, Load, Policy


class AffinityRouter(RequestRouter):
    """Ranks replicas for the `Forward` that a request carries. Load is what this ingress has under way on each.

    A request counts from its choice on, not from its dispatch: many that come at once would all see an idle home.
    It is no FIFOMixin: with that, a request could take the replica that was chosen for another one.
    """

    def initialize_state(self, long_tokens: int = Policy.long_tokens, **_: Any) -> None:
        self._policy = Policy(long_tokens=long_tokens)
        self._load = Load()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [list(by_name.values())]
        request, number = pending_request.args[0], pending_request.metadata.internal_request_id
        self._load.end(number)
        loads = self._load.by_replica()
        candidates = [
            Candidate(name, loads.get(name, 0.0), (replica.routing_stats or {}).get("free_tokens"))
            for name, replica in by_name.items()
        ]
        ranked = self._policy.rank(request.ask, candidates, request.failed)
        if ranked:
            self._load.begin(number, ranked[0], request.ask.load)
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        number = pending_request.metadata.internal_request_id
        self._load.begin(number, replica_id.unique_id, pending_request.args[0].ask.load, dispatched=True)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._load.end(internal_request_id)
