"""Renders chat templates in a `LimitedProcess`: it reads template and variables as two lines of JSON, and writes one.

A template is an untrusted program. jinja2's sandbox keeps it from reaching anything; its time and memory are bounded by
the limits of the process, because a single operation in C can take any amount of both. `chat.py` runs this file as a
script: it imports nothing of the package, so it starts in a tenth of a second and takes 20 MB.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Limits of a template, and what each byte of its variables adds: long chats take longer.
SECONDS, SECONDS_PER_BYTE = 0.5, 1e-6  # of CPU time; templates of real models take up to 0.05
MEMORY, MEMORY_PER_BYTE = 128 << 20, 16  # bytes of address space
TEXT, TEXT_PER_BYTE = 1 << 18, 8  # characters of the prompt
MESSAGE = 300  # characters of an error


class Generation(Extension):
    """{% generation %} marks text to train on; here only its contents count."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """With the same environment as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def answer(template: str, variables: dict[str, Any] | None, most: int) -> dict[str, str]:
    """The prompt, of at most `most` characters, as "text"; or a message, as "error". No variables: only compile."""
    failure = "cannot be read"
    try:
        program = compiled(template)
        failure = "refuses these messages"
        text = "" if variables is None else program.render(variables)
        if len(text) <= most:
            return {"text": text}
        failure, reason = "was stopped", f"its prompt has {len(text):,} characters, of at most {most:,}"
    except MemoryError:
        failure, reason = "was stopped", f"it takes more than {MEMORY >> 20} MB"
    except RecursionError:
        reason = "it nests too deep"
    except Exception as error:  # an untrusted program may raise anything
        reason = str(error) or type(error).__name__
    printable = "".join(character if character.isprintable() else " " for character in reason[:MESSAGE])
    return {"error": f"the chat template {failure}: {printable}"}


def main() -> None:
    """Serve requests until standard input closes, when the parent process ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, most_memory = resource.getrlimit(resource.RLIMIT_AS)
    while length := sys.stdin.buffer.read(8):
        template, _, variables = sys.stdin.buffer.read(int.from_bytes(length)).partition(b"\n")
        size = len(variables)
        with suppress(ValueError, OSError):  # if memory cannot be limited, the time limit bounds it
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY + MEMORY_PER_BYTE * size, most_memory))
        signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * size)  # SIGPROF ends this process
        reply = json.dumps(answer(json.loads(template), json.loads(variables), TEXT + TEXT_PER_BYTE * size))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(len(reply).to_bytes(8) + reply.encode())  # ASCII
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
