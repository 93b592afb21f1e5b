"""How `--help` looks: options in groups, in two columns that fit 80 characters; and what typer's own flags cost."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

MODEL, SAMPLING, CACHE, OUTPUT = "Model", "Sampling", "Cache", "Output"  # groups of options
_GROUPS = ("Arguments", "Options", MODEL, SAMPLING, CACHE, OUTPUT)
_NAMES_WIDTH = 36  # characters: names that are longer stand on a line of their own


class _PlainFlags:
    """typer's own flags are None until given; to make a bool of that, typer would import pydantic: 0.15 s."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.name in ("help", "install_completion", "show_completion"):
                param.default = False
        return params


class Group(_PlainFlags, TyperGroup):
    """All commands."""


class GroupedCommand(_PlainFlags, TyperCommand):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                groups[getattr(param, "rich_help_panel", None) or usual].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=_NAMES_WIDTH)
