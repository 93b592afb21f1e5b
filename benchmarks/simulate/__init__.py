"""A simulation of many replicas: `python benchmarks/simulate --help`."""
