"""Ray Serve's request router, by prefix: where most of a prompt was sent before, unless that replica is too busy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from infer.deploy.forward import ForwardedRequest
from infer.deploy.prefixes import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    def initialize_state(self, slack: int = 8) -> None:
        """slack: requests that a replica may have more than the least busy one, and still be sent what it knows."""
        self._slack, self._table = slack, PrefixTable()

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.retain({_name(replica.replica_id) for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, the best first: Serve takes the first that has room."""
        request = _request(pending_request)
        known = self._table.matches(request.prefix) if request is not None else {}
        tried = request.tried if request is not None else ()
        length = self.replica_queue_len_cache.get
        queues = {each.replica_id: length(each.replica_id) or 0 for each in candidate_replicas}
        most = min(queues.values(), default=0) + self._slack

        def rank(replica: RunningReplica) -> Any:
            name, queue = _name(replica.replica_id), queues[replica.replica_id]
            return name in tried, queue > most, -known.get(name, 0), queue, random.random()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request, name = _request(pending_request), _name(replica_id)
        if request is not None:
            request.tried.append(name)
            self._table.record(request.prefix, name)


def _request(pending: PendingRequest | None) -> ForwardedRequest | None:
    return next((each for each in pending.args if isinstance(each, ForwardedRequest)), None) if pending else None


def _name(replica: ReplicaID) -> str:
    return str(replica.unique_id)
