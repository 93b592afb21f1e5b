"""How commands sample: as the user says, else as the model's files do, else greedily; a chat in a way of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_tokenizer_metadata, reference_model, save_gguf
from commands import CONTEXT, TEMPLATE, Run, assert_refused
from terminal import Terminal

from infer import SamplingParams
from infer.cli.sampling import CHAT, Settings, resolve
from infer.loader.checkpoint import SAMPLING_KINDS
from infer.loader.find import open_checkpoint

pytestmark = pytest.mark.usefixtures("plain_machine")

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
Make = Callable[..., Path]


@pytest.fixture
def with_settings(folder: Path, tmp_path: Path) -> Make:
    """The tiny model, with such a generation_config.json."""

    def make(text: str | None = None, **values: Any) -> Path:
        model = tmp_path / "model"
        if not model.exists():
            shutil.copytree(folder, model)
        (model / "generation_config.json").write_text(json.dumps(values) if text is None else text)
        return model

    return make


@pytest.fixture
def gguf_with(tmp_path: Path) -> Make:
    """The same model as a GGUF file, with such metadata."""

    def make(**values: Any) -> Path:
        metadata = byte_tokenizer_metadata() | {"tokenizer.chat_template": TEMPLATE}
        metadata |= {f"general.sampling.{name}": value for name, value in values.items()}
        return save_gguf(reference_model(max_position_embeddings=CONTEXT), tmp_path / "tiny.gguf", metadata=metadata)

    return make


def asked(**values: Any) -> Settings:
    return Settings(SamplingParams(**values), {name: f"--{name.replace('_', '-')}" for name in values})


def test_a_folder(with_settings: Make) -> None:
    model = with_settings(do_sample=True, **OWN, max_new_tokens=7, eos_token_id=2)
    assert resolve(str(model), asked()).params == SamplingParams(**OWN)
    assert resolve(str(model), asked(), CHAT, "a chat's").params == SamplingParams(**OWN)  # nothing is mixed in
    mine = resolve(str(model), asked(temperature=0.1, top_k=0))
    assert mine.params == SamplingParams(**OWN | {"temperature": 0.1, "top_k": 0})
    assert str(mine) == (
        "temperature 0.1 (--temperature), top_k 0 (--top-k), "
        "top_p 0.95, min_p 0.01, repetition_penalty 1.05 (generation_config.json)"
    )


def test_a_gguf_file(gguf_with: Make) -> None:
    """Its floats have 32 bits."""
    model = gguf_with(temp=0.6, top_k=20, top_p=0.95, min_p=0.01, penalty_repeat=1.05, mirostat=2)
    assert open_checkpoint(model).sampling_defaults() == (OWN, "tiny.gguf", ())
    assert open_checkpoint(gguf_with(top_p=0.5)).sampling_defaults().values == {}


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.6}, {"do_sample": False, **OWN}, {"do_sample": True}, {"do_sample": True, "temperature": 0}],
)
def test_greedy_unless_the_files_ask_for_sampling(with_settings: Make, values: dict[str, Any]) -> None:
    model = str(with_settings(**values))
    assert resolve(model, asked()) == Settings(SamplingParams(), {})
    chat = resolve(model, asked(top_p=0.5), CHAT, "a chat's")
    assert chat.params == SamplingParams(**CHAT | {"top_p": 0.5})
    assert chat.sources == dict.fromkeys(CHAT, "a chat's") | {"top_p": "--top-p"}
    assert resolve(model, asked(temperature=0.0), CHAT).params == SamplingParams()


def test_generating_so(run: Run, folder: Path, with_settings: Make, gguf_with: Make) -> None:
    args = ("generate", "hello", "--seed", "3", "--max-new-tokens", "12", "--json")
    given = [part for name, value in OWN.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    expected = json.loads(run(*args, *given).out)["token_ids"]
    greedy = json.loads(run(*args).out)["token_ids"]
    assert expected != greedy
    model = with_settings(do_sample=True, **OWN)
    done = run(*args, model=model)
    assert json.loads(done.out)["token_ids"] == expected
    assert done.err.count("\n") == 1  # on a terminal alone it would say so
    assert (
        json.loads(run(*args, "--temperature", "0", "--repetition-penalty", "1", model=model).out)["token_ids"]
        == greedy
    )
    file = gguf_with(temp=0.6, top_k=20, top_p=0.95, min_p=0.01, penalty_repeat=1.05)
    assert json.loads(run(*args, model=file).out)["token_ids"] == expected


def test_many_prompts(run: Run, tmp_path: Path, with_settings: Make) -> None:
    """A line's own settings win, also where they are the usual ones."""
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('"hello"\n{"prompt": "hello", "temperature": 0, "repetition_penalty": 1}\n')
    model = with_settings(do_sample=True, **OWN)
    done = run("generate", "--prompts", lines, "--seed", "3", "--max-new-tokens", "12", model=model)
    found = {each["index"]: each["token_ids"] for each in map(json.loads, done.out.splitlines())}
    args = ("generate", "hello", "--seed", "3", "--max-new-tokens", "12", "--json")
    assert found[0] == json.loads(run(*args, model=model).out)["token_ids"]
    assert found[1] == json.loads(run(*args).out)["token_ids"]


HOSTILE = ["hot", True, [], {}, -1, float("nan"), float("inf"), 1e300, 10**400, "0.5"]


@pytest.mark.parametrize("name", SAMPLING_KINDS)
def test_values_that_are_none(with_settings: Make, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Each is left out, with a line that says so; the others hold."""
    for value in HOSTILE:
        model = with_settings(do_sample=True, **OWN | {name: value})
        params = resolve(str(model), asked()).params
        err = capsys.readouterr().err
        assert err.startswith(f"note: generation_config.json: {name} must be ")
        assert err.endswith("; it is ignored\n")
        assert err.count("\n") == 1
        others = {} if name == "temperature" else {other: OWN[other] for other in OWN if other != name}
        assert params == SamplingParams(**others)


def test_hostile_flags_and_files(run: Run, with_settings: Make, gguf_with: Make) -> None:
    args = ("generate", "hello", "--max-new-tokens", "2")
    done = run(*args, model=with_settings(do_sample="yes", **OWN))
    assert (done.status, done.err.count("do_sample must be true or false, not 'yes'; it is ignored")) == (0, 1)
    assert_refused(run(*args, model=with_settings("[1]")), "should hold a JSON object, not list")
    assert_refused(run(*args, model=with_settings('{"top_p": 1, "top_p": 2}')), "it has 'top_p' twice")
    done = run(*args, model=gguf_with(temp="hot", top_k=[1, 2]))
    assert done.status == 0
    assert "note: tiny.gguf: temperature must be from 0 to 100, not 'hot'; it is ignored" in done.err
    assert "note: tiny.gguf: top_k must be an integer" in done.err


def test_told_on_a_terminal(with_settings: Make) -> None:
    model = with_settings(do_sample=True, **OWN)
    args = ("generate", "hello", "--model", model, "--max-new-tokens", "2", "--top-k", "5")
    with Terminal(*args, INFER_KERNELS="0", columns=200) as terminal:
        told = terminal.until("]")
    assert told.endswith(
        "[sampling: temperature 0.6, top_p 0.95, min_p 0.01, repetition_penalty 1.05 (generation_config.json), "
        "top_k 5 (--top-k)]"
    )
