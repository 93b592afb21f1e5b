"""Tokenizers made from plain vocabularies: one id per character, and GPT-2's byte-level BPE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from infer.loader.checkpoint import TokenizerParts

END_OF_TEXT = "<|endoftext|>"


def character_tokenizer(ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """A character without an id is refused when text is encoded: there is no unknown token to stand for it."""
    tokenizer = tokenizers.Tokenizer(WordLevel(dict(ids), unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def gpt2_tokenizer(folder: Path) -> TokenizerParts:
    """From tokenizer.json, or vocab.json and merges.txt."""
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if not whole.exists() and not (vocabulary.exists() and merges.exists()):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: put GPT-2's tokenizer.json there, or its vocab.json and merges.txt"
        )
    try:
        if whole.exists():
            tokenizer = tokenizers.Tokenizer.from_file(str(whole))
        else:
            tokenizer = tokenizers.Tokenizer(BPE.from_file(str(vocabulary), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{folder} has a tokenizer that cannot be read: {error}") from None
    return TokenizerParts(tokenizer, None, END_OF_TEXT, END_OF_TEXT)
