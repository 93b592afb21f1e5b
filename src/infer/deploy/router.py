"""A request router for Ray Serve: to the replica with the longest cached prefix, unless it is too busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from infer.deploy.channel import ForwardedRequest
from infer.deploy.prefixes import PrefixTable, ordered


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    def initialize_state(self, slack: int = 8) -> None:
        """slack: as for `ordered`."""
        self._slack, self._table = slack, PrefixTable()
        self._sent: dict[str, tuple[PendingRequest, str]] = {}  # running requests and their replicas

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.retain({each.replica_id.unique_id for each in replicas})

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, the best first: Serve takes the first with a free slot."""
        request = _request(pending_request)
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        known = {} if request is None else self._table.matches(request.prefix)
        tried = [] if request is None else request.tried
        best = ordered(self._queues(replicas), known, tried, self._slack)
        if pending_request is not None and best:
            self._send(pending_request, best[0])
        return [[replicas[name]] for name in best]

    def _queues(self, names: Collection[str]) -> dict[str, int]:
        """How many requests each replica has. Serve's own counts lag: with them, most requests that arrive together
        would go to one replica."""
        self._sent = {key: sent for key, sent in self._sent.items() if not sent[0].future.cancelled()}
        counted = Counter(name for _, name in self._sent.values())
        return {name: counted[name] for name in names}

    def _send(self, pending: PendingRequest, name: str) -> None:
        self._sent[pending.metadata.internal_request_id] = pending, name

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent.pop(internal_request_id, None)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request = _request(pending_request)
        if pending_request.metadata.internal_request_id in self._sent:  # else it has completed already
            self._send(pending_request, replica_id.unique_id)  # not the best one, if that was full
        if request is not None:
            request.tried.append(replica_id.unique_id)
            self._table.record(request.prefix, replica_id.unique_id)


def _request(pending: PendingRequest | None) -> ForwardedRequest | None:
    """None: not a client's, for example a request for metrics."""
    return pending.args[0] if pending is not None and pending.args else None
