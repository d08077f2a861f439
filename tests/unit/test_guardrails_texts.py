"""The texts of a body: all that can reach a prompt, nothing that names a thing or is a medium."""

from __future__ import annotations

from typing import Any

import pytest

from serving.gateway.guardrails.texts import collect

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "finds",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, ["hi"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}]}, ["hi"]),
        ({"messages": [{"role": "tool", "tool_call_id": "id", "content": "out"}]}, ["out"]),
        ({"messages": [{"role": "user", "content": "hi", "name": "ann"}]}, ["hi", "ann"]),
        ({"messages": [{"role": "x" * 65, "content": "hi"}]}, ["x" * 65, "hi"]),  # too long for a name
        ({"messages": [{"role": "user", "content": {"deep": ["er"]}}]}, ["er"]),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": '{"a":1}'}}]}]},
            ['{"a":1}'],
        ),
        ({"prompt": "one"}, ["one"]),
        ({"prompt": ["one", "two"], "suffix": "three"}, ["one", "two", "three"]),
        ({"input": ["one"]}, ["one"]),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}, IMAGE]}]}, ["hi"]),
        ({"text": "one"}, ["one"]),
        ({"model": "m", "user": "u", "stop": ["x"]}, []),
        ({"messages": 3, "prompt": None}, []),
    ],
)
def test_what_reaches_a_prompt_is_collected(body: dict[str, Any], texts: list[str]):
    assert collect(body).values == texts


def test_tools_are_read_with_the_clients_own_names():
    assert {"find", "finds", "where", "city"} <= set(collect({"tools": [TOOL]}).values)


@pytest.mark.parametrize(("prompt", "number"), [([1, 2, 3], 3), ([[1, 2], [3]], 3), (["a"], 0)])
def test_token_ids_are_counted(prompt: Any, number: int):
    assert collect({"prompt": prompt}).num_token_ids == number


def test_what_is_rewritten_stands_in_the_body():
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "prompt": ["a", "b"]}
    texts = collect(body)
    texts.rewrite([text.upper() for text in texts.values])
    assert body == {"messages": [{"role": "user", "content": [{"type": "text", "text": "HI"}]}], "prompt": ["A", "B"]}
    with pytest.raises(ValueError):
        texts.rewrite(["one"])


def test_the_name_of_a_field_stays():
    texts = collect({"tools": [TOOL]})
    index = texts.values.index("city")
    assert not texts.can_rewrite(index)
    with pytest.raises(ValueError):
        texts.rewrite(["x" if text == "city" else text for text in texts.values])


def test_depth_does_not_matter():
    deep: Any = "end"
    for _ in range(100_000):
        deep = [deep]
    assert collect({"messages": deep}).values == ["end"]
    while isinstance(deep, list):  # taken apart from outside: freeing it whole would recurse
        deep = deep.pop()
