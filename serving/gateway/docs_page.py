"""`/docs`: the API as one page without scripts or anything from outside, so that it also works offline."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .3rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid #d0d7de; } .method { color: #0a6640; font-weight: 600; }
"""


def render(schema: dict[str, Any], base_url: str) -> str:
    """The OpenAPI document as HTML, with a curl command for each example."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(schema['info']['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(schema['info']['title'])}</h1>",
        f"<p>{escape(schema['info'].get('description', ''))}</p>",
        f'<p>Machine-readable: <a href="{base_url}/openapi.json">openapi.json</a>. OpenAI\'s SDK: '
        f'<code>OpenAI(base_url="{base_url}/v1", api_key="-")</code></p>',
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(schema, base_url, path, method.upper(), operation))
    return "".join(parts)


def _operation(schema: dict[str, Any], base_url: str, path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><span class=method>{method}</span> <code>{escape(path)}</code></h2>"]
    parts.append(f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>")
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        parts.append(_fields(_resolve(schema, content["schema"])))
        for name, example in content.get("examples", {}).items():
            parts.append(f"<p>Example: {escape(name)}</p><pre>{escape(_curl(base_url + path, example['value']))}</pre>")
    rows = "".join(
        f"<tr><td><code>{status}</code></td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
        if status != "422"
    )
    parts.append(f"<table><tr><th>Status</th><th>Meaning</th></tr>{rows}</table>")
    return "".join(parts)


def _fields(model: dict[str, Any]) -> str:
    required = set(model.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in model["properties"].items()
    )
    return f"<table><tr><th>Field (* required)</th><th></th></tr>{rows}</table>"


def _resolve(schema: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    name = reference["$ref"].rpartition("/")[2]
    model: dict[str, Any] = schema["components"]["schemas"][name]
    return model


def _curl(url: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, indent=2)
    return f"curl {url} \\\n  -H 'content-type: application/json' \\\n  -d '{text}'"
