"""Whatever is done to a cache, the next logits are those of computing everything afresh."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mocks import CACHES
from torch import Tensor

from infer.cache import BaseCache
from infer.config import RopeConfig
from infer.models.common import Decoder

CAPACITY = 20
CONFIGS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head, tied": {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "bias, no grouping": {"attention_bias": True, "num_key_value_heads": 4},
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    "llama3 rope": {"rope": RopeConfig(5e5, "llama3", 32.0, original_max_position_embeddings=64), "head_dim": 16},
}

# Each operation with a number that the state decides the meaning of.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 9)),
        st.tuples(st.just("decode"), st.integers(1, 3)),
        st.tuples(st.just("truncate"), st.integers(0, CAPACITY)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("refused"), st.integers(1, 3)),
        st.tuples(st.just("failed"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=10,
)


class Driver:
    """Feeds a cached model, and keeps the tokens that the cache should stand for."""

    def __init__(self, model: Decoder, cache: BaseCache, seed: int) -> None:
        self.model = model
        self.cache = cache
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.zeros(cache.shape.batch_size, 0, dtype=torch.long)

    def random(self, n: int) -> Tensor:
        return torch.randint(self.model.config.vocab_size, (self.tokens.shape[0], n), generator=self.generator)

    def prefill(self, n: int) -> None:
        n = min(n, self.cache.capacity - self.cache.seq_len)
        if n:
            new = self.random(n)
            self.tokens = torch.cat((self.tokens, new), dim=1)
            logits = self.model(new, kv_cache=self.cache)
            torch.testing.assert_close(logits, self.model(self.tokens)[:, -1:], atol=1e-4, rtol=0)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.prefill(1)

    def truncate(self, length: int) -> None:
        length = min(length, self.cache.seq_len)
        self.tokens = self.tokens[:, :length]
        self.cache.truncate(length)

    def reset(self, _: int) -> None:
        self.tokens = self.tokens[:, :0]
        self.cache.reset()

    def refused(self, excess: int) -> None:
        """More than fits, and rewinding forward."""
        with pytest.raises(ValueError, match="overflow"):
            self.model(self.random(self.cache.capacity - self.cache.seq_len + excess), kv_cache=self.cache)
        with pytest.raises(ValueError, match="cannot truncate"):
            self.cache.truncate(self.cache.seq_len + excess)

    def failed(self, n: int) -> None:
        """A forward pass that breaks off after the first layer has written."""
        n = min(n, self.cache.capacity - self.cache.seq_len)

        def fail(*_: object) -> None:
            raise InterruptedError

        hook = self.model.layers[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(InterruptedError):
                self.model(self.random(n), kv_cache=self.cache) if n else fail()
        finally:
            hook.remove()


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model(**request.param)


@pytest.mark.parametrize("cache_class", CACHES)
@settings(  # the model is the same for all examples, and no example changes it
    deadline=None,
    max_examples=20,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS, batch=st.integers(1, 3), seed=st.integers(0, 999))
def test_cached_is_recomputed(
    model: Decoder, cache_class: type[BaseCache], operations: list[tuple[str, int]], batch: int, seed: int
) -> None:
    cache = cache_class.from_model_config(model.config, CAPACITY, batch_size=batch, dtype="float32", device="cpu")
    driver = Driver(model, cache, seed)
    for name, number in operations:
        getattr(driver, name)(number)
        assert cache.seq_len == driver.tokens.shape[1]
    driver.decode(1)


@pytest.mark.parametrize("cache_class", CACHES)
def test_every_way_to_cut_a_prompt(model: Decoder, cache_class: type[BaseCache]) -> None:
    """All 32 ways to feed six tokens."""
    tokens = torch.tensor([[5, 9, 60, 33, 2, 2]])
    expected = model(tokens)
    cache = cache_class.from_model_config(model.config, 6, dtype="float32", device="cpu")
    for cuts in range(2**5):
        edges = [0, *(i + 1 for i in range(5) if cuts >> i & 1), 6]
        for start, end in pairwise(edges):
            logits = model(tokens[:, start:end], kv_cache=cache)
            torch.testing.assert_close(logits[:, 0], expected[:, end - 1], atol=1e-4, rtol=0)
        cache.reset()
