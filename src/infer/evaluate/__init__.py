"""What asks how well it all works: equal bits, speed, perplexity, and what the cache saves."""
