"""Through the whole engine: the same bits on every path, and so the same text."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import amount, everything
from torch import Tensor

from infer import (
    LLM,
    KVCache,
    SamplingParams,
    SlidingCache,
    Tokenizer,
    Trace,
    decode_step,
    generate,
    generate_batch,
    load_model,
    prefill,
    stream,
)
from infer.backend import Row, backend_for
from infer.backend.cpu import backend as cpu_backend
from infer.backend.cpu import kernels
from infer.backend.cpu.ops import linear
from infer.cache import NoCache
from infer.cli.common import DEFAULT_MODEL
from infer.compat.seeds import full_attention_matrix, generate_ids_greedy_cached, generate_ids_greedy_full
from infer.engine.memory import CacheMemory
from infer.engine.model import all_logits
from infer.evaluate.divergence import bits
from infer.evaluate.paths import Comparison, PathResult
from infer.models.common import Decoder
from infer.models.rows import LAST, NONE
from infer.nn.linear import Linear

pytestmark = pytest.mark.skipif(kernels() is None, reason="plain torch promises no bits")
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "rope_gpt", "qwen3_moe", "gpt_oss"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPTS = [[5, 9, 2], [7 * i % 64 for i in range(70)], [33], [3 * i % 64 for i in range(23)]]
SEEDED = SamplingParams(temperature=1.2, top_p=0.97, max_new_tokens=12, seed=11)


class Letters:
    """A letter for each token."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(33 + i) for i in token_ids)


LETTERS = Letters()


def differing(results: list[PathResult]) -> dict[str, str]:
    """By path, where it differs from the reference: nothing, if all is well."""
    return {
        result.path: f"{result.difference}, from {result.difference and result.difference.divergence}"
        for result in results
        if not result.equal
    }


EVERY_PAIR = list(itertools.product(FAMILIES, DTYPES))
ENOUGH = [("llama", "float32"), *zip(FAMILIES, itertools.cycle(["bfloat16", "float16", "float32"]), strict=False)]


@pytest.mark.parametrize(("family", "dtype"), amount(EVERY_PAIR, ENOUGH))
def test_same_bits(tiny_model: Callable[..., Decoder], family: str, dtype: str) -> None:
    model = tiny_model(model_type=family, dtype=DTYPES[dtype])
    prompts = amount(PROMPTS, PROMPTS[:3] if dtype == "float32" else PROMPTS[2:])  # in 16 bits, long ones take long
    results = list(Comparison(model, LETTERS, prompts, amount(6, 3), threads=[1]))
    assert differing(results) == {}


@pytest.mark.parametrize("family", amount(["llama", "gemma3"], ["gemma3"]))
def test_same_bits_of_an_int8_cache(tiny_model: Callable[..., Decoder], family: str) -> None:
    results = list(Comparison(tiny_model(model_type=family), LETTERS, PROMPTS, 6, cache_dtype="int8"))
    assert differing(results) == {}


@pytest.mark.parametrize("window", amount([5, 6, 7], [6]))
def test_windows_and_chunks_that_cross_them(tiny_model: Callable[..., Decoder], window: int) -> None:
    """Chunks of 7 end before, at and behind the edge; prompts of W - 1 to 2 W + 1 tokens."""
    model = tiny_model(model_type="gemma3", sliding_window=window)
    prompts = [
        [(5 * i + n) % 64 for i in range(n)] for n in (window - 1, window, window + 1, 2 * window, 2 * window + 1)
    ]
    assert differing(list(Comparison(model, LETTERS, prompts, window + 2))) == {}


class TestMutations:
    """A reduction that depends on how many rows there are is found, and the layer named."""

    def test_a_product(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model(num_hidden_layers=3, dtype=torch.bfloat16)

        def halved(x: Tensor, part: Linear) -> Tensor:
            """In layer 1, a single row is rounded to fewer digits than many are."""
            out = linear(x, part)
            coarse = part is model.layers[1].self_attn.qkv_proj and len(x) == 1
            return out.to(torch.float8_e5m2).to(out.dtype) if coarse else out

        monkeypatch.setattr(cpu_backend, "linear", halved)
        found = [result for result in Comparison(model, LETTERS, PROMPTS[::3], 3) if not result.equal]
        assert found
        places = {result.difference.divergence for result in found if result.difference is not None}
        assert {(place.layer, place.what in ("query", "key", "value")) for place in places if place} == {(1, True)}

    def test_attention(self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
        attend = KVCache.attend

        def halved(cache: KVCache, layer_idx: int, q: Tensor, *args: Any, **options: Any) -> Tensor:
            """In layer 1 a single query rounds once more than many."""
            out = attend(cache, layer_idx, q, *args, **options)
            return out.bfloat16().to(out.dtype) if layer_idx == 1 and q.shape[2] == 1 else out

        monkeypatch.setattr(KVCache, "attend", halved)
        monkeypatch.setattr(KVCache, "table", lambda *_: None)  # kernels would not ask `attend`
        found = {result.path: result.difference for result in Comparison(tiny_model(), LETTERS, PROMPTS[::3], 3)}
        difference = found["KVCache"]
        assert difference is not None
        assert difference.divergence is not None
        assert (difference.divergence.layer, difference.divergence.what) == (1, "attended")
        assert found["GrowingCache"] is None


SAMPLED_PAIRS = list(itertools.product(DTYPES, ["llama", "gemma3"]))


class TestSampling:
    """With a seed, the same text alone, in any batch, with any cache, in any chunks."""

    @pytest.mark.parametrize(("dtype", "family"), amount(SAMPLED_PAIRS, [("float32", "gemma3"), ("bfloat16", "llama")]))
    def test_same_text(self, tiny_model: Callable[..., Decoder], family: str, dtype: str) -> None:
        model = tiny_model(model_type=family, dtype=DTYPES[dtype])
        alone = [generate(model, LETTERS, prompt, SEEDED).token_ids for prompt in PROMPTS]
        assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
        for order in ([0, 1, 2, 3], [3, 0, 1], [2, 2, 2, 0, 1, 3, 1, 0, 2]):
            rows = generate_batch(model, LETTERS, [PROMPTS[i] for i in order], SEEDED, prefill_chunk=5)
            assert [row.token_ids for row in rows] == [alone[i] for i in order]
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, alone, strict=True)):
            for chunk in amount((1, 7), ((1, 7)[i % 2],)):
                cache = SlidingCache.from_model_config(
                    model.config, len(prompt) + 12, prefill_chunk=chunk, dtype=model.dtype, device="cpu"
                )
                got = stream(model, LETTERS, prompt, SEEDED, cache=cache, prefill_chunk=chunk)
                assert [token.token_id for token in got] == tokens
            assert generate(model, LETTERS, prompt, SEEDED, use_kv_cache=False).token_ids == tokens
            assert generate(model, LETTERS, prompt, SEEDED, trace=Trace()).token_ids == tokens

    def test_beyond_the_context(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model(model_type="gpt2", max_position_embeddings=16)
        prompts = [prompt[:9] for prompt in PROMPTS]
        options: dict[str, Any] = {"on_full": "recompute"}
        alone = [generate(model, LETTERS, prompt, SEEDED, **options).token_ids for prompt in prompts]
        uncached = [generate(model, LETTERS, prompt, SEEDED, use_kv_cache=False, **options) for prompt in prompts]
        assert alone == [result.token_ids for result in uncached]
        assert alone == [row.token_ids for row in generate_batch(model, LETTERS, prompts, SEEDED, **options)]


class TestByHand:
    def test_prefill_and_decode_step(self, tiny_model: Callable[..., Decoder]) -> None:
        model = tiny_model()
        ids = torch.tensor([PROMPTS[3]])
        whole = prefill(model, ids, empty(model))[0]
        chunked = prefill(model, ids, empty(model), prefill_chunk=4)[0]
        assert torch.equal(bits(whole), bits(chunked))
        cache = empty(model)
        prefill(model, ids[:, :5], cache)
        for at in range(5, ids.shape[1]):
            traced = at % 2 == 0
            logits, _, _ = decode_step(model, ids[:, at : at + 1], cache, 1 if traced else None, traced)
            assert torch.equal(bits(logits[0, 0]), bits(whole[0, at]))

    def test_ids(self, tiny_model: Callable[..., Decoder]) -> None:
        options: dict[str, Any] = {"max_new_tokens": 20, "eot_token_id": -1}
        model = tiny_model(dtype=torch.bfloat16)
        for prompt in PROMPTS:
            cached = generate_ids_greedy_cached(model, prompt, **options)
            assert generate_ids_greedy_full(model, prompt, **options) == cached

    def test_attention_rows(self, tiny_model: Callable[..., Decoder]) -> None:
        """Those of a token do not depend on the tokens behind it, but for rounding: nothing is computed from them."""
        model = tiny_model()
        whole = full_attention_matrix(model, PROMPTS[3], trace_layer=1)
        part = full_attention_matrix(model, PROMPTS[3][:11], trace_layer=1)
        torch.testing.assert_close(whole[..., :11, :11], part, atol=1e-6, rtol=1e-5)

    def test_a_chat(self, tiny_model: Callable[..., Decoder]) -> None:
        """What a turn finds of the turns before answers as a fresh run does."""
        model = tiny_model(model_type="gemma3")
        prompts: list[list[int]] = []

        def encode(messages: list[dict[str, str]]) -> list[int]:
            # Rewrites earlier turns, so that only a part of what was computed is found.
            ids = [ord(letter) % 64 for message in messages for letter in message["content"]]
            prompts.append([*ids[:-3], len(messages), *ids[-3:]])
            return prompts[-1]

        llm = LLM(model, LETTERS, memory=CacheMemory(model, 10**6, page_size=4))
        chat = llm.session(context=64, encode=encode)
        for text in ("hello there", "and then?", "who?"):
            answer = [token.token_id for token in chat.stream(text, SEEDED)]
            assert answer == generate(model, LETTERS, prompts[-1], SEEDED, use_kv_cache=False).token_ids


def empty(model: Decoder) -> KVCache:
    return KVCache.from_model_config(model.config, 64, dtype=model.dtype, device="cpu")


def digests(folder: str, text: str, *dtypes: str) -> list[str]:
    """Of a pass in each dtype."""
    found = []
    for dtype in dtypes:
        model, _ = load_model(folder, dtype=dtype, device="cpu")
        logits = all_logits(model, NoCache(), torch.tensor([Tokenizer(folder).encode(text)]))
        found.append(hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest())
    return found


def test_other_processes_with_other_numbers_of_threads(folder: Path) -> None:
    arguments = [str(folder), "once upon a time there was a cache", "float32", "bfloat16"]
    here = digests(*arguments)
    assert len(set(here)) == 2
    folders = [str(parent) for parent in Path(__file__).parents[:2]]
    code = f"import sys; sys.path[:0] = {folders}; import torch, test_exact_paths\n"
    code += "print(torch.get_num_threads(), *test_exact_paths.digests(*sys.argv[1:]))"
    for threads in amount(("1", "2"), ("2",)):
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == [threads, *here]


@pytest.mark.slow
class TestRealModels:
    TEXTS = ("The capital of France is", "Once upon a time, in a village by the sea")

    @everything
    @pytest.mark.parametrize("quantize", [None, "int8", "int4"])
    def test_smollm2(self, quantize: str | None) -> None:
        """Without quantisation: `infer verify`, in test_commands.py."""
        model, tokenizer, prompts = self.load(DEFAULT_MODEL, quantize)
        assert differing(list(Comparison(model, tokenizer, prompts, 3))) == {}

    @torch.inference_mode()
    def test_gemma_past_its_window(self) -> None:
        """The last positions, whose window has left the first ones behind: in one pass, in chunks, and in a batch."""
        model, _, (short, longer) = self.load("gemma-3-270m")
        long, last = (longer * 60)[:520], slice(-6, None)
        run = backend_for(model).run
        [expected] = run([Row(NoCache(), long, last)])
        narrow = {"prefill_chunk": 4}  # a ring that the last tokens wrap around
        for kind, settings in amount(
            [(SlidingCache, narrow), (SlidingCache, {}), (KVCache, {})], [(SlidingCache, narrow)]
        ):
            options = {"dtype": "float32", "device": "cpu"}
            cache = kind.from_model_config(model.config, 520, **options, **settings)
            beside = KVCache.from_model_config(model.config, 520, **options)
            run([Row(cache, long[:512], NONE), Row(beside, short, NONE)])
            several = run([Row(cache, long[512:517], slice(-3, None)), Row(beside, long[:1], NONE)])[0]
            single = [run([Row(cache, [token], LAST)])[0] for token in long[517:]]
            assert torch.equal(bits(torch.cat((several, *single), 1)), bits(expected))

    def load(self, name: str, quantize: str | None = None) -> tuple[Decoder, Tokenizer, list[list[int]]]:
        model, _ = load_model(name, dtype="float32", device="cpu", quantize=quantize)
        tokenizer = Tokenizer(name)
        return model, tokenizer, [tokenizer.encode(text) for text in self.TEXTS]
