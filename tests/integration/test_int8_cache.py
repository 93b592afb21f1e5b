"""What rounding the cache to 8 bits costs real models: perplexity within half a percent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amount import amount

from infer import KVCache, SlidingCache, Tokenizer, load_model
from infer.cache import BaseCache
from infer.engine.model import all_logits
from infer.models.common import Decoder

pytestmark = pytest.mark.slow

TEXT = Path(__file__).parents[2] / "benchmarks" / "text.md"
TOKENS, CHUNK = amount(1_000, 300), 128


@pytest.fixture(scope="module")
def gemma() -> tuple[Decoder, Tokenizer]:
    model, _ = load_model("gemma-3-270m", dtype="float32", device="cpu")
    return model, Tokenizer("gemma-3-270m")


@torch.inference_mode()
def perplexity(model: Decoder, ids: list[int], cache: BaseCache) -> float:
    """Fed in chunks, each of which attends to what the cache holds of those before."""
    total = 0.0
    for start in range(0, len(ids) - 1, CHUNK):
        fed = ids[start : min(start + CHUNK, len(ids) - 1)]
        following = ids[start + 1 : start + 1 + len(fed)]
        logits = all_logits(model, cache, torch.tensor([fed]))[0]
        total += float(F.cross_entropy(logits, torch.tensor(following), reduction="sum"))
    return float(torch.tensor(total / (len(ids) - 1)).exp())


@pytest.mark.parametrize(("name", "kind"), [("smollm2", KVCache), *amount([("gemma", SlidingCache)], [])])
def test_perplexity(name: str, kind: type[BaseCache], request: pytest.FixtureRequest) -> None:
    """Of Gemma, past its window of 512."""
    model, tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    assert len(ids) == TOKENS
    exact, rounded = (
        perplexity(model, ids, kind.from_model_config(model.config, TOKENS, dtype=dtype, device="cpu"))
        for dtype in ("float32", "int8")
    )
    print(f"{name}: {exact:.4f} in float32, {rounded:.4f} in int8, {rounded / exact - 1:+.2%}")
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.005)
