"""Tokenizers built from GGUF metadata, which has the vocabulary, and the pre-tokenizer only by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from infer.loader.text_tokenizers import MAX_MERGES, check_vocabulary, rust_calls
from infer.values import short_repr

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types, in GGUF files and SentencePiece models
MAX_TOKEN_CUTS = 2**29  # characters to compare; Gemma's vocabulary has 2**24

# Gemma's GGUF files mark its unused tokens as control tokens, and some control tokens as user-defined. Gemma's own
# tokenizer skips the control tokens in decoded text, and keeps the unused ones.
UNUSED = re.compile(r"<unused\d+>")
SPECIAL = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>")
# Special tokens of Phi 3 take the white space after them, except for these.
PHI3_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")

# Splits of tiktoken's gpt2, cl100k_base and o200k_base, and of models that changed them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    _TEKKEN.replace(rf"{_LOWER}+|", rf"{_LOWER}+{_CONTRACTION}?|")
    .replace(rf"{_LOWER}*|", rf"{_LOWER}*{_CONTRACTION}?|")
    .replace(r"\p{N}|", r"\p{N}{1,3}|")
)
_CJK = "\u4e00-\u9fa5"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How byte-level BPE treats a text before it merges."""

    splits: tuple[str, ...] = (_GPT2,)  # regular expressions: each isolates its matches in the parts from before
    single_digits: bool = False
    nfc: bool = False  # text is normalized to NFC
    ignore_merges: bool = False  # a word with a token of its own is not merged
    bos: bool = False  # texts start with BOS, unless the file says otherwise

    def build(self) -> pre_tokenizers.PreTokenizer:
        parts: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        parts += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(parts)


def _named(names: str, *splits: str, **flags: bool) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), PreTokenizer(splits or (_GPT2,), **flags))


PRE_TOKENIZERS = {  # by `tokenizer.ggml.pre`, as llama.cpp names them
    **_named("default gpt-2 phi-2 jais trillion granite-docling exaone4 mellum gigachat a.x-4.0"),
    **_named("mpt olmo", nfc=True),
    **_named("smollm starcoder refact codeshell exaone minerva-7b mellum2", single_digits=True),
    **_named("command-r", single_digits=True, nfc=True),
    **_named("llama3 llama-v3 llama-bpe falcon3 midm-2.0", _CL100K, ignore_merges=True, bos=True),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", _CL100K),
    **_named("qwen2 deepseek-r1-qwen stablelm2 megrez kormo", _QWEN2, nfc=True),
    **_named("tekken", _TEKKEN, ignore_merges=True, bos=True),
    **_named("gpt-4o llama4 kanana2", _O200K),
    **_named("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_CJK}\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    **_named("deepseek-v3", r"\p{N}{1,3}", f"[{_CJK}\u3040-\u30ff]+", _DEEPSEEK_V3),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"GGUF tokenizer {short_repr(kind)} is not supported: only gpt2 (byte-level BPE) and llama are"
        )
    try:
        check_vocabulary(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges"))
    except ValueError as error:
        raise ValueError(f"the GGUF file {error}") from None
    # SentencePiece's merges are found by splitting every token at every position.
    if sum(len(token) ** 2 for token in metadata["tokenizer.ggml.tokens"]) > MAX_TOKEN_CUTS:
        raise ValueError("the tokenizer has tokens that are too long")
    with rust_calls("the tokenizer cannot be built"):
        try:
            return _build(metadata, kind)
        except KeyError as error:
            raise ValueError(f"GGUF metadata lacks {error.args[0]}") from None
        except IndexError:
            raise ValueError("GGUF metadata has a token id beyond the vocabulary, or too few scores") from None


def _build(metadata: Mapping[str, Any], kind: str) -> tokenizers.Tokenizer:
    tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    control = _tokens_of_type(metadata, CONTROL, UNKNOWN)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in control if UNUSED.fullmatch(token)])
    special = [token for token in control if not UNUSED.fullmatch(token)]
    special += [token for token in _tokens_of_type(metadata, USER_DEFINED) if token in SPECIAL]
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=strips and token not in PHI3_KEEP_SPACE)
            for token in special
        ]
    )
    adds_bos = kind == "llama" or PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "default")].bos
    _add_bos(tokenizer, metadata, default=adds_bos)
    tokenizer.decode(tokenizer.encode("A b1 é\n").ids)  # some parts fail only when used
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {short_repr(pre)} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if pre == "default" and metadata.get("general.architecture") != "gpt2":
        print(
            "the GGUF file does not name its pre-tokenizer: GPT-2's is used, which may split texts in other places",
            file=sys.stderr,
        )
    pre_tokenizer = PRE_TOKENIZERS[pre]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        bpe = BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"the merges of the tokenizer do not fit its vocabulary: {error!s:.200}") from None
    tokenizer = tokenizers.Tokenizer(bpe)
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _tokens_of_type(metadata, USER_DEFINED)])
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = list(metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    pieces = _tokens_of_type(metadata, USER_DEFINED)
    # The file stores spaces; the vocabulary has "▁" for each.
    vocab = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    for piece in pieces:
        i = vocab[piece.replace(" ", "▁")]
        scores[i] = float(len(piece))  # merged before all others, the longest first; files have 0 or -1000
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer = tokenizers.Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown].replace(" ", "▁"),
            fuse_unk=True,
            byte_fallback=True,
            ignore_merges=bool(prefix and pieces),  # pieces, split off below, need not be reachable by merges
        )
    )
    # SentencePiece adds a leading space, and writes "▁" for every space.
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    if not prefix:
        # SentencePiece matches pieces after spaces have become "▁" (normalized). A piece stored with spaces comes from
        # a Hugging Face tokenizer, which matches "▁▁" in the text itself, and leaves spaces to the merges.
        tokenizer.add_tokens([AddedToken(p.replace(" ", "▁"), normalized=" " not in p) for p in pieces])
    elif pieces:
        # Added tokens would get the leading space too.
        pattern = "|".join(re.escape(piece.replace(" ", "▁")) for piece in sorted(pieces, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    decode: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decode + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose union scores best: every split of each token in two, best token first.

    Of one token's pairs, the one with the longest left part comes first, as in tokenizer.json.
    """
    merges = []
    for token in sorted(vocab, key=lambda token: -scores[vocab[token]]):
        for cut in range(len(token) - 1, 0, -1):
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab:
                merges.append((left, right))
        if len(merges) > MAX_MERGES:
            raise ValueError(f"the tokens of the tokenizer can be merged in more than {MAX_MERGES:,} ways")
    return merges


def _tokens_of_type(metadata: Mapping[str, Any], *kinds: int) -> list[str]:
    types = metadata.get("tokenizer.ggml.token_type", [])
    return [t for t, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=False) if kind in kinds]


def _add_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], *, default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    if bos >= len(metadata["tokenizer.ggml.tokens"]):
        raise ValueError(f"the BOS token {bos} is beyond the vocabulary")
    token = metadata["tokenizer.ggml.tokens"][bos]
    # As JSON: in the shorter form of the constructor, "$" and ":" in a token would be syntax.
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": i, "type_id": 0}} for i in "AB"]
    processor = processors.TemplateProcessing()
    state = {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, *texts],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
    processor.__setstate__(json.dumps(state).encode())
    tokenizer.post_processor = processor
