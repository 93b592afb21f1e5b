"""`infer generate --prompts`: many prompts at once, each as it would be alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from terminal import FRAMES, Terminal

from infer import SamplingParams, Tokenizer, generate, load_model

pytestmark = pytest.mark.usefixtures("plain_machine")
FEW = ["--max-new-tokens", "4"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def written(file: Path, *lines: Any) -> str:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


def outputs(done: Any) -> list[dict[str, Any]]:
    return sorted(map(json.loads, done.out.splitlines()), key=lambda each: (each["index"], each.get("sample", 0)))


def alone(folder: Path, prompt: str, **settings: Any) -> tuple[list[int], str, str]:
    params = SamplingParams(**{"max_new_tokens": 4} | settings)
    result = generate(load_model(folder)[0], Tokenizer(folder), Tokenizer(folder).encode(prompt), params)
    return result.token_ids, result.text, result.finish_reason


def outcome(output: dict[str, Any]) -> tuple[list[int], str, str]:
    return output["token_ids"], output["text"], output["finish_reason"]


def test_each_as_it_is_alone(run: Run, folder: Path, file: Path) -> None:
    own = {"temperature": 1.0, "seed": 3, "max_new_tokens": 6}
    written(file, "hello", {"prompt": "hello there", "id": "b", **own}, {"prompt": "hello"})
    done = run("generate", "--prompts", str(file), *FEW)
    assert done.status == 0
    found = outputs(done)
    assert [each.get("id") for each in found] == [None, "b", None]
    assert [each["prompt"] for each in found] == ["hello", "hello there", "hello"]
    timing = {"prefill_time_s", "queue_time_s", "decode_time_s", "decode_tokens_per_s"}  # totals, no time of each step
    assert all(each["timing"].keys() == timing for each in found)
    assert [outcome(each) for each in found] == [
        alone(folder, "hello"),
        alone(folder, "hello there", **own),
        alone(folder, "hello"),
    ]
    assert "3 of 3 prompts, 14 new tokens" in done.err


def test_standard_input_and_plain_text(run: Run, folder: Path, tmp_path: Path) -> None:
    done = run("generate", "--prompts", "-", *FEW, stdin='"hello"\n\n{"prompt": "you"}\n')
    assert [outcome(each) for each in outputs(done)] == [alone(folder, "hello"), alone(folder, "you")]
    plain = tmp_path / "prompts.txt"
    plain.write_text('hello\n12\n"quoted"\n')
    done = run("generate", "--prompts", str(plain), *FEW)
    assert [outcome(each) for each in outputs(done)] == [alone(folder, text) for text in ("hello", "12", "quoted")]


def test_chats(run: Run, file: Path) -> None:
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "hello"}]
    written(file, {"messages": messages}, "hello")
    done = run("generate", "--prompts", str(file), "--chat", "--system", "Be kind", *FEW)
    first, second = outputs(done)
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert (first["messages"], second["prompt"]) == (messages, "hello")
    assert outcome(first) == outcome(second)


def test_samples_and_log_probabilities(run: Run, folder: Path, file: Path) -> None:
    options = ["--n", "2", "--temperature", "1", "--seed", "3", "--logprobs", "1", *FEW]
    done = run("generate", "--prompts", written(file, "hello"), *options)
    first, second = outputs(done)
    assert (first["sample"], second["sample"]) == (0, 1)
    assert outcome(first) == alone(folder, "hello", temperature=1.0, seed=3)
    assert outcome(second) == alone(folder, "hello", temperature=1.0, seed=second["seed"])
    assert first["token_ids"] != second["token_ids"]
    assert [each["token_id"] for each in first["logprobs"]] == first["token_ids"]
    assert all(each["logprob"] <= 0 and len(each["top"]) == 1 for each in first["logprobs"])


def test_one_that_fails(run: Run, folder: Path, file: Path) -> None:
    """The others are generated all the same."""
    written(file, "hello", {"prompt": "hello", "max_new_tokens": 10**6}, "hello")
    done = run("generate", "--prompts", str(file), *FEW)
    assert done.status == 1
    found = outputs(done)
    assert "exceed the model's context" in found[1]["error"]
    assert found[1]["prompt"] == "hello"
    assert [outcome(found[i]) for i in (0, 2)] == [alone(folder, "hello")] * 2
    assert "2 of 3 prompts" in done.err


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no prompts in"),
        ("\n \n", "there are no prompts in"),
        ("hello", "line 1 is not JSON (text needs quotes"),
        ('{"prompt": "a", "max_tokens": 3}', "there is no setting 'max_tokens': did you mean max_new_tokens?"),
        ('"hello"\n{', "line 2 is not JSON"),
        ("3", "line 1 is neither text nor an object with a prompt: 3"),
        ('{"text": "hello"}', 'line 1 needs either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 1 needs either "prompt" or "messages"'),
        ('{"prompt": ["a"]}', "line 1: the prompt must be text"),
        ('{"messages": []}', "line 1: messages must be a list of objects"),
        ('{"prompt": "a", "colour": 1}', "line 1: there is no setting 'colour'"),
        ('{"prompt": "a", "temperature": "hot"}', "line 1: temperature must be"),
        ('{"prompt": "a", "stop": [""]}', "line 1: a stop string must be"),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_refused_before_the_weights_are_read(run: Run, file: Path, text: str, message: str) -> None:
    file.write_text(text)
    done = run("generate", "--prompts", str(file))
    assert (done.status, done.out) == (2, "")
    assert message in done.err


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["hello"], "both given"),
        (["--compare"], "need a single prompt"),
        (["--no-kv-cache"], "need a single prompt"),
        (["--on-full", "recompute"], "need a single prompt"),
        (["--system", "Be kind"], "need --chat"),
        (["--prefill-chunk", "0"], "prefill_chunk must be"),
        (["--cache-dtype", "int3"], "--cache-dtype must be"),
    ],
)
def test_options_that_do_not_go_together(run: Run, file: Path, options: Sequence[str], message: str) -> None:
    done = run("generate", *options, "--prompts", written(file, "hello"))
    assert done.status == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is no prompt: give one, or pipe one to standard input, or a file of prompts with --prompts"),
        (["hello", "--n", "2"], "need --prompts"),
        (["hello", "--prompt-logprobs", "0", "--json"], "need --prompts"),
        (["hello", "--logprobs", "2"], "--logprobs needs --json"),
        (["--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
    ],
)
def test_without_them(run: Run, options: Sequence[str], message: str) -> None:
    done = run("generate", *options)
    assert done.status == 2
    assert message in done.err


COMPILES = f"""{FRAMES}
from infer import progress
from infer.engine import runner
run = runner.Runner._run_pass
def slow_run(self, backend, fed):
    if len(fed[0][1]) > 1:
        with progress.compiling("attend"):
            next_frame()
    next_frame()
    return run(self, backend, fed)
runner.Runner._run_pass = slow_run
"""


def test_on_a_terminal(folder: Path, file: Path) -> None:
    """One line says what one waits for, the prompts or a kernel; it is erased before each result."""
    written(file, "hello", {"prompt": "hello there", "max_new_tokens": 8})
    command = ("generate", "--prompts", file, *FEW, "--model", folder)
    with Terminal(*command, code=COMPILES, INFER_KERNELS="0") as terminal:
        assert terminal.ended() == 0
    *shown, end = terminal.raw.split("\r\n")
    assert end == ""
    drawn = [each.split("\x1b[K") for each in shown]
    texts = [parts.pop() for parts in drawn]
    assert [json.loads(text)["index"] for text in texts[:-1]] == [0, 1]
    assert "2 of 2 prompts" in texts[-1]
    for parts in drawn[:2]:
        assert parts.pop() == "\r"  # erased
    lines = [part for parts in drawn for part in parts]
    assert any(line.startswith("\rcompiling a kernel, once: attend ") for line in lines)
    assert any(line.startswith("\rprompts ") and line.endswith(" 0/2") for line in lines)
    assert any(line.startswith("\rprompts ") and " 1/2, " in line and line.endswith(" tok/s") for line in lines)
