"""The command line in-process, on tiny models: fixtures and helpers that the tests of all commands share."""

from __future__ import annotations

import gc
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import byte_tokenizer, reference_model, save_folder
from torch import Tensor

from infer import KVCache, Tokenizer, render_chat_template
from infer.backend import Backend, Row
from infer.backend.cpu.backend import CpuBackend
from infer.backend.plain import TorchBackend
from infer.cli import main
from infer.loader import load
from infer.loader.gguf_file import GGUFFile
from infer.loader.hf_folder import HFFolder

# Templates may refuse a message, as some of the real ones do.
TEMPLATE = (
    "{% if messages[0].content == 'forbidden' %}{{ raise_exception('not that') }}{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CONTEXT = 256
CACHE_BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 4  # k and v, layers, kv heads, head_dim, float32
WINDOW = 16
WINDOWED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
THINKING_TEMPLATE = TEMPLATE + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a BOS token and a chat template."""
    path = save_folder(reference_model(max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("models") / "tiny")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="session")
def plain(folder: Path) -> Path:
    """The same without either."""
    path = folder.with_name("plain")
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").unlink()
    tokenizer = json.loads(byte_tokenizer().to_str())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    return path


@pytest.fixture(scope="session")
def windowed(folder: Path) -> Path:
    """The same with windows in two of three layers."""
    path = folder.with_name("windowed")
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    # SmolLM 3 is Llama with windows, if all layers have RoPE.
    config |= {"model_type": "smollm3", "layer_types": WINDOWED_LAYERS, "sliding_window": WINDOW}
    config |= {"no_rope_layers": [1] * len(WINDOWED_LAYERS)}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def thinker(folder: Path) -> Path:
    """The same with a switch for thinking in its template."""
    path = folder.with_name("thinker")
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return path


def note_passes(monkeypatch: pytest.MonkeyPatch, note: Callable[[list[int]], None]) -> None:
    """Tell of each pass how many tokens each of its rows is fed, whichever backend runs it."""
    for backend in (TorchBackend, CpuBackend):

        def noted(self: Backend, rows: Sequence[Row], run: Callable = backend.run) -> list[Tensor]:
            note([row.tokens.shape[1] if isinstance(row.tokens, Tensor) else len(row.tokens) for row in rows])
            return run(self, rows)

        monkeypatch.setattr(backend, "run", noted)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that will hold how many tokens each pass was fed, of all its rows together."""
    sizes: list[int] = []
    note_passes(monkeypatch, lambda counts: sizes.append(sum(counts)))
    return sizes


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that will hold how many tokens each row of each pass was fed."""
    counts: list[list[int]] = []
    note_passes(monkeypatch, counts.append)
    return counts


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run, "auto" is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(folder: Path, compiled: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the tiny model (or on `model`; None: it is not told which), with the given standard input."""

    def run_command(command: str, *args: str | Path, model: str | Path | None = folder, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        named = {name: [str(model)] for name in ("info", "verify", "perplexity")} | {"pull": [], "rm": [], "models": []}
        which = [] if model is None else named.get(command, ["--model", str(model)])
        capsys.readouterr()
        gc.disable()  # what is collected of other tests may write to stderr
        try:
            with pytest.raises(SystemExit) as exit_info:
                main([command, *which, *map(str, args)])
        finally:
            gc.enable()
        return Done(exit_info.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

    return run_command


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is taken for weights and none are read."""

    def fail(*args: Any, **options: Any) -> None:
        pytest.fail("the weights were touched")

    monkeypatch.setattr(load, "_materialize", fail)
    monkeypatch.setattr(HFFolder, "blocks", fail)
    monkeypatch.setattr(GGUFFile, "blocks", fail)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that loses its first position in every decode step."""
    store = KVCache._store

    def drop(cache: KVCache, layer_idx: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = store(cache, layer_idx, k, v)
        return (keys[:, :, 1:], values[:, :, 1:]) if k.shape[2] == 1 < keys.shape[2] else (keys, values)

    monkeypatch.setattr(KVCache, "_store", drop)
    monkeypatch.setattr(KVCache, "table", lambda *_: None)  # kernels would not ask `_store`


def chat_ids(folder: Path, *messages: tuple[str, str], **variables: Any) -> list[int]:
    tokenizer = Tokenizer(folder)
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.encode(render_chat_template(chat, tokenizer=tokenizer, **variables), add_special_tokens=False)


def assert_refused(done: Done, message: str) -> None:
    """One line that says what is wrong, on stderr alone."""
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.endswith("\n")
    assert done.err.count("\n") == 1
    assert message in done.err
