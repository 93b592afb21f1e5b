"""A table of parameters for each function of the reference: names, types and defaults from the signature, descriptions
from its docstring, which has them as `name: description`, or from the rows of SamplingParams."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    DocstringParameter,
    DocstringSectionParameters,
    DocstringSectionText,
    ExprCall,
    Extension,
    Function,
    Parameter,
    ParameterKind,
)

# At the start of a line or of a sentence: `name: `, or `one, other: `.
DESCRIBED = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ", re.MULTILINE)
STARS = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}


class Parameters(Extension):
    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """`_row(type, default, help, ...)` is a field of SamplingParams."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "_row":
            _, default, help, *_ = attr.value.arguments
            attr.value = default
            attr.docstring = Docstring(ast.literal_eval(str(help)), parent=attr)

    def on_function(self, *, func: Function, **_: Any) -> None:
        own = [each for each in func.parameters if each.name not in ("self", "cls")]
        # A class may describe the parameters of its constructor.
        of_class = isinstance(func.parent, Class) and func.name == "__init__"
        sources: list[Any] = [func, func.parent] if of_class else [func]
        described: dict[str, str] = {}
        for source in sources:
            if source.docstring is not None:
                text, found = split(source.docstring.value, {each.name for each in own})
                described = found | described
                source.docstring.parsed = [DocstringSectionText(text)] if text else []
        if own and (of_class or func.docstring is not None):
            func.docstring = func.docstring or Docstring(".", parent=func)  # an empty one would not be shown
            table = DocstringSectionParameters([row(each, described) for each in own])
            sections = func.docstring.parsed if func.docstring.value != "." else []
            func.docstring.parsed = [*sections, table]


def row(parameter: Parameter, described: dict[str, str]) -> DocstringParameter:
    return DocstringParameter(
        STARS.get(parameter.kind, "") + parameter.name,
        description=described.get(parameter.name) or (parameter.docstring.value if parameter.docstring else ""),
        annotation=parameter.annotation,
        value=parameter.default,
    )


def split(text: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """The text without the descriptions of these parameters, and the descriptions."""
    found = [match for match in DESCRIBED.finditer(text) if names.issuperset(match[1].split(", "))]
    if not found:
        return text, {}
    described, rest = {}, [text[: found[0].start()]]
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=True):
        description, blank, after = text[match.end() : end].partition("\n\n")
        described |= dict.fromkeys(match[1].split(", "), " ".join(description.split()).removesuffix(";"))
        rest.append(blank + after)
    return "".join(rest).strip(), described
