"""Ray Serve's request router, by prefix: where most of a prompt was sent before, unless that replica is too busy."""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from infer.deploy.forward import ForwardedRequest
from infer.deploy.prefixes import PrefixTable, ordered


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    def initialize_state(self, slack: int = 8) -> None:
        """slack: as for `ordered`."""
        self._slack, self._table = slack, PrefixTable()

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.retain({each.replica_id.unique_id for each in replicas})

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, the best first: Serve takes the first that has room."""
        request, length = _request(pending_request), self.replica_queue_len_cache.get
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        queues = {name: length(each.replica_id) or 0 for name, each in replicas.items()}
        known = {} if request is None else self._table.matches(request.prefix)
        tried = [] if request is None else request.tried
        return [[replicas[name]] for name in ordered(queues, known, tried, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request = _request(pending_request)
        if request is not None:
            request.tried.append(replica_id.unique_id)
            self._table.record(request.prefix, replica_id.unique_id)


def _request(pending: PendingRequest | None) -> ForwardedRequest | None:
    """None: it is none of a client's, as a look at the metrics."""
    return pending.args[0] if pending is not None and pending.args else None
