"""The command line in-process, on a tiny model: what it prints, where, and with which exit status."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import huggingface_hub.constants
import pytest
import torch
from checkpoints import reference_model, save_folder, save_gguf
from commands import CACHE_BYTES_PER_TOKEN, CONTEXT, WINDOW, Done, Run, assert_refused, chat_ids
from matplotlib.image import imread

from infer import LLM, KVCache, SamplingParams, Tokenizer, Trace, load_model, machine
from infer import generate as generate_tokens
from infer.backend.cpu import backend as cpu_backend
from infer.cache.pool import PAGE_SIZE
from infer.cli import main
from infer.cli.common import DEFAULT_MODEL
from infer.cli.sampling import CHAT
from infer.cli.streams import say
from infer.engine import generate as engine
from infer.engine import sequence as sequences
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.llm import Handle
from infer.engine.params import DISTRIBUTION_SETTINGS, SETTINGS
from infer.engine.result import GeneratedToken, GenerationResult
from infer.engine.session import Session
from infer.engine.text import Detokenizer
from infer.evaluate import bench, paths, verify
from infer.loader import describe, load
from infer.loader.builtin import BUILTIN
from infer.loader.hf_folder import HFFolder
from infer.loader.hub_names import HUB_MODELS

pytestmark = pytest.mark.usefixtures("plain_machine")

GREEDY = ("--temperature", "0")  # as all but chats are
CACHES = ["KVCache", "GrowingCache", "SlidingCache", "PagedCache"]
COMMANDS = ["generate", "chat", "trace", "explain", "pull", "models", "info", "verify", "perplexity", "bench"]


def expect(folder: Path, prompt_ids: list[int], **params: Any) -> GenerationResult:
    """What the library generates."""
    model, _ = load_model(folder)
    return generate_tokens(model, Tokenizer(folder), prompt_ids, SamplingParams(**params))


class TestGenerate:
    def test_raw(self, run: Run, folder: Path) -> None:
        expected = expect(folder, [1, *Tokenizer(folder).encode("hello", add_special_tokens=False)], max_new_tokens=8)
        done = run("generate", "hello", "--max-new-tokens", "8")
        assert (done.status, done.out) == (0, expected.text + "\n")
        assert done.err.startswith("[5 prompt tokens, prefill 0.")
        assert "8 new tokens at " in done.err
        assert "interrupted" not in done.err
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize("system", [None, "Be kind", ""])
    def test_chat(self, run: Run, folder: Path, system: str | None) -> None:
        messages = [] if system is None else [("system", system)]
        options = [] if system is None else ["--system", system]
        done = run("generate", "hello", "--chat", *options, "--json", "--max-new-tokens", "4")
        assert json.loads(done.out)["prompt_token_ids"] == chat_ids(folder, *messages, ("user", "hello"))

    def test_chat_template(self, run: Run, plain: Path, tmp_path: Path) -> None:
        """Given for a model without one; a page repeats its run with it."""
        args, page = ("hello", "--chat", "--json", "--max-new-tokens", "4"), tmp_path / "page.html"
        expected = Tokenizer(plain, chat_template="phi3").encode_chat([{"role": "user", "content": "hello"}])
        for command in (("generate",), ("trace", "--html", page)):
            output = json.loads(run(*command, *args, "--chat-template", "phi3", model=plain).out)
            assert output["prompt_token_ids"] == expected
        done = run("trace", "--from", page, "--system", "be kind", "hello", "--json", model=plain)
        assert len(json.loads(done.out)["prompt_token_ids"]) > len(expected)
        assert run("chat", "--chat-template", "chatml", *GREEDY, model=plain, stdin="hello\n").status == 0

    def test_context(self, run: Run, tmp_path: Path) -> None:
        """Beyond the original context of a model with LongRoPE, which is 80."""
        model, prompt = save_folder(reference_model("phi3"), tmp_path / "phi3"), "a" * 90
        line = next(line for line in run("info", model=model).out.splitlines() if line.startswith("context"))
        assert line.endswith("; up to 160 with --context")
        assert " 80 positions, " in line
        args = ("generate", prompt, "--json", "--max-new-tokens", "4")
        assert_refused(run(*args, model=model), "or load the model with a longer context, up to 160 (--context), or")
        tokenizer = Tokenizer(model)
        long = load_model(model, context=100)[0]
        expected = generate_tokens(long, tokenizer, tokenizer.encode(prompt), SamplingParams(max_new_tokens=4))
        assert json.loads(run(*args, "--context", "100", model=model).out)["token_ids"] == expected.token_ids
        assert json.loads(run("info", "--context", "100", "--json", model=model).out)["context"] == 100
        assert "100 positions" in run("chat", "--context", "100", "--chat-template", "phi3", model=model, stdin="").err
        text = tmp_path / "text.txt"
        text.write_text(prompt * 2)
        scored = json.loads(run("perplexity", "--text", text, "--context", "120", "--json", model=model).out)
        assert scored["context"] == 120

    @pytest.mark.parametrize("dash", [["-"], []], ids=["-", "nothing"])
    def test_stdin(self, run: Run, folder: Path, dash: list[str]) -> None:
        done = run("generate", *dash, "--json", "--max-new-tokens", "1", stdin="from a pipe")
        assert json.loads(done.out)["prompt_token_ids"] == Tokenizer(folder).encode("from a pipe")

    def test_json(self, run: Run, folder: Path) -> None:
        expected = expect(folder, Tokenizer(folder).encode("hello"), max_new_tokens=8)
        done = run("generate", "hello", "--json", "--max-new-tokens", "8")
        assert done.status == 0
        output = json.loads(done.out)
        assert list(output) == [
            "model",
            "prompt_token_ids",
            "token_ids",
            "text",
            "finish_reason",
            "timing",
            "cache_memory_bytes",
            "num_cached_tokens",
        ]
        assert {name: output[name] for name in ("prompt_token_ids", "token_ids", "text", "finish_reason")} == {
            name: getattr(expected, name) for name in ("prompt_token_ids", "token_ids", "text", "finish_reason")
        }
        assert output["model"] == str(folder)
        assert output["cache_memory_bytes"] == CACHE_BYTES_PER_TOKEN * (5 + 8)
        timing = output["timing"]
        assert set(timing) == {
            "prefill_time_s",
            "decode_times_s",
            "queue_time_s",
            "decode_time_s",
            "decode_tokens_per_s",
        }
        assert len(timing["decode_times_s"]) == 7
        assert timing["decode_time_s"] == pytest.approx(sum(timing["decode_times_s"]))
        assert timing["decode_tokens_per_s"] == pytest.approx(7 / timing["decode_time_s"])
        assert done.out.count("\n") == 1

    def test_one_token(self, run: Run) -> None:
        done = run("generate", "hello", "--json", "--max-new-tokens", "1")
        assert json.loads(done.out)["timing"]["decode_tokens_per_s"] == 0
        assert "1 new token ·" in done.err

    def test_no_kv_cache(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        args = ("generate", "hello", "--json", "--max-new-tokens", "8")
        expected = json.loads(run(*args).out)["token_ids"]
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "__init__", lambda *args, **options: pytest.fail("a cache was made"))
            output = json.loads(run(*args, "--no-kv-cache").out)
        assert output["token_ids"] == expected
        assert output["cache_memory_bytes"] == 0

    def test_compare(self, run: Run) -> None:
        done = run("generate", "hello", "--compare", "--json", "--max-new-tokens", "8")
        output = json.loads(done.out)
        reference = output["without_kv_cache"]
        assert reference["same_tokens"] is True
        assert reference["token_ids"] == output["token_ids"]
        assert reference["cache_memory_bytes"] == 0
        totals = [t["prefill_time_s"] + t["decode_time_s"] for t in (reference["timing"], output["timing"])]
        assert reference["speed_up"] == pytest.approx(totals[0] / totals[1])
        assert f"{reference['speed_up']:.1f}x faster than without the cache (" in done.err
        assert "same tokens" in done.err

    def test_compare_in_text(self, run: Run) -> None:
        """The second run is not printed."""
        args = ("generate", "hello", "--max-new-tokens", "8")
        compared = run(*args, "--compare")
        assert compared.out == run(*args).out
        assert compared.err.count("\n") == 1

    def test_compare_tells_of_other_tokens(self, run: Run, forgetful: None) -> None:
        done = run("generate", "hello", "--compare", "--json", "--max-new-tokens", "24")
        assert json.loads(done.out)["without_kv_cache"]["same_tokens"] is False
        assert "DIFFERENT tokens" in done.err

    @pytest.mark.parametrize("seed", [(), ("--seed", "3")], ids=["drawn", "given"])
    def test_compare_with_sampling(self, run: Run, seed: tuple[str, ...]) -> None:
        """One seed makes the two runs draw alike."""
        options = ("--temperature", "1", *seed, "--compare", "--json", "--max-new-tokens", "16")
        output = json.loads(run("generate", "hello", *options).out)
        assert output["without_kv_cache"]["same_tokens"] is True

    def test_dtype_and_device(self, run: Run) -> None:
        options = ("--dtype", "bfloat16", "--device", "cpu", "--json", "--max-new-tokens", "2")
        output = json.loads(run("generate", "hello", *options).out)
        assert output["cache_memory_bytes"] == CACHE_BYTES_PER_TOKEN // 2 * (5 + 2)

    def test_stop_is_not_printed(self, run: Run, folder: Path) -> None:
        text = expect(folder, Tokenizer(folder).encode("hello"), max_new_tokens=8).text
        output = json.loads(run("generate", "hello", "--stop", text[3], "--json", "--max-new-tokens", "8").out)
        assert output["text"] == text[: text.index(text[3])]
        assert output["finish_reason"] == "stop"

    @pytest.mark.parametrize(("chunk", "sizes"), [(2, [2, 2, 1]), (5, [5]), (100, [5])])
    def test_prefill_chunk(self, run: Run, passes: list[int], chunk: int, sizes: list[int]) -> None:
        args = ("generate", "hello", "--json", "--max-new-tokens", "4")
        expected = json.loads(run(*args).out)["token_ids"]
        passes.clear()
        assert json.loads(run(*args, "--prefill-chunk", str(chunk)).out)["token_ids"] == expected
        assert passes == sizes + [1] * 3

    def test_windows(self, run: Run, windowed: Path) -> None:
        """The default cache keeps windows, as wide as the chunks need them, and changes nothing."""
        args = ("generate", "x" * 40, "--compare", "--json", "--max-new-tokens", "24")
        outputs = [json.loads(run(*args, *options, model=windowed).out) for options in ([], ["--prefill-chunk", "7"])]
        assert all(output["without_kv_cache"]["same_tokens"] for output in outputs)
        layer = CACHE_BYTES_PER_TOKEN // 3
        assert outputs[0]["cache_memory_bytes"] == layer * 3 * 65  # the chunk of a whole prompt is 512
        assert outputs[1]["cache_memory_bytes"] == layer * (65 + 2 * (WINDOW + 7))

    @pytest.mark.parametrize(
        ("options", "variables"),
        [([], {}), (["--thinking"], {"enable_thinking": True}), (["--no-thinking"], {"enable_thinking": False})],
    )
    def test_thinking(self, run: Run, thinker: Path, options: list[str], variables: dict[str, bool]) -> None:
        done = run("generate", "hello", "--chat", *options, "--json", "--max-new-tokens", "2", model=thinker)
        prompt = json.loads(done.out)["prompt_token_ids"]
        assert prompt == chat_ids(thinker, ("user", "hello"), **variables)
        ending = "assistant:" + "".join(f"[{value}]" for value in variables.values())
        assert Tokenizer(thinker).decode(prompt).endswith(ending)

    def test_gguf(self, run: Run, folder: Path, tmp_path: Path) -> None:
        file = save_gguf(reference_model(max_position_embeddings=CONTEXT), tmp_path / "tiny.gguf")
        args = ("generate", "hello", "--json", "--max-new-tokens", "8")
        assert json.loads(run(*args, model=file).out)["token_ids"] == json.loads(run(*args).out)["token_ids"]


# An option, and what it makes of SamplingParams.
SAMPLING: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--temperature", "0.7"], {"temperature": 0.7}),
    (["--top-k", "40"], {"top_k": 40}),
    (["--top-p", "0.9"], {"top_p": 0.9}),
    (["--min-p", "0.05"], {"min_p": 0.05}),
    (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
    (["--presence-penalty", "-0.5"], {"presence_penalty": -0.5}),
    (["--frequency-penalty", "0.25"], {"frequency_penalty": 0.25}),
    (["--logit-bias", "42:-1.5", "--logit-bias", "7:2"], {"logit_bias": {42: -1.5, 7: 2.0}}),
    (["--stop", "END", "--stop", "a b"], {"stop": ("END", "a b")}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--seed", "11"], {"seed": 11}),
    (["--max-new-tokens", "3"], {"max_new_tokens": 3}),
]
LISTED = {name for _, values in SAMPLING for name in values}
SAMPLING += [
    ([f"--{name.replace('_', '-')}", "1"], {name: SETTINGS[name].kind(1)})
    for name in DISTRIBUTION_SETTINGS
    if name not in LISTED
]


class TestSamplingOptions:
    def test_every_field_is_covered(self) -> None:
        names = {name for name, setting in SETTINGS.items() if setting.every_command}
        assert {name for _, values in SAMPLING for name in values} == names

    @pytest.mark.parametrize("command", ["generate", "chat"])
    @pytest.mark.parametrize(("options", "values"), SAMPLING, ids=[" ".join(options) for options, _ in SAMPLING])
    def test_reaches_sampling_params(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, command: str, options: list[str], values: dict[str, Any]
    ) -> None:
        seen: list[SamplingParams] = []

        def stream(model: Any, tokenizer: Any, prompt: Any, params: SamplingParams, **_: Any) -> Iterator[Any]:
            seen.append(params)
            yield GeneratedToken(9, "x", 0.1, "length")

        class Ended:
            """A request whose only token is there."""

            def __init__(self, llm: LLM, prompt: Any, params: SamplingParams, **_: Any) -> None:
                self.pieces = stream(llm.model, llm.tokenizer, prompt, params)

            def __iter__(self) -> Iterator[Any]:
                return self.pieces

            def result(self) -> None: ...
            def abort(self) -> None: ...

        monkeypatch.setattr(engine, "stream", stream)
        monkeypatch.setattr(LLM, "submit", lambda *args, **options: Ended(*args, **options))
        if "max_new_tokens" not in values:  # the default is too much for the tiny context
            options, values = [*options, "--max-new-tokens", "5"], values | {"max_new_tokens": 5}
        words = ["hello"] if command == "generate" else []
        done = run(command, *words, *options, stdin="hello\n")
        assert (done.status, done.out) == (0, "x\n")
        if command == "chat":  # which samples by itself, with a seed that it draws to go on with
            values = CHAT | {"seed": seen[0].seed} | values
        assert seen == [SamplingParams(**values)]

    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_defaults(self, monkeypatch: pytest.MonkeyPatch, run: Run, command: str) -> None:
        """An option left out is the library's default."""
        made: list[SamplingParams] = []
        check = SamplingParams.__post_init__

        def note(params: SamplingParams) -> None:
            check(params)
            made.append(params)

        with monkeypatch.context() as patch:
            patch.setattr(SamplingParams, "__post_init__", note)
            run(command, *(["hello"] if command == "generate" else []))
        assert made[:2] == [SamplingParams(), SamplingParams(**(CHAT if command == "chat" else {}))]


# A command that loads a model, with what it takes to get there.
LOADING = {
    "generate": ["hello", "--max-new-tokens", "5"],
    "chat": ["--max-new-tokens", "5"],
    "trace": ["hello", "--max-new-tokens", "5"],
    "explain": ["hello"],
    "verify": [],
    "bench": ["--prompt-tokens", "6", "--new-tokens", "4"],
}


class TestLoadingOptions:
    """How the model is loaded is asked for alike in all commands."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What `load_model` and `use_threads` are called with. Nothing is loaded."""
        calls: dict[str, Any] = {}

        def load_model(name: str, **options: Any) -> None:
            calls.update(options)
            raise ValueError("enough")

        monkeypatch.setattr("infer.load_model", load_model)
        monkeypatch.setattr(machine, "use_threads", lambda count: calls.update(threads=count))
        return calls

    @pytest.mark.parametrize("command", LOADING)
    def test_reach_the_loader(self, run: Run, asked: dict[str, Any], command: str) -> None:
        options = ("--dtype", "bfloat16", "--device", "cpu", "--quantize", "int4", "--threads", "1", "--context", "240")
        assert_refused(run(command, *LOADING[command], *options), "enough")
        assert asked == {"dtype": "bfloat16", "device": "cpu", "quantize": "int4", "threads": 1, "context": 240}

    @pytest.mark.parametrize("command", LOADING)
    def test_defaults(self, run: Run, asked: dict[str, Any], command: str) -> None:
        """Without --threads it is up to `load_model`."""
        assert_refused(run(command, *LOADING[command]), "enough")
        assert asked == {"dtype": "auto", "device": "auto", "quantize": None, "context": None}

    def test_threads(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        used: list[int] = []
        monkeypatch.setattr(torch, "set_num_threads", used.append)
        monkeypatch.setattr(machine, "_threads_are_chosen", False)
        assert run("generate", "hello", "--threads", "1", "--max-new-tokens", "2").status == 0
        assert used == [1]  # by the user, and by nothing that comes later

    def test_info(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        def describe_model(*args: Any, **options: Any) -> None:
            asked.update(options)
            raise ValueError("enough")

        monkeypatch.setattr(describe, "describe", describe_model)
        assert_refused(run("info", "--quantize", "int8", "--cache-dtype", "int8"), "enough")
        assert asked == {"quantize": "int8", "cache_dtype": "int8"}
        assert_refused(run("info"), "enough")
        assert asked == {"quantize": None, "cache_dtype": "auto"}


class TestCacheDtype:
    INT8_BYTES_PER_TOKEN = 2 * 3 * 2 * (16 + 2)  # k and v, layers, kv heads, head_dim with its scale

    @pytest.mark.parametrize("command", ["generate", "trace"])
    def test_bytes(self, run: Run, command: str) -> None:
        args = (command, "hello", "--json", "--max-new-tokens", "8", "--cache-dtype")
        plain, rounded = (json.loads(run(*args, dtype).out) for dtype in ("auto", "int8"))
        assert plain["cache_memory_bytes"] == CACHE_BYTES_PER_TOKEN * (5 + 8)
        assert rounded["cache_memory_bytes"] == self.INT8_BYTES_PER_TOKEN * (5 + 8)
        assert len(rounded["token_ids"]) == 8

    def test_compare_says_why_tokens_are_others(self, run: Run, forgetful: None) -> None:
        done = run("generate", "hello", "--compare", "--cache-dtype", "int8", "--max-new-tokens", "24")
        assert "DIFFERENT tokens: int8 rounds, see `infer perplexity`" in done.err

    def test_chat(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []
        init = Session.__init__

        def note(session: Session, *args: Any, **options: Any) -> None:
            made.append(session)
            init(session, *args, **options)

        monkeypatch.setattr(Session, "__init__", note)
        assert run("chat", *GREEDY, "--cache-dtype", "int8", "--max-new-tokens", "8", stdin="hello\n").status == 0
        memory = made[0].llm.memory
        assert memory.index.num_pages == 1
        assert memory.pool.page_bytes == PAGE_SIZE * self.INT8_BYTES_PER_TOKEN

    def test_bench(self, run: Run) -> None:
        options = ("--prompt-tokens", "6", "--new-tokens", "4", "--trials", "1", "--cache-dtype", "int8")
        results = json.loads(run("bench", *options, "--compare", "--json").out)["results"]
        assert [result["config"]["cache_dtype"] for result in results] == ["int8", "auto"]
        assert [result["cache_bytes"] for result in results] == [10 * self.INT8_BYTES_PER_TOKEN, 0]
        assert " MB in int8)\n" in run("bench", *options).out

    @pytest.mark.parametrize("model", ["folder", "windowed"])
    def test_verify(self, run: Run, tmp_path: Path, request: pytest.FixtureRequest, model: str) -> None:
        """Against a pass that rounds as they do: one without a cache would differ."""
        file = tmp_path / "prompts.txt"
        file.write_text(f"hello\n{'once upon a time ' * 4}\n")
        options = ("--prompts", file, "--max-new-tokens", "6", "--cache-dtype", "int8")
        done = run("verify", *options, "--all", model=request.getfixturevalue(model))
        assert done.status == 0
        paths = len(done.out.splitlines()) - 2
        reference = "one pass without a cache that rounds as int8 caches do"
        first, *each, last = done.err.splitlines()
        assert first.startswith(f"{paths} paths to run, each compared with {reference}")
        assert [": equal, " in line for line in each] == [True] * paths
        assert last == f"{paths} of {paths} paths give the same bits as {reference}"

    def test_verify_uses_int8(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello\nwho")
        made: list[tuple[str, torch.dtype]] = []
        make = verify.empty_cache

        def note(*args: Any) -> Any:
            cache = make(*args)
            made.append((type(cache).__name__, cache.dtype))
            return cache

        monkeypatch.setattr(verify, "empty_cache", note)
        monkeypatch.setattr(paths, "empty_cache", note)
        run("verify", "--prompts", file, "--max-new-tokens", "2", "--cache-dtype", "int8")
        assert {name for name, _ in made} == {*CACHES, "Recomputing"}
        assert {dtype for _, dtype in made} == {torch.int8}

    def test_the_reference_keeps_nothing(self, run: Run, tmp_path: Path, passes: list[int]) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello")
        run("verify", "--prompts", file, "--max-new-tokens", "3", "--cache-dtype", "int8")
        assert passes[:5] == [5, 1, 1, 1, 8]  # the text to go on with, stopped early, then all of it for reference


class TestInterrupt:
    """Ctrl-C, as the exception that it raises in the middle of a stream."""

    @pytest.fixture
    def interrupt_after(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        def install(count: int) -> None:
            stream, pieces = engine.stream, Handle.__iter__

            def interrupted(tokens: Iterator[GeneratedToken]) -> Iterator[GeneratedToken]:
                for i, token in enumerate(tokens):
                    if i == count:
                        raise KeyboardInterrupt
                    yield token

            def interrupted_stream(*args: Any, cache: Any = None, **options: Any) -> Iterator[GeneratedToken]:
                return interrupted(stream(*args, cache=cache, **options))

            monkeypatch.setattr(engine, "stream", interrupted_stream)
            monkeypatch.setattr(Handle, "__iter__", lambda handle: interrupted(pieces(handle)))

        return install

    def test_what_was_printed_is_kept(self, run: Run, folder: Path, interrupt_after: Callable[[int], None]) -> None:
        model, _ = load_model(folder)
        tokenizer = Tokenizer(folder)
        steps = list(engine.stream(model, tokenizer, tokenizer.encode("hello"), SamplingParams(max_new_tokens=9)))
        interrupt_after(5)
        done = run("generate", "hello", "--max-new-tokens", "9")
        assert (done.status, done.out) == (130, "".join(step.text for step in steps[:5]) + "\n")
        assert "5 new tokens" in done.err
        assert "interrupted" in done.err
        assert done.err.count("\n") == 1

    def test_json(self, run: Run, interrupt_after: Callable[[int], None]) -> None:
        whole = json.loads(run("generate", "hello", "--json", "--max-new-tokens", "9").out)
        interrupt_after(5)
        done = run("generate", "hello", "--json", "--max-new-tokens", "9")
        output = json.loads(done.out)
        assert done.status == 130
        assert output["finish_reason"] == "interrupted"
        assert output["token_ids"] == whole["token_ids"][:5]
        assert whole["text"].startswith(output["text"])

    def test_before_the_first_token(self, run: Run, interrupt_after: Callable[[int], None]) -> None:
        interrupt_after(0)
        done = run("generate", "hello", "--max-new-tokens", "9")
        assert (done.status, done.out.strip()) == (130, "")
        assert "Traceback" not in done.err

    def test_no_comparison_after_it(self, run: Run, interrupt_after: Callable[[int], None]) -> None:
        interrupt_after(3)
        done = run("generate", "hello", "--compare", "--json", "--max-new-tokens", "9")
        assert done.status == 130
        assert "without_kv_cache" not in json.loads(done.out)

    def test_skipping_the_comparison(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in the slow run leaves the answer, which is whole."""
        stream = engine.stream

        def interrupted(*args: Any, use_kv_cache: bool = True, **options: Any) -> Iterator[GeneratedToken]:
            for i, token in enumerate(stream(*args, use_kv_cache=use_kv_cache, **options)):
                if i == 2 and not use_kv_cache:
                    raise KeyboardInterrupt
                yield token

        monkeypatch.setattr(engine, "stream", interrupted)
        done = run("generate", "hello", "--compare", "--json", "--max-new-tokens", "9")
        output = json.loads(done.out)
        assert done.status == 0
        assert output["finish_reason"] == "length"
        assert "without_kv_cache" not in output
        assert "faster" not in done.err

    def test_while_loading(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(HFFolder, "blocks", interrupted)
        done = run("generate", "hello", "--max-new-tokens", "9")
        assert (done.status, done.out) == (130, "")
        assert "Traceback" not in done.err

    def test_chat_goes_on(self, run: Run, interrupt_after: Callable[[int], None]) -> None:
        whole = run("chat", *GREEDY, "--max-new-tokens", "9", stdin="hello\n").out
        interrupt_after(6)
        done = run("chat", *GREEDY, "--max-new-tokens", "9", stdin="hello\n/reset\nhello\n")
        assert done.status == 0
        first, second, end = done.out.split("\n")
        assert first == second
        assert len(first) > 0
        assert whole.startswith(first)
        assert end == ""
        assert done.err.count("[6 tokens") == 2

    def test_at_the_prompt_of_a_chat(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def readline(stdin: io.StringIO) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr(io, "StringIO", type("Terminal", (io.StringIO,), {"readline": readline}))
        done = run("chat", *GREEDY, "--max-new-tokens", "9")
        assert (done.status, done.out) == (0, "")


class TestChat:
    def test_turns(self, run: Run, folder: Path) -> None:
        """Each answer is that of a fresh run over the whole chat; /reset forgets."""
        history: list[tuple[str, str]] = []
        answers = []
        for text in ("hello", "go on"):
            history.append(("user", text))
            answer = expect(folder, chat_ids(folder, *history), max_new_tokens=8).text
            history.append(("assistant", answer))
            answers.append(answer)
        done = run(
            "chat", *GREEDY, "--max-new-tokens", "8", stdin="hello\n  go on \n\n/reset\nhello\n/exit\nnever read\n"
        )
        assert done.status == 0
        assert done.out == "".join(answer + "\n" for answer in (*answers, answers[0]))
        assert done.err.startswith(f"{folder}: {CONTEXT} positions; ")
        assert done.err.count("[8 tokens at ") == 3
        assert done.err.count("\n> ") == 1 + 5 - 1  # nothing is printed after the empty line

    def test_system(self, run: Run, folder: Path) -> None:
        expected = expect(folder, chat_ids(folder, ("system", "Be kind"), ("user", "hello")), max_new_tokens=8).text
        stdin = "hello\n/reset\nhello\n"
        assert (
            run("chat", *GREEDY, "--system", "Be kind", "--max-new-tokens", "8", stdin=stdin).out == f"{expected}\n" * 2
        )

    @pytest.mark.parametrize(
        ("options", "variables"),
        [([], {}), (["--thinking"], {"enable_thinking": True}), (["--no-thinking"], {"enable_thinking": False})],
    )
    def test_thinking(self, run: Run, thinker: Path, options: list[str], variables: dict[str, bool]) -> None:
        expected = expect(thinker, chat_ids(thinker, ("user", "hello"), **variables), max_new_tokens=8).text
        assert (
            run("chat", *GREEDY, *options, "--max-new-tokens", "8", model=thinker, stdin="hello\n").out
            == f"{expected}\n"
        )

    def test_prefill_chunk(self, run: Run, folder: Path, passes: list[int]) -> None:
        args = ("chat", *GREEDY, "--max-new-tokens", "4")
        expected = run(*args, stdin="hello\n").out
        passes.clear()
        assert run(*args, "--prefill-chunk", "10", stdin="hello\n").out == expected
        length = len(chat_ids(folder, ("user", "hello")))
        assert passes == [10] * (length // 10) + [length % 10] * bool(length % 10) + [1] * 3

    def test_windows(self, run: Run, windowed: Path) -> None:
        """Answers of any number of windows; the cache is smaller than the contiguous one."""
        history: list[tuple[str, str]] = []
        for text in ("hello", "go on"):
            history.append(("user", text))
            history.append(("assistant", expect(windowed, chat_ids(windowed, *history), max_new_tokens=20).text))
        options = ("--max-new-tokens", "20", "--prefill-chunk", "8", "--context", "200")
        done = run("chat", *GREEDY, *options, model=windowed, stdin="hello\ngo on\n")
        assert done.out == "".join(text + "\n" for role, text in history if role == "assistant")
        assert done.err.startswith(f"{windowed}: 200 positions; ")

    @pytest.mark.parametrize("stdin", ["", "/exit\n", "hello", "hello\n"])
    def test_leaving(self, run: Run, stdin: str) -> None:
        done = run("chat", *GREEDY, "--max-new-tokens", "4", stdin=stdin)
        assert done.status == 0
        assert done.out.count("\n") == stdin.count("hello")
        assert "Traceback" not in done.err

    @pytest.mark.parametrize(("options", "limit"), [([], CONTEXT), (["--context", "100"], 100)])
    def test_a_turn_that_is_too_long(self, run: Run, options: list[str], limit: int) -> None:
        first, second = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="hello\ngo on\n").out.splitlines()
        done = run("chat", *GREEDY, "--max-new-tokens", "8", *options, stdin=f"hello\n{'x' * limit}\ngo on\n")
        assert done.status == 0
        assert done.out.splitlines() == [first, second]
        complaints = [line for line in done.err.splitlines() if "exceed" in line]
        assert len(complaints) == 1
        assert f"exceed the context of {limit} (shorten the message, use /undo or /clear" in complaints[0]

    def test_a_turn_that_the_template_refuses(self, run: Run) -> None:
        expected = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="hello\n").out
        done = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="forbidden\nhello\n")
        assert (done.status, done.out) == (0, expected)
        assert done.err.count("the chat template refuses these messages: not that\n") == 1  # and nothing to do about it

    def test_drafts_are_counted(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))  # as many as possible
        arguments = ["chat", *GREEDY, "--max-new-tokens", "40"]
        plain, done = run(*arguments, stdin="hello\n"), run(*arguments, "--speculate", "ngram", stdin="hello\n")
        assert done.out == plain.out
        assert re.search(r"s to the first, \d+ of \d+ drafts? right; cache holds", done.err)
        assert "right" not in plain.err

    def test_cache_is_kept(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Session] = []
        init = Session.__init__

        def note(session: Session, *args: Any, **options: Any) -> None:
            made.append(session)
            init(session, *args, **options)

        monkeypatch.setattr(Session, "__init__", note)
        done = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="hello\ngo on\n")
        (session,) = made
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
        assert f"cache holds {len(session.tokens)}; cut, at 8 new tokens: /more continues it]" in done.err
        memory = session.llm.memory
        found = memory.index.match(session.tokens)
        assert found.length == len(session.tokens)
        assert len(found.pages) == -(-len(session.tokens) // PAGE_SIZE)
        assert memory.pool.page_bytes == PAGE_SIZE * CACHE_BYTES_PER_TOKEN

    def test_fork_and_branch(self, run: Run) -> None:
        """Each branch goes on from what was said before the fork."""
        args = ("chat", *GREEDY, "--max-new-tokens", "8")
        one = run(*args, stdin="hello\ngo on\n").out
        other = run(*args, stdin="hello\nwhy\n").out
        hello, on = one.splitlines()
        done = run(*args, stdin="hello\n/fork\nwhy\n/branch 1\ngo on\n/branch 2\n/branch 3\n")
        assert done.out == f"{hello}\n{other.splitlines()[1]}\n{on}\n"
        assert done.err.count("[branch 2 of 2: 1 turn;") == 1
        assert done.err.count("[branch 1 of 2: 1 turn;") == 1
        assert done.err.count("[branch 2 of 2: 2 turns;") == 1
        assert "/branch takes a number from 1 to 2, not '3'" in done.err

    def test_rewind(self, run: Run) -> None:
        args = ("chat", *GREEDY, "--max-new-tokens", "8")
        hello, on = run(*args, stdin="hello\ngo on\n").out.splitlines()
        done = run(*args, stdin="hello\ngo on\n/rewind\ngo on\n/rewind 2\nhello\n/rewind 5\n/rewind x\n")
        assert done.out.splitlines() == [hello, on, on, hello]
        assert "cannot rewind 5 of 1 turns" in done.err
        assert "/undo takes a number of turns, not 'x'" in done.err

    def test_save_and_load(self, run: Run, tmp_path: Path, passes: list[int], folder: Path) -> None:
        """In another process, and nothing is prefilled again."""
        args, file = ("chat", *GREEDY, "--max-new-tokens", "8"), tmp_path / "a.session"
        hello, on = run(*args, stdin="hello\ngo on\n").out.splitlines()
        done = run(*args, stdin=f"hello\n/save {file}\n")
        assert f"[{file}: 1 turn, " in done.err
        passes.clear()
        done = run(*args, stdin=f"/load {file}\ngo on\n")
        assert done.out.splitlines() == [on]
        history = [("user", "hello"), ("assistant", hello), ("user", "go on")]
        assert passes[0] <= len(chat_ids(folder, *history)) - len(chat_ids(folder, ("user", "hello")))
        for command, message in (
            ("/load", "/load needs a file name"),
            ("/save", "/save needs a file name"),
            (f"/load {tmp_path / 'none'}", "there is no file"),
            (f"/save {tmp_path}", "is a folder, not a file to write to"),
            (f"/save {tmp_path / 'no' / 'where'}", "there is no folder"),
        ):
            assert message in run(*args, stdin=f"{command}\n").err

    def test_commands(self, run: Run) -> None:
        done = run(
            "chat", *GREEDY, "--max-new-tokens", "8", stdin="/help\n/pages\n/frok\n/zzz\n/pages now\nhello\n/pages\n"
        )
        for name in ("/undo [N]", "/fork", "/branch N", "/save FILE", "/load FILE", "/stats", "/clear", "/exit"):
            assert f"  {name} " in done.err
        assert "there is no command /frok: did you mean /fork?" in done.err
        assert "there is no command /zzz: /help lists them" in done.err
        assert "/pages takes no argument, not 'now'" in done.err
        assert "conversation   0 positions in 0 pages, 0 shared with other branches" in done.err

    def test_pages_of_branches(self, run: Run) -> None:
        stdin = f"{'hello ' * 12}\n/pages\n/fork\n/pages\ngo on\n/pages\n"
        lines = run("chat", *GREEDY, "--max-new-tokens", "8", stdin=stdin).err.splitlines()
        first, second, third = [line for line in lines if line.startswith("  conversation")]
        held, pages = (int(number) for number in re.findall(r"(\d+) (?:position|page)s", first))
        assert pages == -(-held // PAGE_SIZE) == 2
        assert first.endswith(f"{held} positions in 2 pages, 0 shared with other branches")
        assert second.endswith(f"{held} positions in 2 pages, 2 shared with other branches")
        assert third.endswith(" pages, 1 shared with other branches")  # the second was written to, and copied for that

    def test_more(self, run: Run, tmp_path: Path) -> None:
        """A reply that was cut goes on as if it had not been, also in a conversation that was saved and loaded."""
        args = ("chat", *GREEDY, "--ignore-eos", "--max-new-tokens")
        whole, after = run(*args, "16", stdin="hello\ngo on\n").out.splitlines()
        done = run(*args, "8", stdin="hello\n/more\n/set max_new_tokens 16\ngo on\n")
        first, second, third = done.out.splitlines()
        assert first + second == whole
        assert third == after
        assert done.err.count("; cut, at 8 new tokens: /more continues it]") == 2
        assert "there is no reply to continue" in run(*args, "8", stdin="hello\n/undo\n/more\n").err
        run(*args, "8", stdin=f"hello\n/save {tmp_path / 'cut'}\n")
        assert run(*args, "8", stdin=f"/load {tmp_path / 'cut'}\n/more\n").out == f"{second}\n"

    def test_a_full_context_forgets_the_oldest_turns(self, run: Run, folder: Path) -> None:
        """Each reply is that of the turns that are left."""
        texts = [f"{i} {'x' * 40}" for i in range(4)]
        args = ("chat", *GREEDY, "--context", "148", "--max-new-tokens", "6")
        done = run(*args, stdin="".join(f"{text}\n" for text in texts))
        answers = done.out.splitlines()
        assert len(answers) == 4
        assert done.err.count("[the context is full: the first 1 turn forgotten]") == 2
        assert done.err.count("note: ") == 1
        turns = [
            each for pair in zip(texts, answers, strict=True) for each in zip(("user", "assistant"), pair, strict=True)
        ]
        for i in (2, 3):
            ids = chat_ids(folder, *turns[2 * (i - 1) : 2 * i + 1])
            assert answers[i] == expect(folder, ids, max_new_tokens=6).text

    def test_a_full_context_is_refused_where_that_is_asked_for(self, run: Run) -> None:
        texts = [f"{i} {'x' * 40}" for i in range(3)]
        args = ("chat", *GREEDY, "--on-full", "error", "--context", "160", "--max-new-tokens", "6")
        done = run(*args, stdin="".join(f"{text}\n" for text in [*texts, "/undo", texts[1]]))
        assert len(done.out.splitlines()) == 3
        assert done.err.count("the context is full: ") == 1
        assert "or --on-full drop)" in done.err
        assert_refused(run("chat", "--on-full", "recompute"), "--on-full must be drop or error, not 'recompute'")

    def test_a_reply_is_cut_where_the_context_ends(self, run: Run) -> None:
        """Not refused: it has the room that is left, and goes on once turns are forgotten."""
        args = ("chat", *GREEDY, "--ignore-eos", "--context", "120", "--max-new-tokens", "100")
        done = run(*args, stdin=f"hello\n{'x' * 30}\n/more\n/more\n")
        assert "; cut, the context is full: /more continues it]" in done.err
        assert done.status == 0
        assert "[the context is full: the first 1 turn forgotten]" in done.err
        assert "tokens of this turn alone + 30 new tokens exceed the context of 120" in done.err

    def test_settings(self, run: Run) -> None:
        stdin = "/set\n/set top-k 5\n/set seed=7\n/set seed off\n/set top_p x\n/set nonsense 1\n/set temperature off\n"
        err = run("chat", "--max-new-tokens", "8", stdin=stdin).err
        assert "[sampling: temperature 0.7, top_p 0.9, min_p 0.05, repetition_penalty 1.1 (chat defaults);" in err
        assert "top_k 5 (/set)" in err
        assert err.count(", seed 7]") == 1
        assert "top_p must be a number, or off, not 'x'" in err
        assert "there is no setting nonsense: there are temperature, " in err
        assert "[sampling: greedy: temperature 0.0, top_k 5 (/set), top_p 0.9" in err

    def test_system_message(self, run: Run, folder: Path) -> None:
        hello = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="hello\n").out
        stdin = "/system Be kind\nhello\n/undo\n/system off\nhello\n/system\n"
        done = run("chat", *GREEDY, "--max-new-tokens", "8", stdin=stdin)
        kind = expect(folder, chat_ids(folder, ("system", "Be kind"), ("user", "hello")), max_new_tokens=8).text
        assert done.out == f"{kind}\n{hello}"
        assert "[system: Be kind]" in done.err
        assert done.err.count("[no system message]") == 2

    def test_a_page_of_the_last_reply(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sampled without a seed, it is generated again all the same, with what /more has added."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        made: list[Trace] = []
        save = Trace.save

        def note(trace: Trace, path: Any) -> None:
            made.append(trace)
            save(trace, path)

        monkeypatch.setattr(Trace, "save", note)
        done = run("chat", "--ignore-eos", "--max-new-tokens", "8", stdin="/trace\nhello\n/more\n/trace\n")
        (page,) = tmp_path.glob("infer-trace-*.html")
        assert f"[{page}: open it in a browser]" in done.err
        assert "there is no reply to trace" in done.err
        assert "other tokens" not in done.err
        assert len(made[0].steps) == 16

    def test_a_message_that_begins_as_a_command(self, run: Run) -> None:
        done = run("chat", *GREEDY, "--max-new-tokens", "8", stdin="/usr/bin\n /usr/bin\n")
        assert "there is no command /usr/bin" in done.err
        assert len(done.out.splitlines()) == 1

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            ("much", "--cache-memory must be a size like 800MB or 2GB, not 'much'"),
            ("-1GB", "--cache-memory must be at least 1 byte"),
            ("1XB", "--cache-memory must be a size like"),
            ("100", "100 bytes of cache are too few: 64 positions of this model"),
            ("60KB", "but the memory for caches has"),
        ],
    )
    def test_cache_memory_is_checked(self, run: Run, size: str, message: str) -> None:
        done = run("chat", *GREEDY, "--max-new-tokens", "8", "--cache-memory", size, stdin="hello\n")
        assert done.status == 2
        assert message in done.err
        assert "Traceback" not in done.err


class TestCatalogue:
    @pytest.fixture(autouse=True)
    def caches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both caches empty: this project's and the hub's, whose place is read when it is imported."""
        monkeypatch.setenv("INFER_CACHE", str(tmp_path / "infer"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))

    def put_builtin(self, monkeypatch: pytest.MonkeyPatch) -> Path:
        data = b"a model"
        small = replace(BUILTIN[DEFAULT_MODEL], size=len(data), sha256=hashlib.sha256(data).hexdigest())
        monkeypatch.setitem(BUILTIN, DEFAULT_MODEL, small)
        small.path.parent.mkdir(parents=True)
        small.path.write_bytes(data)
        return small.path

    def put_hub_model(self, tmp_path: Path, folder: Path) -> Path:
        repo = tmp_path / "hf" / "hub" / "models--someone--tiny"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("0" * 40)
        snapshot = repo / "snapshots" / ("0" * 40)
        shutil.copytree(folder, snapshot)
        return snapshot

    def test_pull_prints_the_path(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        path = self.put_builtin(monkeypatch)
        assert run("pull", DEFAULT_MODEL) == Done(0, f"{path}\n", "")

    def test_pull_from_the_hub(self, run: Run, tmp_path: Path, folder: Path) -> None:
        snapshot = self.put_hub_model(tmp_path, folder)
        assert run("pull", "someone/tiny") == Done(0, f"{snapshot}\n", "")
        assert run("generate", "hello", "--max-new-tokens", "2", model="someone/tiny").status == 0

    def test_pull_of_nothing(self, run: Run) -> None:
        for name in ("nonsense", ""):
            message = f"no model {name!r}: it is neither a path, nor a name that `infer models` lists, nor a hub id"
            assert_refused(run("pull", name), message)

    def test_models(self, run: Run, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        table, families = run("models").out.split("\n\n")
        assert "\nqwen2 " in families
        header, *lines, footer = table.splitlines()
        assert header.split() == ["name", "size", "status", "license", "source"]
        assert footer.startswith("* gated: accept the license")
        assert [line.split()[0] for line in lines] == [*BUILTIN, *HUB_MODELS]
        assert lines[0].split()[:5] == [DEFAULT_MODEL, "98", "MB", "-", "Apache-2.0"]
        assert lines[0].endswith("package index: SmolLM2 135M Instruct, Q4_1")
        gated = {line.split()[0] for line in lines if re.search(r" \* +hub: ", line)}
        assert gated == {name for name, model in HUB_MODELS.items() if model.gated}
        assert "llama-3.2-1b" in gated
        self.put_builtin(monkeypatch)
        self.put_hub_model(tmp_path, folder)
        done = run("models")
        _, *lines, hub, _ = done.out.partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in lines if " cached " in line] == [DEFAULT_MODEL]
        assert hub.split()[0] == "someone/tiny"
        assert hub.endswith("hub: someone/tiny")
        assert (done.status, done.err) == (0, "")

    def test_models_json(self, run: Run, tmp_path: Path, folder: Path) -> None:
        """A cached model that has a short name is listed once, with the bytes that it takes."""
        self.put_hub_model(tmp_path, folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        hub = tmp_path / "hf" / "hub"
        shutil.copytree(hub / "models--someone--tiny", hub / "models--Qwen--Qwen3-0.6B")
        done = run("models", "--json")
        models = {model.pop("name"): model for model in json.loads(done.out)}
        assert list(models) == [*BUILTIN, *HUB_MODELS, "someone/tiny"]
        assert [(name, models[name]["bytes"], models[name]["cached"]) for name in BUILTIN] == [
            (model.name, model.size, False) for model in BUILTIN.values()
        ]
        of_hub = {"bytes": size, "cached": True, "gated": False, "source": "hub"}
        assert models["qwen3-0.6b"] == of_hub | {"license": "Apache-2.0", "model": "Qwen/Qwen3-0.6B"}
        assert models["someone/tiny"] == of_hub | {"license": None, "model": "someone/tiny"}
        assert (done.status, done.err) == (0, "")

    def test_short_name_of_a_hub_model(self, run: Run, tmp_path: Path, folder: Path) -> None:
        """pull, generate and rm take it."""
        snapshot = self.put_hub_model(tmp_path, folder)
        repo = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B"
        (tmp_path / "hf" / "hub" / "models--someone--tiny").rename(repo)
        assert run("pull", "qwen3-0.6b") == Done(0, f"{repo / snapshot.relative_to(snapshot.parents[1])}\n", "")
        assert run("generate", "hello", "--max-new-tokens", "2", model="qwen3-0.6b").status == 0
        assert run("rm", "qwen3-0.6b").out.startswith("removed qwen3-0.6b: ")
        assert not repo.exists()


@pytest.mark.usefixtures("untouched")
class TestInfo:
    PARAMETERS = 2 * 128 * 64 + 64 + 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64)

    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
        """Choose how much memory the machine has left."""
        return lambda count: monkeypatch.setattr(describe, "available_memory", lambda device, processes=1: count)

    def test_json(self, run: Run, folder: Path, free: Callable[[int | None], None]) -> None:
        weights = 4 * self.PARAMETERS
        free(weights + 100 * CACHE_BYTES_PER_TOKEN + 1)
        done = run("info", "--json", "--device", "cpu", "--dtype", "float32")
        assert json.loads(done.out) == {
            "model": str(folder),
            "path": str(folder),
            "architecture": "llama",
            "parameters": self.PARAMETERS,
            "layers": 3,
            "hidden_size": 64,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "dtype": "float32",
            "device": "cpu",
            "backend": "cpu: numba kernels",
            "quantize": None,
            "weights": "float32",
            "weight_bytes": weights,
            "sliding_window": None,
            "sliding_layers": 0,
            "cache_dtype": "float32",
            "cache_bytes_per_token": CACHE_BYTES_PER_TOKEN,
            "context": CONTEXT,
            "longest_context": CONTEXT,
            "cache_bytes": CONTEXT * CACHE_BYTES_PER_TOKEN,
            "contiguous_cache_bytes": CONTEXT * CACHE_BYTES_PER_TOKEN,
            "free_bytes": weights + 100 * CACHE_BYTES_PER_TOKEN + 1,
            "largest_context": 100,
            "page_bytes": PAGE_SIZE * CACHE_BYTES_PER_TOKEN,
            "conversations": 0,
        }
        assert (done.status, done.err) == (0, "")

    def test_backend(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """What will run it, and why, before there is a model."""

        def backend(*options: str) -> str:
            return json.loads(run("info", "--json", "--device", "cpu", *options).out)["backend"]

        for dtype in ("float32", "bfloat16", "float16"):
            assert backend("--dtype", dtype) == "cpu: numba kernels"
        none = "torch: INFER_KERNELS=0, numba is missing, or it is a dtype without kernels"
        assert backend("--dtype", "float64") == none
        monkeypatch.setenv("INFER_KERNELS", "0")
        assert backend() == none

    @pytest.mark.parametrize(("quantize", "least", "most"), [("int4", 0.6, 1.2), ("int8", 1.0, 1.2)])
    def test_quantize(self, run: Run, quantize: str, least: float, most: float) -> None:
        """The embedding is kept in 8 bits either way, and norms in float32."""
        facts = json.loads(run("info", "--json", "--quantize", quantize).out)
        assert (facts["quantize"], facts["dtype"]) == (quantize, "float32")
        assert least < facts["weight_bytes"] / facts["parameters"] < most

    def test_dtype(self, run: Run) -> None:
        facts = json.loads(run("info", "--json", "--dtype", "bfloat16").out)
        assert facts["dtype"] == "bfloat16"
        assert facts["weight_bytes"] == 2 * self.PARAMETERS
        assert facts["cache_bytes_per_token"] == CACHE_BYTES_PER_TOKEN // 2

    @pytest.mark.parametrize(
        ("count", "expected"),
        [(10**9, CONTEXT), (4 * PARAMETERS + CACHE_BYTES_PER_TOKEN - 1, 0), (1000, 0), (None, CONTEXT)],
    )
    def test_largest_context(
        self, run: Run, free: Callable[[int | None], None], count: int | None, expected: int
    ) -> None:
        free(count)
        assert json.loads(run("info", "--json", "--dtype", "float32").out)["largest_context"] == expected

    def test_text(self, run: Run, folder: Path, free: Callable[[int | None], None]) -> None:
        free(4 * self.PARAMETERS + 100 * CACHE_BYTES_PER_TOKEN)
        done = run("info", "--device", "cpu", "--dtype", "float32")
        lines = {line[:22].strip(): line[22:].strip() for line in done.out.splitlines()}
        assert lines["model"] == str(folder)
        assert lines["architecture"] == "llama"
        assert lines["parameters"] == "0.1 M"
        assert lines["heads"] == "4 query, 2 key/value, 16 dimensions each"
        assert lines["weights"] == f"{4 * self.PARAMETERS / 1e3:.1f} kB in float32 on cpu, 4.00 bytes per weight"
        assert lines["backend"] == "cpu: numba kernels"
        assert lines["cache per token"] == f"{CACHE_BYTES_PER_TOKEN} bytes"
        assert lines["context"] == f"{CONTEXT} positions, {CONTEXT * CACHE_BYTES_PER_TOKEN / 1e3:.1f} kB of cache"
        assert lines["largest that fits"].startswith("100 positions (")
        assert "windows" not in lines
        assert done.err == ""

    def test_context(self, run: Run) -> None:
        facts = json.loads(run("info", "--json", "--context", "10").out)
        assert facts["context"] == 10
        assert facts["cache_bytes"] == facts["contiguous_cache_bytes"] == 10 * CACHE_BYTES_PER_TOKEN
        assert (
            f"10 positions, {10 * CACHE_BYTES_PER_TOKEN / 1e3:.1f} kB of cache\n" in run("info", "--context", "10").out
        )

    @pytest.fixture
    def gemma(self, tmp_path: Path) -> Path:
        """The config of Gemma-3-1b, and nothing else."""
        config = {
            "model_type": "gemma3_text",
            "num_hidden_layers": 26,
            "hidden_size": 1152,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 6912,
            "vocab_size": 262_144,
            "max_position_embeddings": 32_768,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    def test_windows(self, run: Run, gemma: Path) -> None:
        args = ("info", "--context", "32768", "--dtype", "bfloat16")
        facts = json.loads(run(*args, "--json", model=gemma).out)
        assert (facts["sliding_window"], facts["sliding_layers"]) == (512, 22)
        assert facts["contiguous_cache_bytes"] == 32_768 * facts["cache_bytes_per_token"] == 872_415_232
        # Four layers keep everything, the others their window and a chunk.
        assert facts["cache_bytes"] == 1024 * (4 * 32_768 + 22 * (512 + 512)) <= 160e6
        done = run(*args, model=gemma)
        lines = {line[:22].strip(): line[22:].strip() for line in done.out.splitlines()}
        assert lines["parameters"] == "999.9 M"
        assert lines["windows"] == "22 of 26 layers see 512 positions"
        assert lines["context"] == ("32,768 positions, 157.3 MB of cache; 872.4 MB if every layer kept all positions")
        assert json.loads(run("info", "--dtype", "bfloat16", "--json", model=gemma).out) == facts | {
            "free_bytes": pytest.approx(facts["free_bytes"], rel=0.5),
            "conversations": pytest.approx(facts["conversations"], rel=0.5),  # as many as are free
        }

    @pytest.mark.parametrize("context", [1, 512, 1024])
    def test_contexts_within_a_ring(self, run: Run, gemma: Path, context: int) -> None:
        """The default cache is never larger than the contiguous one."""
        facts = json.loads(run("info", "--context", str(context), "--json", model=gemma).out)
        assert facts["cache_bytes"] == facts["contiguous_cache_bytes"]

    @pytest.mark.parametrize(("spare", "expected"), [(0, 20_000), (-1, 19_999), (4 * 1024 - 1, 20_000)])
    def test_largest_context_with_windows(
        self, run: Run, gemma: Path, free: Callable[[int | None], None], spare: int, expected: int
    ) -> None:
        """Each further position takes memory in the four global layers alone."""
        args = ("info", "--json", "--dtype", "bfloat16")
        weights = json.loads(run(*args, model=gemma).out)["weight_bytes"]
        free(weights + 1024 * (4 * 20_000 + 22 * 1024) + spare)
        assert json.loads(run(*args, model=gemma).out)["largest_context"] == expected

    def test_text_where_nothing_fits(self, run: Run, free: Callable[[int | None], None]) -> None:
        free(1000)
        assert "none: the weights alone do not fit (1.0 kB free)" in run("info").out
        free(None)
        assert "largest that fits" not in run("info").out

    def test_without_weights(self, run: Run, folder: Path, tmp_path: Path) -> None:
        shutil.copy(folder / "config.json", tmp_path)
        assert json.loads(run("info", "--json", model=tmp_path).out)["parameters"] == self.PARAMETERS


class TestVerify:
    DEFAULT = ("hello", "水は")

    @pytest.fixture(autouse=True)
    def few_prompts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "PROMPTS", self.DEFAULT)

    def test_equal(self, run: Run) -> None:
        done = run("verify", "--max-new-tokens", "3", "--all")
        assert done.status == 0
        promise, header, *lines = done.out.splitlines()
        assert promise == "kernels: every path must give the same bits"
        assert header.split() == ["path", "prompts", "positions"]
        assert all(line.endswith("  equal") for line in lines)
        names = [line[:34].strip() for line in lines]
        assert {*CACHES, "no cache, traced", "default cache, batch of 3", "generate_batch"} <= set(names)
        assert {f"sampled, {name}" for name in CACHES} <= set(names)
        first, *each, last = done.err.splitlines()
        assert first.startswith(f"{len(lines)} paths to run, each compared with one pass without a cache")
        assert [": equal, " in line for line in each] == [True] * len(lines)
        assert last == f"{len(lines)} of {len(lines)} paths give the same bits as one pass without a cache"

    def test_without_kernels(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_backend, "kernels", lambda: None)
        done = run("verify", "--max-new-tokens", "3", "--also-threads", "1")
        assert done.status == 0
        why = "there are no kernels for this CPU: INFER_KERNELS=0, or numba is missing"
        assert done.out.startswith(f"plain torch ({why}): paths agree within rounding\n")
        assert "the most likely token is the same everywhere, near-ties aside" in done.err

    def test_windows(self, run: Run, windowed: Path, compared: list[list[int]]) -> None:
        """A prompt past the window joins the others, unless the prompts are the user's."""
        assert run("verify", "--max-new-tokens", "3", model=windowed).status == 0
        (prompts,) = compared
        assert len(prompts) == 3
        assert len(prompts[2]) == WINDOW + 48

    def test_prompts_from_a_file(self, run: Run, windowed: Path, tmp_path: Path, compared: list[list[int]]) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello\n\n  \nwho goes “there”?\n", encoding="utf-8")
        run("verify", "--prompts", file, "--max-new-tokens", "2", model=windowed)
        tokenizer = Tokenizer(windowed)
        assert compared == [[tokenizer.encode("hello"), tokenizer.encode("who goes “there”?")]]

    @pytest.fixture
    def compared(self, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        """The prompts of each comparison."""
        seen: list[list[int]] = []
        compare = paths.Comparison

        def noted(model: Any, tokenizer: Any, prompts: list[int], *args: Any, **options: Any) -> Any:
            seen.append(prompts)
            return compare(model, tokenizer, prompts, *args, **options)

        monkeypatch.setattr(paths, "Comparison", noted)
        return seen

    def test_json(self, run: Run, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello")
        done = run("verify", "--prompts", file, "--max-new-tokens", "3", "--json")
        output = json.loads(done.out)
        found = output.pop("paths")
        assert output == {"model": str(folder), "kernels": True, "plain_torch": None, "passed": True}
        (path,) = [path for path in found if path["path"] == "KVCache"]
        assert path == {
            "path": "KVCache",
            "prompts": 1,
            "positions": 8,
            "different": 0,
            "largest": 0.0,
            "other_tokens": 0,
            "difference": None,
            "equal": True,
        }
        assert done.status == 0
        assert done.out.count("\n") == 1

    def test_a_cache_that_is_wrong(self, run: Run, tmp_path: Path, forgetful: None) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello")
        args = ("verify", "--prompts", file, "--max-new-tokens", "24", "--dtype", "float32")
        done = run(*args, "--json")
        assert done.status == 1
        output = json.loads(done.out)
        assert output["passed"] is False
        different = {path["path"] for path in output["paths"] if not path["equal"]}
        assert "KVCache" in different
        assert not any(
            name.startswith(("GrowingCache", "SlidingCache", "PagedCache")) for name in different
        )  # those are sound
        (path,) = [path for path in output["paths"] if path["path"] == "KVCache"]
        assert path["difference"]["prompt"] == "hello"
        assert path["difference"]["divergence"]["what"] == "attended"
        done = run(*args)
        assert done.status == 1
        (line,) = [line for line in done.out.splitlines() if line.startswith("KVCache  ")]
        assert f'DIFFERS at {path["different"]} positions; first in "hello", position ' in line
        assert f"{len(output['paths']) - len(different)} of {len(output['paths'])} paths" in done.err
        assert "Traceback" not in done.err


class TestBench:
    ARGS = ("--prompt-tokens", "6", "--new-tokens", "4", "--trials", "2", "--warmup", "1")

    def test_text(self, run: Run, folder: Path) -> None:
        done = run("bench", *self.ARGS)
        assert done.status == 0
        assert done.out.startswith("=== Generation Benchmark ===")
        assert str(folder) in done.out
        assert "6 prompt + 4 new" in done.out
        assert done.err.splitlines() == [
            "6 + 4 tokens with the cache",
            "  warm-up 1/1",
            "  trial 1/2",
            "  trial 2/2",
        ]

    @pytest.mark.parametrize(
        ("options", "kinds"),
        [([], [True]), (["--kv-cache"], [True]), (["--no-kv-cache"], [False]), (["--compare"], [True, False])],
    )
    def test_json(self, run: Run, options: list[str], kinds: list[bool]) -> None:
        done = run("bench", *self.ARGS, *options, "--json")
        output = json.loads(done.out)
        assert done.status == 0
        assert [result["config"] for result in output["results"]] == [
            asdict(bench.BenchConfig(6, 4, trials=2, warmup=1, use_kv_cache=kind)) for kind in kinds
        ]
        assert [row["same_tokens"] for row in output["comparisons"]] == [True] * (len(kinds) - 1)
        assert done.out.count("\n") == 1

    def test_drafts(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))  # as many as possible
        monkeypatch.setattr(sequences, "sample", lambda *_: 7)  # a text that repeats itself
        monkeypatch.setattr(bench, "SUITE", {"short": (3, 20), "long": (9, 30)})
        done = run("bench", "--suite", "--trials", "2", "--speculate", "ngram", "--json")
        output = json.loads(done.out)
        found = output["results"]
        assert [result["config"]["speculate"] for result in found] == [None, "ngram"] * 2
        assert [row["new_tokens"] for row in output["comparisons"]] == [20, 30]
        for row, without, drafts in zip(output["comparisons"], found[::2], found[1::2], strict=True):
            assert row["tokens_per_s"] == [without["decode_tokens_per_s"], drafts["decode_tokens_per_s"]]
            assert row["same_tokens"]
            assert row["drafted"] == drafts["drafted"] > 0 == without["drafted"]
            assert row["accepted"] == drafts["accepted"] == drafts["drafted"]
        assert done.err.splitlines()[:2] == ["3 + 20 tokens with the cache, with drafts and without", "  warm-up 1/1"]

    def test_drafts_that_no_kernels_verify(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_backend, "kernels", lambda: None)
        assert_refused(
            run("bench", *self.ARGS, "--speculate", "ngram"),
            "only kernels verify drafts, not backend torch: omit --speculate",
        )

    def test_prefill_chunk(self, run: Run, passes: list[int]) -> None:
        """Also beside the run without a cache, which has no chunks."""
        done = run("bench", *self.ARGS, "--prefill-chunk", "4", "--compare", "--json")
        output = json.loads(done.out)
        assert [result["config"]["prefill_chunk"] for result in output["results"]] == [4, None]
        assert output["comparisons"][0]["same_tokens"] is True
        assert passes == [4, 2, 1, 1, 1] * 3 + [6, 7, 8, 9] * 3
        assert "6 prompt + 4 new, prefilled in chunks of 4" in run("bench", *self.ARGS, "--prefill-chunk", "4").out

    @pytest.mark.parametrize("prompt", [CONTEXT - 2, CONTEXT + 3])
    def test_beyond_the_context(self, run: Run, passes: list[int], prompt: int) -> None:
        """It is measured what `generate` does there: the last tokens that fit, at each step."""
        args = ("--prompt-tokens", str(prompt), "--new-tokens", "5", "--trials", "1", "--warmup", "0")
        assert_refused(run("bench", *args), "or continue beyond it with --on-full recompute")
        done = run("bench", *args, "--on-full", "recompute", "--compare", "--json")
        output = json.loads(done.out)
        assert [result["config"]["on_full"] for result in output["results"]] == ["recompute"] * 2
        assert output["comparisons"][0]["same_tokens"] is True
        without = [min(prompt + i, CONTEXT) for i in range(5)]
        cached = [CONTEXT - 2, 1, 1, CONTEXT, CONTEXT] if prompt < CONTEXT else without
        assert passes == cached + without
        assert "5 new, recomputed beyond the context" in run("bench", *args, "--on-full", "recompute").out

    def test_suite_plot_and_report(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "SUITE", {"short": (3, 4), "long": (9, 5)})
        plot, report = tmp_path / "steps.png", tmp_path / "report.json"
        options = ("--suite", "--compare", "--trials", "1", "--plot", plot, "--report", report)
        done = run("bench", *options, "--json")
        assert done.status == 0
        output = json.loads(done.out)
        assert json.loads(report.read_text()) == output
        lengths = [(result["config"]["prompt_tokens"], result["config"]["new_tokens"]) for result in output["results"]]
        assert lengths == [(3, 4), (3, 4), (9, 5), (9, 5)]
        assert len(output["comparisons"]) == 2
        assert imread(plot).shape[2] >= 3


SUPPORTED_DEVICES = "use auto, cpu, cuda"
TOO_LONG = "x" * 300
NO_SWITCH = "this model's chat template has no switch for thinking: leave --thinking/--no-thinking out"
NO_CACHE_DTYPE = "--cache-dtype must be auto or int8, not 'int3'"
NO_CHUNK = "prefill_chunk must be an integer, 1 or more, not 0"

# Arguments and what the message must say. "FOLDER" and "MISSING" stand for paths that only a run knows.
REFUSED: dict[str, tuple[list[str], str]] = {
    "negative temperature": (["generate", "hi", "--temperature", "-1"], "temperature must be 0 or more, not -1.0"),
    "top_p of 0": (["generate", "hi", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
    "top_p above 1": (["generate", "hi", "--top-p", "1.5"], "top_p must be above 0 and at most 1, not 1.5"),
    "top_p that is no number": (["generate", "hi", "--top-p", "nan"], "top_p must be"),
    "negative top_k": (["generate", "hi", "--top-k", "-1"], "top_k must be"),
    "min_p above 1": (["generate", "hi", "--min-p", "2"], "min_p must be from 0 to 1"),
    "no new tokens": (["generate", "hi", "--max-new-tokens", "0"], "max_new_tokens must be"),
    "empty stop": (["generate", "hi", "--stop", ""], "a stop string must be a non-empty string"),
    "temperature in a chat": (["chat", "--temperature", "-1"], "temperature must be 0 or more"),
    "logit bias without a number": (["generate", "hi", "--logit-bias", "5"], "ID:BIAS, like 42:-1.5, not '5'"),
    "logit bias in words": (["generate", "hi", "--logit-bias", "a:b"], "ID:BIAS, like 42:-1.5, not 'a:b'"),
    "logit bias outside the vocabulary": (
        ["generate", "hi", "--logit-bias", "128:1", "--max-new-tokens", "5"],
        "token id 128 in the logit_bias is outside the vocabulary 0..127",
    ),
    "overflow": (
        ["generate", "hello", "--max-new-tokens", "300"],
        "5 prompt tokens + 300 new tokens = 305 positions exceed the model's context of 256",
    ),
    "overflow by the prompt": (
        ["generate", TOO_LONG, "--max-new-tokens", "1"],
        "301 prompt tokens + 1 new tokens = 302 positions exceed the model's context of 256",
    ),
    "system without chat": (["generate", "hi", "--system", "Be kind"], "--system and --thinking need --chat"),
    "thinking without chat": (["generate", "hi", "--thinking"], "--system and --thinking need --chat"),
    "no thinking without chat": (["generate", "hi", "--no-thinking"], "--system and --thinking need --chat"),
    "no switch for thinking": (["generate", "hi", "--chat", "--no-thinking"], NO_SWITCH),
    "no switch for thinking in a chat": (["chat", "--thinking", "--max-new-tokens", "5"], NO_SWITCH),
    "no tokens in a chunk": (["generate", "hi", "--prefill-chunk", "0"], NO_CHUNK),
    "no tokens in a chunk of a chat": (["chat", "--prefill-chunk", "0"], NO_CHUNK),
    "no tokens in a chunk of a bench": (["bench", "--prefill-chunk", "0"], NO_CHUNK),
    "chunks without a cache": (
        ["generate", "hi", "--prefill-chunk", "4", "--no-kv-cache"],
        "--prefill-chunk needs the cache: leave --no-kv-cache out",
    ),
    "chunks without a cache in a bench": (
        ["bench", "--prefill-chunk", "4", "--no-kv-cache"],
        "prefill_chunk needs the cache",
    ),
    "lengths beside a suite's": (
        ["bench", "--suite", "--new-tokens", "9"],
        "--suite sets the lengths: leave --prompt-tokens and --max-new-tokens out",
    ),
    "a comparison without the cache": (
        ["bench", "--compare", "--no-kv-cache"],
        "--compare measures with the cache and without it: leave --no-kv-cache out",
    ),
    **{
        f"drafts in a bench with {option}": (
            ["bench", "--speculate", "ngram", option, *value],
            f"--speculate measures with drafts and without, both with the cache: leave {option} out",
        )
        for option, *value in (("--compare",), ("--no-kv-cache",), ("--plot", "steps.png"))
    },
    "no context": (["info", "FOLDER", "--context", "0"], "context must be from 1 to the model's 256, not 0"),
    "too much context": (["info", "FOLDER", "--context", "257"], "context must be from 1 to the model's 256, not 257"),
    "template refuses": (["generate", "forbidden", "--chat"], "the chat template refuses these messages: not that"),
    "unknown dtype": (["generate", "hi", "--dtype", "int3", "--max-new-tokens", "5"], "unknown dtype 'int3'"),
    "unknown device": (["generate", "hi", "--device", "gpu", "--max-new-tokens", "5"], SUPPORTED_DEVICES),
    "a device without numbers": (
        ["generate", "hi", "--device", "meta", "--max-new-tokens", "5"],
        "models do not run on device 'meta'",
    ),
    "unknown dtype in a chat": (["chat", "--dtype", "int3", "--max-new-tokens", "5"], "unknown dtype 'int3'"),
    "unknown device in a chat": (["chat", "--device", "gpu", "--max-new-tokens", "5"], SUPPORTED_DEVICES),
    "no room for a turn in a chat": (
        ["chat", "--context", "20", "--max-new-tokens", "20"],
        "--context 20 is too short for a turn: ",
    ),
    "no context in a chat": (["chat", "--context", "0"], "context must be from 1 to the model's 256, not 0"),
    "too much context in a chat": (["chat", "--context", "257"], "context must be from 1 to the model's 256, not 257"),
    "unknown dtype for info": (["info", "FOLDER", "--dtype", "int3"], "unknown dtype 'int3'"),
    "unknown device for info": (["info", "FOLDER", "--device", "gpu"], SUPPORTED_DEVICES),
    "unknown dtype for verify": (["verify", "FOLDER", "--dtype", "int3"], "unknown dtype 'int3'"),
    "unknown device for bench": (["bench", "--device", "gpu"], SUPPORTED_DEVICES),
    **{
        f"unknown dtype of the cache for {command}": ([command, *args, "--cache-dtype", "int3"], NO_CACHE_DTYPE)
        for command, args in (
            ("generate", ["hi"]),
            ("chat", []),
            ("trace", ["hi"]),
            ("bench", []),
            ("verify", ["FOLDER"]),
            ("info", ["FOLDER"]),
        )
    },
    **{
        f"8 bits without a cache for {command}": (
            [command, *args, "--cache-dtype", "int8", "--no-kv-cache"],
            "--cache-dtype int8 needs the cache: leave --no-kv-cache out",
        )
        for command, args in (("generate", ["hi"]), ("trace", ["hi"]), ("bench", []))
    },
    "unknown width": (["generate", "hi", "--quantize", "int3", "--max-new-tokens", "5"], "int3"),
    "unknown width for info": (["info", "FOLDER", "--quantize", "int3"], "int3"),
    "no threads": (
        ["generate", "hi", "--threads", "0", "--max-new-tokens", "5"],
        f"threads must be an integer from 1 to this machine's {os.cpu_count()} CPUs, not 0",
    ),
    "too many threads": (["bench", "--threads", "100000"], "CPUs, not 100000"),
    "unknown model": (
        ["generate", "hi", "--model", "nonsense"],
        "no model 'nonsense': it is neither a path, nor a name that `infer models` lists, nor a hub id",
    ),
    "misspelled model": (["generate", "hi", "--model", "smolm2-135m"], "did you mean smollm2-135m?"),
    "misspelled model of the hub": (["generate", "hi", "--model", "qwen3-0.6"], "did you mean qwen3-0.6b?"),
    "missing file": (["generate", "hi", "--model", "MISSING.gguf"], "there is no file"),
    "missing schema": (["generate", "hi", "--json-schema", "MISSING"], "there is no file"),
    "not a checkpoint": (["generate", "hi", "--model", "FOLDER/config.json"], "is not a checkpoint"),
    "missing prompts file": (["verify", "FOLDER", "--prompts", "MISSING"], "there is no file"),
    "prompts that are a folder": (["verify", "FOLDER", "--prompts", "FOLDER"], "directory"),
    "no tokens to verify": (["verify", "FOLDER", "--max-new-tokens", "0"], "max_new_tokens must be"),
    "overflow in verify": (["verify", "FOLDER", "--max-new-tokens", "256"], "exceed the model's context of 256"),
    "overflow in bench": (
        ["bench", "--prompt-tokens", "250", "--new-tokens", "7"],
        "exceed the model's context of 256",
    ),
    "overflow in the suite": (["bench", "--suite"], "exceed the model's context of 256"),
    "no trials": (["bench", "--trials", "0"], "trials must be at least 1, not 0"),
    "one new token": (["bench", "--new-tokens", "1"], "new_tokens must be at least 2, not 1"),
    "plot into a missing folder": (["bench", "--plot", "MISSING/plot.png"], "there is no folder"),
    "report into a missing folder": (["bench", "--report", "MISSING/report.json"], "there is no folder"),
    "report onto a folder": (["bench", "--report", "FOLDER"], "is a folder"),
}


@pytest.mark.usefixtures("untouched")
class TestRefused:
    """Before weights are touched, in one line, with exit status 2."""

    @pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
    def test_refused(self, run: Run, folder: Path, tmp_path: Path, args: list[str], message: str) -> None:
        command, *rest = [
            arg.replace("FOLDER", str(folder)).replace("MISSING", str(tmp_path / "missing")) for arg in args
        ]
        if command in ("info", "verify"):  # `run` puts the folder in front
            rest = rest[1:]
        assert_refused(run(command, *rest, stdin="hello\n"), message)

    @pytest.mark.parametrize("prompt", ["", "-"])
    def test_empty_prompt(self, run: Run, plain: Path, prompt: str) -> None:
        assert_refused(run("generate", prompt, model=plain), "the prompt is empty")

    def test_empty_prompts_file(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("\n  \n")
        assert_refused(run("verify", "--prompts", file), "holds no prompts")

    def test_prompts_that_are_not_text(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_bytes(b"\xff\xfe\x00")
        assert_refused(run("verify", "--prompts", file), "decode")

    @pytest.mark.parametrize("args", [["chat"], ["generate", "hi", "--chat"], ["serve"]])
    def test_unknown_chat_template(self, run: Run, plain: Path, args: list[str]) -> None:
        done = run(*args, "--chat-template", "chatmll", model=plain)
        assert_refused(done, "a chat template is a Jinja file or one of llama, ")

    def test_chat_template_without_chat(self, run: Run, plain: Path) -> None:
        done = run("generate", "hi", "--chat-template", "chatml", model=plain)
        assert_refused(done, "--chat-template needs --chat")

    @pytest.mark.parametrize("args", [["chat"], ["generate", "hi", "--chat"]])
    def test_no_chat_template(self, run: Run, plain: Path, args: list[str]) -> None:
        assert_refused(run(*args, model=plain), "this model has no chat template")

    @pytest.mark.parametrize("command", ["generate", "chat", "info", "verify", "bench"])
    def test_folder_without_a_config(self, run: Run, tmp_path: Path, command: str) -> None:
        words = ["hi"] if command == "generate" else []
        assert_refused(run(command, *words, model=tmp_path), "is not a model folder: it has no config.json")

    @pytest.mark.parametrize("command", ["generate", "chat", "info", "verify", "bench"])
    def test_unsupported_architecture(self, run: Run, tmp_path: Path, folder: Path, command: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
        words = ["hi"] if command == "generate" else []
        assert_refused(run(command, *words, model=tmp_path), "architecture 'mamba' is not supported; supported: ")

    @pytest.mark.parametrize(
        ("name", "message"),
        [("tokenizer.json", "has no tokenizer.json"), ("model.safetensors", "has no weights: neither model.safe")],
    )
    def test_missing_part(self, run: Run, tmp_path: Path, folder: Path, name: str, message: str) -> None:
        model = shutil.copytree(folder, tmp_path / "model")
        (model / name).unlink()
        assert_refused(run("generate", "hi", "--max-new-tokens", "5", model=model), message)

    def test_truncated_weights(self, run: Run, tmp_path: Path, folder: Path) -> None:
        model = shutil.copytree(folder, tmp_path / "model")
        weights = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        assert_refused(run("generate", "hi", "--max-new-tokens", "5", model=model), "is damaged or cut short")

    def test_broken_config(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        assert_refused(run("info", model=tmp_path), "is not valid JSON")

    def test_plot_without_matplotlib(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert_refused(run("bench", "--plot", tmp_path / "plot.png"), "pip install 'infer-kv[plot]'")

    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_out_of_memory(self, run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load, "available_memory", lambda device, processes=1: 1000)
        words = ["hi"] if command == "generate" else []
        assert_refused(run(command, *words, "--max-new-tokens", "5"), "the weights need 0.00 GB")

    @pytest.mark.parametrize("command", ["generate", "chat"])
    def test_weights_and_cache_together(self, run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each fits alone."""
        facts = json.loads(run("info", "--context", "200", "--json").out)
        largest = max(facts["weight_bytes"], facts["cache_bytes"])
        monkeypatch.setattr(machine, "lazy_allocations", WeakSet())  # other tests' caches may be collected meanwhile
        monkeypatch.setattr(machine, "_system_memory", lambda: largest)
        words = ["hi"] if command != "chat" else []
        done = run(command, *words, "--max-new-tokens", "200")
        assert_refused(done, "beside 0.00 GB for the cache")

    @pytest.mark.parametrize("args", [[command, "--nonsense"] for command in COMMANDS])
    def test_unknown_option(self, run: Run, args: list[str]) -> None:
        done = run(*args)
        assert (done.status, done.out) == (2, "")
        assert "--nonsense" in done.err
        assert "Traceback" not in done.err

    @pytest.mark.parametrize(
        "args", [["generate"], ["generate", "a", "b"], ["generate", "hi", "--temperature", "warm"], ["nonsense"]]
    )
    def test_unusable_arguments(self, args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        printed = capsys.readouterr()
        assert (exit_info.value.code, printed.out) == (2, "")
        assert printed.err


def test_errors_of_many_lines_become_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("first\n  second\n")

    monkeypatch.setattr(HFFolder, "tokenizer_parts", fail)
    assert_refused(run("generate", "hi"), "first second")


def test_an_interrupt_that_became_another_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ swallows the KeyboardInterrupt and complains of what it got."""
    before = signal.getsignal(signal.SIGINT)

    def swallow(*args: Any, **options: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of an object") from None

    monkeypatch.setattr(Tokenizer, "encode", swallow)
    assert run("generate", "hi") == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is before


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


class TestUnexpected:
    """One line, exit status 1, and a way to see more."""

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (ZeroDivisionError(), "error: ZeroDivisionError (INFER_TRACEBACK=1 shows where)\n"),
            (RuntimeError("one\n two"), "error: RuntimeError: one two (INFER_TRACEBACK=1 shows where)\n"),
            (RecursionError("too deep"), "error: RecursionError: too deep (INFER_TRACEBACK=1 shows where)\n"),
            (MemoryError(), "error: MemoryError (out of memory)\n"),
            (Panic("index out of bounds"), "error: Panic: index out of bounds (INFER_TRACEBACK=1 shows where)\n"),
        ],
        ids=repr,
    )
    def test_one_line(self, run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str) -> None:
        def fail(*args: Any, **options: Any) -> None:
            raise error

        monkeypatch.setattr(Tokenizer, "encode", fail)
        assert run("generate", "hi") == (1, "", line)
        monkeypatch.setenv("INFER_TRACEBACK", "1")
        done = run("generate", "hi")
        assert done.status == 1
        assert done.err.startswith("Traceback")
        assert "in fail" in done.err
        assert done.err.endswith(line)

    def test_a_traceback_of_what_is_refused(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INFER_TRACEBACK", "1")
        done = run("generate", "hi", "--top-p", "2")
        assert done.status == 2
        assert done.err.startswith("Traceback")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestControlCharacters:
    """A model's text does not reach a terminal as anything it would obey; a pipe gets it as it is."""

    TEXT = "a\x1b[31m\x1b]0;title\x07\x9b2J\r\x7f\u202eb\u2066\tc\n✓"
    SHOWN = "a\\x1b[31m\\x1b]0;title\\x07\\x9b2J\\x0d\\x7f\\u202eb\\u2066\tc\n✓"

    @pytest.fixture
    def speaking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Detokenizer, "push", lambda *_: TestControlCharacters.TEXT)

    @pytest.mark.parametrize("command", ["generate", "chat", "trace"])
    def test_generated(
        self, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, speaking: None, command: str
    ) -> None:
        args = ["--max-new-tokens", "2", *([] if command == "chat" else ["hi"])]
        assert self.TEXT in run(command, *args, stdin="hi\n").out
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        run(command, *args, stdin="hi\n")
        assert self.SHOWN in terminal.getvalue()
        assert "\x1b]" not in terminal.getvalue()

    @pytest.mark.parametrize("command", ["trace", "explain"])
    def test_tokens(self, run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        """Also where they are shown one by one."""
        monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **_: self_text(ids))
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run(command, "hi", "--max-new-tokens", "3").status == 0
        shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())  # our own colours
        assert not set("\x1b\x07\x9b\x7f\u202e\u2066") & set(shown)

    def test_messages(self, capsys: pytest.CaptureFixture[str]) -> None:
        say(self.TEXT)
        assert capsys.readouterr().err == f"{self.SHOWN}\n"


def self_text(ids: list[int]) -> str:
    return TestControlCharacters.TEXT.replace("[31m", "") * len(ids)
