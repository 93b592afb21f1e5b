"""The OpenAPI document of the API; sessions and the live page are not in it."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from infer.server import bodies

REF = "#/components/schemas/{model}"
POSTS: dict[str, tuple[type[BaseModel], str, bool]] = {  # the body, a summary, whether it streams
    "/v1/completions": (bodies.Completion, "The text that follows a prompt.", True),
    "/v1/chat/completions": (bodies.ChatCompletion, "The answer to a chat's messages.", True),
    "/v1/responses": (bodies.CreateResponse, "The answer to a conversation, as items.", True),
    "/v1/embeddings": (bodies.Embedding, "Embeddings of texts.", False),
    "/tokenize": (bodies.Tokenize, "The tokens of a text or of a chat.", False),
    "/detokenize": (bodies.Detokenize, "The text of tokens.", False),
}
GETS = {
    "/v1/models": "The model of this server.",
    "/v1/models/{name}": "One model.",
    "/tokenizer_info": "The tokenizer's special tokens and chat template.",
    "/health": "As /health/ready.",
    "/health/live": "Whether the server runs.",
    "/health/ready": "Whether the server can answer.",
    "/metrics": "Prometheus metrics.",
}
ERRORS = {
    400: "The request is invalid.",
    401: "An API key is needed.",
    403: "The page's origin or the Host header is not allowed.",
    404: "There is no such model or path.",
    405: "The path has other methods.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full.",
    500: "An unexpected error occurred.",
    503: "The server is shutting down, or its engine has failed.",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetails


@cache
def document() -> dict[str, Any]:
    kinds: list[type[BaseModel]] = [Error, *(kind for kind, _, _ in POSTS.values())]
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF)
    paths: dict[str, Any] = {}
    for path, (kind, summary, streams) in POSTS.items():
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe the events of a stream
        body = {"required": True, "content": _json(kind.__name__)}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(content)}}
    for path, summary in GETS.items():
        media_type = "text/plain" if path == "/metrics" else "application/json"
        paths[path] = {"get": {"summary": summary, "responses": _responses({media_type: {}})}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=schema)}}}


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    errors = {str(status): {"description": words, "content": _json("Error")} for status, words in ERRORS.items()}
    return {"200": {"description": "Success.", "content": content}, **errors}
