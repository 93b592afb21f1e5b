"""Texts and small SentencePiece models for the tests of tokenizers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer as Backend

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "it's we'LL they've I'm 'S",
    "1 12 123 1234 12345 3.14159",
    "naïve café — “quotes” … ©",
    "Москва, Ελλάδα, 東京, 서울, القاهرة, दिल्ली",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "def f(x):\n    return x**2  # square\n",
    "x" * 50,
    "\u00a0\u3000\u200b\ufeff",
    "e\u0301 \u1e9e ﬁ",
    "<s>not</s> special",
]


TEKKEN_REGEX = (  # as in Mistral's tekken.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


COMMON = """
the of and a to in is you that it he was for on are as with his they at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number no way
"""


WORDS = COMMON.split()


USER_SYMBOLS = ["<turn>", "\n\n", "▁▁", "▁▁▁"]


SYMBOL_TEXTS = ["<turn>the one", "the<turn>one", "a <turn> b<turn>", "<turn><turn>", "a\n\n\nb", " <turn> x"]


def sentences(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))).capitalize() + "." for _ in range(count)]


SENTENCEPIECE_TEXTS = [
    *TEXTS[:-1],
    *sentences(1, 40),
    "   leading",
    "trailing   ",
    " a b  c   d    e ",
    "thethethethe ofofof andthe",
    "THE OF AND",
    "\x00\x01\x7f",
    "a\nb\n\nc",
    "▁under▁score",
    "<0x41>",  # a byte's token, which text does not spell
    "\U0001f9d1\u200d\U0001f680",
]


def random_texts(extra: list[str]) -> list[str]:
    rng = random.Random(2)
    atoms = [*"abcdethoi   TÜ東🦙\n▁1", *WORDS, *extra]
    return ["".join(rng.choices(atoms, k=rng.randint(1, 40))) for _ in range(500)]


def train_sentencepiece(folder: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(sentences(0, 400) + ["Ünïcödé 東京 naïve 123 4567"] * 20), encoding="utf-8")
    defaults: dict[str, Any] = {
        "input": str(corpus),
        "model_prefix": str(folder / "spm"),
        "model_type": "bpe",
        "vocab_size": 600,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(**defaults | settings)
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))


def assert_agrees_with_sentencepiece(rebuilt: Backend, spm: sentencepiece.SentencePieceProcessor, text: str) -> None:
    ids = spm.encode(text)
    assert rebuilt.encode(text, add_special_tokens=False).ids == ids, text
    assert rebuilt.encode(text).ids == [spm.bos_id(), *ids]
    assert rebuilt.decode(ids) == spm.decode(ids)
