"""The bodies of requests, with the types and bounds of their fields. An unknown field is refused.

Optional fields may be null, as in OpenAI's API.
"""

from __future__ import annotations

import marshal
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from infer.engine.params import SETTINGS, SamplingParams
from infer.engine.schema import bounded
from infer.loader import json_process
from infer.loader.limited_process import LimitedProcess, ProcessEnded
from infer.server.wire import bad_request

Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
FAIL_FAST = Field(fail_fast=True)  # of a list: millions of wrong items are one error, not as many
MAX_PROMPTS = 1024  # of a request
MAX_FIELDS = 100  # of an object: more than any has
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Clients include the second by default, to send reasoning back. It has no effect: reasoning is plain text here.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

# Of texts or of token ids, one or several.
Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FAIL_FAST]
    | Annotated[list[Token], Field(min_length=1), FAIL_FAST]
    | Annotated[
        list[Annotated[list[Token], Field(min_length=1), FAIL_FAST]],
        Field(min_length=1, max_length=MAX_PROMPTS),
        FAIL_FAST,
    ]
)

# Accepted, because clients send them by default, and ignored: they identify users, or are about prices.
HINTS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")


def _at_most(count: int) -> BeforeValidator:
    """`max_length` of a mapping, which pydantic checks only after it has made an error of each item."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many", f"must have at most {count:,} items, not {len(value):,}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, value: Any) -> Any:
        """pydantic would make an error of each unknown field."""
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise bad_request(f"an object has {len(value):,} fields: most are unknown", code="unknown_parameter")
        return value


B = TypeVar("B", bound=Body)

# Types that the table of sampling settings does not have.
_TYPES: dict[str, Any] = {
    "stop": Annotated[str, Field(max_length=1000)] | Annotated[list[Text], Field(max_length=16)],
    "logit_bias": Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024), _at_most(1024)
    ],
}


def _with_settings(responses: bool) -> Callable[[type[B]], type[B]]:
    """Adds fields of sampling settings to a body. responses: the fields that /v1/responses has, or that it lacks."""
    rows = {name: row for name, row in SETTINGS.items() if row.served is not None and row.served.responses is responses}
    types = {name: _TYPES.get(name, Annotated[row.kind, Field(**row.served_bounds)]) for name, row in rows.items()}
    fields: dict[str, Any] = {name: (kind | None, None) for name, kind in types.items()}
    return lambda body: create_model(body.__name__, __base__=body, __module__=__name__, __doc__=body.__doc__, **fields)


class Unsupported(NamedTuple):
    """A field of OpenAI's that is not supported."""

    ignored: tuple[Any, ...] = ()  # values that are accepted, because they have no effect
    advice: str = ""  # added to the error


@_with_settings(responses=True)
class Request(Body):
    """Common to all requests that generate text."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {"service_tier": Unsupported(("auto", "default"))}

    model: str | None = None  # the only one
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        supported = dict(value)
        for name in HINTS:
            if name not in cls.model_fields:
                supported.pop(name, None)
        for name, (ignored, advice) in cls.unsupported.items():
            given = supported.pop(name, None)
            if given is not None and given not in ignored:
                message = f"{name} is not supported" + (f": {advice}" if advice else "")
                raise bad_request(message, name, "unsupported_parameter")
        return supported

    def settings(self, **others: Any) -> SamplingParams:
        """others: settings of one endpoint, by the names of `SamplingParams`; None: not given."""
        given: dict[str, Any] = {}
        for name, row in SETTINGS.items():
            if row.served is not None and name in type(self).model_fields:
                value = getattr(self, name)
                try:
                    given[name] = row.served.default if value is None else row.served.convert(value)
                except ValueError as error:
                    raise bad_request(str(error), name) from None
        try:
            return SamplingParams(**{name: value for name, value in (given | others).items() if value is not None})
        except ValueError as error:
            raise bad_request(str(error)) from None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class StreamOptions(ResponseStreamOptions):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # no effect: usage is sent once, at the end
    include_request: bool | None = None  # the request's number on the live page


@_with_settings(responses=False)
class Generation(Request):
    """Common to /v1/completions and /v1/chat/completions."""

    n: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def constraint(self) -> dict[str, Any]:
        return {name: text for name in ("regex", "grammar") if (text := getattr(self, name)) is not None}


class Embedding(Body):
    """Texts to embed."""

    stream: ClassVar[None] = None

    model: str | None = None  # the only one
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class Completion(Generation):
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **Request.unsupported,
        "suffix": Unsupported(("",)),
        "best_of": Unsupported((1,)),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class OfFunctionType(Body):
    type: Literal["function"]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OfFunctionType):
    function: Function


class FunctionName(Body):
    name: str


class ToolChoice(OfFunctionType):
    function: FunctionName


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Format(Body):
    """The format of the text, with the schema in a place of the endpoint's own."""

    type: Literal["text", "json_object", "json_schema"]

    @property
    def constraint(self) -> dict[str, Any]:
        if self.type == "text":
            return {}
        return {"json_schema": {"type": "object"} if self.type == "json_object" else self._schema()}

    @abstractmethod
    def _schema(self) -> dict[str, Any]:
        """For the type json_schema."""


def _strict(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """As clients send the schema of a class: the integers of one have limits here as in Python."""
    return bounded(schema) if strict else schema


class ResponseFormat(Format):
    json_schema: JsonSchema | None = None

    def _schema(self) -> dict[str, Any]:
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise bad_request("response_format.json_schema needs a schema", "response_format")
        return _strict(self.json_schema.schema_, self.json_schema.strict)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """A text that the answer may repeat: its tokens are drafted."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=1024), FAIL_FAST]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletion(Generation):
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **Request.unsupported,
        "audio": Unsupported(),
        "function_call": Unsupported(advice="use tool_choice"),
        "functions": Unsupported(advice="use tools"),
        "modalities": Unsupported((["text"],)),
        "store": Unsupported((False,), "nothing is stored here, omit it or send false"),
        "verbosity": Unsupported(("medium",)),
        "web_search_options": Unsupported(),
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=8192)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class FunctionTool(Function, OfFunctionType):
    """The Responses API has the function's fields in the tool itself."""


class FunctionChoice(FunctionName, OfFunctionType):
    """The same for the choice of a tool."""


class TextFormat(Format):
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def _schema(self) -> dict[str, Any]:
        if self.name is None or self.schema_ is None:
            raise bad_request("a text.format of type json_schema needs a name and a schema", "text.format")
        return _strict(self.schema_, self.strict)


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class CreateResponse(Request):
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **Request.unsupported,
        "background": Unsupported((False,), "wait for the answer, or stream it"),
        "context_management": Unsupported(([],)),
        "conversation": Unsupported(advice="nothing is stored here, send the conversation as input"),
        "max_tool_calls": Unsupported(advice="it limits tools that run on the server, and none do"),
        "moderation": Unsupported(),
        "previous_response_id": Unsupported(advice="nothing is stored here, send the conversation as input"),
        "prompt": Unsupported(advice="nothing is stored here, send its text as instructions or input"),
        "store": Unsupported((False,), "nothing is stored here, omit it or send false"),
        "truncation": Unsupported(("disabled",), "shorten the input, which is never truncated here"),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=8192)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], FAIL_FAST] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    # Hints that the response repeats.
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
            _at_most(16),
        ]
        | None
    ) = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


class NewSession(Body):
    messages: Annotated[list[dict[str, Any]], Field(max_length=8192)] | None = None


class Rewind(Body):
    turns: Annotated[int, Field(ge=0)] = 1


class Tokenize(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=8192)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(Body):
    model: str | None = None
    tokens: Annotated[list[Token], FAIL_FAST]
    skip_special_tokens: bool | None = None


_process = LimitedProcess(Path(json_process.__file__))


def parse_body(kind: type[B], data: bytes) -> B:
    """Parse and validate a body."""
    try:
        value = json_process.parse_json(data)
    except (ValueError, RecursionError):
        raise bad_request(json_process.NOT_JSON) from None
    return validate(kind, value)


def parse_in_process(data: bytes) -> Any:
    """The value of a large body, parsed in a separate process."""
    try:
        value, error = marshal.loads(_process.answer(data))
    except ProcessEnded as ended:
        error = f"the body was not parsed: {ended}"
    if error is not None:
        raise bad_request(error)
    return value


def validate(kind: type[B], value: Any) -> B:
    """The error is about the first wrong field."""
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # For a field of several types, prefer an error of the value's own type.
        own = [each for each in found if each["loc"][:1] == found[0]["loc"][:1] and not each["type"].endswith("_type")]
        first = (own or found)[0]
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            param = param or f"{first['loc'][-1]!s:.64}"
            raise bad_request(f"unknown parameter: {param}", param, "unknown_parameter") from None
        raise bad_request(f"{param}: {first['msg']}" if param else first["msg"], param) from None


def _path(location: tuple[int | str, ...]) -> str | None:
    """As OpenAI writes it: messages[0].content. pydantic's names of types in a union are omitted."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list"):
            path += f".{part}" if path else part
    return path or None
