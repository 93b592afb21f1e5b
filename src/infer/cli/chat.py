"""`infer chat`: a conversation with a model, and its commands."""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from infer import progress
from infer.cli import completion
from infer.cli.common import (
    AllowSpecialTokensOption,
    ChatTemplateOption,
    ModelChoice,
    ParallelLoadOptions,
    PrefixCacheOptions,
    SystemOption,
    ThinkingOption,
    sampling_options,
)
from infer.cli.editor import FILE, KEYS, PROMPT, editor
from infer.cli.run import encode_chat, show, spread
from infer.cli.sampling import CHAT, SETTINGS, Settings, resolve
from infer.cli.status import shown
from infer.cli.streams import counted, say
from infer.cli.trace import DEFAULT_LAYERS
from infer.engine.params import SETTINGS as ALL_SETTINGS
from infer.engine.params import SamplingParams
from infer.progress import Progress
from infer.values import did_you_mean

if TYPE_CHECKING:
    from infer.engine.engine import Stats
    from infer.engine.result import GeneratedToken
    from infer.engine.session import Session

ON_FULL = ("drop", "error")
HISTORY_FILE = "chat_history"  # in the cache folder
SETTABLE = (*SETTINGS, "seed", "max_new_tokens")
OFF = "off"
NEARLY_FULL = 0.1  # warn if less than this fraction of the context is left
LAST_TURNS, MESSAGE_LENGTH, ANSWER_LENGTH = 3, 160, 800  # what /load shows; lengths in characters
REPLY_SHARE = 0.25  # old turns are dropped until this fraction of the context is free for a reply


@dataclass(frozen=True)
class ChatLoadOptions(ParallelLoadOptions):
    context: Annotated[
        int | None,
        typer.Option(help="Maximum positions of a conversation.", show_default="4096, or the model's context"),
    ] = None


def chat(
    *,
    chosen: ModelChoice,
    system: SystemOption = None,
    thinking: ThinkingOption = None,
    chat_template: ChatTemplateOption = None,
    allow_special_tokens: AllowSpecialTokensOption = False,
    on_full: Annotated[
        str,
        typer.Option(
            help="What to do when the context is full. drop: forget the oldest turns. error: refuse, until /undo or "
            "/clear frees positions.",
            metavar="|".join(ON_FULL),
            autocompletion=completion.choices(*ON_FULL),
        ),
    ] = "drop",
    caches: PrefixCacheOptions,
    load: ChatLoadOptions,
    params: Annotated[Settings, sampling_options(fallbacks=CHAT)],
) -> None:
    """Talk to a model. The cache is kept between turns: only new tokens are prefilled. /help lists commands."""
    from infer import LLM, ModelConfig, Tokenizer
    from infer.engine.sequence import CacheExceeded, ContextExceeded, check_sequence
    from infer.engine.session import CONTEXT
    from infer.folders import cache_folder

    if on_full not in ON_FULL:
        raise ValueError(f"--on-full must be {' or '.join(ON_FULL)}, not {on_full!r}")
    caches.check()
    tokenizer = Tokenizer(chosen.name, chat_template=chat_template, allow_special_tokens=allow_special_tokens)
    encode = functools.partial(encode_chat, tokenizer, thinking)
    settings = resolve(chosen.name, params, CHAT, "chat defaults")
    config = ModelConfig.from_pretrained(chosen.name, load.context)
    capacity = load.context or min(CONTEXT, config.max_position_embeddings)
    # Before the weights are read: is there a chat template, and does a short turn fit into the context?
    try:
        least = replace(settings.params, max_new_tokens=min(settings.params.max_new_tokens, max(1, capacity // 4)))
        check_sequence(config, encode([{"role": "user", "content": "hello"}]), least, capacity)
    except (CacheExceeded, ContextExceeded) as error:
        raise ValueError(f"--context {capacity} is too short for a turn: {error}") from None
    model = load.load(chosen.name, config, capacity, caches.cache_dtype)
    with LLM(model, tokenizer, **caches.for_llm()) as llm:
        session = llm.session(system=system, params=settings.params, context=capacity, encode=encode)
        fitting = counted(llm.memory.max_sequences(capacity), "chat")
        say(
            f"{chosen.name}: {capacity} positions; room for {fitting} of this length. "
            "/help lists commands, /exit leaves."
        )
        conversation = Conversation(session, settings, on_full)
        words = {name: command.words for name, command in conversation.commands.items()}
        with editor(words, cache_folder() / HISTORY_FILE) as lines:
            if sys.stderr.isatty():
                say(f"[sampling: {settings}; /set changes it]", dim=True)
            while not conversation.is_over and (text := lines.ask()) is not None:
                conversation.take(text)


class Command(NamedTuple):
    run: Callable[[str], None]
    argument: str  # its name in /help; "": takes none
    help: str
    words: tuple[str, ...] = ()  # completions of the argument


@dataclass
class Branch:
    """One of several conversations with a common beginning."""

    session: "Session"
    sources: dict[str, str]  # see Settings
    warned: bool = False  # whether the user knows that the context is nearly full
    steps: "list[GeneratedToken]" = field(default_factory=list)  # of the last reply


class Conversation:
    """Handles each line that the user sends: a message or a command."""

    def __init__(self, session: "Session", settings: Settings, on_full: str) -> None:
        """on_full: drop (the oldest turns) or error."""
        self.branches, self.at = [Branch(session, settings.sources)], 0
        self.on_full = on_full
        self.is_over = False
        self.commands = {
            "/help": Command(self.help, "", "list commands"),
            "/more": Command(self.more, "", "continue a reply that was cut or stopped"),
            "/undo": Command(self.undo, "[N]", "forget the last turn, or the last N"),
            "/clear": Command(self.clear, "", "forget the conversation"),
            "/system": Command(self.system, "[TEXT]", f"show or set the system message; {OFF} removes it", (OFF,)),
            "/set": Command(self.set, "[NAME VALUE]", "show or change the sampling settings", SETTABLE),
            "/stats": Command(self.stats, "", "show settings, speed and cache memory"),
            "/trace": Command(self.trace, "", "open a page that shows how each token of the last reply was chosen"),
            "/save": Command(self.save, "FILE", "save the conversation with its cache", FILE),
            "/load": Command(self.load, "FILE", "continue a saved conversation, without prefilling it", FILE),
            "/fork": Command(self.fork, "", "branch the conversation (history is shared)"),
            "/branch": Command(self.branch, "N", "switch to branch N"),
            "/exit": Command(self.exit, "", "leave"),
        }
        self.aliases = {"/rewind": "/undo", "/reset": "/clear", "/pages": "/stats", "/quit": "/exit"}

    @property
    def current(self) -> Branch:
        return self.branches[self.at]

    @property
    def session(self) -> "Session":
        return self.current.session

    @property
    def settings(self) -> Settings:
        return Settings(self.session.params, self.current.sources)

    def take(self, text: str) -> None:
        """Handle one line. Errors are printed, and the conversation continues."""
        try:
            if text.startswith("/"):
                self.command(text.strip())
            elif text.strip():
                self.reply(text.strip())
        except KeyboardInterrupt:
            say("[stopped]", dim=True)
        except (ValueError, OSError) as error:
            say(str(error))

    def command(self, line: str) -> None:
        typed, *rest = line.split(maxsplit=1)
        name, argument = self.aliases.get(typed, typed), "".join(rest)
        if name not in self.commands:
            near = get_close_matches(name, [*self.commands, *self.aliases], 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise ValueError(f"there is no command {name[:40]}: {hint} (to send it as a message, begin with a space)")
        if argument and not self.commands[name].argument:
            raise ValueError(f"{typed} takes no argument, not {argument!r}")
        if not argument and self.commands[name].argument == "FILE":
            raise ValueError(f"{name} needs a file name")
        self.commands[name].run(argument)

    def reply(self, text: str | None) -> None:
        """Answer a message; None: continue the last answer."""
        session = self.session
        params = self._fit(text)
        num_turns, answer, prefill = session.turns, session.answer, Progress(progress.PREFILL, 0, 0)

        def on_progress(report: Progress) -> None:
            nonlocal prefill
            if report.what == progress.PREFILL:
                prefill = report

        before = session.llm.stats()
        with progress.listen(on_progress):
            steps = show(session.more(params) if text is None else session.stream(text, params), wrap=True)
        if not steps:
            if session.turns > num_turns:  # with an empty answer
                session.truncate(num_turns)
                session.answer = answer
            is_reading = prefill.done < prefill.total
            read = f"{prefill.done:,} of {prefill.total:,} tokens"
            when = f"while reading the prompt ({read})" if is_reading else "before the answer began"
            kept = "the reply is as it was" if text is None else "the turn is undone"
            say(f"[interrupted {when}: {kept}]", dim=True)
            return
        self.current.steps = steps
        drafts = drafts_right(before, session.llm.stats())
        say(f"[{speed(steps)}{drafts}; cache holds {len(session.tokens)}{self._cut(steps, params)}]", dim=True)
        left = session.context - len(session.tokens)
        nearly_full = left < NEARLY_FULL * session.context
        if nearly_full and not self.current.warned:
            then = "the oldest turns are forgotten" if self.on_full == "drop" else "/undo or /clear is needed"
            say(f"note: {left:,} of {session.context:,} positions are left; after that, {then}")
        self.current.warned = nearly_full

    def _fit(self, text: str | None) -> SamplingParams:
        """Drop old turns if needed; returns the parameters, with max_new_tokens limited to the free positions."""
        from infer.engine.sequence import CacheExceeded, ContextExceeded

        session, params = self.session, self.session.params
        least = min(params.max_new_tokens, max(1, int(REPLY_SHARE * session.context)))
        try:
            length = len(session.prompt(text))
            if length + least > session.context:
                if self.on_full == "error":
                    raise CacheExceeded(
                        f"the context is full: {length} tokens + {least} new ones exceed {session.context} positions"
                    )
                dropped = session.make_room(text, least)
                say(f"[the context is full: the first {counted(dropped, 'turn')} forgotten]", dim=True)
                length = len(session.prompt(text))
        except (CacheExceeded, ContextExceeded) as error:
            hint = "shorten the message, use /undo or /clear, or start with a larger --context"
            if self.on_full == "error":
                hint += " or --on-full drop"
            raise ValueError(f"{error} ({hint})") from None
        return replace(params, max_new_tokens=min(params.max_new_tokens, session.context - length))

    def _cut(self, steps: "list[GeneratedToken]", params: SamplingParams) -> str:
        """Why the answer is incomplete, if it is."""
        reason = steps[-1].finish_reason
        if reason is None:
            return "; interrupted, the turn is kept: /more continues it"
        if reason != "length":
            return ""
        full = params.max_new_tokens < self.session.params.max_new_tokens
        return (
            f"; cut, {'the context is full' if full else f'at {params.max_new_tokens} new tokens'}: /more continues it"
        )

    def help(self, _: str) -> None:
        other = {name: alias for alias, name in self.aliases.items()}
        for name, command in self.commands.items():
            also = f" (also {other[name]})" if name in other else ""
            say(f"  {name + ' ' + command.argument:<18} {command.help}{also}")
        for key, meaning in KEYS:
            say(f"  {key:<18} {meaning}")

    def more(self, _: str) -> None:
        if self.session.answer is None:
            raise ValueError("there is no reply to continue")
        if self.session.answer.finish_reason in ("eos", "stop"):
            raise ValueError("the last reply is complete: the model ended it")
        self.reply(None)

    def undo(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            raise ValueError(f"/undo takes a number of turns, not {argument!r}")
        if not self.session.turns:
            raise ValueError("there is no turn to forget")
        self.session.rewind(int(argument or 1))
        self.current.steps = []
        say(f"[{turns(self.session)}, cache holds {len(self.session.tokens)}]", dim=True)

    def clear(self, _: str) -> None:
        self.session.reset()
        self.current.steps = []
        say("[0 turns]", dim=True)

    def system(self, argument: str) -> None:
        if argument:
            self.session.instruct(None if argument == OFF else argument)
        message = self.session.system
        say("[no system message]" if message is None else f"[system: {message}]", dim=True)

    def set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.replace("=", " ").partition(" ")
            name = name.replace("-", "_").lower()
            if name not in SETTABLE:
                raise ValueError(f"there is no setting {name[:40]}: {did_you_mean(name, SETTABLE)}")
            changed = self.settings.changed("/set", **{name: parse_setting(name, value.strip())})
            self.session.params, self.current.sources = changed.params, changed.sources
        params = self.session.params
        seed = "" if params.seed is None else f", seed {params.seed}"
        say(f"[sampling: {self.settings}; max_new_tokens {params.max_new_tokens}{seed}]", dim=True)

    def stats(self, _: str) -> None:
        from rich.filesize import decimal

        session, steps = self.session, self.current.steps
        memory, own = session.llm.memory, session.pages()
        pool = memory.pool
        others = [branch.session.pages() for branch in self.branches if branch is not self.current]
        shared = len(own & set().union(*others))
        held, params = len(session.tokens), session.params
        lines = [
            ("sampling", f"{self.settings}; max_new_tokens {params.max_new_tokens}"),
            ("last reply", speed(steps) if steps else "none"),
            ("context", f"{held:,} of {session.context:,} positions, {turns(session)}"),
            (
                "conversation",
                f"{counted(held, 'position')} in {counted(len(own), 'page')}, {shared:,} shared with other branches",
            ),
            (
                "memory",
                f"{decimal(pool.memory_bytes)} in {counted(pool.num_pages, 'page')} of {pool.page_size} positions, "
                f"{decimal(pool.page_bytes)} each; {pool.num_free_pages:,} free",
            ),
            ("prefix cache", f"{counted(memory.index.num_pages, 'page')}, evicted when memory is needed"),
        ]
        for name, value in lines:
            say(f"  {name:<14} {value}", dim=True)

    def trace(self, _: str) -> None:
        """Generate the last reply again, with its seed."""
        from infer.trace import Trace

        session, answer = self.session, self.session.answer
        if answer is None or len(answer.token_ids) == answer.given:
            raise ValueError("there is no reply to trace")
        prompt, expected = [*answer.prompt, *answer.token_ids[: answer.given]], answer.token_ids[answer.given :]
        trace = Trace(spread(session.llm.model.config.num_hidden_layers, DEFAULT_LAYERS))
        trace.title = "the last reply"
        with shown(progress.PREFILL, progress.GENERATING):
            traced = session.llm.submit(prompt, replace(answer.params, max_new_tokens=len(expected)), trace=trace)
            for count, _token in enumerate(traced, 1):
                progress.report(progress.GENERATING, count, len(expected))
        if traced.result().token_ids != expected:
            say("note: the traced reply differs from yours: penalties start at the last /more, or plain torch rounded")
        handle, name = tempfile.mkstemp(".html", "infer-trace-")
        os.close(handle)
        trace.save(name)
        opened = open_in_browser(Path(name))
        say(f"[{name}{', opened in the browser' if opened else ': open it in a browser'}]", dim=True)

    def save(self, argument: str) -> None:
        path = Path(argument).expanduser()
        self.session.save(path)
        say(f"[{path}: {turns(self.session)}, {path.stat().st_size / 1e6:.1f} MB]", dim=True)

    def load(self, argument: str) -> None:
        path = Path(argument).expanduser()
        session = self.session.llm.load_session(path, encode=self.session.encode)
        defaults = SamplingParams()
        changed = [name for name in SETTINGS if getattr(session.params, name) != getattr(defaults, name)]
        self.branches[self.at] = Branch(session, dict.fromkeys(changed, path.name))
        say(f"[{path}: {turns(session)}, cache holds {len(session.tokens)}]", dim=True)
        show_last_turns(session)

    def fork(self, _: str) -> None:
        self.branches.append(replace(self.current, session=self.session.fork()))
        self.branch(str(len(self.branches)))

    def branch(self, argument: str) -> None:
        if not argument.isdecimal() or not 1 <= int(argument) <= len(self.branches):
            raise ValueError(f"/branch takes a number from 1 to {len(self.branches)}, not {argument!r}")
        self.at = int(argument) - 1
        count = len(self.branches)
        say(f"[branch {self.at + 1} of {count}: {turns(self.session)}; /branch N switches]", dim=True)

    def exit(self, _: str) -> None:
        self.is_over = True


def parse_setting(name: str, value: str) -> Any:
    setting = ALL_SETTINGS[name]
    if value.lower() == OFF:
        return setting.default
    try:
        return setting.kind(value)
    except ValueError:
        kind = "an integer" if setting.kind is int else "a number"
        raise ValueError(f"{name} must be {kind}, or {OFF}, not {value[:40]!r}") from None


def open_in_browser(page: Path) -> bool:
    """Open a page, if there is a graphical display: a text browser would take over the terminal."""
    import webbrowser

    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    return screen and sys.stderr.isatty() and webbrowser.open(page.as_uri())


def show_last_turns(session: "Session") -> None:
    """The last turns of a conversation, each message in a line or two, the last answer in some more."""
    shown = session.messages[-2 * min(session.turns, LAST_TURNS) :] if session.turns else []
    for i, message in enumerate(shown):
        text, is_last = message["content"].strip(), i == len(shown) - 1
        text = shorten(text, ANSWER_LENGTH) if is_last else shorten(" ".join(text.split()), MESSAGE_LENGTH)
        say(f"\n{PROMPT}{text}" if message["role"] == "user" else text, dim=True)


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def turns(session: "Session") -> str:
    return counted(session.turns, "turn")


def drafts_right(before: "Stats", after: "Stats") -> str:
    """Of the drafts that were verified meanwhile."""
    drafted = after.drafted_tokens - before.drafted_tokens
    right = after.accepted_tokens - before.accepted_tokens
    return f", {right} of {counted(drafted, 'draft')} right" if drafted else ""


def speed(steps: "list[GeneratedToken]") -> str:
    new = sum(step.time_s for step in steps[1:])
    rate = f" at {(len(steps) - 1) / new:.1f} tok/s" if new else ""
    return f"{counted(len(steps), 'token')}{rate}, {steps[0].time_s:.2f} s to the first"
