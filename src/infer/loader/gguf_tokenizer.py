"""Tokenizers rebuilt from GGUF metadata: the vocabulary is there, the rules behind it go by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from infer.loader.text_tokenizers import MAX_MERGES, check_vocabulary, rust_calls
from infer.values import shown

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types
MAX_TOKEN_CUTS = 2**29  # characters to look at; Gemma's vocabulary has 2**24

# Gemma's files call its fillers control tokens and some of its marks user-defined. Its own tokenizer leaves the marks
# out of decoded text, and the fillers in.
FILLER = re.compile(r"<unused\d+>")
MARKS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2(*, single_digits: bool = False) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not single_digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


# How text is cut before merging, by `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": lambda: _gpt2(single_digits=True),
    "llama3": lambda: _split(LLAMA3_SPLIT),
    "llama-v3": lambda: _split(LLAMA3_SPLIT),
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
}
# These vocabularies take a whole word that has a token before trying to merge towards it, and start with BOS.
LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
# These have text in Unicode's composed form.
COMPOSED = ("qwen2",)


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"GGUF tokenizer {shown(kind)} is not supported: only gpt2 (byte-level BPE) and llama are")
    try:
        check_vocabulary(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges"))
    except ValueError as error:
        raise ValueError(f"the GGUF file {error}") from None
    # SentencePiece's merges are found by cutting every token in every way.
    if sum(len(token) ** 2 for token in metadata["tokenizer.ggml.tokens"]) > MAX_TOKEN_CUTS:
        raise ValueError("the GGUF file's tokens are too long")
    with rust_calls("the GGUF file's tokenizer cannot be built"):
        try:
            return _build(metadata, kind)
        except KeyError as error:
            raise ValueError(f"GGUF metadata lacks {error.args[0]}") from None
        except IndexError:
            raise ValueError("GGUF metadata names a token beyond the vocabulary, or has too few scores") from None


def _build(metadata: Mapping[str, Any], kind: str) -> tokenizers.Tokenizer:
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    control = _tokens_of_type(metadata, CONTROL, UNKNOWN)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in control if FILLER.fullmatch(token)])
    special = [token for token in control if not FILLER.fullmatch(token)]
    special += [token for token in _tokens_of_type(metadata, USER_DEFINED) if token in MARKS]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    _add_bos(tokenizer, metadata, default=kind == "llama" or metadata.get("tokenizer.ggml.pre") in LLAMA3)
    tokenizer.decode(tokenizer.encode("A b1 é\n").ids)  # some parts fail only when they are used
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"GGUF pre-tokenizer {shown(pre)} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        bpe = BPE(vocab=vocab, merges=merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"the GGUF file's merges do not fit its vocabulary: {error!s:.200}") from None
    tokenizer = tokenizers.Tokenizer(bpe)
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _tokens_of_type(metadata, USER_DEFINED)])
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = list(metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    pieces = _tokens_of_type(metadata, USER_DEFINED)
    # Runs of spaces are stored as such; the vocabulary has "▁" for every space.
    vocab = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    for piece in pieces:
        i = vocab[piece.replace(" ", "▁")]
        scores[i] = float(len(piece))  # before all others, the longest first; files say 0 or -1000
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer = tokenizers.Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown].replace(" ", "▁"),
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=bool(prefix and pieces),  # those pieces, cut out below, need not be reachable by merging
        )
    )
    # A leading space, as SentencePiece adds it, and "▁" for every space.
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    if not prefix:
        # SentencePiece looks for pieces where spaces are "▁" already (normalized). A piece stored with spaces comes
        # from a Hugging Face tokenizer, which looks for "▁▁" in the text itself, and leaves spaces to merging.
        tokenizer.add_tokens([AddedToken(p.replace(" ", "▁"), normalized=" " not in p) for p in pieces])
    elif pieces:
        # Added tokens would be given the leading space too.
        pattern = "|".join(re.escape(piece.replace(" ", "▁")) for piece in sorted(pieces, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    decode: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decode + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union scores best: every way to cut each token in two, best token first.

    Of one token's pairs, that with the longest left part comes first, as in the files that transformers reads.
    """
    merges = []
    for token in sorted(vocab, key=lambda token: -scores[vocab[token]]):
        for cut in range(len(token) - 1, 0, -1):
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab:
                merges.append((left, right))
        if len(merges) > MAX_MERGES:
            raise ValueError(f"the GGUF file's tokens can be merged in more than {MAX_MERGES:,} ways")
    return merges


def _tokens_of_type(metadata: Mapping[str, Any], *kinds: int) -> list[str]:
    types = metadata.get("tokenizer.ggml.token_type", [])
    return [t for t, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=False) if kind in kinds]


def _add_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], *, default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    if bos >= len(metadata["tokenizer.ggml.tokens"]):
        raise ValueError(f"the GGUF file's BOS token {bos} is beyond its vocabulary")
    token = metadata["tokenizer.ggml.tokens"][bos]
    # As the JSON that it is stored in: the shorter form takes "$" and ":" in a token for its own.
    first, text, more = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        *({"Sequence": {"id": i, "type_id": 0}} for i in "AB"),
    )
    processor = processors.TemplateProcessing()
    state = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, more],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.post_processor = processor
