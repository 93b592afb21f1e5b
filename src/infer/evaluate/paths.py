"""The logits of all positions, on every path through the engine, compared with those of one pass without a cache.

Through kernels they must be the same, bit for bit. Where they are not, both runs are repeated with a cache around each
that keeps what every layer attended with, and the first thing in which they diverge is named. Texts that are sampled
with a seed are compared too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.backend import Row, backend_for
from infer.cache import BaseCache, Cache, KVCache, PagedCache, SlidingCache
from infer.cache.base import resolve_cache_dtype
from infer.cache.pool import bytes_for
from infer.cache.ring import PREFILL_CHUNK
from infer.cache.traced import TracedCache
from infer.engine.batch import generate_batch
from infer.engine.cached import generate_ids_greedy_cached
from infer.engine.caches import make_cache
from infer.engine.generate import generate
from infer.engine.loop import Loop, Task
from infer.engine.memory import CacheMemory
from infer.engine.model import Model, all_logits, model_device, model_dtype, step
from infer.engine.params import SamplingParams
from infer.engine.request import Request
from infer.engine.store import read, write
from infer.engine.text import Decodes
from infer.evaluate.divergence import Call, Divergence, RecordingCache, bits, first_divergence
from infer.evaluate.verify import CACHES, check, empty_cache, first_difference, reference_cache
from infer.models.rows import ALL
from infer.trace.record import Trace

CHUNKS = (1, 7, 64, 512)  # of the prefill, where a prompt is longer
PREFIXES = 8  # lengths at which a run without a cache is stopped
REWINDS = 4  # lengths to which a cache is truncated
REFED = 64  # tokens that are fed again behind each of these, where there are so many
NEAR_TIE = {2: 0.05, 4: 1e-3, 8: 1e-3}  # by bytes of a logit: how close two are, as a part of the logits' spread
KEPT_BYTES = 1 << 30  # of reference logits; what is more is computed again for each path


@dataclass(frozen=True)
class Difference:
    """The first position of a prompt at which a path has other bits than the reference."""

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


@dataclass(frozen=True)
class PathResult:
    path: str
    prompts: int = 0
    positions: int = 0  # that were compared
    different: int = 0  # of these
    largest: float = 0.0  # difference of two logits
    other_tokens: int = 0  # positions at which another token is the likeliest, by more than a near-tie
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        return not self.different


class Text(NamedTuple):
    tokens: list[int]  # the prompt, and what follows it
    prompt_len: int


class Piece(NamedTuple):
    prompt: int
    start: int  # position of the first
    logits: Tensor  # [n, V]


Wrap = Callable[[Sequence[int], Cache], Cache]  # the prompts that are a cache's rows, and that cache
Run = Callable[[Sequence[int], Wrap], Iterator[Piece]]


class Path(NamedTuple):
    name: str
    run: Run  # the prompts with these indices
    prompts: list[int]
    together: bool = False  # they cannot be run one by one


def compare(
    model: Model,
    tokenizer: Decodes,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 32,
    *,
    seed: int = 0,
    cache_dtype: str = "auto",
    threads: Sequence[int] = (),
    diagnose: bool = True,
) -> Iterator[PathResult]:
    """Every path with all prompts (token ids) and their greedy continuations, against one pass without a cache.

    seed: of the sampled texts. diagnose: find out where the runs of a path that differs diverge.

    cache_dtype: as for `verify`. threads: other numbers of them to try, on a CPU.
    """
    check(model.config, prompts, max_new_tokens)
    runs = Runs(model, prompts, max_new_tokens, cache_dtype)
    for path in runs.paths(threads):
        yield runs.compare(path, diagnose)
    yield runs.chosen("generate", [text.tokens for text in runs.texts])
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    if len(prompts) > 1:
        results = generate_batch(model, tokenizer, prompts, params, cache_dtype=cache_dtype)
        yield runs.chosen("generate_batch", [result.prompt_token_ids + result.token_ids for result in results])
    yield from runs.sampled(tokenizer, replace(params, temperature=0.8, top_p=0.95, seed=seed))


def number_of_paths(prompts: Sequence[Sequence[int]], threads: Sequence[int] = ()) -> int:
    """How many `compare` will go."""
    together = 6 if len(prompts) > 1 else 1
    return len(chunkings(prompts)) * len(CACHES) + 2 * len(CACHES) + 11 + len(threads) + together


class Runs:
    """All prompts, and the ways to run them."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], new: int, cache_dtype: str) -> None:
        self.model, self.cache_dtype = model, cache_dtype
        self.device = model_device(model)
        never = -1  # no token ends a text
        self.texts = [
            Text(
                generate_ids_greedy_cached(model, ids, max_new_tokens=new, eot_token_id=never, cache_dtype=cache_dtype),
                len(ids),
            )
            for ids in prompts
        ]
        self._kept: dict[int, Tensor] = {}

    def paths(self, threads: Sequence[int] = ()) -> Iterator[Path]:
        everything = list(range(len(self.texts)))
        yield Path("no cache, stopped early", self.uncached, everything)
        for kind in CACHES:
            for chunk in chunkings([text.tokens[: text.prompt_len] for text in self.texts]):
                name = kind.__name__ if chunk is None else f"{kind.__name__}, chunks of {chunk}"
                longer = [i for i in everything if chunk is None or self.texts[i].prompt_len > chunk]
                yield Path(name, self.cached(kind, chunk), longer)
        for kind in CACHES:
            yield Path(f"{kind.__name__}, truncated", self.truncated(kind), everything)
        for name, begin in (
            ("prefix hit", self.hit),
            ("evicted", self.evicted),
            ("forked", self.forked),
            ("saved and loaded", self.loaded),
        ):
            yield Path(f"PagedCache, {name}", self.resumed(begin), everything)
        yield Path("default cache, last logits alone", self.stepped, everything)
        yield Path("default cache, traced", self.traced(keeps=True), everything)
        yield Path("no cache, traced", self.traced(keeps=False), everything)
        if len(everything) > 1:
            count, batch = len(everything), self.batch(staggered=False)
            yield Path(f"default cache, batch of {count}", batch, everything, together=True)
            mixed = self.batch(staggered=True)
            yield Path(f"default cache, batch of {count}, in turn", mixed, everything, together=True)
            yield Path(f"KVCache of {len(everything)} rows", self.rectangle, everything, together=True)
        for count in threads:
            name = f"KVCache, {count} thread{'s' if count > 1 else ''}"
            yield Path(name, self.threaded(count, self.cached(KVCache, None)), everything)

    def feed(self, cache: Cache, rows: Sequence[int], sizes: Sequence[int]) -> Iterator[Piece]:
        """In passes of these sizes, from where each row's cache is. rows: the prompts; more than one start alike."""
        for size in sizes:
            start = cache.seq_len
            fed = torch.tensor([self.texts[i].tokens[start : start + size] for i in rows], device=self.device)
            yield from self._pass(cache, rows, fed, [start] * len(rows))

    def _pass(self, cache: Cache, rows: Sequence[int], fed: Tensor, starts: Sequence[int]) -> Iterator[Piece]:
        for i, start, row in zip(rows, starts, all_logits(self.model, cache, fed), strict=True):
            yield Piece(i, start, row)

    def reference(self, prompt: int, wrap: Wrap) -> Tensor:
        """[positions, V], in one pass."""
        tokens = self.texts[prompt].tokens
        cache = wrap([prompt], reference_cache(self.model, len(tokens), self.cache_dtype))
        (piece,) = self.feed(cache, [prompt], [len(tokens)])
        return piece.logits

    def kept_reference(self, prompt: int) -> Tensor:
        if prompt not in self._kept:
            logits = self.reference(prompt, _unwatched)
            if sum(len(text.tokens) for text in self.texts) * logits[0].nbytes > KEPT_BYTES:
                self._kept.clear()
            self._kept[prompt] = logits
        return self._kept[prompt]

    def default_cache(self, prompt: int) -> Cache:
        return make_cache(self.model, len(self.texts[prompt].tokens), self.device, cache_dtype=self.cache_dtype)

    def empty(self, kind: type[BaseCache], prompt: int, chunk: int | None = None) -> BaseCache:
        return empty_cache(kind, self.model, len(self.texts[prompt].tokens), chunk, self.cache_dtype)

    # The paths

    def uncached(self, prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
        for i in prompts:
            length = len(self.texts[i].tokens)
            for size in _spread(length, PREFIXES):
                cache = wrap([i], reference_cache(self.model, length, self.cache_dtype))
                yield from self.feed(cache, [i], [size])

    def cached(self, kind: type[BaseCache], chunk: int | None) -> Run:
        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            for i in prompts:
                yield from self.feed(wrap([i], self.empty(kind, i, chunk)), [i], self._sizes(i, chunk))

        return run

    def resumed(self, begin: Callable[[CacheMemory, list[int]], PagedCache]) -> Run:
        """A cache that holds the prompt, or a part of it, in some way; the rest is fed in one pass, and token by token.

        begin: makes that cache, of tokens that it may hold.
        """

        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            for i in prompts:
                tokens, prompt_len = self.texts[i]
                enough = 3 * self.empty(PagedCache, i).pool.memory_bytes  # type: ignore[attr-defined]
                memory = CacheMemory(self.model, enough, cache_dtype=self.cache_dtype)
                cache = wrap([i], begin(memory, tokens))
                rest = max(0, prompt_len - cache.seq_len)
                yield from self.feed(
                    cache, [i], [*([rest] if rest else []), *[1] * (len(tokens) - cache.seq_len - rest)]
                )

        return run

    def hit(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """Behind a text that another request began with, and left in the middle of a page."""
        first, cache = memory.cache(len(tokens)), memory.cache(len(tokens))
        self.fill(first, [*tokens[: len(tokens) * 2 // 3], *tokens[: len(tokens) // 4]])
        memory.keep(first)
        memory.recall(cache, tokens)
        return cache

    def evicted(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """The same, once its pages had to go, and were used by others."""
        self.hit(memory, tokens)
        memory.index.evict(memory.pool.count)
        self.fill(memory.cache(len(tokens)), tokens[::-1])
        cache = memory.cache(len(tokens))
        memory.recall(cache, tokens)
        return cache

    def forked(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """From a cache that then went on with something else."""
        first = memory.cache(len(tokens))
        self.fill(first, tokens[: len(tokens) // 2])
        cache = first.fork()
        self.fill(first, tokens[: len(tokens) - first.seq_len])
        return cache

    def loaded(self, memory: CacheMemory, tokens: list[int]) -> PagedCache:
        """From a file, into another memory."""
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

    def truncated(self, kind: type[BaseCache]) -> Run:
        """To the prompt, with the rest fed token by token; then to less and less of it, with a pass behind each."""

        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            for i in prompts:
                tokens, prompt_len = self.texts[i]
                cache = wrap([i], self.empty(kind, i, PREFILL_CHUNK if kind is SlidingCache else None))
                yield from self.feed(cache, [i], self._sizes(i, None))
                if _rewound(cache, prompt_len):
                    yield from self.feed(cache, [i], [1] * (len(tokens) - prompt_len))
                for length in reversed(_spread(len(tokens) - 1, REWINDS)):
                    if _rewound(cache, length):
                        yield from self.feed(cache, [i], [min(REFED, len(tokens) - length)])

        return run

    def stepped(self, prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
        """As `generate` does it: the head is asked about the last position alone."""
        for i in prompts:
            cache = wrap([i], self.default_cache(i))
            for size in self._sizes(i, None):
                start, end = cache.seq_len, cache.seq_len + size
                fed = torch.tensor([self.texts[i].tokens[start:end]], device=self.device)
                with torch.inference_mode():
                    logits = step(self.model, cache, fed)
                yield Piece(i, end - 1, logits)

    def traced(self, *, keeps: bool) -> Run:
        layers = range(self.model.config.num_hidden_layers)

        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            for i in prompts:
                length = len(self.texts[i].tokens)
                cache = self.default_cache(i) if keeps else reference_cache(self.model, length, self.cache_dtype)
                sizes = self._sizes(i, None) if keeps else [length]
                yield from self.feed(wrap([i], TracedCache(cache, layers)), [i], sizes)

        return run

    def batch(self, *, staggered: bool) -> Run:
        """All prompts in one pass, then a token of each. staggered: each a pass later, beside others' tokens."""

        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            caches = {i: wrap([i], self.default_cache(i)) for i in prompts}
            for count in itertools.count():
                rows = []
                for at, (i, cache) in enumerate(caches.items()):
                    tokens, prompt_len = self.texts[i]
                    start = cache.seq_len
                    if start < len(tokens) and (at <= count or not staggered):
                        rows.append(
                            (i, start, Row(cache, tokens[start : start + 1] if start else tokens[:prompt_len], ALL))
                        )
                if not rows:
                    return
                with torch.inference_mode():
                    logits = backend_for(self.model).run([row for _, _, row in rows])
                for (i, start, _), piece in zip(rows, logits, strict=True):
                    yield Piece(i, start, piece[0])

        return run

    def rectangle(self, prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
        """All rows in one cache, as far as the shortest goes: the first half in one pass, then token by token."""
        length = min(len(self.texts[i].tokens) for i in prompts)
        dtype = resolve_cache_dtype(self.cache_dtype, model_dtype(self.model) or torch.float32)
        cache = KVCache.from_model_config(
            self.model.config, length, batch_size=len(prompts), dtype=dtype, device=self.device
        )
        half = (length + 1) // 2
        yield from self.feed(wrap(prompts, cache), prompts, [half, *[1] * (length - half)])

    def threaded(self, count: int, inner: Run) -> Run:
        def run(prompts: Sequence[int], wrap: Wrap) -> Iterator[Piece]:
            for i in prompts:
                before = torch.get_num_threads()
                torch.set_num_threads(count)
                try:
                    pieces = list(inner([i], wrap))
                finally:
                    torch.set_num_threads(before)
                yield from pieces

        return run

    def _sizes(self, prompt: int, chunk: int | None) -> list[int]:
        """Of the passes: the prompt's chunks, then one token after another."""
        tokens, n = self.texts[prompt]
        size = chunk or n
        return [min(size, n - at) for at in range(0, n, size)] + [1] * (len(tokens) - n)

    # Comparing

    def compare(self, path: Path, diagnose: bool = True) -> PathResult:
        result = PathResult(path.name, len(path.prompts))
        for together in [path.prompts] if path.together else [[i] for i in path.prompts]:
            pieces = path.run(together, _unwatched)
            if path.together:  # by prompt: one reference after another
                pieces = iter(sorted(pieces, key=lambda piece: piece.prompt))
            first: Difference | None = None
            for piece in pieces:
                result, found = self._add(result, piece)
                if found is not None and (
                    first is None or (found.prompt, found.position) < (first.prompt, first.position)
                ):
                    first = found
            if result.difference is None and first is not None:
                divergence = self.divergence(path.run, together, first) if diagnose else None
                result = replace(result, difference=replace(first, divergence=divergence))
        return result

    def _add(self, result: PathResult, piece: Piece) -> tuple[PathResult, Difference | None]:
        prompt, start, got = piece
        expected = self.kept_reference(prompt)[start : start + len(got)]
        differs = bits(expected) != bits(got)  # [n, V]
        rows = differs.any(-1)
        count = int(rows.sum())
        result = replace(result, positions=result.positions + len(got), different=result.different + count)
        if not count:
            return result, None
        apart = (expected.cpu().double() - got.cpu().double()).abs().masked_fill(~differs.cpu(), 0.0)
        result = replace(
            result,
            largest=max(result.largest, float(apart.nan_to_num(nan=math.inf).max())),
            other_tokens=result.other_tokens + _other_tokens(expected, got.argmax(-1)),
        )
        row, element = (int(at) for at in differs.nonzero()[0])
        pair = float(expected[row, element]), float(got[row, element])
        return result, Difference(prompt, start + row, "logits", element, *pair)

    def chosen(self, name: str, texts: Sequence[Sequence[int]]) -> PathResult:
        """The tokens that a greedy run chose: by the reference, none may be likelier."""
        result = PathResult(name, len(texts))
        for i, (tokens, (known, prompt_len)) in enumerate(zip(texts, self.texts, strict=True)):
            parted = first_difference(tokens, known)  # what follows is another text
            end = len(tokens) if parted is None else parted + 1
            expected = self.kept_reference(i)[prompt_len - 1 : end - 1]  # [new, V]
            picked = torch.tensor(tokens[prompt_len:end], device=expected.device)
            wrong = (expected.gather(1, picked[:, None])[:, 0] != expected.max(-1).values).nonzero().flatten().tolist()
            result = replace(
                result,
                positions=result.positions + len(expected),
                different=result.different + len(wrong),
                other_tokens=result.other_tokens + _other_tokens(expected, picked),
            )
            if wrong and result.difference is None:
                at = prompt_len + wrong[0]
                pair = float(expected[wrong[0]].argmax()), float(tokens[at])
                result = replace(result, difference=Difference(i, at, "token", None, *pair))
        return result

    def sampled(self, tokenizer: Decodes, params: SamplingParams) -> Iterator[PathResult]:
        """The same seed, with every kind of cache, in chunks, traced, in a batch, and on a busy server.

        Against runs without a cache.
        """
        prompts = [tokens[:prompt_len] for tokens, prompt_len in self.texts]

        def texts(make: Callable[[int], dict[str, Any]]) -> list[list[int]]:
            runs = ((prompt, make(i)) for i, prompt in enumerate(prompts))
            return [generate(self.model, tokenizer, prompt, params, **options).token_ids for prompt, options in runs]

        def reference(i: int) -> Cache:
            return reference_cache(self.model, len(self.texts[i].tokens), self.cache_dtype)

        expected = texts(lambda i: {"cache": reference(i)})
        for kind in CACHES:
            found = texts(lambda i, kind=kind: {"cache": self.empty(kind, i)})  # type: ignore[misc]
            yield self._same_texts(f"sampled, {kind.__name__}", found, expected)
        options: dict[str, Any] = {"cache_dtype": self.cache_dtype}
        chunked = texts(lambda _: options | {"prefill_chunk": CHUNKS[1]})
        yield self._same_texts(f"sampled, chunks of {CHUNKS[1]}", chunked, expected)
        yield self._same_texts("sampled, traced", texts(lambda _: options | {"trace": Trace()}), expected)
        if len(prompts) > 1:
            together = generate_batch(self.model, tokenizer, prompts, params, **options)
            yield self._same_texts("sampled, generate_batch", [result.token_ids for result in together], expected)
        yield self._same_texts("sampled, busy server", self._busy(tokenizer, prompts, params), expected)

    def _busy(self, tokenizer: Decodes, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
        """The prompts in a loop, where others come and go, and memory does not hold them all."""
        config, chance = self.model.config, random.Random(0)
        item = resolve_cache_dtype(self.cache_dtype, model_dtype(self.model) or torch.float32).itemsize
        sizes = [bytes_for(config, len(text.tokens), item, chunk=len(text.tokens)) for text in self.texts]
        room = max(max(sizes), sum(sizes) // 2) + bytes_for(config, 1, item)
        loop = Loop(
            self.model, CacheMemory(self.model, room, cache_dtype=self.cache_dtype), max_rows=8, prefill_chunk=64
        )

        def task(i: int, **others: Any) -> Task:
            return Task(Request(config, tokenizer, prompts[i], replace(params, **others)))

        wanted = [task(i) for i in range(len(prompts))]
        passing = [task(i, seed=i) for i in range(len(prompts))]  # begin alike, and are given up
        coming = chance.sample([*wanted, *passing], len(wanted) + len(passing))
        while coming or not loop.idle:
            if coming and chance.random() < 0.5:
                loop.submit(coming.pop())
            if chance.random() < 0.1:
                loop.abort([each for each in passing[:1] if each not in coming])
                passing = passing[1:] + passing[:1]
            loop.step()
        for each in wanted:
            if each.error is not None:
                raise each.error
        return [each.request.tokens[each.request.prompt_len :] for each in wanted]

    def _same_texts(self, name: str, found: Sequence[list[int]], expected: Sequence[list[int]]) -> PathResult:
        result = PathResult(name, len(found), sum(map(len, expected)))
        for i, (got, right) in enumerate(zip(found, expected, strict=True)):
            if (at := first_difference(got, right)) is not None:
                position = self.texts[i].prompt_len + at
                first = Difference(i, position, "token", None, float(right[at]), float(got[at]))
                result = replace(result, different=result.different + 1, difference=result.difference or first)
        return result

    def divergence(self, run: Run, prompts: Sequence[int], difference: Difference) -> Divergence:
        """Where the runs behind a difference in the logits diverge."""
        calls: list[Call] = []
        reference: list[Call] = []
        pieces = list(run(prompts, lambda rows, cache: RecordingCache(cache, rows, calls)))
        expected = self.reference(difference.prompt, lambda rows, cache: RecordingCache(cache, rows, reference))
        if (found := first_divergence(reference, calls, difference.prompt, difference.position)) is not None:
            return found
        right = bits(expected[difference.position])
        for prompt, start, logits in pieces:
            at = difference.position - start
            if prompt == difference.prompt and 0 <= at < len(logits) and not torch.equal(right, bits(logits[at])):
                return Divergence("head")
        return Divergence("whole step")


def _other_tokens(expected: Tensor, picked: Tensor) -> int:
    """How many of the tokens picked [n] are less likely than the likeliest by expected [n, V], near-ties aside."""
    wide = expected.cpu().double()  # some devices have no float64
    behind = wide.max(-1).values - wide.gather(1, picked.cpu()[:, None])[:, 0]
    return int((behind > NEAR_TIE[expected.element_size()] * wide.std(-1)).sum())


def _unwatched(rows: Sequence[int], cache: Cache) -> Cache:
    return cache


def _rewound(cache: Cache, length: int) -> bool:
    """Whether the cache goes back so far: a ring that has lost what it would need says no."""
    try:
        cache.truncate(length)
    except ValueError:
        return False
    return True


def chunkings(prompts: Sequence[Sequence[int]]) -> list[int | None]:
    longest = max(map(len, prompts))
    return [None, *(size for size in CHUNKS if size < longest)]


def _spread(last: int, count: int) -> list[int]:
    """From 1 to the last, evenly."""
    return sorted({1 + (last - 1) * i // max(1, count - 1) for i in range(count)})
