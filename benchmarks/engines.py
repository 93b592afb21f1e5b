"""The engines of `compare.py`: each generates from a prompt, and returns the tokens with their times."""

from __future__ import annotations

import ctypes
import io
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from infer import SamplingParams, Tokenizer, generate_batch, stream
from infer.models.common import Decoder


class Trial:
    """One generation: the tokens and the time of each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._moments = [time.perf_counter()]

    def add(self, token: int) -> None:
        self._moments.append(time.perf_counter())
        self.tokens.append(token)

    @property
    def prefill_s(self) -> float:
        return self._moments[1] - self._moments[0]

    @property
    def steps_s(self) -> list[float]:
        return [after - before for before, after in zip(self._moments[1:-1], self._moments[2:], strict=True)]


Engine = Callable[[list[int], int], Trial]  # prompt, number of tokens to generate


def infer_engine(model: Decoder, tokenizer: Tokenizer) -> Engine:
    def run(prompt: list[int], new_tokens: int) -> Trial:
        trial = Trial()
        for token in stream(model, tokenizer, prompt, SamplingParams(ignore_eos=True, max_new_tokens=new_tokens)):
            trial.add(token.token_id)
        return trial

    return run


class TrialStreamer(transformers.generation.BaseStreamer):
    """Receives the output of transformers' generate: first the prompt, then each token."""

    def __init__(self) -> None:
        self.trial = Trial()
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.trial.add(int(value))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def transformers_engine(model: Any, *, use_cache: bool = True) -> Engine:
    @torch.inference_mode()
    def run(prompt: list[int], new_tokens: int) -> Trial:
        ids = torch.tensor([prompt], device=model.device)
        # No eos id at all: forbidding it (min_new_tokens) would make these tokens differ from infer's.
        settings = transformers.GenerationConfig(
            do_sample=False, use_cache=use_cache, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
        )
        streamer = TrialStreamer()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer)
        return streamer.trial

    return run


def load_transformers(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with redirect_stderr(io.StringIO()):  # its GGUF reader draws a progress bar that no setting turns off
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=dtype).eval().to(device)
    model.generation_config = transformers.GenerationConfig()  # the checkpoint's has an eos id
    return model


def llama_cpp_version() -> str | None:
    """None if llama-cpp-python is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return None
    return str(llama_cpp.__version__)


def llama_cpp_engine(path: Path, context: int) -> Engine:
    """Runs the GGUF file, with as many threads as torch."""
    import llama_cpp

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
    )

    def best() -> int:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())

    def run(prompt: list[int], new_tokens: int) -> Trial:
        model.reset()
        trial, fed = Trial(), prompt
        for _ in range(new_tokens):
            model.eval(fed)
            trial.add(best())
            fed = [trial.tokens[-1]]
        return trial

    return run


class BatchTrial(NamedTuple):
    """A batch of sequences: the tokens of each, and the seconds for the prompts and for all of it."""

    tokens: list[list[int]]
    prefill_s: float
    seconds: float

    @property
    def step_s(self) -> float:
        return (self.seconds - self.prefill_s) / (len(self.tokens[0]) - 1)


BatchEngine = Callable[[list[list[int]], int], BatchTrial]  # prompts, number of tokens to generate


def llama_cpp_batch_engine(path: Path, rows: int, context: int) -> BatchEngine:
    """Decodes `rows` sequences of up to `context` tokens in one batch, greedily, with as many threads as torch."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    threads = torch.get_num_threads()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    context = -(-context // 256) * 256  # llama.cpp rounds up too
    params.n_ctx, params.n_seq_max, params.n_batch = rows * context, rows, rows * context
    params.n_threads = params.n_threads_batch = threads
    handle = llama_cpp.llama_init_from_model(model, params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(rows * context, 0, 1)

    def feed(fed: Sequence[Sequence[int]], start: int) -> list[int]:
        """Feed tokens of each sequence, from a position on; returns the most likely next token of each."""
        batch.n_tokens, last = 0, []
        for row, tokens in enumerate(fed):
            for i, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, start + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = i == len(tokens) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        if failed := llama_cpp.llama_decode(handle, batch):
            raise RuntimeError(f"llama_decode ended with {failed}")
        logits = (llama_cpp.llama_get_logits_ith(handle, at) for at in last)
        return [int(np.ctypeslib.as_array(each, shape=(vocabulary,)).argmax()) for each in logits]

    def run(prompts: list[list[int]], new_tokens: int) -> BatchTrial:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(handle), True)
        started = time.perf_counter()
        tokens = [[token] for token in feed(prompts, 0)]
        prefill_s = time.perf_counter() - started
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
            for row, token in zip(tokens, feed([row[-1:] for row in tokens], position), strict=True):
                row.append(token)
        return BatchTrial(tokens, prefill_s, time.perf_counter() - started)

    return run


def infer_batch_engine(model: Decoder, tokenizer: Tokenizer) -> BatchEngine:
    """Some rows decode while others prefill, so prefill is timed in a separate run."""

    def timed(prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        started = time.perf_counter()
        params = SamplingParams(ignore_eos=True, max_new_tokens=new_tokens)
        results = generate_batch(model, tokenizer, prompts, params)
        return [result.token_ids for result in results], time.perf_counter() - started

    def run(prompts: list[list[int]], new_tokens: int) -> BatchTrial:
        _, prefill_s = timed(prompts, 1)
        tokens, seconds = timed(prompts, new_tokens)
        return BatchTrial(tokens, prefill_s, seconds)

    return run


def llama_cpp_quantized(path: Path, to: Path, kind: str = "Q4_0") -> Path:
    """Quantize a GGUF file with llama.cpp, which has its fastest kernels for Q4_0."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    if llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantize {path}")
    return to
