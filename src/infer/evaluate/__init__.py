"""Measurements: equal bits on every path (verify), speed, perplexity, and the savings of the cache."""
