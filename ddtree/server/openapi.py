"""The server's OpenAPI document: request bodies from the routes' models, answers by what a client may count on."""

from __future__ import annotations

from typing import Any

from ddtree import __version__
from ddtree.server.chat import ChatRequest
from ddtree.server.completions import CompletionRequest
from ddtree.server.fields import Wire
from ddtree.server.messages import CountTokensRequest, MessagesRequest
from ddtree.server.responses import ResponsesRequest
from ddtree.server.tokens import DetokenizeRequest, TokenizeRequest

REFS = "#/components/schemas/"
NUMBER = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
LIST = {"type": "array"}
OBJECT = {"type": "object"}


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has all of these; more may come."""
    return {"type": "object", "required": list(properties), "properties": properties}


USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
REPORT = _object(
    mode={"enum": ["ddtree", "chain", "target_only"]},
    scoring={"enum": ["factorised", "conditioned", None]},
    decode_rounds=COUNT,
    conditioned_rounds=COUNT,
    nodes_verified=COUNT,
    accepted_tokens=COUNT,
    trimmed_tokens=COUNT,
    output_tokens=COUNT,
    acceptance_histogram=OBJECT,
    mean_acceptance_length={"type": ["number", "null"]},
    tokens_per_second={"type": ["number", "null"]},
    seed={"type": "integer"},
)
MODEL = _object(id=TEXT, object={"const": "model"}, max_model_len=COUNT)
ERROR = _object(error=_object(message=TEXT, type=TEXT))
MESSAGE = _object(role={"enum": ["user", "assistant"]}, content=TEXT)
CHOICES = {"type": "array", "minItems": 1, "items": _object(index=COUNT, finish_reason=TEXT)}

# (method, path, what it does, body or None, answer's schema or None for text)
ROUTES: list[tuple[str, str, str, type[Wire] | None, dict | None]] = [
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatRequest,
        _object(id=TEXT, object={"const": "chat.completion"}, choices=CHOICES, usage=USAGE, ddtree=REPORT),
    ),
    (
        "post",
        "/v1/completions",
        "Continue a text",
        CompletionRequest,
        _object(id=TEXT, object={"const": "text_completion"}, choices=CHOICES, usage=USAGE, ddtree=REPORT),
    ),
    (
        "post",
        "/v1/responses",
        "Answer in typed items",
        ResponsesRequest,
        _object(id=TEXT, object={"const": "response"}, status=TEXT, output=LIST, usage=OBJECT, ddtree=REPORT),
    ),
    (
        "post",
        "/v1/messages",
        "Answer in content blocks",
        MessagesRequest,
        _object(id=TEXT, type={"const": "message"}, content=LIST, stop_reason=TEXT, usage=OBJECT, ddtree=REPORT),
    ),
    ("post", "/v1/messages/count_tokens", "Count a conversation", CountTokensRequest, _object(input_tokens=COUNT)),
    ("post", "/tokenize", "Text or messages to token ids", TokenizeRequest, _object(tokens=LIST, count=COUNT)),
    ("post", "/detokenize", "Token ids to text", DetokenizeRequest, _object(prompt=TEXT)),
    ("get", "/v1/models", "The model and its aliases", None, _object(data={"type": "array", "items": MODEL})),
    ("get", "/v1/models/{model_id}", "One of them", None, MODEL),
    ("get", "/health", "200 once warm", None, _object(status=TEXT)),
    ("get", "/version", "The version", None, _object(version=TEXT)),
    ("get", "/stats", "State of the server", None, _object(state=TEXT, running=COUNT, waiting=COUNT, uptime_s=NUMBER)),
    ("get", "/metrics", "Prometheus metrics", None, None),
]


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    components: dict[str, Any] = {"Error": ERROR}
    paths: dict[str, Any] = {}
    for method, path, summary, body, answer in ROUTES:
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(answer, method)}
        if body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": _reference(body, components)}},
            }
        if "{model_id}" in path:
            operation["parameters"] = [
                {"name": "model_id", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}
            ]
        paths[path] = {method: operation}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ddtree", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
    }


def _reference(model: type[Wire], components: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template=REFS + "{model}", by_alias=True)
    components |= schema.pop("$defs", {})
    if "messages" in schema["properties"]:
        # The model leaves messages to the text room, which reads more forms than these.
        schema["properties"]["messages"] = {"type": "array", "minItems": 1, "items": MESSAGE}
    components[model.__name__] = schema
    return {"$ref": REFS + model.__name__}


def _responses(answer: dict | None, method: str) -> dict[str, Any]:
    if answer is None:
        return {"200": {"description": "OK", "content": {"text/plain": {"schema": TEXT}}}}
    content = {"application/json": {"schema": answer}}
    if method == "post":
        content["text/event-stream"] = {"schema": TEXT}
    fault = {"description": "A fault, named", "content": {"application/json": {"schema": {"$ref": REFS + "Error"}}}}
    return {"200": {"description": "OK", "content": content}, "4XX": fault, "5XX": fault}
