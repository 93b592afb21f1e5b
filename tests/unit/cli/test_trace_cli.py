"""`infer trace` in-process, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CACHE_BYTES_PER_TOKEN, CONTEXT, Run, assert_refused, chat_ids

from infer import SamplingParams, Tokenizer, Trace, generate, load_model
from infer.cli.trace import parse_step, spread
from infer.engine import generate as engine
from infer.engine.draft import MAX_DRAFTS, Speculation
from infer.engine.result import GeneratedToken
from infer.trace import record
from infer.trace.page import read_page
from infer.trace.save import json_lines

pytestmark = pytest.mark.usefixtures("plain_machine")

STEPS = 6
LAYERS, HEADS = [0, 1, 2], [0, 1, 2, 3]
SHORT = ("--max-new-tokens", str(STEPS))


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is no terminal, and of no particular width."""
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def traced(path: Path, prompt: str = "hello", trace: Trace | None = None, **params: Any) -> Trace:
    """What the library records."""
    trace = Trace() if trace is None else trace
    model, _ = load_model(path)
    tokenizer = Tokenizer(path)
    generate(
        model, tokenizer, tokenizer.encode(prompt), SamplingParams(**{"max_new_tokens": STEPS} | params), trace=trace
    )
    return trace


def table_of(out: str) -> list[list[str]]:
    """The words of each step's line."""
    lines = out[out.index("\nstep ") + 1 :].split("\n\n")[0].splitlines()
    return [line.split() for line in lines[1:]]


class TestText:
    def test_text_then_table_then_strip(self, run: Run, folder: Path) -> None:
        plain = run("generate", "hello", *SHORT)
        done = run("trace", "hello", *SHORT)
        assert done.status == 0
        assert done.out.startswith(plain.out + "\nstep ")
        trace = traced(folder)
        assert [row[0] for row in table_of(done.out)] == [str(i + 1) for i in range(STEPS)]
        assert [row[2] for row in table_of(done.out)] == [f"{step.probability:.1%}" for step in trace.steps]
        assert [row[-1] for row in table_of(done.out)] == [str(step.cache_positions) for step in trace.steps]
        assert done.out.count("Attention when step") == 1
        assert f"Attention when step {STEPS} chose" in done.out
        assert "layers 0 to 2, heads 0 to 3, averaged" in done.out
        assert done.err.startswith("[5 prompt tokens, prefill 0.")
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(("columns", "width"), [(None, 100), ("60", 60), ("160", 160)])
    def test_width(self, run: Run, monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int) -> None:
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        out = run("trace", "hello " * 12, *SHORT).out
        picture = out[out.index("\nstep ") :].splitlines()
        assert width - 6 <= max(map(len, picture)) <= width
        assert "\x1b" not in out

    @pytest.mark.parametrize(("chosen", "steps"), [("last", [STEPS]), ("2", [2]), ("all", [*range(1, STEPS + 1)])])
    def test_show_step(self, run: Run, chosen: str, steps: list[int]) -> None:
        out = run("trace", "hello", *SHORT, "--show-step", chosen).out
        titles = [line.split() for line in out.splitlines() if line.startswith("Attention when")]
        assert [int(title[3]) for title in titles] == steps

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ([], "layers 0 to 2, heads 0 to 3, averaged"),
            (["--layers", "0,-1"], "layers 0 and 2, heads 0 to 3, averaged"),
            (["--heads", "3,1"], "layers 0 to 2, heads 1 and 3, averaged"),
            (["--layers", "-1", "--heads", "0"], "layer 2, head 0, to"),
            (["--show-layer", "-2"], "layer 1, heads 0 to 3, averaged"),
            (["--show-layer", "1", "--show-head", "2"], "layer 1, head 2, to"),
        ],
    )
    def test_layers_and_heads(self, run: Run, options: list[str], words: str) -> None:
        out = run("trace", "hello", *SHORT, *options).out
        assert f"attention of {words}" in " ".join(out.split())

    def test_one_token_of_a_default_run(self, run: Run) -> None:
        assert len(table_of(run("trace", "hello", "--max-new-tokens", "1").out)) == 1
        assert len(table_of(run("trace", "hello", "--ignore-eos").out)) == 32


class TestJson:
    def test_all_but_the_rows(self, run: Run, folder: Path) -> None:
        done = run("trace", "hello", *SHORT, "--json")
        output = json.loads(done.out)
        plain = json.loads(run("generate", "hello", *SHORT, "--json").out)
        assert (done.status, done.out.count("\n")) == (0, 1)
        assert list(output) == [*plain, "layers", "heads", "steps"]
        assert [output[key] for key in ("model", "token_ids", "text")] == [
            plain[key] for key in ("model", "token_ids", "text")
        ]
        assert (output["layers"], output["heads"]) == (LAYERS, HEADS)
        trace = traced(folder)
        for step, line in zip(output["steps"], list(json_lines(trace))[1:], strict=True):
            looks = step.pop("looked_at")
            assert [look.keys() for look in looks] == [{"position", "token_id", "text", "weight"}] * 3
            assert step.pop("time_s") > 0
            assert step == {key: value for key, value in line.items() if key not in ("step", "attention", "time_s")}

    def test_looks_of_a_layer_and_head(self, run: Run, folder: Path) -> None:
        output = json.loads(run("trace", "hello", *SHORT, "--json", "--show-layer", "2", "--show-head", "-1").out)
        last = traced(folder).steps[-1].attention[2].weights[3]
        best = 1 + np.argsort(-last[1:], kind="stable")[:3]
        assert [look["position"] for look in output["steps"][-1]["looked_at"]] == best.tolist()

    def test_alternatives(self, run: Run) -> None:
        output = json.loads(run("trace", "hello", *SHORT, "--json", "--alternatives", "3", "--top-k", "50").out)
        assert [len(step["alternatives"]) for step in output["steps"]] == [3] * STEPS

    def test_sampling(self, run: Run) -> None:
        options = ("hello", *SHORT, "--temperature", "1", "--seed", "3", "--json")
        output = json.loads(run("trace", *options).out)
        assert output["token_ids"] == json.loads(run("generate", *options).out)["token_ids"]

    def test_prompts(self, run: Run, folder: Path, thinker: Path) -> None:
        """As a chat, and from standard input, as for `generate`."""
        options = ("--chat", "--system", "Be kind", "--no-thinking")
        output = json.loads(run("trace", "hello", *options, *SHORT, "--json", model=thinker).out)
        messages = (("system", "Be kind"), ("user", "hello"))
        assert output["prompt_token_ids"] == chat_ids(thinker, *messages, enable_thinking=False)
        output = json.loads(run("trace", "-", *SHORT, "--json", stdin="from a pipe").out)
        assert output["prompt_token_ids"] == Tokenizer(folder).encode("from a pipe")

    def test_no_kv_cache(self, run: Run, passes: list[int]) -> None:
        expected = json.loads(run("trace", "hello", *SHORT, "--json").out)
        passes.clear()
        output = json.loads(run("trace", "hello", *SHORT, "--json", "--no-kv-cache").out)
        assert passes == [5 + i for i in range(STEPS)]
        assert output["token_ids"] == expected["token_ids"]
        assert [step["cache"] for step in output["steps"]] == [{"positions": 0, "bytes": 0}] * STEPS
        assert [step["cache"]["positions"] for step in expected["steps"]] == [5 + i for i in range(STEPS)]

    def test_prefill_chunk_and_windows(self, run: Run, windowed: Path, passes: list[int]) -> None:
        args = ("trace", "x" * 40, *SHORT, "--json", "--prefill-chunk", "16")
        output = json.loads(run(*args, model=windowed).out)
        assert passes == [16, 16, 9] + [1] * (STEPS - 1)
        assert output["token_ids"] == [step.token_id for step in traced(windowed, "x" * 40).steps]


class TestOnFull:
    ARGS = ("x" * (CONTEXT - 4), "--max-new-tokens", "12", "--json", "--ignore-eos")

    @pytest.mark.parametrize("command", ["generate", "trace"])
    def test_recompute(self, run: Run, command: str, passes: list[int]) -> None:
        """Beyond the context the last tokens are fed anew; the tokens are those of a run without a cache."""
        expected = json.loads(run("generate", *self.ARGS, "--on-full", "recompute", "--no-kv-cache").out)
        passes.clear()
        output = json.loads(run(command, *self.ARGS, "--on-full", "recompute").out)
        prompt = len(output["prompt_token_ids"])
        helped = CONTEXT - prompt
        assert passes == [prompt] + [1] * helped + [CONTEXT] * (11 - helped)
        assert output["token_ids"] == expected["token_ids"]
        assert output["cache_memory_bytes"] == CONTEXT * CACHE_BYTES_PER_TOKEN
        if command == "trace":
            filled = [step["cache"]["positions"] for step in output["steps"]]
            assert filled == [*range(prompt, CONTEXT + 1)] + [0] * (11 - helped)

    def test_compare(self, run: Run) -> None:
        output = json.loads(run("generate", *self.ARGS, "--on-full", "recompute", "--compare").out)
        assert output["without_kv_cache"]["same_tokens"] is True

    def test_a_prompt_beyond_the_context(self, run: Run) -> None:
        done = run("trace", "x" * (CONTEXT + 20), *SHORT, "--on-full", "recompute")
        assert done.status == 0
        assert len(table_of(done.out)) == STEPS

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize("command", ["generate", "trace"])
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "positions exceed the model's context of 256"),
            (["--on-full", "error"], "positions exceed the model's context of 256"),
            (["--on-full", "slide"], "on_full must be one of error, recompute, not 'slide'"),
        ],
    )
    def test_refused(self, run: Run, command: str, options: list[str], message: str) -> None:
        assert_refused(run(command, *self.ARGS, *options), message)


class TestFiles:
    def test_saved(self, run: Run, folder: Path, tmp_path: Path) -> None:
        lines, arrays, page = (tmp_path / f"trace.{suffix}" for suffix in ("jsonl", "npz", "html"))
        options = ("--save", lines, "--save", arrays, "--html", page)
        done = run("trace", "hello", *SHORT, *options, "--layers", "0,2", "--heads", "1")
        assert done.status == 0
        assert done.err == f"wrote {lines}\nwrote {arrays}\nwrote {page}: {page.as_uri()}\n"
        trace = traced(folder, trace=Trace([0, 2], [1]))
        token_ids = [step.token_id for step in trace.steps]

        head, *steps = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
        assert (head["model"], head["layers"], head["heads"]) == (str(folder), [0, 2], [1])
        assert [step["token_id"] for step in steps] == token_ids

        with np.load(arrays) as saved:
            assert saved["token_ids"].tolist() == token_ids
            assert {name for name in saved if name.startswith("attention_")} == {"attention_0", "attention_2"}
            np.testing.assert_array_equal(saved["attention_2"][-1], trace.steps[-1].attention[2].weights)
        assert "<html" in page.read_text(encoding="utf-8")

    def test_a_file_that_cannot_be_written(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The run is shown, and whatever else can be is written."""
        save = Trace.save

        def full(trace: Trace, path: Path) -> None:
            if path.suffix == ".npz":
                raise OSError("no space left")
            save(trace, path)

        monkeypatch.setattr(Trace, "save", full)
        arrays, page = tmp_path / "trace.npz", tmp_path / "trace.html"
        done = run("trace", "hello", *SHORT, "--save", arrays, "--html", page, "--table")
        assert done.status == 2
        assert len(table_of(done.out)) == STEPS
        assert f"wrote {page}" in done.err
        assert done.err.endswith(f"error: {arrays} could not be written: no space left\n")
        assert page.exists()

    def test_with_json(self, run: Run, tmp_path: Path) -> None:
        """Standard output is the object, and nothing else."""
        file = tmp_path / "trace.jsonl"
        done = run("trace", "hello", *SHORT, "--json", "--save", file)
        assert len(json.loads(done.out)["steps"]) == STEPS == len(file.read_text().splitlines()) - 1


class TestPage:
    """With --html a run prints one line: where the page is."""

    @pytest.mark.parametrize(
        ("options", "fragment"),
        [
            ([], ""),
            (["--show-step", "2"], "#step=2"),
            (["--show-step", "last", "--show-layer", "-1"], "#layer=2"),
            (["--show-step", "6", "--show-layer", "1", "--show-head", "-1"], "#step=6&layer=1&head=3"),
        ],
    )
    def test_one_line(self, run: Run, tmp_path: Path, options: list[str], fragment: str) -> None:
        page = tmp_path / "a page.html"
        done = run("trace", "hello", *SHORT, "--html", page, *options)
        assert (done.status, done.out) == (0, "")
        assert done.err == f"wrote {page}: {page.as_uri()}{fragment}\n"

    def test_table(self, run: Run, tmp_path: Path) -> None:
        page = tmp_path / "run.html"
        done = run("trace", "hello", *SHORT, "--html", page, "--table")
        assert done.out == run("trace", "hello", *SHORT).out
        assert done.err.startswith(f"wrote {page}: ")

    def test_a_page_that_cannot_be_written(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(trace: Trace, path: Path) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(Trace, "save", full)
        done = run("trace", "hello", *SHORT, "--html", tmp_path / "run.html")
        assert done.status == 2
        assert "wrote" not in done.err
        assert done.err.endswith("could not be written: no space left\n")

    def test_repeated(self, run: Run, tmp_path: Path) -> None:
        pages = tmp_path / "run.html", tmp_path / "again.html"
        run("trace", "hello", *SHORT, "--html", pages[0])
        done = run("trace", "--from", pages[0], "--html", pages[1], model=None)
        assert (done.status, done.out) == (0, "")
        assert done.err.splitlines()[1:] == [
            f"wrote {pages[1]}: {pages[1].as_uri()} · the same {STEPS} tokens as in {pages[0]}"
        ]


class TestPromptRows:
    def test_the_last_tokens(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "trace.jsonl"
        for options, kept in [((), 4), (("--prompt-rows", "2"), 2), (("--prompt-rows", "0"), 0)]:
            assert run("trace", "hello", *SHORT, "--save", file, *options).status == 0
            prompt = json.loads(file.read_text().splitlines()[0])["prompt"]
            assert ["probability" in token for token in prompt] == [False] * (len(prompt) - kept) + [True] * kept

    def test_refused(self, run: Run) -> None:
        assert run("trace", "hello", "--prompt-rows", "-1").status == 2


class TestFrom:
    """A page's run again."""

    SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--layers", "0,2", "--heads", "1", "--alternatives", "3")

    @pytest.fixture
    def page(self, run: Run, tmp_path: Path) -> Path:
        page = tmp_path / "run.html"
        assert run("trace", "hello", *SHORT, *self.SAMPLED, "--html", page).status == 0
        return page

    def again(self, run: Run, page: Path, *options: Any) -> tuple[Any, Any]:
        """The run as JSON, and what was said. Without the --model that `run` adds."""
        done = run("trace", "--from", page, "--json", *options, model=None)
        return json.loads(done.out) if done.out else None, done

    def test_the_same_tokens(self, run: Run, page: Path, folder: Path, tmp_path: Path) -> None:
        """The seed, which nobody gave, is the page's."""
        file = tmp_path / "again.html"
        output, done = self.again(run, page, "--html", file)
        saved, repeated = read_page(page), read_page(file)
        assert done.status == 0
        assert done.err.startswith(f"repeating {page} with {folder}\n")
        assert f"the same {STEPS} tokens as in {page}" in done.err
        assert output["same_tokens"] is True
        assert output["from"] == str(page)
        assert (repeated.tokens, repeated.prompt) == (saved.tokens, saved.prompt)
        assert repeated.settings == saved.settings
        assert (repeated.layers, repeated.heads) == ([0, 2], [1])
        assert saved.settings["prompt"] == "hello"
        assert saved.settings["params"]["temperature"] == 0.9

    def test_options_beside_it(self, run: Run, page: Path) -> None:
        saved = read_page(page)
        output, done = self.again(run, page, "--max-new-tokens", "3", "--layers", "1", "--no-kv-cache")
        assert done.status == 0
        assert f"the same first 3 tokens as in {page}, which has {STEPS}" in done.err
        assert [step["token_id"] for step in output["steps"]] == saved.tokens[:3]
        assert output["layers"] == [1]
        output, done = self.again(run, page, "--seed", "1", "--temperature", "1.5")
        assert done.status == 0, "with other settings, other tokens are no failure"
        assert output["same_tokens"] is False
        assert f"DIFFERENT tokens than in {page} from step" in done.err

    def test_another_prompt(self, run: Run, page: Path, folder: Path) -> None:
        for options, text in [((), "bye"), (("--chat",), chat_ids(folder, ("user", "bye")))]:
            done = run("trace", "bye", "--from", page, "--json", *options, model=None)
            ids = Tokenizer(folder).encode(text) if isinstance(text, str) else text
            assert json.loads(done.out)["prompt_token_ids"] == ids
        output, _ = self.again(run, page, "--chat")
        assert output["prompt_token_ids"] == chat_ids(folder, ("user", "hello"))

    def test_a_chat(self, run: Run, folder: Path, tmp_path: Path) -> None:
        page = tmp_path / "chat.html"
        run("trace", "hello", *SHORT, "--chat", "--system", "be kind", "--html", page)
        output, _ = self.again(run, page)
        assert output["same_tokens"] is True
        assert output["prompt_token_ids"] == read_page(page).prompt
        assert read_page(page).settings["system"] == "be kind"

    def test_from_a_pipe(self, run: Run, tmp_path: Path) -> None:
        page = tmp_path / "piped.html"
        run("trace", "-", *SHORT, "--html", page, stdin="from a pipe")
        assert read_page(page).settings["prompt"] == "from a pipe"
        assert self.again(run, page)[0]["same_tokens"] is True

    def test_other_tokens_are_a_failure(self, run: Run, page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        token = read_page(page).tokens[2]
        page.write_text(text.replace(f'"id":{token},', f'"id":{token + 1},'), encoding="utf-8")
        output, done = self.again(run, page, "--layers", "1")
        assert done.status == 1
        assert output["same_tokens"] is False
        assert f"DIFFERENT tokens than in {page} from step" in done.err

    def test_a_page_from_python(self, run: Run, folder: Path, tmp_path: Path) -> None:
        """It does not know where its model came from."""
        page = tmp_path / "python.html"
        traced(folder, temperature=0.8).save(page)
        assert_refused(self.again(run, page)[1], f"{page} does not say which model it ran: give it with --model")
        output, done = self.again(run, page, "--model", folder)
        assert done.status == 0
        assert output["same_tokens"] is True
        done = run("trace", "--from", page, "--chat", "--model", folder, model=None)
        assert_refused(done, f"{page} holds only the tokens of its prompt: give the prompt as well")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b"", "it holds no trace"),
            (b"<html></html>", "it holds no trace"),
            (b"\xff\xfe", "it is not UTF-8 text"),
            (b'<script type="application/json" id="data">{</script>', "its data is not valid JSON"),
            (b'<script type="application/json" id="data">[1]</script>', "it has no settings"),
            (b'<script type="application/json" id="data">{"settings": {}}</script>', "it has no settings"),
            (b'<script type="application/json" id="data">{"settings": {"params": 1}}</script>', "another form"),
            (b'<script type="application/json" id="data">' + b"[" * 99999 + b"</script>", "another form"),
        ],
    )
    def test_no_page(self, run: Run, tmp_path: Path, text: bytes, reason: str) -> None:
        page = tmp_path / "no.html"
        page.write_bytes(text)
        done = self.again(run, page)[1]
        assert_refused(done, f"{page} is not a page of a trace that can be repeated: ")
        assert reason in done.err

    def test_no_file(self, run: Run, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nowhere.html"):
            assert_refused(self.again(run, path)[1], f"there is no file {path} to repeat a run from")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"params": {"temperature": -1, "logit_bias": {}}}, "temperature must be 0 or more, not -1"),
            ({"params": {"warmth": 1, "logit_bias": {}}}, "unexpected keyword argument 'warmth'"),
            ({"model": 5}, "model is 5"),
            ({"chat": "yes"}, "chat is 'yes'"),
            ({"quantize": "int3"}, "quantize must be one of auto, int4, int8"),
            ({"top_k": None}, "top_k is None"),
        ],
    )
    def test_settings_that_are_none(self, run: Run, page: Path, change: dict[str, Any], reason: str) -> None:
        text = page.read_text(encoding="utf-8")
        settings = read_page(page).settings
        before = json.dumps(settings, separators=(",", ":"))
        assert before in text
        page.write_text(text.replace(before, json.dumps(settings | change)), encoding="utf-8")
        assert_refused(self.again(run, page)[1], reason)

    def test_no_prompt(self, run: Run) -> None:
        assert_refused(
            run("trace"), "there is no prompt: give one, or pipe one to standard input, or a page to repeat with --from"
        )


class TestSpeculate:
    @pytest.fixture(autouse=True)
    def _always_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As many as possible, whatever they cost."""
        monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))

    def test_changes_no_number(self, run: Run) -> None:
        args = ("trace", "hello " * 4, "--max-new-tokens", "40", "--ignore-eos", "--json")
        plain, output = (json.loads(run(*args, *options).out) for options in ((), ("--speculate", "ngram")))
        drafted = [step.pop("drafted") for step in output["steps"]]
        assert sum(drafted) == output["accepted"] > 0
        assert sum([step.pop("drafted") for step in plain["steps"]]) == 0
        for step in (*plain["steps"], *output["steps"]):
            del step["time_s"]
        assert output["steps"] == plain["steps"]

    def test_a_page_is_repeated_with_and_without(self, run: Run, tmp_path: Path) -> None:
        page = tmp_path / "run.html"
        options = ("--max-new-tokens", "40", "--ignore-eos", "--speculate", "ngram")
        assert run("trace", "hello " * 4, *options, "--html", page).status == 0
        assert '"drafted":true' in page.read_text(encoding="utf-8")
        for more in ((), ("--speculate", "ngram")):
            done = run("trace", "--from", page, *more, "--json", model=None)
            assert (done.status, json.loads(done.out)["same_tokens"]) == (0, True)
            assert ("drafted" in json.loads(done.out)) == bool(more)

    def test_the_table(self, run: Run) -> None:
        done = run("trace", "hello " * 4, "--max-new-tokens", "40", "--ignore-eos", "--speculate", "ngram")
        assert [int(row[0]) for row in table_of(done.out)] == [*range(1, 41)]
        assert any(row[0].startswith("+") for row in table_of(done.out))
        assert "right" in done.err


class TestInterrupt:
    @pytest.fixture
    def interrupt_after(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        """Ctrl-C when so many tokens have been printed, in the middle of the next step."""

        def install(count: int) -> None:
            stream = engine.stream

            def interrupted(*args: Any, **options: Any) -> Iterator[GeneratedToken]:
                for i, token in enumerate(stream(*args, **options)):
                    if i == count:
                        raise KeyboardInterrupt
                    yield token

            monkeypatch.setattr(engine, "stream", interrupted)

        return install

    def test_what_was_traced_is_shown_and_saved(
        self, run: Run, tmp_path: Path, interrupt_after: Callable[[int], None]
    ) -> None:
        file = tmp_path / "trace.jsonl"
        interrupt_after(4)
        done = run("trace", "hello", *SHORT, "--save", file)
        assert done.status == 130
        assert len(table_of(done.out)) == 4
        assert len(file.read_text().splitlines()) == 1 + 4
        assert "interrupted" in done.err

    def test_json(self, run: Run, interrupt_after: Callable[[int], None]) -> None:
        interrupt_after(4)
        done = run("trace", "hello", *SHORT, "--json")
        output = json.loads(done.out)
        assert (done.status, output["finish_reason"]) == (130, "interrupted")
        assert [step["token_id"] for step in output["steps"]] == output["token_ids"]

    def test_before_the_first_token(self, run: Run, tmp_path: Path, interrupt_after: Callable[[int], None]) -> None:
        interrupt_after(0)
        done = run("trace", "hello", *SHORT, "--save", tmp_path / "trace.jsonl")
        assert (done.status, done.out.strip()) == (130, "")
        assert not list(tmp_path.iterdir())


# Options of `infer trace hi` and what the message must say; MISSING stands for a path.
REFUSED: dict[str, tuple[list[str], str]] = {
    "table and json": (["--table", "--json"], "--table and --json both print the steps"),
    "no such layer": (["--layers", "0,3"], "there is no layer 3 to trace: the model has layers 0 to 2"),
    "no such layer from the end": (["--layers", "-4"], "there is no layer -4 to trace"),
    "no such head": (["--heads", "4"], "there is no head 4 to trace: the model has heads 0 to 3"),
    "layers in words": (["--layers", "first"], "--layers must be all, or numbers like 0,5,-1, not 'first'"),
    "no layers": (["--layers", ""], "--layers must be all, or numbers like 0,5,-1, not ''"),
    "heads in words": (["--heads", "0,"], "--heads must be all, or numbers like 0,5,-1, not '0,'"),
    "no such layer to show": (["--show-layer", "3"], "there is no layer 3 to trace"),
    "a layer to show that is not traced": (
        ["--layers", "0,2", "--show-layer", "1"],
        "--show-layer 1 is not traced: --layers are 0, 2",
    ),
    "no such head to show": (["--show-head", "-5"], "--show-head -5 is not traced: --heads are 0, 1, 2, 3"),
    "no such step": (["--show-step", "0"], "--show-step must be a step from 1 on, last or all, not '0'"),
    "a step in words": (["--show-step", "first"], "--show-step must be a step from 1 on, last or all, not 'first'"),
    "no alternatives": (["--alternatives", "0"], "--alternatives must be 1 or more, up to 2,147,483,648, not 0"),
    "unknown suffix": (["--save", "trace.csv"], "a trace is saved as .jsonl, .npz or .html, not as 'trace.csv'"),
    "page of another suffix": (["--html", "page.npz"], "that ends in .html, not 'page.npz'"),
    "missing folder": (["--save", "MISSING/trace.npz"], "there is no folder"),
    "a step that cannot be": (["--show-step", "99"], "--show-step 99 is beyond the 32 steps"),
    "missing folder of a page": (["--html", "MISSING/trace.html"], "there is no folder"),
    "chunks without a cache": (["--prefill-chunk", "4", "--no-kv-cache"], "--prefill-chunk needs the cache"),
    "system without chat": (["--system", "Be kind"], "--system and --thinking need --chat"),
    "overflow": (["--max-new-tokens", "300"], "exceed the model's context of 256"),
    "negative temperature": (["--temperature", "-1"], "temperature must be 0 or more"),
    "unknown dtype": (["--dtype", "int3"], "unknown dtype 'int3'"),
}


@pytest.mark.usefixtures("untouched")
class TestRefused:
    """Before weights are touched, in one line, with exit status 2, and leaving no file behind."""

    @pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
    def test_refused(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        options = [option.replace("MISSING", str(tmp_path / "missing")) for option in options]
        assert_refused(run("trace", "hi", *options), message)
        assert not list(tmp_path.iterdir())

    def test_onto_a_folder(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "trace.npz").mkdir()
        assert_refused(run("trace", "hi", "--save", tmp_path / "trace.npz"), "is a folder")

    def test_more_rows_than_memory(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record, "available_memory", lambda device, processes=1: 1000)
        assert_refused(run("trace", "hi"), "trace fewer layers or heads")


@pytest.mark.parametrize(
    ("count", "most", "chosen"),
    [(30, 4, [0, 9, 19, 29]), (18, 4, [0, 5, 11, 17]), (4, 4, [0, 1, 2, 3]), (3, 4, [0, 1, 2]), (1, 4, [0])],
)
def test_spread(count: int, most: int, chosen: list[int]) -> None:
    assert spread(count, most) == chosen


@pytest.mark.parametrize(
    ("text", "chosen"), [("last", [4]), ("all", [0, 1, 2, 3, 4]), ("1", [0]), ("5", [4]), ("9", [4])]
)
def test_parse_step(text: str, chosen: list[int]) -> None:
    """Of a run that ended after 5 of 9 steps."""
    assert parse_step(text, 9, 5) == chosen
