"""JSON schemas: from what a user gives (a dict, JSON text or a class) to text, and from generated text to a value.

This module needs no torch, and pydantic for classes only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Self, cast, get_origin

from infer.values import short_repr
from infer.version import install

MAX_CONSTRAINT = 2**16  # bytes of a constraint's text
MAX_NESTING = 64  # levels of a schema
MAX_INTEGER = 2**53 - 1  # the largest that all readers of JSON keep exactly
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "default", "enum", "examples")  # keys that have values, not schemas
SchemaSource = Mapping[str, Any] | str | type[Any] | UnionType  # a dict, JSON text, or a class like `list[City]`


class Schema(str):
    """A schema as JSON text, with the class that it describes, if it was made from one."""

    kind: Any = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """Refuses what is not an object, or nested too deeply to compile."""
        if isinstance(given, cls):
            return given
        is_class = isinstance(given, type) or get_origin(given) is not None
        try:
            described = _class_schema(given) if is_class else given
            text = described if isinstance(described, str) else json.dumps(described, allow_nan=False)
            check_text("json_schema", text)
            parsed = json.loads(text)
            schema = cls(json.dumps(parsed, allow_nan=False))
        except (TypeError, RecursionError, json.JSONDecodeError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise ValueError(f'json_schema must be an object like {{"type": "object"}}, not {short_repr(parsed)}')
        level: list[Any] = [parsed]
        for _ in range(MAX_NESTING):
            level = [inner for value in level for inner in _inner(value)]
        if any(isinstance(value, dict | list) for value in level):
            raise ValueError(f"json_schema is nested more than {MAX_NESTING} levels deep")
        schema.kind = given if is_class else None
        return schema

    def parse(self, text: str) -> Any:
        """The value of a text that matches: an instance of the class, or what `json.loads` returns."""
        value = json.loads(text)
        return value if self.kind is None else _pydantic().TypeAdapter(self.kind).validate_json(text)


def check_text(name: str, text: Any) -> None:
    """Refuse the text of a constraint that is no string, not Unicode or too long."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, not {short_repr(text)}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not Unicode: it has a lone surrogate") from None
    if size > MAX_CONSTRAINT:
        raise ValueError(f"{name} has {size:,} bytes: at most {MAX_CONSTRAINT:,} are allowed")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _pydantic() -> Any:
    try:
        import pydantic
    except ImportError:
        raise ImportError(
            f"a class as json_schema needs pydantic, which is not installed: {install('server')}"
        ) from None
    return pydantic


def bounded(schema: Any, levels: int = MAX_NESTING + 1) -> Any:
    """A schema whose integers have limits: a small model may add digits until it is cut off."""
    if isinstance(schema, list) and levels:
        return [bounded(each, levels - 1) for each in schema]
    if not isinstance(schema, dict) or not levels:  # `Schema.of` refuses what is nested more deeply
        return schema
    found = {key: value if key in VALUES else bounded(value, levels - 1) for key, value in schema.items()}
    if found.get("type") == "integer" and not any(_is_beyond(found.get(limit)) for limit in LIMITS):
        found = {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER} | found
    return found


def _is_beyond(limit: Any) -> bool:
    return isinstance(limit, int | float) and abs(limit) > MAX_INTEGER


def _class_schema(kind: Any) -> dict[str, Any]:
    """The schema of a class, in which objects have no keys but its fields, unless its config has extra="allow".

    Otherwise a model may add keys until it is cut off: pydantic ignores them, so its own schemas allow them.
    """
    pydantic = _pydantic()
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
    from pydantic.json_schema import GenerateJsonSchema

    def closed(schema: dict[str, Any]) -> dict[str, Any]:
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        return schema

    class ClosedSchema(GenerateJsonSchema):
        def model_schema(self, schema: Any) -> dict[str, Any]:
            return closed(super().model_schema(schema))

        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            return closed(super().dataclass_schema(schema))

        def typed_dict_schema(self, schema: Any) -> dict[str, Any]:
            return closed(super().typed_dict_schema(schema))

    try:
        schema: dict[str, Any] = pydantic.TypeAdapter(kind).json_schema(schema_generator=ClosedSchema)
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ValueError(f"json_schema: {str(error).partition(chr(10))[0]}") from None
    return cast(dict[str, Any], bounded(schema))
