"""Releases as configured: days are midnight UTC, a freeze names what it holds, a webhook's address is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.config import load_config
from workbench.config_layers import ConfigError

MODELS = "models: {m: {source: /weights}}\n"


def releases(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "workbench.yaml"
    path.write_text(MODELS + text)
    return path


def test_days_become_seconds_and_freezes_hold_between_two_midnights(tmp_path: Path) -> None:
    text = """releases:
  evidence_valid_days: 2
  freezes: [{begins: 2026-12-20, ends: 2027-01-04T06:00:00+01:00, why: holidays, models: [m]}]
"""
    policy = load_config(releases(tmp_path, text), {}).releases.policy()
    assert policy.evidence_valid_s == 2 * 86_400
    begin_s, end_s = 1_797_724_800.0, 1_799_038_800.0
    assert (policy.freezes[0].from_s, policy.freezes[0].until_s) == (begin_s, end_s)
    assert (policy.frozen("m", begin_s) or "").startswith("holidays, until 2027-01-04")
    assert policy.frozen("m", end_s) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("releases: {freezes: [{begins: 2026-12-20, ends: 2026-12-20, why: x}]}", "ends after it begins"),
        ("releases: {freezes: [{begins: 2026-12-20, ends: 2026-12-21, why: x, models: [mm]}]}", "did you mean 'm'"),
        ("releases: {webhook: ftp://secret@example.com}", "http:// or https://"),
        ("releases: {evidence_valid_days: 0}", "evidence_valid_days"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(releases(tmp_path, text), {})


def test_a_webhook_is_a_secret(tmp_path: Path) -> None:
    config = load_config(releases(tmp_path, "releases: {webhook: 'https://hooks.example.com/secret'}"), {})
    assert config.releases.webhook is not None
    assert config.releases.webhook.get_secret_value() == "https://hooks.example.com/secret"
    assert "hooks" not in repr(config) and "hooks" not in config.model_dump_json()
