"""Releases as configured: how long evidence counts, when nothing goes on, who is told."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, SecretStr, field_validator, model_validator

from serving.core.approval import Freeze, ReleasePolicy
from serving.core.policies.gate import DAY_S
from workbench.config_layers import Strict


class FreezeConfig(Strict):
    """A time in which no rollout goes on, `begins` included and `ends` not; a day begins at midnight, UTC.

    `models` are those that it holds; all without them. Going back is never held.
    """

    begins: date | datetime
    ends: date | datetime
    why: str = Field(min_length=1)
    models: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if _unix_s(self.ends) <= _unix_s(self.begins):
            raise ValueError(f"a freeze ends after it begins; got {self.begins} to {self.ends}")
        return self

    def freeze(self) -> Freeze:
        """The same for the core."""
        return Freeze(_unix_s(self.begins), _unix_s(self.ends), f"{self.why}, until {self.ends}", self.models)


class ReleasesConfig(Strict):
    """What holds for releases.

    `evidence_valid_days`: for so long a gate's verdict counts, and an approval with it. `webhook` gets alarms, new
    champions and waiting approvals as JSON; its address may hold a secret and is shown nowhere.
    """

    evidence_valid_days: PositiveFloat = 14.0
    freezes: tuple[FreezeConfig, ...] = ()
    webhook: SecretStr | None = None

    @field_validator("webhook")
    @classmethod
    def _is_an_address(cls, webhook: SecretStr | None) -> SecretStr | None:
        parts = None if webhook is None else urlsplit(webhook.get_secret_value())
        if parts is not None and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError("a webhook is an http:// or https:// address")
        return webhook

    def policy(self) -> ReleasePolicy:
        """The same for the core."""
        return ReleasePolicy(self.evidence_valid_days * DAY_S, tuple(freeze.freeze() for freeze in self.freezes))


def _unix_s(day: date | datetime) -> float:
    moment = day if isinstance(day, datetime) else datetime.combine(day, time.min)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
