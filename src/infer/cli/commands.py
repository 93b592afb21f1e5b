"""The commands of `infer`. Torch and the rest are imported by those that need them: `--help` answers at once."""

import typer

from infer.cli import catalogue, chat, deploy, explain, generate, measure, serve, trace, verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV-cached generation with language models: exact, readable, visible, fast.",
)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    deploy.deploy,
    trace.trace,
    explain.explain,
    catalogue.pull,
    catalogue.rm,
    catalogue.models,
    catalogue.info,
    verify.verify,
    measure.bench,
    measure.perplexity,
):
    app.command()(command)
