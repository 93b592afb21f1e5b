"""What proposes tokens: earlier parts of a text, other texts, a smaller model, a function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.backend import Row, backend_for
from infer.cache.paged import PagedCache
from infer.cache.pool import OutOfPages, bytes_for, pages_for
from infer.config import ModelConfig
from infer.engine.draft import MAX_DRAFTS, Drafter
from infer.engine.memory import CacheMemory
from infer.engine.model import Model, cache_dtype_of, model_name
from infer.engine.sequence import Sequence as EngineSequence
from infer.engine.sequence import named
from infer.engine.text import common_prefix
from infer.models.rows import LAST, NONE
from infer.values import ANY_MODEL, short_repr

NGRAMS = ("ngram", "ngram-shared")
SIZES = (6, 4, 3)  # of the n-grams that are looked up, the longest first
SHARED_TOKENS = 32_768  # of other outputs, whose n-grams are kept: some 30 MB
INDEXED = 4096  # tokens whose n-grams are added at a proposal
CHUNK = 32  # tokens that a draft model computes of prompts before a step, which waits for them
RIGHT_SHARE = 0.9  # of the drafts of a text that a draft model catches up with
SURE = 0.5  # the probability from which a draft model's token is proposed

DrafterFunction = Callable[[EngineSequence, int], Collection[int]]
Speculate = str | Path | Model | Drafter | DrafterFunction | None


class BaseDrafter:
    """What the drafters have in common: each serves one `LLM` at a time, and counts drafts."""

    num_drafted = num_accepted = 0  # of the sequences that have finished; the command line prints them
    _is_claimed = False

    def claim(self) -> None:
        if self._is_claimed:
            raise ValueError("this drafter belongs to another LLM: make one for each")
        self._is_claimed = True

    def close(self) -> None:
        self._is_claimed = False

    def finish(self, sequence: EngineSequence) -> None:
        self.num_drafted += sequence.num_drafted
        self.num_accepted += sequence.num_accepted


class NgramDrafter(BaseDrafter):
    """Proposes what followed the last tokens where they occurred before: in the prompt, the output or the prediction.

    A text that repeats parts of its prompt, such as an edit or a quotation, is drafted without a second model. A
    proposal takes the same time after any number of tokens; those of a long prompt are indexed over several.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """shared: what followed in recent outputs of other sequences, too, if they have the same `cache_salt`."""
        self._texts: dict[EngineSequence, _Text] = {}
        self._outputs = _Outputs() if shared else None

    def propose(self, counts: Mapping[EngineSequence, int]) -> dict[EngineSequence, list[int]]:
        return {sequence: self._text(sequence).propose(sequence.token_ids, n) for sequence, n in counts.items()}

    def finish(self, sequence: EngineSequence) -> None:
        super().finish(sequence)
        self._texts.pop(sequence, None)
        if self._outputs is not None and sequence.error is None:
            self._outputs.add(sequence)

    def _text(self, sequence: EngineSequence) -> _Text:
        if sequence not in self._texts:
            self._texts[sequence] = _Text(sequence, self._outputs)
        return self._texts[sequence]


class _Text:
    """The prediction and the tokens of one sequence, and where each n-gram occurred last."""

    def __init__(self, sequence: EngineSequence, outputs: _Outputs | None) -> None:
        self._tokens = [*sequence.prediction, *sequence.prompt]
        self._start = len(sequence.prediction)  # of the prompt
        self._after: dict[tuple[int, ...], int] = {}  # the position after the last occurrence of an n-gram
        self._indexed = 1
        self._next: int | None = 0 if sequence.prediction else None  # the position that is likely to be repeated next
        self._salt, self._outputs = sequence.cache_salt, outputs

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        """ids: the prompt and what was generated."""
        self._append(ids[len(self._tokens) - self._start :])
        for size in SIZES if self._next is None else ():
            gram = tuple(self._tokens[-size:])
            self._next = self._after.get(gram)
            if self._next is not None:
                break
            if self._outputs is not None and (found := self._outputs.following(self._salt, gram, count)):
                return found
        if self._next is None:
            return []
        drafts: list[int] = []
        length = len(self._tokens)
        for at in range(self._next, self._next + count):  # past the end, the repetition repeats
            drafts.append(self._tokens[at] if at < length else drafts[at - length])
        return drafts

    def _append(self, new: Sequence[int]) -> None:
        before = len(self._tokens)
        self._tokens += new
        if self._next is not None:
            stop = self._next + len(new)
            self._next = stop if self._tokens[self._next : stop] == self._tokens[before:] else None
        stop = min(len(self._tokens), self._indexed + INDEXED)
        for end in range(self._indexed, stop):
            for size in SIZES:
                if size <= end:
                    self._after[tuple(self._tokens[end - size : end])] = end
        self._indexed = stop


class _Output(NamedTuple):
    salt: str
    tokens: list[int]


class _Outputs:
    """The last outputs, and where each of their n-grams occurred last."""

    def __init__(self) -> None:
        self._outputs: deque[_Output] = deque()
        self._count = 0  # of their tokens
        self._after: dict[tuple[str, tuple[int, ...]], tuple[_Output, int]] = {}

    def add(self, sequence: EngineSequence) -> None:
        output = _Output(sequence.cache_salt, sequence.token_ids[sequence.prompt_len :])
        if not output.tokens:
            return
        self._outputs.append(output)
        self._count += len(output.tokens)
        for gram, end in _grams(output.tokens):
            self._after[output.salt, gram] = output, end
        while self._count > SHARED_TOKENS:
            oldest = self._outputs.popleft()
            self._count -= len(oldest.tokens)
            for gram, _ in _grams(oldest.tokens):
                if self._after.get((oldest.salt, gram), (None, 0))[0] is oldest:
                    del self._after[oldest.salt, gram]

    def following(self, salt: str, gram: tuple[int, ...], count: int) -> list[int]:
        output, end = self._after.get((salt, gram), (_Output("", []), 0))
        return output.tokens[end : end + count]


def _grams(tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """All n-grams, and where each ends."""
    ends = range(1, len(tokens) + 1)
    return [(tuple(tokens[end - size : end]), end) for end in ends for size in SIZES if size <= end]


class _DraftRow(NamedTuple):
    sequence: EngineSequence
    cache: PagedCache
    tokens: list[int]  # to compute


@dataclass
class _Held:
    """What a draft model's cache holds: `length` tokens of the sequence, then drafts."""

    cache: PagedCache
    length: int
    drafts: list[int]


class ModelDrafter(BaseDrafter):
    """Proposes what a smaller model with the same vocabulary finds most likely, as long as it is sure.

    It keeps a cache for each sequence. All sequences go through its passes together, and prompts in chunks.
    """

    def __init__(self, model: Model, memory: CacheMemory | None = None) -> None:
        """memory: for its caches; None: a share of an `LLM`'s, or enough for one sequence."""
        self.model, self.memory = model, memory
        self._owns_memory = memory is None
        self._caches: dict[EngineSequence, _Held] = {}

    def __repr__(self) -> str:
        return f"ModelDrafter({model_name(self.model)})"

    def left_of(self, size: int, config: ModelConfig, itemsize: int) -> int:
        """What it leaves of so many bytes to the caches of a model, if both have as many positions."""
        return int(size / (1 + self._bytes_beside(config, itemsize)))

    def match(self, memory: CacheMemory) -> None:
        """Take memory for as many positions as this has."""
        beside = self._bytes_beside(memory.model.config, memory.pool.dtype.itemsize)
        self.memory = CacheMemory(self.model, int(memory.pool.memory_bytes * beside))

    def _bytes_beside(self, config: ModelConfig, itemsize: int) -> float:
        """Of a position, for each byte of another model's."""
        own = self.model.config.cache_bytes_per_token(cache_dtype_of(self.model, "auto").itemsize)
        return own / config.cache_bytes_per_token(itemsize)

    def close(self) -> None:
        """Free its memory, unless it was given."""
        super().close()
        self._caches.clear()
        if self._owns_memory and self.memory is not None:
            self.memory.pool.close()
            self.memory = None

    @torch.inference_mode()
    def propose(self, counts: Mapping[EngineSequence, int]) -> dict[EngineSequence, list[int]]:
        """A sequence whose cache lacks more than its last tokens gets no drafts yet: the cache is filled first."""
        backend, (rows, behind) = backend_for(self.model), self._next_rows(counts)
        drafts = {row.sequence: self._caches[row.sequence].drafts for row in rows}
        if behind:
            backend.run([Row(cache, tokens, NONE) for _, cache, tokens in behind])
        while rows:
            logits = backend.run([Row(cache, tokens, LAST) for _, cache, tokens in rows])
            scores = torch.cat([each[0] for each in logits]).float()  # [rows, V]
            best, tokens = scores.max(1)
            sure = (best - scores.logsumexp(1)).exp() >= SURE
            following = list[_DraftRow]()
            for (sequence, cache, _), token, is_sure in zip(rows, tokens.tolist(), sure.tolist(), strict=True):
                if is_sure:
                    drafts[sequence].append(token)
                    if len(drafts[sequence]) < counts[sequence]:
                        following.append(_DraftRow(sequence, cache, [token]))
            rows = following
        return drafts

    def finish(self, sequence: EngineSequence) -> None:
        super().finish(sequence)
        if (held := self._caches.pop(sequence, None)) is not None and self.memory is not None:
            self.memory.keep(held.cache)
            held.cache.reset()

    def _next_rows(self, counts: Mapping[EngineSequence, int]) -> tuple[list[_DraftRow], list[_DraftRow]]:
        """The tokens that caches lack: all of sequences that lack only the last ones; of the others up to CHUNK."""
        rows, behind, left = list[_DraftRow](), list[_DraftRow](), CHUNK
        for sequence, count in counts.items():
            if sequence.num_tokens + count > self.model.config.max_position_embeddings:
                continue
            cache = self._cache(sequence)
            tokens = sequence.token_ids[cache.seq_len :]
            is_behind = len(tokens) > MAX_DRAFTS + 1
            # A long prompt is not worth its time for a few tokens, nor a text whose drafts were wrong.
            is_right = sequence.num_accepted >= RIGHT_SHARE * sequence.num_drafted
            if is_behind and len(tokens) > max(CHUNK, (sequence.max_len - sequence.num_tokens) * is_right):
                continue
            tokens = tokens[:-1][:left] if is_behind else tokens
            if not tokens or max(tokens) >= self.model.config.vocab_size:
                continue
            try:
                cache.reserve(len(tokens) + count)
            except OutOfPages:
                continue
            left -= is_behind * len(tokens)
            (behind if is_behind else rows).append(_DraftRow(sequence, cache, tokens))
        return rows, behind

    def _cache(self, sequence: EngineSequence) -> PagedCache:
        """Its cache, without the drafts that were wrong."""
        held = self._caches.get(sequence)
        if held is None:
            memory = self._memory_for(sequence)
            memory.check_version()
            cache = memory.cache(sequence.max_len)
            cache.salt = sequence.cache_salt
            memory.attach_prefix(cache, sequence.token_ids)
            held = self._caches[sequence] = _Held(cache, sequence.num_tokens, [])
        right = common_prefix(held.drafts, sequence.token_ids[held.length : held.length + len(held.drafts)])
        keep = min(held.length + right, sequence.num_tokens - 1)
        if held.cache.seq_len > keep:
            try:
                held.cache.truncate(keep)
            except ValueError:  # a window no longer has the positions before
                held.cache.reset()
        held.length, held.drafts = sequence.num_tokens, []
        return held.cache

    def _memory_for(self, sequence: EngineSequence) -> CacheMemory:
        """The memory; or, of a single sequence, as much as that needs."""
        config, length = self.model.config, min(sequence.max_len, self.model.config.max_position_embeddings)
        pool = None if self.memory is None else self.memory.pool
        needs_more = pool is None or pages_for(config, length, pool.page_size, CHUNK) > pool.num_pages
        if self.memory is None or (needs_more and self._owns_memory and not self._is_claimed and not self._caches):
            item = cache_dtype_of(self.model, "auto").itemsize
            size = bytes_for(config, length, item, chunk=CHUNK) + bytes_for(config, 1, item)
            self.memory = CacheMemory(self.model, size)
        return self.memory


class _FunctionDrafter(BaseDrafter):
    """Asks a function for the drafts of each sequence."""

    def __init__(self, function: DrafterFunction) -> None:
        self._function = function

    def propose(self, counts: Mapping[EngineSequence, int]) -> dict[EngineSequence, Collection[int]]:
        return {sequence: self._function(sequence, count) for sequence, count in counts.items()}


def drafter_of(speculate: Speculate, tokenizer: object, device: torch.device | str = "auto") -> Drafter | None:
    """What `speculate` names: n-grams, a draft model, a drafter, or a function of a sequence and a count.

    tokenizer: whose tokens are drafted. device: for a draft model.
    """
    if speculate is None:
        return None
    if speculate in NGRAMS:
        return NgramDrafter(shared=speculate == NGRAMS[1])
    if isinstance(speculate, str | Path):
        with named(f"speculate={str(speculate)!r}", ValueError, OSError):
            return _load(speculate, tokenizer, device)
    given: Any = speculate
    if ANY_MODEL.accepts(given):
        return ModelDrafter(given)
    if isinstance(given, Drafter) and not isinstance(given, type):
        return given
    if callable(given) and not isinstance(given, type):
        return _FunctionDrafter(given)
    raise ValueError(
        'speculate must be "ngram", "ngram-shared", a draft model or its name, a drafter with `propose` and `finish`, '
        f"or a function, not {short_repr(speculate)}"
    )


def _load(name: str | Path, tokenizer: object, device: torch.device | str) -> ModelDrafter:
    from infer.loader.load import load_model
    from infer.loader.tokenizer import Tokenizer

    own = Tokenizer(name)
    if isinstance(tokenizer, Tokenizer):
        for i in range(max(own.vocab_size, tokenizer.vocab_size)):
            ours, theirs = own.id_to_token(i), tokenizer.id_to_token(i)
            if ours != theirs:
                raise ValueError(
                    f"a draft model has the same vocabulary as the model, but its token {i} is {ours!r}, not {theirs!r}"
                )
    return ModelDrafter(load_model(name, device=device)[0])
