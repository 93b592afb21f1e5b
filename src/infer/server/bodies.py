"""What clients may ask for: the bodies of requests, with the types and ranges of their fields.

A field that is not here is refused. Optional fields may be null, as in OpenAI's API.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from infer.engine.params import SEEDS, SamplingParams
from infer.server.errors import refused

Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
FIRST = Field(fail_fast=True)  # of a list: millions of wrong items are one error, not as many
MOST_FIELDS = 100  # of an object: more than any has
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# The second, which clients ask for unasked to send reasoning back, has no effect: here it is plain text anyway.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

# Accepted, because clients send them unasked, and without effect on the text: who asks, and hints about prices.
HINTS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")


def _at_most(count: int) -> BeforeValidator:
    """For a mapping, as `max_length` is, which is looked at only behind an error for each item."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_many", f"should have at most {count:,} items, not {len(value):,}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """pydantic would make an error of each."""
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise refused(f"an object has {len(value):,} fields, more than there are", code="unknown_parameter")
        return value


class Request(Body):
    """What all requests for text have in common."""

    # Fields of OpenAI's that are refused, and the values that ask for nothing.
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {"service_tier": ("auto", "default")}
    advice: ClassVar[Mapping[str, str]] = {}  # what to do instead

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=SEEDS)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = dict(value)
        for name in HINTS:
            if name not in cls.model_fields:
                known.pop(name, None)
        for name, allowed in cls.harmless.items():
            given = known.pop(name, None)
            if given is not None and given not in allowed:
                advice = f": {cls.advice[name]}" if name in cls.advice else ""
                raise refused(f"{name} is not supported{advice}", name, "unsupported_parameter")
        return known

    def sampling(self, **others: Any) -> SamplingParams:
        """others: what a kind of request has of its own; None where it was not given."""
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "seed": None if self.seed is None else self.seed % SEEDS,
            **others,
        }
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            raise refused(str(error)) from None


class Generation(Request):
    """What /v1/completions and /v1/chat/completions have in common."""

    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[Text], Field(max_length=16)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024), _at_most(1024)] | None
    ) = None
    regex: str | None = None
    grammar: str | None = None
    stream_options: StreamOptions | None = None

    @property
    def numbered(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_request)

    @property
    def usage_at_the_end(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def constraint(self) -> dict[str, Any]:
        return {name: text for name in ("regex", "grammar") if (text := getattr(self, name)) is not None}

    def settings(self, **others: Any) -> SamplingParams:
        return self.sampling(
            n=self.n,
            stop=self.stop or None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._biases(),
            **(self.constraint | others),
        )

    def _biases(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        try:
            return {int(token): bias for token, bias in self.logit_bias.items()}
        except ValueError:
            raise refused("logit_bias maps token ids to numbers", "logit_bias") from None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class StreamOptions(ResponseStreamOptions):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # without effect: the usage comes once, at the end
    include_request: bool | None = None  # the number that the live page knows it by


class Completion(Generation):
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Request.harmless, "suffix": ("",), "best_of": (1,)}

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1), FIRST]
        | Annotated[list[Token], Field(min_length=1), FIRST]
        | Annotated[list[Annotated[list[Token], Field(min_length=1), FIRST]], Field(min_length=1), FIRST]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Format(Body):
    """What a text has to be, wherever the schema stands."""

    type: Literal["text", "json_object", "json_schema"]

    @property
    def constraint(self) -> dict[str, Any]:
        if self.type == "text":
            return {}
        return {"json_schema": {"type": "object"} if self.type == "json_object" else self._schema()}

    @abstractmethod
    def _schema(self) -> dict[str, Any]:
        """Where the type is json_schema."""


class ResponseFormat(Format):
    json_schema: JsonSchema | None = None

    def _schema(self) -> dict[str, Any]:
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise refused("response_format.json_schema needs a schema", "response_format")
        return self.json_schema.schema_


class ChatCompletion(Generation):
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Request.harmless,
        "audio": (),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "prediction": (),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "function_call": "it is called tool_choice now",
        "functions": "they are called tools now",
        "store": "nothing is stored here, leave it out or send false",
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
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class TextFormat(Format):
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def _schema(self) -> dict[str, Any]:
        if self.name is None or self.schema_ is None:
            raise refused("a text.format of type json_schema needs a name and a schema", "text.format")
        return self.schema_


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class CreateResponse(Request):
    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Request.harmless,
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "store": (False,),
        "truncation": ("disabled",),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "background": "wait for the answer, or stream it",
        "conversation": "nothing is stored here, send all of it as input",
        "max_tool_calls": "it limits tools that run on the server, of which there are none",
        "previous_response_id": "nothing is stored here, send the whole conversation as input",
        "prompt": "nothing is stored here, send its text as instructions or input",
        "store": "nothing is stored here, leave it out or send false",
        "truncation": "shorten the input, which is never cut here",
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=8192)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], FIRST] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    # Hints of OpenAI's that the answer repeats.
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
    tokens: Annotated[list[Token], FIRST]
    skip_special_tokens: bool | None = None


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], data: bytes) -> B:
    """Check a body; what is wrong with it is said of the first field that is."""
    try:
        value = json.loads(data, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        raise refused("the body is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise refused("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # Of a field of several types, what is wrong with the one that it has.
        own = [each for each in found if each["loc"][:1] == found[0]["loc"][:1] and not each["type"].endswith("_type")]
        first = (own or found)[0]
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            param = param or f"{first['loc'][-1]!s:.64}"
            raise refused(f"unknown parameter: {param}", param, "unknown_parameter") from None
        raise refused(f"{param}: {first['msg']}" if param else first["msg"], param) from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):  # no answer could repeat it
        raise ValueError(f"{text:.20} is too large")
    return value


def _path(location: tuple[int | str, ...]) -> str | None:
    """As OpenAI writes it: messages[0].content. What names a type of several, instead of a field, is left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict", "list"):
            path += f".{part}" if path else part
    return path or None
