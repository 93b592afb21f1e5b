"""The commands of `infer`. They import torch only when they run, so that `--help` is fast."""

from typing import Annotated

import typer

from infer.cli import catalogue, chat, explain, generate, measure, serve, trace, verify
from infer.cli.common import Group, GroupedCommand, with_options

HELP = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
app = typer.Typer(
    cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=HELP
)


def show_version(given: bool) -> None:
    if given:
        from infer.version import version

        print(f"infer {version()}")
        raise typer.Exit


@app.callback()
def infer(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """KV-cached generation with language models: exact, readable, visible, fast."""


for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    serve.deploy,
    trace.trace,
    explain.explain,
    measure.score,
    measure.compare,
    catalogue.pull,
    catalogue.rm,
    catalogue.models,
    catalogue.info,
    verify.verify,
    measure.bench,
    measure.perplexity,
):
    app.command(cls=GroupedCommand, context_settings=HELP)(with_options(command))
