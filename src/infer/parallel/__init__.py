"""Tensor parallelism: a driver and its workers, one process each, have a shard of a model each."""
