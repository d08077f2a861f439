"""Configuration as layers of plain data: YAML text, a deep merge, and the environment on top."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

ENV_PREFIX = "WORKBENCH__"


class ConfigError(Exception):
    """The configuration cannot be used; the message lists every mistake with its path."""


def unknown(name: str, what: str, known: list[str]) -> str:
    """The message for a name that is not among the known ones, with the nearest that is."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known)) or 'none'}"
    return f"unknown {what} {name!r}; {hint}"


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """One YAML mapping; a key that stands twice is refused.

    Raises:
        ConfigError: the text is no YAML mapping.
    """
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 45th of a month, a number of thousands of digits
        raise ConfigError(f"{origin}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected keys and values, found {type(data).__name__}")
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; a configuration must not lose the first in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Later layers over earlier ones, mappings key by key; lists are replaced whole."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def overlay_env(data: dict[str, Any], env: dict[str, str]) -> None:
    """Sets WORKBENCH__A__B=value as data["a"]["b"], the value read as YAML; a number steps into a list.

    Raises:
        ConfigError: the path leads nowhere, or the value is no YAML.
    """
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split("__")
        parent: Any = data
        for depth, key in enumerate(path[:-1]):
            parent = _step(parent, key, f"{variable}: {'.'.join(path[: depth + 1])}")
        last = path[-1]
        try:
            value = yaml.safe_load(env[variable])
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"{variable}: {env[variable][:200]!r} is no YAML value") from None
        if isinstance(parent, list):
            parent[_index(parent, last, variable)] = value
        else:
            parent[last] = value


def _step(parent: Any, key: str, origin: str) -> Any:
    if isinstance(parent, list):
        return parent[_index(parent, key, origin)]
    if not isinstance(parent.setdefault(key, {}), dict | list):
        raise ConfigError(f"{origin} holds a value and no keys")
    return parent[key]


def _index(items: list[Any], key: str, origin: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(f"{origin}: expected an index from 0 to {len(items) - 1}, found {key!r}")
    return int(key)


Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    """A part of the configuration: frozen, and a key it does not know is refused with the nearest that it does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        strangers = [str(key) for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if strangers:
            raise ValueError("; ".join(unknown(key, "key", list(cls.model_fields)) for key in strangers))
        return data
