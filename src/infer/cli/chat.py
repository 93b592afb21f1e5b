"""`infer chat`: a conversation, and commands to fork, rewind, save and load it."""

import functools
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli.common import (
    DEFAULT_MODEL,
    CacheDtypeOption,
    CacheMemoryOption,
    Loading,
    ModelOption,
    PrefillChunkOption,
    PrefixStoreOption,
    SystemOption,
    ThinkingOption,
    check_cache_dtype,
    loading_options,
    parse_size,
    sampling_options,
)
from infer.cli.generate import Pages, encode_chat, show
from infer.cli.streams import counted, say
from infer.engine.params import SamplingParams

if TYPE_CHECKING:
    from infer.engine.result import GeneratedToken
    from infer.engine.session import Session


@sampling_options
@functools.partial(loading_options, split=True)
def chat(
    *,
    model: ModelOption = DEFAULT_MODEL,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    prefill_chunk: PrefillChunkOption = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of a conversation.", show_default="4096, or all the model has")
    ] = None,
    cache_dtype: CacheDtypeOption = "auto",
    cache_memory: CacheMemoryOption = None,
    prefix_store: PrefixStoreOption = None,
    loading: Loading,
    params: SamplingParams,
) -> None:
    """Talk with a model. The cache is kept between turns, so only new tokens are prefilled. /help lists commands."""
    from infer import LLM, ModelConfig, Tokenizer
    from infer.engine.request import CacheExceeded, check_chunk, check_request
    from infer.engine.session import CONTEXT

    check_chunk(prefill_chunk)
    check_cache_dtype(cache_dtype)
    size = parse_size(cache_memory)
    Pages(size, prefix_store).check(kv_cache=True)
    tokenizer = Tokenizer(model)
    encode = functools.partial(encode_chat, tokenizer, thinking)
    config = ModelConfig.from_pretrained(model)
    capacity = min(CONTEXT, config.max_position_embeddings) if context is None else context
    if not 1 <= capacity <= config.max_position_embeddings:
        raise ValueError(f"context must be from 1 to the model's {config.max_position_embeddings}, not {context}")
    # A model without a chat template, or a context without room for any turn, is refused before the weights are read.
    try:
        check_request(config, encode([{"role": "user", "content": "hello"}]), params, capacity)
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
        session = llm.session(system=system, params=params, context=capacity, encode=encode)
        many = counted(llm.memory.conversations(capacity), "such chat")
        cache = f"{megabytes(llm.memory.pool.memory_bytes)} of cache for {many}"
        say(f"{model}: {capacity} positions, {cache}. /help lists commands, /exit leaves.")
        Chat(session).run()


class Chat:
    """Reads lines: messages for the model, and commands."""

    def __init__(self, session: "Session") -> None:
        self.branches, self.at = [session], 0
        self.commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/help": (self.help, "", "list commands"),
            "/rewind": (self.rewind, "[N]", "forget the last turn, or the last N"),
            "/reset": (self.reset, "", "forget the whole conversation"),
            "/fork": (self.fork, "", "go on in a copy; what was said so far is held once"),
            "/branch": (self.branch, "N", "go to another copy"),
            "/save": (self.save, "FILE", "keep the conversation, cache included"),
            "/load": (self.load, "FILE", "go on with a saved one, without prefilling it"),
            "/pages": (self.pages, "", "what the memory of the cache holds"),
            "/exit": (self.help, "", "leave; Ctrl-D does too"),
        }

    @property
    def session(self) -> "Session":
        return self.branches[self.at]

    def run(self) -> None:
        while (line := ask()) is not None and line != "/exit":
            if not line:
                continue
            try:
                if line.startswith("/"):
                    self.command(line)
                else:
                    self.reply(line)
            except (ValueError, OSError) as error:
                say(str(error))

    def command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self.commands:
            near = get_close_matches(name, self.commands, 1, 0.7)
            raise ValueError(
                f"there is no command {name}: {f'did you mean {near[0]}?' if near else '/help lists them'}"
            )
        run, wanted, _ = self.commands[name]
        if argument.strip() and not wanted:
            raise ValueError(f"{name} takes nothing behind it, not {argument.strip()!r}")
        run(argument.strip())

    def reply(self, text: str) -> None:
        from infer.engine.request import CacheExceeded, ContextExceeded

        try:
            steps = show(self.session.stream(text))
        except (CacheExceeded, ContextExceeded) as error:
            raise ValueError(f"{error} (/rewind or /reset forgets; --context makes room for longer ones)") from None
        if steps:
            say(f"[{speed(steps)}; cache holds {len(self.session.tokens)}]")

    def help(self, _: str) -> None:
        for name, (_run, wanted, meaning) in self.commands.items():
            say(f"  {name + ' ' + wanted:<14} {meaning}")

    def rewind(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            raise ValueError(f"/rewind takes a number of turns, not {argument!r}")
        self.session.rewind(int(argument or 1))
        say(f"[{turns(self.session)}, cache holds {len(self.session.tokens)}]")

    def reset(self, _: str) -> None:
        self.session.reset()
        say("[0 turns]")

    def fork(self, _: str) -> None:
        self.branches.append(self.session.fork())
        self.branch(str(len(self.branches)))

    def branch(self, argument: str) -> None:
        if not argument.isdecimal() or not 1 <= int(argument) <= len(self.branches):
            raise ValueError(f"/branch takes a number from 1 to {len(self.branches)}, not {argument!r}")
        self.at = int(argument) - 1
        say(f"[branch {self.at + 1} of {len(self.branches)}: {turns(self.session)}; /branch N goes to another]")

    def save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save needs a file to write to")
        self.session.save(Path(argument))
        say(f"[{argument}: {turns(self.session)}, {Path(argument).stat().st_size / 1e6:.1f} MB]")

    def load(self, argument: str) -> None:
        if not argument:
            raise ValueError("/load needs a file to read")
        self.branches[self.at] = self.session.llm.load_session(argument, encode=self.session.encode)
        say(f"[{argument}: {turns(self.session)}, cache holds {len(self.session.tokens)}]")

    def pages(self, _: str) -> None:
        memory = self.session.llm.memory
        pool, own = memory.pool, self.session.pages()
        others = [branch.pages() for branch in self.branches if branch is not self.session]
        shared = len(own & set().union(*others))
        say(
            f"  memory         {megabytes(pool.memory_bytes)} in {counted(pool.count, 'page')} of {pool.page} "
            f"positions, {pool.page_bytes / 1e3:,.1f} kB each; {pool.free:,} free"
        )
        say(
            f"  conversation   {counted(len(self.session.tokens), 'position')} in {counted(len(own), 'page')}, "
            f"{shared:,} shared with other branches"
        )
        say(f"  remembered     {counted(memory.index.pages, 'page')}, by their tokens, until memory is needed")


def turns(session: "Session") -> str:
    return counted(session.turns, "turn")


def megabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def speed(steps: list["GeneratedToken"]) -> str:
    new = sum(step.time_s for step in steps[1:])
    rate = f" at {(len(steps) - 1) / new:.1f} tok/s" if new else ""
    return f"{counted(len(steps), 'token')}{rate}, {steps[0].time_s:.2f} s to the first"


def ask() -> str | None:
    """The user's next line; None at the end."""
    try:
        if sys.stdin.isatty():
            say()
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if not line:
        say()
        return None
    return line.strip()
