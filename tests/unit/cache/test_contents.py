"""A cache knows which tokens it holds, and of which model: another prompt, or another model, goes wrong no more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amount import pairs
from mocks import Letters

from infer import GrowingCache, KVCache, SamplingParams, SlidingCache, decode_step, generate, prefill
from infer.backend import Row, backend_for
from infer.cache import BaseCache, Cache
from infer.cache.traced import TracedCache
from infer.models.common import Decoder

KINDS = [KVCache, GrowingCache, SlidingCache]
GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

Make = Callable[..., Decoder]


def new(kind: type[BaseCache], model: Decoder, **options: Any) -> Any:
    return kind.from_model_config(model.config, 40, dtype=torch.float32, device="cpu", **options)


def ids(model: Decoder, prompt: list[int], cache: Cache | None = None) -> list[int]:
    return generate(model, Letters(), prompt, GREEDY, cache=cache).token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prompt",
    [
        [7, 7, 7],  # another
        PROMPT[:3],  # shorter
        PROMPT,  # the same
        [*PROMPT, 8, 8],  # the same, and another answer
        [*PROMPT[:4], 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8],
    ],
)
def test_another_prompt(tiny_model: Make, kind: type[BaseCache], prompt: list[int]) -> None:
    model = tiny_model(model_type="gemma3" if kind is SlidingCache else "llama")
    cache = new(kind, model)
    first = ids(model, PROMPT, cache)
    assert cache.contents.tokens(cache.seq_len) == [*PROMPT, *first[:-1]]
    assert ids(model, prompt, cache) == ids(model, prompt)
    assert cache.contents.tokens(cache.seq_len) == [*prompt, *ids(model, prompt)[:-1]]


def test_what_is_common_is_not_fed_again(tiny_model: Make, fed: list[list[int]]) -> None:
    model = tiny_model()
    cache = new(KVCache, model)
    ids(model, PROMPT, cache)
    fed.clear()
    ids(model, [*PROMPT[:6], 8, 8], cache)
    assert fed[0] == [2]


def test_a_ring_that_cannot_go_back(tiny_model: Make) -> None:
    """It starts again at position 0."""
    model = tiny_model(model_type="gemma3")
    cache = new(SlidingCache, model, prefill_chunk=1)
    ids(model, list(range(20)), cache)
    assert ids(model, [*range(5), 60], cache) == ids(model, [*range(5), 60])


def test_a_watched_cache(tiny_model: Make) -> None:
    model = tiny_model()
    cache = new(KVCache, model)
    ids(model, PROMPT, TracedCache(cache, [0]))
    assert ids(model, [7, 7, 7], TracedCache(cache, [0])) == ids(model, [7, 7, 7])


def test_single_steps(tiny_model: Make) -> None:
    model = tiny_model()
    logits, cache, _ = prefill(model, torch.tensor([PROMPT]), new(KVCache, model))
    token = logits[:, -1].argmax(-1, keepdim=True)
    decode_step(model, token, cache)
    assert cache.contents.tokens(cache.seq_len) == [*PROMPT, int(token)]
    cache.truncate(3)
    assert cache.contents.tokens(3) == PROMPT[:3]


def test_filled_by_hand(tiny_model: Make) -> None:
    """Its tokens are unknown: they are assumed to be a prefix of the prompt."""
    model = tiny_model()
    full, cache = new(KVCache, model), new(KVCache, model)
    ids(model, PROMPT, full)
    cache.k.copy_(full.k)
    cache.v.copy_(full.v)
    cache.advance(5)
    assert cache.contents.tokens(5) is None
    assert ids(model, PROMPT, cache) == ids(model, PROMPT)
    assert cache.contents.tokens(cache.seq_len) is None
    with pytest.raises(ValueError, match="nothing is left to compute"):
        ids(model, [7, 7], cache)


def test_several_rows(tiny_model: Make) -> None:
    model = tiny_model()
    cache = new(KVCache, model, batch_size=2)
    backend_for(model).run([Row(cache, torch.tensor([[1, 2], [3, 4]]))])
    assert cache.contents.tokens(2) is None


@pytest.mark.parametrize("call", [ids, lambda model, prompt, cache: model(torch.tensor([prompt]), kv_cache=cache)])
def test_another_model(tiny_model: Make, call: Callable[..., Any]) -> None:
    one, other = tiny_model(0), tiny_model(1)
    cache = new(KVCache, one)
    ids(one, PROMPT, cache)
    held = cache.seq_len
    with torch.no_grad(), pytest.raises(ValueError, match="of another model: reset it"):
        call(other, PROMPT, cache)
    assert cache.seq_len == held
    cache.reset()
    assert ids(other, PROMPT, cache) == ids(other, PROMPT)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy(tiny_model: Make, copied: Callable[[Any], Any]) -> None:
    model = tiny_model()
    cache = new(KVCache, model)
    ids(model, PROMPT, cache)
    twin = copied(cache)
    assert ids(model, PROMPT[:5], twin) == ids(model, PROMPT[:5])
    assert cache.contents.tokens(cache.seq_len) is not None
    assert ids(model, PROMPT, cache) == ids(model, PROMPT)


class TestSetByHand:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("seq_len", [-1, 41, 2.0, True, None, 10**20])
    def test_seq_len(self, tiny_model: Make, kind: type[BaseCache], seq_len: Any) -> None:
        model = tiny_model()
        cache = new(kind, model)
        cache.seq_len = seq_len
        with torch.no_grad(), pytest.raises(ValueError, match="seq_len was set to"):
            model(torch.tensor([PROMPT]), kv_cache=cache)

    @pairs(
        run=[lambda model: backend_for(model).run, lambda model: model.run],
        change=[
            lambda t: t[..., :3],
            lambda t: t[..., :-1, :],
            lambda t: t[..., :1, :, :],
            lambda t: t.double(),
            lambda t: t.half(),
            lambda t: t.to("meta"),
            lambda t: None,
        ],
        name=["k", "v"],
        kind=KINDS,
    )
    def test_tensors(
        self, tiny_model: Make, kind: type[BaseCache], name: str, change: Callable[..., Any], run: Callable[..., Any]
    ) -> None:
        model = tiny_model()
        cache = new(kind, model)
        with torch.no_grad():
            run(model)([Row(cache, PROMPT)])
            stored = getattr(cache, name)
            setattr(cache, name, [change(t) for t in stored] if isinstance(stored, list) else change(stored))
            with pytest.raises(ValueError, match=f"the cache's {name}"):
                run(model)([Row(cache, [1])])
            setattr(cache, name, stored)
            run(model)([Row(cache, [1])])
