"""Schedules on disk: one folder a schedule below `.workbench/schedules`, edited under one lock."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from workbench.schedule.cron import check
from workbench.schedule.files import AlreadyRuns, ScheduleBroken, locked, read_json, write_json
from workbench.schedule.history import History
from workbench.schedule.steps import CostTableStep

NAME = r"[a-z0-9][a-z0-9._-]{0,63}"


class ScheduleError(Exception):
    """The schedule cannot be used or edited; the message says what to do."""


class NoSuchSchedule(ScheduleError):
    """There is none of that name."""


class ScheduleExists(ScheduleError):
    """There is one of that name."""


class ScheduleRuns(ScheduleError):
    """It runs at this moment."""


def _web_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a webhook is an http:// or https:// address")
    return url


class CompareRule(BaseModel):
    """A run is worse when this metric of a cell is worse than the accepted run's by more than the tolerance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(min_length=1)
    tolerance_frac: float = Field(gt=0, lt=1, allow_inf_nan=False)


class Schedule(BaseModel):
    """What is run, when, within which bounds, and who is told."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=f"^{NAME}$")
    cron: Annotated[str, AfterValidator(check)]
    notebook: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    time_limit_minutes: float = Field(default=240.0, gt=0, le=7 * 1440)
    grace_minutes: float = Field(default=30.0, gt=0, le=7 * 1440)
    keep_reports: int = Field(default=30, ge=1, le=10_000)
    compare: CompareRule | None = None
    cost_table: CostTableStep = CostTableStep.NONE
    webhook: Annotated[str, AfterValidator(_web_address)] | None = None
    in_crontab: bool = True
    created_at_s: float


class Book:
    """The schedules of one data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Names of all schedules, sorted."""
        return sorted(path.parent.name for path in self.folder.glob("*/schedule.json"))

    def all(self) -> list[Schedule]:
        """All schedules. Raises ScheduleBroken."""
        return [self.get(name) for name in self.names()]

    def get(self, name: str) -> Schedule:
        """The schedule.

        Raises:
            NoSuchSchedule: there is none of that name.
            ScheduleBroken: its file cannot be read.
        """
        self._check_known(name)
        path = self._file(name)
        try:
            return Schedule.model_validate(read_json(path))
        except ValidationError as error:
            raise ScheduleBroken(f"{path} is no schedule: {error.errors()[0]['msg']}; add it anew") from error

    def _check_known(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise NoSuchSchedule(f"no schedule {name}; there are {', '.join(names) or 'none'}")

    def add(self, schedule: Schedule, *, replaces: bool = False) -> None:
        """Keeps a schedule. Raises ScheduleExists."""
        with self.editing():
            if schedule.name in self.names() and not replaces:
                raise ScheduleExists(f"there is a schedule {schedule.name}: say --replace, or remove it first")
            write_json(self._file(schedule.name), schedule.model_dump(mode="json"))

    def remove(self, name: str) -> None:
        """Forgets a schedule with its history; reports and MLflow keep what they have.

        Raises:
            NoSuchSchedule: there is none of that name.
            ScheduleRuns: it runs at this moment.
        """
        self._check_known(name)
        with self.editing():
            try:
                with locked(self.lock_path(name)):
                    shutil.rmtree(self.folder / name)
            except AlreadyRuns:
                raise ScheduleRuns(f"{name} runs at this moment: wait for its end, then remove it") from None

    def editing(self) -> AbstractContextManager[int]:
        """Keeps other commands from editing meanwhile."""
        return locked(self.folder / "edit.lock", waits=True)

    def history(self, name: str) -> History:
        """The runs of a schedule."""
        return History(self.folder / name)

    def lock_path(self, name: str) -> Path:
        """Held while the schedule runs."""
        return self.folder / name / "run.lock"

    def is_running(self, name: str) -> bool:
        """Whether a run is going on."""
        try:
            with locked(self.lock_path(name)):
                return False
        except AlreadyRuns:
            return True

    def _file(self, name: str) -> Path:
        return self.folder / name / "schedule.json"


def mistakes(error: ValidationError, option: Callable[[str], str]) -> str:
    """The mistakes of a schedule, each under the option that it came from."""
    lines = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"] if str(part) != "function-after[_web_address(), str]")
        lines.append(f"{option(field)}: {one['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
