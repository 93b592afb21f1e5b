"""The API's own description, for people and programs."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from infer.server import bodies

REF = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/completions": (bodies.Completion, "The text that follows a prompt.", True),
    "/v1/chat/completions": (bodies.ChatCompletion, "The answer to a chat's messages.", True),
    "/v1/responses": (bodies.CreateResponse, "The answer to a conversation, as items.", True),
    "/tokenize": (bodies.Tokenize, "The tokens of a text, or of a chat.", False),
    "/detokenize": (bodies.Detokenize, "The text of tokens.", False),
}
GETS = {
    "/v1/models": "The model of this server.",
    "/v1/models/{name}": "One model.",
    "/tokenizer_info": "The tokens around a text, and the template of chats.",
    "/health": "Whether the server can answer.",
    "/metrics": "Numbers for Prometheus.",
}
REFUSALS = {
    400: "The request is refused, for the reason given.",
    401: "A key is needed.",
    403: "A page of another origin may not ask.",
    404: "There is no such model, or path.",
    405: "The path knows other methods.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests wait.",
    500: "Something has gone wrong.",
    503: "The server ends, or its engine has failed.",
}


@cache
def document() -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (kind, words, streams) in POSTS.items():
        schema = kind.model_json_schema(ref_template=REF)
        kinds |= schema.pop("$defs", {})
        kinds[kind.__name__] = schema
        content = {"application/json": {"schema": {"$ref": REF.format(model=kind.__name__)}}}
        answers = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            answers["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the events of a stream
        paths[path] = {
            "post": {
                "summary": words,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "The answer.", "content": answers}, **_refusals()},
            }
        }
    for path, words in GETS.items():
        kind_of = "text/plain" if path == "/metrics" else "application/json"
        get: dict[str, Any] = {
            "summary": words,
            "responses": {"200": {"description": "The answer.", "content": {kind_of: {}}}, **_refusals()},
        }
        if "{name}" in path:
            get["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": get}
    kinds["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": "1"},
        "paths": paths,
        "components": {"schemas": kinds},
    }


def _refusals() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    return {str(status): {"description": words, "content": content} for status, words in REFUSALS.items()}
