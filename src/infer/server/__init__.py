"""The OpenAI-compatible API, the live page and metrics."""
