"""Arguments that are swapped, forgotten or of another library's making: the error names the mistake, in one line."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import reference_model, save_folder

from infer import (
    LLM,
    CacheMemory,
    GrowingCache,
    KVCache,
    ModelConfig,
    SamplingParams,
    Session,
    SlidingCache,
    Tokenizer,
    Trace,
    decode_step,
    generate,
    generate_batch,
    load_model,
    perplexity,
    prefill,
    render_chat_template,
    stream,
)
from infer.compat.seeds import (
    full_attention_matrix,
    generate_ids_cached,
    generate_ids_greedy_cached,
    generate_ids_greedy_full,
)
from infer.engine.generate import RunKeywords, RunOptions
from infer.engine.llm import RequestKeywords
from infer.engine.model import make_cache
from infer.engine.params import SamplingKeywords
from infer.evaluate.explain import explain
from infer.evaluate.paths import Comparison
from infer.evaluate.perplexity import compare
from infer.models.common import Decoder

IDS = [1, 2, 3]
TENSOR = torch.tensor([IDS])
ENDS: dict[str, Any] = {"max_new_tokens": 1, "eot_token_id": 0}
MESSAGE = {"role": "user", "content": "hello"}
MODEL = "model must be a loaded model, as in `model, config = load_model(name)`, not "
TOKENIZER = "tokenizer must be a tokenizer, as in `tokenizer = Tokenizer(name)`, not "
CACHE = "cache must be a cache, as in `KVCache.allocate(...)`, not "
PARAMS = "params must be SamplingParams(max_new_tokens=..., temperature=..., ...), not "
PATH = "name_or_path must be a name or path, not "
PROMPT = "must be a string, token ids or a list of messages, not "


class Parts(NamedTuple):
    """What a user has at hand."""

    folder: Path
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    llm: LLM
    cache: Any

    @property
    def loaded(self) -> tuple[Decoder, ModelConfig]:
        return self.model, self.config


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    folder = save_folder(reference_model("llama"), tmp_path_factory.mktemp("model"))
    model, config = load_model(folder, dtype="float32", device="cpu")
    tokenizer = Tokenizer(folder)
    with LLM(model, tokenizer, cache_memory=10**7) as llm:
        yield Parts(folder, model, config, tokenizer, llm, make_cache(model, 64, torch.device("cpu")))


def bare() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


NEED_A_CONFIG: list[Callable[[Any], Any]] = [
    lambda p: generate(bare(), p.tokenizer, IDS),
    lambda p: stream(bare(), p.tokenizer, IDS),
    lambda p: generate_batch(bare(), p.tokenizer, [IDS]),
    lambda p: prefill(bare(), TENSOR, p.cache),
    lambda p: decode_step(bare(), TENSOR[:, :1], p.cache),
    lambda p: perplexity(bare(), IDS),
    lambda p: compare(p.model, bare(), IDS),
    lambda p: explain(bare(), p.tokenizer, IDS, 2),
    lambda p: Comparison(bare(), p.tokenizer, [IDS]),
    lambda p: make_cache(bare(), 8, torch.device("cpu")),
    lambda p: CacheMemory(bare()),
    lambda p: LLM(bare(), p.tokenizer),
    lambda p: full_attention_matrix(bare(), IDS, trace_layer=0),
    lambda p: generate_ids_cached(bare(), IDS, **ENDS),
    lambda p: generate_ids_greedy_cached(bare(), IDS, **ENDS),
    lambda p: generate_ids_greedy_full(bare(), IDS, **ENDS),
]


@pytest.mark.parametrize("call", NEED_A_CONFIG, ids=lambda call: inspect.getsource(call).strip()[:60])
def test_a_model_without_a_config(parts: Parts, call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"^the model has no \.config, .*: give it a ModelConfig"):
        call(parts)


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    # What load_model gives, as it is.
    (lambda p: generate(p.loaded, p.tokenizer, IDS), MODEL + "tuple"),
    (lambda p: stream(p.loaded, p.tokenizer, IDS), MODEL + "tuple"),
    (lambda p: generate_batch(p.loaded, p.tokenizer, [IDS]), MODEL + "tuple"),
    (lambda p: prefill(p.loaded, TENSOR, p.cache), MODEL + "tuple"),
    (lambda p: decode_step(p.loaded, TENSOR[:, :1], p.cache), MODEL + "tuple"),
    (lambda p: perplexity(p.loaded, IDS), MODEL + "tuple"),
    (lambda p: full_attention_matrix(p.loaded, IDS, trace_layer=0), MODEL + "tuple"),
    (lambda p: generate_ids_cached(p.loaded, IDS, **ENDS), MODEL + "tuple"),
    (lambda p: generate_ids_greedy_cached(p.loaded, IDS, **ENDS), MODEL + "tuple"),
    (lambda p: generate_ids_greedy_full(p.loaded, IDS, **ENDS), MODEL + "tuple"),
    (lambda p: CacheMemory(p.loaded), MODEL + "tuple"),
    (lambda p: LLM(p.loaded), "model must be a name or path or a loaded model"),
    (lambda p: load_model(p.loaded), PATH + "tuple"),
    # One thing for another.
    (lambda p: generate(p.tokenizer, p.model, IDS), MODEL + "Tokenizer"),
    (lambda p: generate("smollm2-135m", p.tokenizer, IDS), MODEL + "'smollm2-135m'"),
    (lambda p: generate(p.llm, p.tokenizer, IDS), MODEL + "LLM"),
    (lambda p: generate(p.model, p.tokenizer, IDS, cache=KVCache), CACHE + "the class KVCache"),
    (lambda p: generate(p.model, p.tokenizer, p.model), "must be a flat sequence of token ids, not Llama"),
    (lambda p: generate_batch(p.tokenizer, p.model, [IDS]), MODEL + "Tokenizer"),
    (lambda p: LLM(p.tokenizer, p.model), "model must be a name or path or a loaded model"),
    (lambda p: LLM(p.model, p.folder), TOKENIZER + "PosixPath"),
    (
        lambda p: LLM(p.model, p.tokenizer, cache_memory="2GB"),
        "cache_memory must be an integer, in bytes",
    ),
    (lambda p: Tokenizer(p.model), PATH + "Llama"),
    (lambda p: load_model(p.tokenizer), PATH + "Tokenizer"),
    (lambda p: ModelConfig.from_pretrained(None), PATH + "None"),
    (lambda p: KVCache(p.config), "k must be a tensor (`allocate` makes an empty cache), not ModelConfig"),
    (lambda p: GrowingCache(p.config), "shape must be a CacheShape (`allocate` makes an empty cache), not ModelConfig"),
    (lambda p: SlidingCache(p.model), "shape must be a CacheShape (`allocate` makes an empty cache), not Llama"),
    (lambda p: CacheMemory(p.config), MODEL + "ModelConfig"),
    (lambda p: Session(p.model), "llm must be an LLM, not Llama"),
    (lambda p: Trace(p.model), "layers must be a list of numbers, or None for all, not Llama"),
    (lambda p: Trace(5), "layers must be a list of numbers, or None for all, not 5"),
    (lambda p: prefill(p.model, p.cache, TENSOR), CACHE + "Tensor"),
    (lambda p: decode_step(p.model, p.cache, 5), CACHE + "5"),
    (
        lambda p: prefill(p.model, IDS, p.cache),
        "must be a tensor of integers, [batch, tokens], not [1, 2, 3]",
    ),
    (lambda p: p.model("text"), "input_ids must be a tensor of token ids [batch, tokens], not 'text'"),
    (lambda p: perplexity(p.model, "text"), "token_ids must be token ids, as in `tokenizer.encode(text)`, not 'text'"),
    (lambda p: perplexity(p.model, p.tokenizer, "text"), "token_ids must be token ids"),
    (lambda p: generate_ids_cached(p.model, IDS, max_new_tokens=1, eot_token_id=None), "or -1 for none, not None"),
    # Forgotten.
    (lambda p: generate(p.model, "text"), TOKENIZER + "'text'"),
    (lambda p: stream(p.model, IDS), TOKENIZER + "[1, 2, 3]"),
    (lambda p: generate_batch(p.model, [IDS]), TOKENIZER + "[[1, 2, 3]]"),
    (lambda p: generate(p.model, p.tokenizer, "text"), "the prompt must be token ids, not text: encode it first"),
    (lambda p: LLM(p.model), "LLM(model, tokenizer)"),
    (lambda p: prefill(p.model, IDS), "missing 1 required positional argument: 'cache'"),
    (lambda p: p.llm.generate(max_new_tokens=20), "missing 1 required positional argument: 'prompts'"),
    # Settings.
    (lambda p: generate(p.model, p.tokenizer, IDS, 20), PARAMS + "20"),
    (
        lambda p: generate_batch(p.model, p.tokenizer, [IDS], 20),
        "must be SamplingParams, or one for each prompt",
    ),
    (lambda p: generate(p.model, p.tokenizer, IDS, temperature=1), "write SamplingParams(temperature=...)"),
    (lambda p: generate(p.model, p.tokenizer, IDS, max_tokens=1), "write SamplingParams(max_new_tokens=...)"),
    (lambda p: generate(p.model, p.tokenizer, IDS, use_cache=False), "did you mean use_kv_cache?"),
    (lambda p: p.llm.generate("x", 20), PARAMS + "20"),
    (lambda p: p.llm.generate("x", max_tokens=20), "'max_tokens': did you mean max_new_tokens?"),
    (lambda p: p.llm.generate(["x", "y"], [20, 20]), "prompt 0: " + PARAMS + "20"),
    (lambda p: p.llm.session(params=20), PARAMS + "20"),
    (lambda p: p.llm.session().send("x", 20), PARAMS + "20"),
    (lambda p: p.llm.session().more(20), PARAMS + "20"),
    (lambda p: SamplingParams(temprature=1), "'temprature': did you mean temperature?"),
    (lambda p: SamplingParams(do_sample=True), "'do_sample': there are temperature, top_k, "),
    # Prompts.
    (lambda p: p.llm.generate(None), "prompts " + PROMPT + "None"),
    (lambda p: p.llm.generate(MESSAGE), "prompts " + PROMPT + "{"),
    (lambda p: p.llm.submit(b"text"), "prompt " + PROMPT + "b'text'"),
    (lambda p: p.llm.score(["a", "b"]), "must be a flat sequence of token ids, not ['a', 'b']"),
    (lambda p: p.llm.chat(["hello"]), "messages must be a string or a list of messages, like [{"),
    (lambda p: p.llm.chat("hello", stream="no"), "stream must be true or false, not 'no'"),
    (lambda p: p.llm.chat("hello", prioriti=1), "'prioriti': "),
    (lambda p: p.llm.chat(MESSAGE), "messages must be a string or a list of messages, like [{"),
    (lambda p: p.llm.session(system=5), "system must be a string, not 5"),
    (lambda p: p.llm.session().send(5), "text must be a string, not 5"),
    (lambda p: p.tokenizer.encode(IDS), "text must be a string, not [1, 2, 3]"),
    (lambda p: render_chat_template("hello", tokenizer=p.tokenizer), "messages must be a list of messages, like [{"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_mistakes_are_named(call: Callable[[Parts], Any], message: str, parts: Parts) -> None:
    with pytest.raises(TypeError) as error:
        call(parts)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 320


def test_no_messages(parts: Parts) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        parts.llm.chat([])


def test_signatures_are_those_that_were_written() -> None:
    assert [*inspect.signature(generate).parameters][:4] == ["model", "tokenizer", "prompt_token_ids", "params"]
    assert next(iter(inspect.signature(SamplingParams).parameters)) == "temperature"
    assert next(iter(inspect.signature(LLM).parameters)) == "model"


def keywords(function: Any) -> dict[str, Any]:
    """By `inspect.signature`, which `help()` prints, too."""
    parameters = inspect.signature(function).parameters.values()
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


REQUEST = {"priority": 0, "cache_salt": None, "trace": None, "draft": True}


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (LLM.submit, REQUEST),
        (LLM.submit_all, REQUEST),
        (LLM.generate, REQUEST),
        (LLM.stream, REQUEST),
        (LLM.chat, REQUEST | {"stream": False}),
        (Session.send, {"trace": None}),
        (Session.stream, {"trace": None}),
    ],
)
def test_methods_show_the_settings(function: Any, own: dict[str, Any]) -> None:
    settings = {name: each.default for name, each in inspect.signature(SamplingParams).parameters.items()}
    assert keywords(function) == own | settings
    assert "temperature: 'float' = 0.0" in pydoc.plain(pydoc.render_doc(function))


@pytest.mark.parametrize("function", [generate, stream])
def test_functions_show_their_options(function: Any) -> None:
    assert keywords(function) == {field.name: field.default for field in fields(RunOptions)}


@pytest.mark.parametrize(
    ("keywords", "source"),
    [(SamplingKeywords, SamplingParams), (RunKeywords, RunOptions)],
    ids=lambda kind: kind.__name__,
)
def test_type_checkers_read_the_same_types(keywords: Any, source: Any) -> None:
    expected = {field.name: field.type for field in fields(source)}
    assert {name: each.__forward_arg__ for name, each in keywords.__annotations__.items()} == expected


def test_type_checkers_read_the_options_of_a_request() -> None:
    own = RequestKeywords.__annotations__.keys() - SamplingKeywords.__annotations__.keys()
    assert own == REQUEST.keys()


def test_none_is_what_was_left_out(parts: Parts) -> None:
    params = SamplingParams(max_new_tokens=1)
    assert generate(parts.model, parts.tokenizer, IDS, params, cache=None).generated_tokens == 1
    with LLM(parts.folder, tokenizer=None, device="cpu", cache_memory=10**7) as llm:
        assert llm.generate(IDS, params).generated_tokens == 1
