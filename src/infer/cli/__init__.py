"""The `infer` command. Torch and the rest are imported by the commands that need them: `--help` answers at once."""

import sys

import typer

from infer.cli import catalogue, explain, measure, talk, trace, verify
from infer.cli.common import say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cached generation with language models: exact, readable, visible, fast.",
)
for command in (
    talk.generate,
    talk.chat,
    trace.trace,
    explain.explain,
    catalogue.pull,
    catalogue.models,
    catalogue.info,
    verify.verify,
    measure.bench,
    measure.perplexity,
):
    app.command()(command)


def main(args: list[str] | None = None) -> None:
    """Run the command line; what the user can mend is one line, and exit status 2."""
    try:
        app(args)
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(2)
