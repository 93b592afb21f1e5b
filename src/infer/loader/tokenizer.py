"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from infer.loader.chat import read_chat_template, render_chat_template
from infer.loader.control_tokens import ControlTokens, strings
from infer.loader.find import open_checkpoint
from infer.loader.text_tokenizers import bytes_of, rust_calls
from infer.values import STRING, takes

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of a partial character
SLICE = 1 << 14  # characters of a text that are encoded to see whether it is too long
LONG = 4096  # characters or tokens: longer calls use the batch functions, which release the GIL
UNCERTAIN = f" {INCOMPLETE}"  # characters at either end of a token that its neighbors may change


class TooManyTokens(ValueError):
    """A text that has more tokens than are allowed."""


class Tokenizer:
    """The tokenizer of a checkpoint: a folder, a GGUF file, nanoGPT's ckpt.pt, a built-in short name, or a hub id.

    chat_template: used instead of the checkpoint's own: a name (chatml, llama3, mistral, gemma, phi3, ...) or a Jinja
    file.
    allow_special_tokens: `encode_chat` encodes control tokens in messages as such. By default they are plain text.
    """

    def __init__(
        self, name_or_path: str | Path, *, chat_template: str | Path | None = None, allow_special_tokens: bool = False
    ) -> None:
        template = None if chat_template is None else read_chat_template(chat_template)
        parts = open_checkpoint(name_or_path, weights=False).tokenizer_parts()
        self._backend = parts.backend
        self.chat_template = parts.chat_template if template is None else template
        self.bos_token = parts.bos_token
        self.eos_token = parts.eos_token
        self.allow_special_tokens = allow_special_tokens
        self._single: dict[tuple[int, bool], str] = {}  # texts of single tokens

    def __repr__(self) -> str:
        chat = "a chat template" if self.chat_template else "no chat template"
        return f"Tokenizer({self.vocab_size:,} tokens, bos {self.bos_token!r}, eos {self.eos_token!r}, {chat})"

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.token_to_id(self.eos_token)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    @takes(text=STRING)
    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """add_special_tokens: begin with BOS if the model has one; False after `render_chat_template`.

        A control token in the text, e.g. `<|im_end|>`, becomes that token.
        max_tokens: a text with more than twice as many is refused before it is encoded completely.
        """
        return self._encode(self._backend, text, add_special_tokens, max_tokens)

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        if max_tokens is not None:
            self._check_length(backend, [text], 2 * max_tokens, max_tokens)  # each cut may have added a few
        try:
            with rust_calls("the tokenizer fails"):
                if len(text) < LONG:
                    return backend.encode(text, add_special_tokens=add_special_tokens).ids
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except ValueError as error:
            halves = [character for character in text if "\ud800" <= character <= "\udfff"]
            if halves:
                raise ValueError(f"the text is not valid Unicode: {halves[0]!r} is half a surrogate pair") from None
            if "WordLevel" not in str(error):
                raise
            strange = [character for character in dict.fromkeys(text) if self.token_to_id(character) is None]
            lacks = " ".join(map(repr, strange[:8]))
            raise ValueError(f"the vocabulary lacks characters of the text: {lacks}") from None

    def _check_length(self, backend: tokenizers.Tokenizer, texts: Sequence[str], most: int, max_tokens: int) -> None:
        """Refuse texts that together have more than `most` tokens, without encoding much more than that."""
        count = 0
        if sum(map(len, texts)) > max(SLICE, most):
            for text in texts:
                for start in range(0, len(text), SLICE):
                    count += len(self._encode(backend, text[start : start + SLICE], False))
                    if count > most:
                        raise TooManyTokens(f"the prompt has more than {max_tokens} tokens")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **variables: Any
    ) -> list[int]:
        """The chat template's prompt for messages, encoded. variables: of the template, such as enable_thinking.

        Control tokens in messages and variables are plain text, unless `allow_special_tokens`.
        max_tokens: as for `encode`.
        """
        if self.allow_special_tokens:
            text = render_chat_template(messages, tokenizer=self, **variables)
            return self._encode(self._backend, text, False, max_tokens)
        control = self._control
        try:
            if max_tokens is not None:
                # A template may leave out some of the messages.
                self._check_length(self._backend, [*strings(messages)], 8 * max_tokens, max_tokens)
            mark = control.mark(messages, variables, self.chat_template)
            messages, variables = control.marked(messages, mark), control.marked(variables, mark)
        except RecursionError:
            raise ValueError("messages and variables of a chat template nest too deep") from None
        marked = render_chat_template(messages, tokenizer=self, **variables)
        text, renamed = marked.replace(mark, ""), control.renamed(marked).replace(mark, "")
        if renamed == control.renamed(text):  # all control tokens are the template's
            return self._encode(self._backend, text, False, max_tokens)
        return control.unrenamed(self._encode(control.backend, renamed, False, max_tokens))

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._backend)

    def token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """The bytes that each id below `count` adds inside a text, and at its beginning.

        At the beginning SentencePiece drops a space. Special tokens, and ids without a token, add nothing.
        """
        with rust_calls("the tokenizer fails"):
            first = self._backend.decode_batch([[i] for i in range(count)])
            # A token whose text does not depend on its neighbors, to put before the others.
            before = next((i for i, text in enumerate(first) if text and text == text.strip(UNCERTAIN)), None)
            if before is None:
                raise ValueError("the tokenizer has no token with a fixed text")
            pairs = self._backend.decode_batch([[before, i] for i in range(count)])
        inside = [self._bytes(i, pair.removeprefix(first[before])) for i, pair in enumerate(pairs)]
        return inside, [self._bytes(i, text) for i, text in enumerate(first)]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token at the beginning of a text, also of a partial character."""
        return self._bytes(token_id, self.decode([token_id]))

    def _bytes(self, token_id: int, text: str) -> bytes:
        return text.encode() if INCOMPLETE not in text else bytes_of(self.id_to_token(token_id) or "", text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) == 1:  # called for each token of a stream
            key = (token_ids[0], skip_special_tokens)
            text = self._single.get(key)
            if text is None:
                text = self._single[key] = self._backend.decode([*token_ids], skip_special_tokens=skip_special_tokens)
            return text
        if len(token_ids) < LONG:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
