"""The OpenAPI document of the endpoints that FastAPI does not know: their bodies are the engine's affair."""

from __future__ import annotations

from typing import Any

from proxy.request import CHAT, COMPLETIONS, WHOLE_PATHS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
                "kind": {"type": "string"},
            },
        }
    },
}
_STATUSES = {
    "400": "The request cannot be served as it is",
    "401": "A valid API key is needed",
    "404": "No such model",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "422": "The engine refused a field",
    "429": "This key, or everybody, sends too much",
    "500": "An engine failed",
    "501": "Needs a union instance, and this cluster has none",
    "502": "A leg failed",
    "503": "Nobody can serve this now",
    "504": "An engine did not answer in time",
}
_PROPERTIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": {"type": "array", "items": {"type": "object"}}},
    COMPLETIONS: {"prompt": {"type": ["string", "array"]}},
    "/v1/responses": {"input": {"type": ["string", "array"]}},
    "/v1/messages": {"messages": {"type": "array", "items": {"type": "object"}}},
}


def _operation(path: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            "model": {"type": "string"},
            "stream": {"type": "boolean"},
            "max_tokens": {"type": "integer", "minimum": 1},
            **_PROPERTIES[path],
        },
        "required": ["model", *_PROPERTIES[path]],
        "additionalProperties": True,
        "not": {"anyOf": [{"required": ["kv_transfer_params"]}, {"required": ["ec_transfer_params"]}]},
    }
    return {
        "summary": path,
        "description": "As the engine serves it; `kv_transfer_params` is set by the proxy alone.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The engine's answer, or with `stream` its events",
                "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
            },
            **_errors(),
        },
    }


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": text, "content": content} for code, text in _STATUSES.items()}


def document(base: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document, its errors in our shape, and the token-carrying endpoints."""
    components = base.setdefault("components", {})
    components.setdefault("schemas", {})["Error"] = _ERROR
    for path in base["paths"].values():
        for operation in path.values():
            operation["responses"] = {**_errors(), **operation["responses"]}
    for name in ("/tokenize", "/detokenize"):
        operation = base["paths"][name]["post"]
        schema = {"type": "object", "properties": {"model": {"type": "string"}}, "additionalProperties": True}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    for name in (CHAT, COMPLETIONS, *WHOLE_PATHS):
        base["paths"][name] = {"post": _operation(name)}
    return base
