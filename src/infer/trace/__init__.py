"""Traces of a run: the alternatives of each token, where attention looked, how full the cache was."""

from infer.trace.data import TraceStep
from infer.trace.record import Trace

__all__ = ["Trace", "TraceStep"]
