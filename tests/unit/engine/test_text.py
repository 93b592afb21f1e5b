"""Detokenizer with real tokenizers: what is streamed is what decoding everything at once gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mocks import MockTokenizer
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from infer.engine.text import Detokenizer, SupportsDecode

TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Naïve café, Straße, žluťoučký kůň",
    "你好、世界。今天天气很好。",
    "こんにちは世界 안녕하세요",
    "😀😃👍🏽 family: 👨‍👩‍👧‍👦 flags: 🇫🇷🇯🇵",
    "def f(x):\n    return x ** 2\n",
]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MODEST = settings(deadline=None, max_examples=150, derandomize=True, database=None)


@cache
def byte_level() -> Tokenizer:
    """As GPT-2 and Llama 3 have it: tokens are bytes, and may end within a character."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: "▁" for a space, bytes for what is not in the vocabulary, the first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,好"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("o", "g"), ("▁", "a")]
    vocab = {piece: i for i, piece in enumerate(pieces + [left + right for left, right in merges])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = pytest.mark.parametrize("make", [byte_level, sentencepiece])


def pieces(tokenizer: SupportsDecode, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What a stream shows token by token, the end included; and whether a stop string ended it."""
    text = Detokenizer(tokenizer, stop)
    shown = []
    for i in ids:
        shown.append(text.push(i))
        if text.stopped:
            break
    return [*shown, text.finish()], text.stopped


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    """All of the text, and never a replacement character before it is certain to stay."""
    shown, _ = pieces(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(shown) == whole
    so_far = ""
    for piece in shown:
        so_far += piece
        assert whole.startswith(so_far)


@st.composite
def sentencepiece_ids(draw: st.DrawFn) -> list[int]:
    """Any tokens and texts, and characters cut short; but these with no other bytes beside them.

    The decoder takes a run of bytes as a whole, so that a bad one at its end also spoils good characters before it,
    which a stream has shown by then.
    """
    tokenizer = sentencepiece()
    ids: list[int] = []
    for kind in draw(st.lists(st.sampled_from(["token", "text", "cut short"]), max_size=8)):
        if kind == "token":
            ids.append(draw(st.integers(0, 2) | st.integers(259, tokenizer.get_vocab_size() - 1)))
        elif kind == "text":
            ids += tokenizer.encode(draw(st.text(max_size=5))).ids
        else:
            a = tokenizer.token_to_id("a")
            character = draw(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]))
            ids += [a, *(3 + byte for byte in character.encode()[:-1]), a]
    return ids


class TestRealTokenizers:
    @MODEST
    @given(st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=30))
    def test_any_ids_of_byte_level(self, ids: list[int]) -> None:
        assert_streams(byte_level(), ids)

    @MODEST
    @given(sentencepiece_ids())
    def test_ids_of_sentencepiece(self, ids: list[int]) -> None:
        assert_streams(sentencepiece(), ids)

    @MODEST
    @given(st.lists(st.integers(0, sentencepiece().get_vocab_size() - 1), max_size=12))
    def test_any_ids_of_sentencepiece_show_no_extra_replacement(self, ids: list[int]) -> None:
        shown, _ = pieces(sentencepiece(), ids)
        assert "".join(shown).count(REPLACEMENT) <= sentencepiece().decode(ids).count(REPLACEMENT)

    @TOKENIZERS
    @MODEST
    @given(text=st.text(max_size=20))
    def test_any_text(self, make: Callable[[], Tokenizer], text: str) -> None:
        tokenizer = make()
        ids = tokenizer.encode(text).ids
        assert_streams(tokenizer, ids)
        shown, _ = pieces(tokenizer, ids)
        assert "".join(shown).count(REPLACEMENT) == tokenizer.decode(ids).count(REPLACEMENT)

    @TOKENIZERS
    @pytest.mark.parametrize("text", TEXT)
    def test_sample_texts(self, make: Callable[[], Tokenizer], text: str) -> None:
        tokenizer = make()
        assert_streams(tokenizer, tokenizer.encode(text).ids)

    @TOKENIZERS
    def test_characters_come_whole(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = make()
        ids = tokenizer.encode("a 🦜 b").ids  # in neither vocabulary
        shown, _ = pieces(tokenizer, ids)
        assert sum("🦜" in piece for piece in shown) == 1
        assert not any(REPLACEMENT in piece for piece in shown)

    @TOKENIZERS
    def test_an_unfinished_character_comes_in_the_end(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = make()
        ids = tokenizer.encode("a🦜").ids[:-1]
        shown, _ = pieces(tokenizer, ids)
        assert not any(REPLACEMENT in piece for piece in shown[:-1])
        assert "".join(shown) == tokenizer.decode(ids)
        assert shown[-1].endswith(REPLACEMENT)

    @TOKENIZERS
    def test_a_special_token_does_not_swallow_a_space(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = make()
        ids = [*tokenizer.encode("dog").ids, tokenizer.token_to_id("</s>"), *tokenizer.encode(" the dog").ids]
        shown, _ = pieces(tokenizer, ids)
        assert "".join(shown) == tokenizer.decode(ids)

    @TOKENIZERS
    @pytest.mark.parametrize("stop", ["the", "e l", "好、", "🏽 f", " ", "\n"])
    def test_stop_strings(self, make: Callable[[], Tokenizer], stop: str) -> None:
        tokenizer = make()
        whole = "over the lazy dog 你好、世界 👍🏽 family\nend"
        shown, stopped = pieces(tokenizer, tokenizer.encode(whole).ids, (stop,))
        assert stopped
        assert "".join(shown) == whole[: whole.index(stop)]


class TestStopStrings:
    @pytest.mark.parametrize("stop", [("STOP",), ("no", "STOP"), ("STOP", "TOPS")], ids=str)
    @pytest.mark.parametrize("whole", ["aaSTOPbb", "STOP", "SSTOP", "STSTOPSTOP", "aSTaSTOP!"])
    def test_all_splits(self, whole: str, stop: tuple[str, ...]) -> None:
        """However the text is cut into tokens, nothing of the stop string is shown, and all before it is."""
        for count in range(len(whole)):
            for cuts in combinations(range(1, len(whole)), count):
                words = [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])]
                shown, stopped = pieces(MockTokenizer(words), list(range(len(words))), stop)
                assert stopped
                assert "".join(shown) == whole[: whole.index("STOP")]

    @MODEST
    @given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
    def test_nothing_is_lost_or_shown_early(self, words: list[str], stop: list[str]) -> None:
        """After each token, shown text is a beginning of the whole that reaches into no stop string."""
        shown, stopped = pieces(MockTokenizer(words), list(range(len(words))), tuple(stop))
        whole, text = "".join(words), "".join(shown)
        assert whole.startswith(text)
        assert not any(s in text for s in stop)
        assert stopped == any(s in whole for s in stop)
        assert text == whole if not stopped else any(whole.startswith(s, len(text)) for s in stop)

    def test_text_that_only_began_like_it_is_shown(self) -> None:
        assert pieces(MockTokenizer(["x", "ST", "O", "x", "S"]), [0, 1, 2, 3, 4], ("STOP",)) == (
            ["x", "", "", "STOx", "", "S"],
            False,
        )

    def test_text_comes_at_once_when_it_cannot_be_a_stop_string(self) -> None:
        assert pieces(MockTokenizer(["ab", "c"]), [0, 1], ("STOP",))[0] == ["ab", "c", ""]

    def test_no_tokens(self) -> None:
        assert pieces(MockTokenizer(), []) == ([""], False)


class Counted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], /) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


class TestWithoutAnEnd:
    """Bytes that never become a character, and tokens without text: each costs the same, however many came before."""

    @staticmethod
    def byte(tokenizer: Tokenizer, value: int) -> int:
        if tokenizer is sentencepiece():
            return 3 + value
        return next(i for i in range(tokenizer.get_vocab_size()) if raw_bytes(tokenizer, i) == bytes([value]))

    @TOKENIZERS
    @pytest.mark.parametrize("cycle", [[0x80], [0xF0], [0xF0, 0x9F], [0xE2, 0x82, 0xE2], [0xFF, 0xC3]], ids=str)
    def test_bytes(self, make: Callable[[], Tokenizer], cycle: list[int]) -> None:
        tokenizer = make()
        ids = [self.byte(tokenizer, value) for value in cycle] * (600 // len(cycle))
        counted = Counted(tokenizer)
        shown, _ = pieces(counted, ids)
        assert "".join(shown) == tokenizer.decode(ids)
        assert counted.decoded < 100 * len(ids)
        assert sum(map(bool, shown)) > len(ids) // 32  # as it comes, not all in the end

    @TOKENIZERS
    def test_then_a_character(self, make: Callable[[], Tokenizer]) -> None:
        """After any number of stray bytes: where they are cut falls on every byte of it."""
        tokenizer = make()
        a = tokenizer.token_to_id("a")
        parrot = [self.byte(tokenizer, value) for value in "🦜".encode()]
        for strays in range(40):
            ids = [a, *[self.byte(tokenizer, 0x80)] * strays, a, *parrot, a]
            assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.decode(ids)

    @MODEST
    @given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xA6, 0x9C, 0xFF]), max_size=80))
    def test_any_bytes(self, values: list[int]) -> None:
        tokenizer = byte_level()
        assert_streams(tokenizer, [self.byte(tokenizer, value) for value in values])

    @TOKENIZERS
    def test_tokens_without_text(self, make: Callable[[], Tokenizer]) -> None:
        tokenizer = make()
        end, dog = tokenizer.token_to_id("</s>"), tokenizer.encode("the dog").ids
        for before in ([], dog):
            ids = [*before, *[end] * 600, *dog]
            counted = Counted(tokenizer)
            shown, _ = pieces(counted, ids)
            assert "".join(shown) == tokenizer.decode(ids)
            assert counted.decoded < 100 * len(ids)


@cache
def raw_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Of a byte-level token, as GPT-2 writes them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    values = {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
    return bytes(values.get(character, 0) for character in tokenizer.id_to_token(token))
