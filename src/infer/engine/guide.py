"""Constrained output: which tokens may follow, so that the text matches a JSON schema, a regex or a grammar.

`llguidance` parses the text; it gets the bytes of every token of a vocabulary, and computes a mask for each token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from infer.config import ModelConfig
from infer.engine.params import SamplingParams
from infer.version import install

if TYPE_CHECKING:
    from llguidance import LLMatcher

COMPILED = 64  # grammars that a vocabulary keeps: those of a server come back
LONGEST_TOKEN = 32  # bytes of a token that forced text is cut into
LEXER_STATES = 50_000  # maximum lexer states per request (1 to 2 kB each)
# Between the parts of a JSON text: at most one blank, after a comma or a colon (these are regexes). Small models
# write white space up to max_new_tokens wherever it is allowed.
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# The model decides how forced text is cut into tokens, as it does elsewhere: then nothing has to be encoded.
OPTIONS = '%llguidance {"no_forcing": true}'

Mask = NDArray[np.bool_]


@runtime_checkable
class HasTokenBytes(Protocol):
    def token_bytes(self, count: int, /) -> tuple[list[bytes], list[bytes]]: ...


class Guide:
    """The grammar state of one sequence: which tokens may come next."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, kind: str) -> None:
        self._vocabulary, self._matcher, self._kind = vocabulary, matcher, kind
        self._begun = False
        self._allowed: Mask | None = None  # computed once per token

    def allowed(self) -> Mask:
        """The tokens that may come next, [V]: none if `error` says why, or if the text is complete."""
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._allowed = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)
            if self._matcher.is_error():
                self._allowed[:] = False
            elif not self._begun:
                self._allowed &= self._vocabulary.can_begin
        return self._allowed

    def append_token(self, token: int) -> bool:
        """Append a token. Returns whether the text is complete and no token can follow, not even an end."""
        self._begun, self._allowed = True, None
        self._matcher.consume_token(token)
        return not self._vocabulary.eos and not self.allowed().any() and not self.error

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        return int(self._matcher.deep_copy().validate_tokens([*tokens]))

    def forced_tokens(self, count: int) -> list[int]:
        """Up to `count` tokens of the text that has to come next. The model may cut it into others."""
        text = self._matcher.deep_copy().compute_ff_bytes()
        return self._vocabulary.tokens_of(text, count) if text else []

    @property
    def error(self) -> str:
        """Why no token can follow, although the text is incomplete; empty: one can."""
        if not self._matcher.is_error():
            return ""
        reason = self._matcher.get_error().partition("\n")[0]
        reason = "the vocabulary lacks what has to follow" if reason == "NoExtensionBias" else reason
        return f"{reason} (by the {self._kind})"


class Vocabulary:
    """The tokens of a model, as llguidance reads them."""

    def __init__(self, tokenizer: HasTokenBytes, size: int, eos: Sequence[int]) -> None:
        llguidance = _llguidance()
        self.size, self.eos = size, eos
        tokens, first = tokenizer.token_bytes(size)
        # Tokens that lose their leading space as the first of a text cannot begin one.
        self.can_begin: Mask = np.array([a == b for a, b in zip(tokens, first, strict=True)])
        self.can_begin[list(eos)] = True
        for i in eos:
            tokens[i] = b"eos"  # whatever its bytes, it ends the text
        self._tokens = tokens
        wrapped = llguidance.TokenizerWrapper(_Tokens(tokens, eos))
        # Without an eos token, llguidance adds one to the tokens: one more bit at the end of a mask.
        self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=list(eos) or None)
        self._limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        self._compiled = lru_cache(COMPILED)(self._compile)

    def guide(self, kind: str, text: str) -> Guide:
        """kind: the setting of `SamplingParams` that the text is of."""
        guide = Guide(self, self._compiled(kind, text).deep_copy(), kind)
        if not guide.allowed().any():
            raise ValueError(f"no token of this vocabulary can begin a text that the {kind} allows")
        return guide

    def tokens_of(self, text: bytes, count: int) -> list[int]:
        """The first tokens of a text, each as long as possible."""
        ids, tokens = self._ids, list[int]()
        while text and len(tokens) < count:
            size = next((n for n in range(min(len(text), self._longest), 0, -1) if text[:n] in ids), 0)
            if not size:
                break
            tokens.append(ids[text[:size]])
            text = text[size:]
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: i for i, token in enumerate(self._tokens) if token and i not in self.eos}

    @cached_property
    def _longest(self) -> int:
        return min(LONGEST_TOKEN, max(map(len, self._tokens)))

    def _compile(self, kind: str, text: str) -> LLMatcher:
        llguidance = _llguidance()
        if kind == "json_schema":
            grammar = f"start: %json {bounded(json.loads(text))}"
        elif kind == "regex":
            grammar = f"start: /{llguidance.regex_to_lark(text, 'd')}/"  # in which \d is 0 to 9
        else:
            grammar = text
        grammar += f"\n{OPTIONS}"
        matcher: LLMatcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(f"the {kind} cannot be used: {_reason(matcher.get_error(), kind)}")
        return matcher


class _Tokens:
    """What llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = tokens, list(eos)
        self.eos_token_id = eos[0] if eos else None

    def __call__(self, text: Any) -> list[int]:
        raise NotImplementedError("nothing is forced, so nothing has to be encoded")


_vocabularies: WeakKeyDictionary[HasTokenBytes, dict[tuple[int, tuple[int, ...]], Vocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_of(tokenizer: object, config: ModelConfig) -> Vocabulary:
    """Cached for each tokenizer and kind of model, as it takes about a second."""
    if not isinstance(tokenizer, HasTokenBytes):
        raise TypeError(
            f"a json_schema, regex or grammar needs the bytes of each token, which {type(tokenizer).__name__} does "
            "not give: use infer.Tokenizer, or define token_bytes as it does"
        )
    eos = tuple(i for i in config.eos_token_ids if i < config.vocab_size)
    with _lock:
        own = _vocabularies.setdefault(tokenizer, {})
        key = config.vocab_size, eos
        if key not in own:
            own[key] = Vocabulary(tokenizer, *key)
        return own[key]


def guide_for(params: SamplingParams, tokenizer: object, config: ModelConfig) -> Guide | None:
    """None where anything may be generated. What cannot be is refused."""
    constraint = params.constraint
    return None if constraint is None else vocabulary_of(tokenizer, config).guide(*constraint)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ImportError(
            f"a json_schema, regex or grammar needs llguidance, which is not installed: {install('server')}"
        ) from None
    return llguidance


def bounded(schema: Mapping[str, Any]) -> str:
    """The schema with a limit to whitespace, unless it says itself what that may be."""
    return json.dumps({"x-guidance": SEPARATORS, **schema})


def _reason(error: str, kind: str) -> str:
    """The line of an error that says what is wrong; where, only of what was not wrapped here."""
    lines = error.splitlines() or [""]
    line = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    if kind != "grammar":
        line = re.sub(r"^(at )?\d+\(\d+\): ", "", line).removeprefix("failed to compile JSON schema: ")
    return line[:300]
