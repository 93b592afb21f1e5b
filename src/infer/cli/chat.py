"""`infer chat`: a conversation with a model. Its commands are in `conversation.py`."""

import functools
import sys
from dataclasses import replace
from typing import Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    CacheMemoryOption,
    Loading,
    PrefillChunkOption,
    PrefixStoreOption,
    SystemOption,
    ThinkingOption,
    check_cache_dtype,
    loading_options,
    model_option,
    parse_size,
    sampling_options,
)
from infer.cli.conversation import Conversation
from infer.cli.editor import editor
from infer.cli.generate import Pages, encode_chat
from infer.cli.sampling import CHAT, Asked, resolve
from infer.cli.streams import counted, say

ON_FULL = ("drop", "error")
HISTORY = "chat_history"  # in the cache folder


@model_option
@functools.partial(sampling_options, usual=CHAT)
@functools.partial(loading_options, split=True)
def chat(
    *,
    model: str = DEFAULT_MODEL,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of a conversation.", show_default="4096, or all the model has")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    on_full: Annotated[
        str,
        typer.Option(
            help="What to do when the context is full. drop: forget the oldest turns. error: refuse, until /undo or "
            "/clear makes room.",
            metavar="drop|error",
        ),
    ] = "drop",
    loading: Loading,
    params: Asked,
) -> None:
    """Talk with a model. The cache is kept between turns, so only new tokens are prefilled. /help lists commands."""
    from infer import LLM, ModelConfig, Tokenizer
    from infer.engine.request import CacheExceeded, check_chunk, check_request
    from infer.engine.session import CONTEXT
    from infer.folders import cache_folder

    if on_full not in ON_FULL:
        raise ValueError(f"--on-full must be {' or '.join(ON_FULL)}, not {on_full!r}")
    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype)
    size = parse_size(cache_memory)
    Pages(size, prefix_store).check(kv_cache=True)
    tokenizer = Tokenizer(model)
    encode = functools.partial(encode_chat, tokenizer, thinking)
    settings = resolve(model, params, CHAT, "chat defaults")
    config = ModelConfig.from_pretrained(model)
    capacity = min(CONTEXT, config.max_position_embeddings) if context is None else context
    if not 1 <= capacity <= config.max_position_embeddings:
        raise ValueError(f"context must be from 1 to the model's {config.max_position_embeddings}, not {context}")
    # A model without a chat template, or a context without room for any turn, is refused before the weights are read.
    try:
        least = replace(settings.params, max_new_tokens=min(settings.params.max_new_tokens, max(1, capacity // 4)))
        check_request(config, encode([{"role": "user", "content": "hello"}]), least, capacity)
    except CacheExceeded as error:
        raise ValueError(f"--context {capacity} has no room for a turn: {error}") from None
    network = loading.load(model, config, capacity, cache_dtype)
    with LLM(
        network,
        tokenizer,
        cache_memory=size,
        cache_dtype=cache_dtype,
        prefix_store=prefix_store,
        prefill_chunk=prefill_chunk,
    ) as llm:
        session = llm.session(system=system, params=settings.params, context=capacity, encode=encode)
        many = counted(llm.memory.conversations(capacity), "such chat")
        say(f"{model}: {capacity} positions; memory for {many}. /help lists commands, /exit leaves.")
        conversation = Conversation(session, settings, on_full)
        words = {name: command.words for name, command in conversation.commands.items()}
        with editor(words, cache_folder() / HISTORY) as lines:
            if sys.stderr.isatty():
                say(f"[sampling: {settings}; /set changes it]", dim=True)
            while not conversation.over and (text := lines.ask()) is not None:
                conversation.take(text)
