"""Watching a run: what each token was chosen from, where attention looked, what the cache held."""

from infer.trace.data import TraceStep
from infer.trace.record import Trace

__all__ = ["Trace", "TraceStep"]
