"""`infer verify`: the logits of all positions, on every path through the engine, against one pass without a cache.

On kernels all bits must be equal. Where they differ, both runs are repeated with caches that record every layer's
attention, and the first tensor that differs is reported. Texts sampled with a seed are compared too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from infer.backend import Row, backend_for
from infer.cache import BaseCache, Cache, KVCache, PagedCache, SlidingCache
from infer.cache.pool import bytes_for
from infer.cache.ring import PREFILL_CHUNK
from infer.cache.traced import TracedCache
from infer.engine.draft import MAX_DRAFTS
from infer.engine.engine import Engine
from infer.engine.generate import generate, generate_batch
from infer.engine.memory import CacheMemory
from infer.engine.model import (
    Model,
    all_logits,
    backend_name,
    cache_dtype_of,
    make_cache,
    model_device,
    step,
    verifies_drafts,
)
from infer.engine.params import SamplingParams
from infer.engine.sequence import Sequence as EngineSequence
from infer.engine.store import read, write
from infer.engine.text import SupportsDecode
from infer.evaluate.divergence import Call, Divergence, RecordingCache, bits, first_divergence
from infer.evaluate.verify import CACHES, check, empty_cache, first_difference, reference_cache
from infer.models.common import Decoder
from infer.models.rows import ALL
from infer.trace.record import Trace
from infer.values import MODEL, takes

T = TypeVar("T")
CHUNKS = (1, 7, 64, 512)  # prefill chunks, for prompts that are longer
PREFIXES = 8  # lengths of runs without a cache
REWINDS = 4  # lengths to which a cache is truncated
MAX_REFED = 64  # tokens fed again after each truncation
NEAR_TIE = {2: 0.05, 4: 1e-3, 8: 1e-3}  # by bytes of a logit: a difference relative to the standard deviation
RIGHT_DRAFTS = 0.8  # their share
MAX_KEPT_BYTES = 1 << 30  # of reference logits; more are recomputed for each path


@dataclass(frozen=True)
class Difference:
    """The first position of a prompt at which the bits of a path differ from the reference."""

    prompt: int
    position: int
    what: str  # "logits" | "token"
    element: int | None  # of the logits
    expected: float
    got: float
    divergence: Divergence | None = None

    def __str__(self) -> str:
        if self.element is None:
            return f"position {self.position}, token {self.got:.0f} instead of {self.expected:.0f}"
        return f"position {self.position}, {self.what} {self.element}: {self.got!r} instead of {self.expected!r}"


@dataclass
class PathResult:
    path: str
    prompts: int = 0
    positions: int = 0  # that were compared
    different: int = 0  # positions with other bits
    largest: float = 0.0  # difference of two logits
    other_tokens: int = 0  # positions with another top token, near-ties excluded
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        return not self.different


class Text(NamedTuple):
    tokens: list[int]  # the prompt and its continuation
    prompt_len: int


class Piece(NamedTuple):
    prompt: int
    start: int  # position of the first
    logits: Tensor  # [n, V]


Run = Callable[[], Iterator[Piece]]  # of one prompt, or of all, prompt by prompt


class Drafted(EngineSequence):
    """Drafts the next tokens of a known text at every step, some of them wrong. No drafter: it would measure times.

    forced: these tokens are chosen, whatever the logits.
    """

    def __init__(self, *args: Any, known: Sequence[int], forced: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.known, self.forced, self.chance = known, forced, random.Random(0)
        self.chosen_from: tuple[int, Tensor]  # the first position of the last step, and logits [n, V]

    def commit(self, start: int, n: int, logits: Tensor) -> list[int]:
        position = self.num_tokens - 1
        if chosen := super().commit(start, n, logits):
            self.chosen_from = position, logits[: len(chosen)]
            self._draft()
        return chosen

    def commit_from_device(self, tokens: Sequence[int], logprob_terms: Sequence[list[int]] | None) -> None:
        super().commit_from_device(tokens, logprob_terms)
        self._draft()

    def _draft(self) -> None:
        following, chance = self.known[self.num_tokens :][:MAX_DRAFTS], self.chance.random
        self.draft_token_ids = [each if chance() < RIGHT_DRAFTS else _another(each) for each in following]

    def _sample(self, logits: Tensor) -> int:
        return self.known[self.num_tokens] if self.forced else super()._sample(logits)


def _another(token: int) -> int:
    return int(not token)


class Path(NamedTuple):
    name: str
    check: Callable[[str], PathResult]  # given the name


class Comparison:
    """Every path with all prompts (token ids) and their greedy continuations, against one pass without a cache.

    Iterate over it to run them; its length is their number.
    """

    @takes(model=MODEL)
    def __init__(
        self,
        model: Model,
        tokenizer: SupportsDecode,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 32,
        *,
        seed: int = 0,
        cache_dtype: str = "auto",
        threads: Sequence[int] = (),
        diagnose: bool = True,
        split: Decoder | None = None,
    ) -> None:
        """seed: of the sampled texts. threads: other thread counts to try, on a CPU.

        diagnose: find where a path that differs diverges. split: the same model in several processes (tensor parallel),
        which then runs the paths; the references stay in one process.
        """
        check(model.config, prompts, max_new_tokens)
        self.single, self.split, self.tokenizer = model, split, tokenizer
        self.model: Model = model if split is None else split
        self.device = model_device(model)
        self.prompts = [list(prompt) for prompt in prompts]
        self.cache_dtype, self.diagnose = cache_dtype, diagnose
        self.greedy = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        self.sampled = replace(self.greedy, temperature=0.8, top_p=0.95, seed=seed)
        self._kept: dict[int, Tensor] = {}
        self._calls: list[Call] | None = None  # while a run is recorded
        self.verifies_drafts = verifies_drafts(backend_name(self.model))
        self.paths = [*self._logit_paths(threads), *self._text_paths()]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[PathResult]:
        group = None if self.split is None else self.split.group
        prefix = "" if group is None else f"{group.world_size} processes, "
        return (path.check(prefix + path.name) for path in self.paths)

    @cached_property
    def texts(self) -> list[Text]:
        generated = self.generated(self.greedy, lambda _: {"cache_dtype": self.cache_dtype})
        return [Text(prompt + ids, len(prompt)) for prompt, ids in zip(self.prompts, generated, strict=True)]

    @cached_property
    def samples(self) -> list[list[int]]:
        return self.generated(self.sampled, lambda i: {"cache": self.uncached_cache(i)})

    def _logit_paths(self, threads: Sequence[int]) -> Iterator[Path]:
        """In several processes all caches are pages."""
        is_single, everything = self.split is None, range(len(self.prompts))
        kinds = CACHES if is_single else (PagedCache,)

        def each(name: str, run: Callable[[int], Iterator[Piece]], prompts: Sequence[int] = everything) -> Path:
            return Path(name, partial(self._compare_logits, [partial(run, i) for i in prompts], len(prompts)))

        def together(name: str, run: Run) -> Path:
            return Path(name, partial(self._compare_logits, [run], len(everything)))

        if is_single or self.cache_dtype == "auto":
            yield each("no cache, stopped early", self.uncached)
        for kind, chunk in itertools.product(kinds, chunkings(self.prompts)):
            longer = [i for i in everything if chunk is None or len(self.prompts[i]) > chunk]
            name = kind.__name__ if chunk is None else f"{kind.__name__}, chunks of {chunk}"
            yield each(name, partial(self.cached, kind, chunk), longer)
        for kind in kinds:
            yield each(f"{kind.__name__}, truncated", partial(self.truncated, kind))
        for begin in (self.prefix_hit, self.evicted, self.forked, self.saved_and_loaded):
            yield each(f"PagedCache, {begin.__name__.replace('_', ' ')}", partial(self.resumed, begin))
        if self.verifies_drafts and backend_name(self.model) == "cpu":  # captured steps return no logits
            yield each("PagedCache, drafts", self.drafted)
        if is_single:
            yield each("default cache, only the last logits", self.stepped)
            yield each("default cache, traced", partial(self.traced, True))
            yield each("no cache, traced", partial(self.traced, False))
        if len(everything) > 1:
            batch = f"default cache, batch of {len(everything)}"
            yield together(batch, partial(self.batch, False))
            yield together(f"{batch}, in turn", partial(self.batch, True))
            if is_single:
                yield together(f"KVCache of {len(everything)} rows", self.rectangle)
        for count in threads:
            yield each(f"KVCache, {count} thread{'s' if count > 1 else ''}", partial(self.threaded, count))

    def _text_paths(self) -> Iterator[Path]:
        """Greedy texts; then texts of one seed: with every cache, in chunks, traced, in a batch, on a busy server."""
        is_single, in_batch, dtype = self.split is None, len(self.prompts) > 1, {"cache_dtype": self.cache_dtype}
        if is_single:
            yield Path(
                "generate",
                partial(self._compare_greedy, lambda: [text.tokens[text.prompt_len :] for text in self.texts]),
            )
        if is_single and in_batch:
            yield Path("generate_batch", partial(self._compare_greedy, partial(self.batched, self.greedy)))
        options: dict[str, Callable[[int], dict[str, Any]]] = {}
        if is_single:
            for kind in CACHES:
                options[kind.__name__] = lambda i, kind=kind: {"cache": self.empty(kind, i)}  # type: ignore[misc]
            options[f"chunks of {CHUNKS[1]}"] = lambda _: dtype | {"prefill_chunk": CHUNKS[1]}
            options["traced"] = lambda _: dtype | {"trace": Trace()}
        samples = {name: partial(self.generated, self.sampled, each) for name, each in options.items()}
        if is_single or self.cache_dtype == "auto":
            samples |= {"generate_batch": partial(self.batched, self.sampled)} if in_batch else {}
            samples["busy server"] = partial(self.on_busy_server, self.sampled)
            if self.verifies_drafts:
                samples["busy server, drafts"] = partial(self.on_busy_server, self.sampled, drafts=True)
        for name, texts in samples.items():
            yield Path(f"sampled, {name}", partial(self._compare_sampled, texts))

    def generated(self, params: SamplingParams, options: Callable[[int], dict[str, Any]]) -> list[list[int]]:
        runs = enumerate(self.prompts)
        return [generate(self.single, self.tokenizer, prompt, params, **options(i)).token_ids for i, prompt in runs]

    def batched(self, params: SamplingParams) -> list[list[int]]:
        results = generate_batch(self.model, self.tokenizer, self.prompts, params, cache_dtype=self.cache_dtype)
        return [result.token_ids for result in results]

    def on_busy_server(self, params: SamplingParams, drafts: bool = False) -> list[list[int]]:
        """The prompts on a busy engine: other sequences are submitted and aborted, and memory is too small for all."""
        config, chance = self.model.config, random.Random(0)
        item = cache_dtype_of(self.model, self.cache_dtype).itemsize
        sizes = [bytes_for(config, len(text.tokens), item, chunk=len(text.tokens)) for text in self.texts]
        size = max(max(sizes), sum(sizes) // 2) + bytes_for(config, 1, item)
        memory = CacheMemory(self.model, size, cache_dtype=self.cache_dtype)
        engine = Engine(self.model, memory, max_rows=8, prefill_chunk=64)
        compared = [
            Drafted(config, self.tokenizer, prompt, params, known=prompt + ids if drafts else [])
            for prompt, ids in zip(self.prompts, self.samples, strict=True)
        ]
        others = [replace(params, seed=i) for i in range(len(self.prompts))]
        aborted = [EngineSequence(config, self.tokenizer, *each) for each in zip(self.prompts, others, strict=True)]
        coming = chance.sample([*compared, *aborted], len(compared) + len(aborted))
        while coming or not engine.is_idle:
            if coming and chance.random() < 0.5:
                engine.submit(coming.pop())
            if chance.random() < 0.1:
                engine.abort([each for each in aborted[:1] if each not in coming])
                aborted = aborted[1:] + aborted[:1]
            engine.step()
        for each in compared:
            if each.error is not None:
                raise each.error
        return [each.token_ids[each.prompt_len :] for each in compared]

    def feed(self, cache: Cache, rows: Sequence[int], sizes: Sequence[int]) -> Iterator[Piece]:
        """Passes of these sizes, from the cache's position on. rows: the prompts that are the cache's rows."""
        for size in sizes:
            start = cache.seq_len
            ids = torch.tensor([self.texts[i].tokens[start : start + size] for i in rows], device=self.device)
            for i, logits in zip(rows, all_logits(self.model, cache, ids), strict=True):
                yield Piece(i, start, logits)

    def observed(self, cache: Cache, *rows: int) -> Cache:
        """The cache to run with, which records where a difference is searched. rows: the prompts that are its rows."""
        return cache if self._calls is None else RecordingCache(cache, rows, self._calls)

    def reference(self, prompt: int) -> Tensor:
        """[positions, V], in one pass."""
        tokens = torch.tensor([self.texts[prompt].tokens], device=self.device)
        return all_logits(self.single, self.observed(self.uncached_cache(prompt), prompt), tokens)[0]

    def kept_reference(self, prompt: int) -> Tensor:
        if prompt not in self._kept:
            logits = self.reference(prompt)
            if sum(len(text.tokens) for text in self.texts) * logits[0].nbytes > MAX_KEPT_BYTES:
                self._kept.clear()
            self._kept[prompt] = logits
        return self._kept[prompt]

    def uncached_cache(self, prompt: int) -> Cache:
        return reference_cache(self.single, len(self.texts[prompt].tokens), self.cache_dtype)

    def default_cache(self, prompt: int) -> Cache:
        return make_cache(self.model, len(self.texts[prompt].tokens), self.device, cache_dtype=self.cache_dtype)

    def empty(self, kind: type[BaseCache], prompt: int, chunk: int | None = None) -> Cache:
        if self.split is not None:
            return self.default_cache(prompt)  # pages, in all processes
        return empty_cache(kind, self.model, len(self.texts[prompt].tokens), chunk, self.cache_dtype)

    # The paths, of one prompt

    def uncached(self, i: int) -> Iterator[Piece]:
        for size in _spread(len(self.texts[i].tokens), PREFIXES):
            yield from self.feed(self.observed(self.uncached_cache(i), i), [i], [size])

    def cached(self, kind: type[BaseCache], chunk: int | None, i: int) -> Iterator[Piece]:
        yield from self.feed(self.observed(self.empty(kind, i, chunk), i), [i], self._sizes(i, chunk))

    def resumed(self, begin: Callable[[CacheMemory, list[int]], PagedCache], i: int) -> Iterator[Piece]:
        """Start with a cache that holds a part of the text; feed the rest of the prompt at once, then token by token.

        begin: makes that cache for these tokens.
        """
        tokens, prompt_len = self.texts[i]
        enough = 3 * self.empty(PagedCache, i).pool.memory_bytes  # type: ignore[attr-defined]
        memory = CacheMemory(self.model, enough, cache_dtype=self.cache_dtype)
        cache = self.observed(begin(memory, tokens), i)
        rest = max(0, prompt_len - cache.seq_len)
        yield from self.feed(cache, [i], [*([rest] if rest else []), *[1] * (len(tokens) - cache.seq_len - rest)])

    def prefix_hit(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """After a hit on a prefix of another sequence, up to the middle of a page."""
        first, cache = memory.cache(len(tokens)), memory.cache(len(tokens))
        self.fill(first, [*tokens[: len(tokens) * 2 // 3], *tokens[: len(tokens) // 4]])
        memory.keep(first)
        memory.attach_prefix(cache, tokens)
        return cache

    def evicted(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """The same after its pages were evicted and reused."""
        self.prefix_hit(memory, tokens)
        memory.index.evict(memory.pool.num_pages)
        self.fill(memory.cache(len(tokens)), tokens[::-1])
        cache = memory.cache(len(tokens))
        memory.attach_prefix(cache, tokens)
        return cache

    def forked(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """From a cache that then continued with other tokens."""
        first = memory.cache(len(tokens))
        self.fill(first, tokens[: len(tokens) // 2])
        cache = first.fork()
        self.fill(first, tokens[: len(tokens) - first.seq_len])
        return cache

    def saved_and_loaded(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """From a file, into another CacheMemory."""
        first = memory.cache(len(tokens))
        self.fill(first, tokens[: len(tokens) // 2])
        other = CacheMemory(self.model, memory.pool.memory_bytes, cache_dtype=self.cache_dtype)
        with TemporaryDirectory() as folder:
            write(FilePath(folder) / "cache", "cache", memory.dump(first), {})
            _, dumped = read(FilePath(folder) / "cache", "cache")
        cache = other.cache(len(tokens))
        other.restore(cache, dumped)
        return cache

    def fill(self, cache: PagedCache, tokens: Sequence[int]) -> None:
        step(self.model, cache, torch.tensor([list(tokens)], device=self.device))

    def truncated(self, kind: type[BaseCache], i: int) -> Iterator[Piece]:
        """To the prompt, then the rest token by token; then to shorter and shorter prefixes, with a pass after each."""
        tokens, prompt_len = self.texts[i]
        cache = self.observed(self.empty(kind, i, PREFILL_CHUNK if kind is SlidingCache else None), i)
        yield from self.feed(cache, [i], self._sizes(i, None))
        if _rewound(cache, prompt_len):
            yield from self.feed(cache, [i], [1] * (len(tokens) - prompt_len))
        for length in reversed(_spread(len(tokens) - 1, REWINDS)):
            if _rewound(cache, length):
                yield from self.feed(cache, [i], [min(MAX_REFED, len(tokens) - length)])

    def stepped(self, i: int) -> Iterator[Piece]:
        """Like `generate`: logits of the last position only."""
        cache = self.observed(self.default_cache(i), i)
        for size in self._sizes(i, None):
            start, end = cache.seq_len, cache.seq_len + size
            ids = torch.tensor([self.texts[i].tokens[start:end]], device=self.device)
            with torch.inference_mode():
                logits = step(self.model, cache, ids)
            yield Piece(i, end - 1, logits)

    def drafted(self, i: int) -> Iterator[Piece]:
        """Steps of an engine that verify several tokens, and reject some."""
        tokens, prompt_len = self.texts[i]
        cache = self.observed(self.empty(PagedCache, i), i)
        about = self.model.config, self.tokenizer, tokens[:prompt_len], self.greedy
        sequence = Drafted(*about, cache=cache, known=tokens, forced=True)
        calls = [] if self._calls is None else self._calls
        with Engine(self.model) as engine:
            engine.submit(sequence)
            while not engine.is_idle:
                begun = len(calls)
                engine.step()
                if sequence.error is not None:
                    raise sequence.error
                kept = sequence.num_tokens - 1  # positions; the reference has no rejected tokens
                calls[begun:] = [call.until(kept) for call in calls[begun:]]
                yield Piece(i, *sequence.chosen_from)

    def traced(self, keeps: bool, i: int) -> Iterator[Piece]:
        cache = self.default_cache(i) if keeps else self.uncached_cache(i)
        sizes = self._sizes(i, None) if keeps else [len(self.texts[i].tokens)]
        traced = TracedCache(cache, range(self.model.config.num_hidden_layers))
        yield from self.feed(self.observed(traced, i), [i], sizes)

    def threaded(self, count: int, i: int) -> Iterator[Piece]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            pieces = list(self.cached(KVCache, None, i))
        finally:
            torch.set_num_threads(before)
        yield from pieces

    # The paths of all prompts together

    def batch(self, staggered: bool) -> Iterator[Piece]:
        """All prompts in one pass, then one token of each. staggered: each prompt one pass later, in a mixed batch."""
        caches = [self.observed(self.default_cache(i), i) for i in range(len(self.texts))]
        pieces = []
        for count in itertools.count():
            rows = []
            for i, ((tokens, prompt_len), cache) in enumerate(zip(self.texts, caches, strict=True)):
                start = cache.seq_len
                if start < len(tokens) and (i <= count or not staggered):
                    ids = tokens[start : start + 1] if start else tokens[:prompt_len]
                    rows.append((i, start, Row(cache, ids, ALL)))
            if not rows:
                break
            with torch.inference_mode():
                logits = backend_for(self.model).run([row for _, _, row in rows])
            pieces += [Piece(i, start, own[0]) for (i, start, _), own in zip(rows, logits, strict=True)]
        yield from sorted(pieces, key=lambda piece: piece.prompt)

    def rectangle(self) -> Iterator[Piece]:
        """All rows in one cache, up to the shortest length: the first half in one pass, then token by token."""
        count, length = len(self.texts), min(len(text.tokens) for text in self.texts)
        dtype = cache_dtype_of(self.model, self.cache_dtype)
        cache = KVCache.from_model_config(self.model.config, length, batch_size=count, dtype=dtype, device=self.device)
        half = (length + 1) // 2
        pieces = self.feed(self.observed(cache, *range(count)), range(count), [half, *[1] * (length - half)])
        yield from sorted(pieces, key=lambda piece: piece.prompt)

    def _sizes(self, prompt: int, chunk: int | None) -> list[int]:
        """Tokens per pass: the prompt's chunks, then one token after another."""
        tokens, n = self.texts[prompt]
        size = chunk or n
        return [min(size, n - at) for at in range(0, n, size)] + [1] * (len(tokens) - n)

    # Comparing

    def _compare_logits(self, runs: Sequence[Run], prompts: int, name: str) -> PathResult:
        result = PathResult(name, prompts)
        for run in runs:
            found = [difference for piece in run() if (difference := self._compare_piece(result, piece)) is not None]
            if found and result.difference is None:
                first = min(found, key=lambda each: (each.prompt, each.position))
                divergence = self.divergence(run, first) if self.diagnose else None
                result.difference = replace(first, divergence=divergence)
        return result

    def _compare_piece(self, result: PathResult, piece: Piece) -> Difference | None:
        prompt, start, got = piece
        expected = self.kept_reference(prompt)[start : start + len(got)]
        differs = bits(expected) != bits(got)  # [n, V]
        count = int(differs.any(-1).sum())
        result.positions += len(got)
        result.different += count
        if not count:
            return None
        apart = (expected.cpu().double() - got.cpu().double()).abs().masked_fill(~differs.cpu(), 0.0)
        result.largest = max(result.largest, float(apart.nan_to_num(nan=math.inf).max()))
        result.other_tokens += _other_tokens(expected, got.argmax(-1))
        row, element = (int(at) for at in differs.nonzero()[0])
        pair = float(expected[row, element]), float(got[row, element])
        return Difference(prompt, start + row, "logits", element, *pair)

    def _compare_greedy(self, texts: Callable[[], list[list[int]]], name: str) -> PathResult:
        """Each token must have the largest logit of the reference."""
        result = PathResult(name, len(self.texts))
        for i, (found, (known, prompt_len)) in enumerate(zip(texts(), self.texts, strict=True)):
            first = first_difference(found, known[prompt_len:])  # after it, the texts have nothing in common
            picked = torch.tensor(found if first is None else found[: first + 1], device=self.device)
            expected = self.kept_reference(i)[prompt_len - 1 :][: len(picked)]  # [new, V]
            wrong = expected.gather(1, picked[:, None])[:, 0] != expected.max(-1).values
            result.positions += len(expected)
            result.different += int(wrong.sum())
            result.other_tokens += _other_tokens(expected, picked)
            if wrong.any() and result.difference is None:
                at = int(wrong.nonzero()[0])
                pair = float(expected[at].argmax()), float(picked[at])
                result.difference = Difference(i, prompt_len + at, "token", None, *pair)
        return result

    def _compare_sampled(self, texts: Callable[[], list[list[int]]], name: str) -> PathResult:
        result = PathResult(name, len(self.prompts), sum(map(len, self.samples)))
        for i, (found, expected) in enumerate(zip(texts(), self.samples, strict=True)):
            if (at := first_difference(found, expected)) is not None:
                result.different += 1
                pair = float(expected[at]), float(found[at])
                first = Difference(i, len(self.prompts[i]) + at, "token", None, *pair)
                result.difference = result.difference or first
        return result

    def divergence(self, run: Run, difference: Difference) -> Divergence:
        """Where the two runs of a difference in the logits diverge."""
        pieces, calls = self._recorded(lambda: list(run()))
        expected, reference = self._recorded(lambda: self.reference(difference.prompt))
        if (found := first_divergence(reference, calls, difference.prompt, difference.position)) is not None:
            return found
        right = bits(expected[difference.position])
        for prompt, start, logits in pieces:
            at = difference.position - start
            if prompt == difference.prompt and 0 <= at < len(logits) and not torch.equal(right, bits(logits[at])):
                return Divergence("head")
        return Divergence("fused step")

    def _recorded(self, run: Callable[[], T]) -> tuple[T, list[Call]]:
        calls: list[Call] = []
        self._calls = calls
        try:
            return run(), calls
        finally:
            self._calls = None


def _other_tokens(expected: Tensor, picked: Tensor) -> int:
    """How many of the picked tokens [n] are not the top token of the expected logits [n, V], near-ties excluded."""
    wide = expected.cpu().double()  # some devices have no float64
    gap = wide.max(-1).values - wide.gather(1, picked.cpu()[:, None])[:, 0]
    return int((gap > NEAR_TIE[expected.element_size()] * wide.std(-1)).sum())


def _rewound(cache: Cache, length: int) -> bool:
    """Truncate, unless the cache refuses: a ring may have overwritten the window."""
    try:
        cache.truncate(length)
    except ValueError:
        return False
    return True


def chunkings(prompts: Sequence[Sequence[int]]) -> list[int | None]:
    longest = max(map(len, prompts))
    return [None, *(size for size in CHUNKS if size < longest)]


def _spread(last: int, count: int) -> list[int]:
    """`count` integers from 1 to `last`, evenly spaced."""
    return sorted({1 + (last - 1) * i // max(1, count - 1) for i in range(count)})
