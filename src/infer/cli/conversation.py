"""A chat's messages and commands: what becomes of each line that the user sends."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from infer import progress
from infer.cli.editor import FILE, KEYS
from infer.cli.generate import show
from infer.cli.sampling import SETTINGS, Settings
from infer.cli.status import shown
from infer.cli.streams import counted, say
from infer.engine.params import SamplingParams
from infer.values import meant

if TYPE_CHECKING:
    from infer.engine.result import GeneratedToken
    from infer.engine.session import Session

SETTABLE = (*SETTINGS, "seed", "max_new_tokens")
WHOLE = ("top_k", "seed", "max_new_tokens")
OFF = "off"
NEARLY_FULL = 0.1  # of the context left, below which the user is told
ROOM = 0.25  # of the context, which an answer has room for at least: turns are forgotten for it


class Command(NamedTuple):
    run: Callable[[str], None]
    wanted: str  # what stands behind it
    meaning: str
    words: tuple[str, ...] = ()  # that complete it


@dataclass
class Branch:
    """One of several conversations that have begun alike."""

    session: "Session"
    sources: dict[str, str]  # of its settings
    warned: bool = False  # that its context is nearly full
    steps: "list[GeneratedToken]" = field(default_factory=list)  # of its last reply


class Conversation:
    """Takes messages for the model, and commands."""

    def __init__(self, session: "Session", settings: Settings, on_full: str) -> None:
        """on_full: drop the oldest turns, or error."""
        self.branches, self.at = [Branch(session, settings.sources)], 0
        self.on_full = on_full
        self.over = False
        self.commands = {
            "/help": Command(self.help, "", "list commands"),
            "/more": Command(self.more, "", "go on with a reply that was cut or stopped"),
            "/undo": Command(self.undo, "[N]", "forget the last turn, or the last N"),
            "/clear": Command(self.clear, "", "forget the whole conversation"),
            "/system": Command(self.system, "[TEXT]", f"show the system message, or set it; {OFF}: none", (OFF,)),
            "/set": Command(self.set, "[NAME VALUE]", "show how tokens are sampled, or change it", SETTABLE),
            "/stats": Command(self.stats, "", "settings, speed, and what the memory of the cache holds"),
            "/trace": Command(self.trace, "", "a page on how each token of the last reply was chosen"),
            "/save": Command(self.save, "FILE", "keep the conversation, cache included", FILE),
            "/load": Command(self.load, "FILE", "go on with a saved one, without prefilling it", FILE),
            "/fork": Command(self.fork, "", "go on in a copy; what was said so far is held once"),
            "/branch": Command(self.branch, "N", "go to another copy"),
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
        """A line, as the user has sent it. What is wrong with it is said, and the conversation goes on."""
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
        if argument and not self.commands[name].wanted:
            raise ValueError(f"{typed} takes nothing behind it, not {argument!r}")
        self.commands[name].run(argument)

    def reply(self, text: str | None) -> None:
        """Answer a message; None: go on with the last answer."""
        session = self.session
        params = self._fit(text)
        steps = show(session.more(params) if text is None else session.stream(text, params))
        if not steps:
            return
        self.current.steps = steps
        say(f"[{speed(steps)}; cache holds {len(session.tokens)}{self._cut(steps, params)}]", dim=True)
        left = session.context - len(session.tokens)
        nearly_full = left < NEARLY_FULL * session.context
        if nearly_full and not self.current.warned:
            then = "the oldest turns are forgotten" if self.on_full == "drop" else "/undo or /clear has to make room"
            say(f"note: {left:,} of {session.context:,} positions are left; then {then}")
        self.current.warned = nearly_full

    def _fit(self, text: str | None) -> SamplingParams:
        """The settings, with as many new tokens as there is room for. For a useful number, old turns are forgotten."""
        from infer.engine.request import CacheExceeded, ContextExceeded

        session, params = self.session, self.session.params
        least = min(params.max_new_tokens, max(1, int(ROOM * session.context)))
        try:
            length = len(session.prompt(text))
            if length + least > session.context:
                if self.on_full == "error":
                    raise CacheExceeded(
                        f"the context is full: {length} tokens + {least} new ones exceed its {session.context}"
                    )
                dropped = session.make_room(text, least)
                say(f"[the context is full: the first {counted(dropped, 'turn')} forgotten]", dim=True)
                length = len(session.prompt(text))
        except (CacheExceeded, ContextExceeded) as error:
            hint = "shorten the message; /undo or /clear forgets, --context makes room"
            if self.on_full == "error":
                hint += ", --on-full drop forgets the oldest turns"
            raise ValueError(f"{error} ({hint})") from None
        return replace(params, max_new_tokens=min(params.max_new_tokens, session.context - length))

    def _cut(self, steps: "list[GeneratedToken]", params: SamplingParams) -> str:
        """Why the answer is not whole, if it is not."""
        reason = steps[-1].finish_reason
        if reason is None:
            return "; stopped: /more goes on"
        if reason != "length":
            return ""
        full = params.max_new_tokens < self.session.params.max_new_tokens
        return f"; cut, {'the context is full' if full else f'at {params.max_new_tokens} new tokens'}: /more goes on"

    def help(self, _: str) -> None:
        other = {name: alias for alias, name in self.aliases.items()}
        for name, (_run, wanted, meaning, _words) in self.commands.items():
            also = f" (also {other[name]})" if name in other else ""
            say(f"  {name + ' ' + wanted:<18} {meaning}{also}")
        for key, meaning in KEYS:
            say(f"  {key:<18} {meaning}")

    def more(self, _: str) -> None:
        if self.session.answer is None:
            raise ValueError("there is no reply to go on with")
        if self.session.answer.finish_reason in ("eos", "stop"):
            raise ValueError("the last reply is whole: the model has ended it itself")
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
        told = self.session.system
        say("[no system message]" if told is None else f"[system: {told}]", dim=True)

    def set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.replace("=", " ").partition(" ")
            name = name.replace("-", "_").lower()
            if name not in SETTABLE:
                raise ValueError(f"there is no setting {name[:40]}: {meant(name, SETTABLE)}")
            changed = self.settings.changed("/set", **{name: parse_setting(name, value.strip())})
            self.session.params, self.current.sources = changed.params, changed.sources
        params = self.session.params
        seed = "" if params.seed is None else f", seed {params.seed}"
        say(f"[sampling: {self.settings}; max_new_tokens {params.max_new_tokens}{seed}]", dim=True)

    def stats(self, _: str) -> None:
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
                f"{memory_size(pool.memory_bytes)} in {counted(pool.count, 'page')} of {pool.page} positions, "
                f"{memory_size(pool.page_bytes)} each; {pool.free:,} free",
            ),
            ("remembered", f"{counted(memory.index.pages, 'page')}, by their tokens, until memory is needed"),
        ]
        for name, value in lines:
            say(f"  {name:<14} {value}", dim=True)

    def trace(self, _: str) -> None:
        """Generates the last reply again, with its seed."""
        from infer.cli.trace import DEFAULT_LAYERS, spread
        from infer.trace import Trace

        session, answer = self.session, self.session.answer
        if answer is None or len(answer.token_ids) == answer.given:
            raise ValueError("there is no reply to trace")
        prompt, expected = [*answer.prompt, *answer.token_ids[: answer.given]], answer.token_ids[answer.given :]
        trace = Trace(spread(session.llm.model.config.num_hidden_layers, DEFAULT_LAYERS))
        trace.title = "the last reply"
        with shown(progress.PREFILL):
            result = session.llm.submit(
                prompt, replace(answer.params, max_new_tokens=len(expected)), trace=trace
            ).result()
        if result.token_ids != expected:
            say("note: generated again, the reply has other tokens: penalties count anew, or plain torch rounds")
        handle, name = tempfile.mkstemp(".html", "infer-trace-")
        os.close(handle)
        trace.save(name)
        opened = opens_browser(Path(name))
        say(f"[{name}{', opened in the browser' if opened else ': open it in a browser'}]", dim=True)

    def save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save needs a file to write to")
        path = Path(argument).expanduser()
        self.session.save(path)
        say(f"[{path}: {turns(self.session)}, {path.stat().st_size / 1e6:.1f} MB]", dim=True)

    def load(self, argument: str) -> None:
        if not argument:
            raise ValueError("/load needs a file to read")
        path = Path(argument).expanduser()
        session = self.session.llm.load_session(path, encode=self.session.encode)
        usual = SamplingParams()
        own = [name for name in SETTINGS if getattr(session.params, name) != getattr(usual, name)]
        self.branches[self.at] = Branch(session, dict.fromkeys(own, path.name))
        say(f"[{path}: {turns(session)}, cache holds {len(session.tokens)}]", dim=True)

    def fork(self, _: str) -> None:
        self.branches.append(replace(self.current, session=self.session.fork()))
        self.branch(str(len(self.branches)))

    def branch(self, argument: str) -> None:
        if not argument.isdecimal() or not 1 <= int(argument) <= len(self.branches):
            raise ValueError(f"/branch takes a number from 1 to {len(self.branches)}, not {argument!r}")
        self.at = int(argument) - 1
        count = len(self.branches)
        say(f"[branch {self.at + 1} of {count}: {turns(self.session)}; /branch N goes to another]", dim=True)

    def exit(self, _: str) -> None:
        self.over = True


def parse_setting(name: str, value: str) -> Any:
    if value.lower() == OFF:
        return next(field.default for field in fields(SamplingParams) if field.name == name)
    try:
        return int(value) if name in WHOLE else float(value)
    except ValueError:
        kind = "a whole number" if name in WHOLE else "a number"
        raise ValueError(f"{name} is {kind}, or {OFF}, not {value[:40]!r}") from None


def opens_browser(page: Path) -> bool:
    """Where somebody sits at a screen; on a server a browser of text would take the terminal."""
    import webbrowser

    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    return screen and sys.stderr.isatty() and webbrowser.open(page.as_uri())


def memory_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def turns(session: "Session") -> str:
    return counted(session.turns, "turn")


def speed(steps: "list[GeneratedToken]") -> str:
    new = sum(step.time_s for step in steps[1:])
    rate = f" at {(len(steps) - 1) / new:.1f} tok/s" if new else ""
    return f"{counted(len(steps), 'token')}{rate}, {steps[0].time_s:.2f} s to the first"
