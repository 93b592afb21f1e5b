"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.loader.chat import render_chat_template
from infer.loader.find import open_checkpoint
from infer.loader.text_tokenizers import bytes_of, rust_calls
from infer.values import STRING, takes

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a part of a character shows as
LONG = 4096  # characters, or tokens: such calls are made so that other threads go on meanwhile
UNCERTAIN = f" {INCOMPLETE}"  # at either end of a token, what its neighbours may change


class Tokenizer:
    """The tokenizer of a checkpoint: a folder, a GGUF file, nanoGPT's ckpt.pt, a built-in short name, or a hub id."""

    def __init__(self, name_or_path: str | Path) -> None:
        parts = open_checkpoint(name_or_path, weights=False).tokenizer_parts()
        self._backend = parts.backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self.chat_template = parts.chat_template
        self.bos_token = parts.bos_token
        self.eos_token = parts.eos_token
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
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: put BOS in front where the model has one; not after `render_chat_template`."""
        try:
            with rust_calls("the tokenizer fails"):
                if len(text) < LONG:
                    return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
                return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except ValueError as error:
            halves = [character for character in text if "\ud800" <= character <= "\udfff"]
            if halves:
                raise ValueError(f"the text is not Unicode: {halves[0]!r} is half a character") from None
            if "WordLevel" not in str(error):
                raise
            strange = [character for character in dict.fromkeys(text) if self.token_to_id(character) is None]
            lacks = " ".join(map(repr, strange[:8]))
            raise ValueError(f"the model cannot read the text, its vocabulary lacks {lacks}") from None

    def encode_chat(self, messages: list[dict[str, str]], **variables: Any) -> list[int]:
        """The prompt that the chat template makes of messages. variables: of the template, as enable_thinking."""
        return self.encode(render_chat_template(messages, tokenizer=self, **variables), add_special_tokens=False)

    def token_bytes(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """What each of the ids from 0 to count - 1 adds to a text; of special tokens, and ids without one, nothing.

        And what it is at the beginning of a text, where SentencePiece's tokens lose a space.
        """
        with rust_calls("the tokenizer fails"):
            first = self._backend.decode_batch([[i] for i in range(count)])
            # A token that shows as what it is, for the others to stand behind.
            before = next((i for i, text in enumerate(first) if text and text == text.strip(UNCERTAIN)), None)
            if before is None:
                raise ValueError("the tokenizer has no token with a text of its own")
            pairs = self._backend.decode_batch([[before, i] for i in range(count)])
        inside = [pair.removeprefix(first[before]) for pair in pairs]
        return self._as_bytes(inside), self._as_bytes(first)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token is at the beginning of a text, also where it is no whole character."""
        return self._bytes(token_id, self.decode([token_id]))

    def _as_bytes(self, texts: Sequence[str]) -> list[bytes]:
        return [self._bytes(i, text) for i, text in enumerate(texts)]

    def _bytes(self, token_id: int, text: str) -> bytes:
        return text.encode() if INCOMPLETE not in text else bytes_of(self.id_to_token(token_id) or "", text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) == 1:  # asked for with each token of a stream
            key = (token_ids[0], skip_special_tokens)
            text = self._single.get(key)
            if text is None:
                text = self._single[key] = self._backend.decode([*token_ids], skip_special_tokens=skip_special_tokens)
            return text
        if len(token_ids) < LONG:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
