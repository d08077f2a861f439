"""Judges a version: what the registry says of it, compared with the record; puts right what differs.

    gate.<name>          pass | fail | inconclusive, as the gates recorded them
    gate.evidence        digest of the document that the verdict rests on; gate.run the run that holds it
    approval             a release manager's word: that digest's beginning, 16 hex digits or more
    approval.rejected    a release manager's no, with its reason

The document is read and hashed at each judgement. A copy of what was recorded is kept, so that one that was overwritten
is put back too. Blocks: it is asked in a thread.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from serving.control.release_events import ReleaseEvents
from serving.core import gate_record
from serving.core.approval import Claim, ReleasePolicy, rule
from serving.core.errors import ServingError
from serving.core.policies.rollout import Judgement
from serving.core.ports import Clock
from serving.core.releases import Evidence, ReleaseBook
from serving.store.documents import read_file, write_file

logger = logging.getLogger(__name__)


class Claims(Protocol):
    """What the registry says, and where it is put right. All raise ServingError when it does not answer or refuses."""

    def tags(self, model: str, version: str) -> Mapping[str, str]:
        """All tags of a version."""
        ...

    def write_tags(self, model: str, version: str, tags: Mapping[str, str | None]) -> None:
        """Sets tags; takes those away whose value is None."""
        ...

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """The bytes there now, None where there is nothing."""
        ...

    def write_artifact(self, run_id: str, path: str, data: bytes) -> None:
        """Makes `data` the artifact."""
        ...


class RecordJudge:
    """The judge by the release book.

    Args:
        book: gives the newest book.
        claims: the registry.
        policy: for how long evidence counts, and freezes.
        clock: now.
        events: where alarms are told.
        copies: folder of the documents as they were recorded; None keeps none.
    """

    def __init__(
        self,
        book: Callable[[], ReleaseBook],
        claims: Claims,
        policy: ReleasePolicy,
        clock: Clock,
        events: ReleaseEvents,
        copies: Path | None = None,
    ) -> None:
        self._book = book
        self._claims = claims
        self._policy = policy
        self._clock = clock
        self._events = events
        self._copies = copies
        self._looking: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def judge(self, model: str, version: str) -> Judgement:
        """What counts now. Raises ServingError when the registry does not answer."""
        return self.look(model, version)[0]

    def look(self, model: str, version: str) -> tuple[Judgement, Mapping[str, str] | None]:
        """What counts now, and the tags as they stand after it; None where they could not be put right.

        One thread at a time looks at a version: two would put right, and tell, the same.

        Raises:
            ServingError: the registry does not answer.
        """
        with self._looking[model, version]:
            return self._look(model, version)

    def _look(self, model: str, version: str) -> tuple[Judgement, Mapping[str, str] | None]:
        tags = self._claims.tags(model, version)
        book = self._book()
        evidence = next(iter(book.of(model).evidence_of(version)), None)
        found = None if evidence is None else self._digest_now(evidence)
        ruling = rule(Claim(model, version, tags, found), book, self._policy, self._clock.now_s())
        self._events.alarms("claims", model, version, ruling.findings)
        try:
            if ruling.put_back:
                self._claims.write_tags(model, version, ruling.put_back)
            if evidence is None or found == evidence.digest or self._restore(evidence):
                self._events.alarms("claims", model, version, ())  # done again, it is told again
        except ServingError as error:  # it counts for nothing all the same; the next look tries again
            logger.warning("%s@%s: what the registry says could not be put right: %s", model, version, error.message)
            return ruling.judgement, None
        right = {tag: value for tag, value in (dict(tags) | dict(ruling.put_back)).items() if value is not None}
        return ruling.judgement, right

    def _digest_now(self, evidence: Evidence) -> str | None:
        data = self._claims.artifact(evidence.run_id, evidence.path)
        if data is None:
            return None
        digest = gate_record.digest(data)
        copy = self._copy(evidence)
        if digest == evidence.digest and copy is not None and not copy.exists():
            try:
                write_file(copy, data, 0o600)
            except ServingError as error:  # without a copy it could not be put back; it counts all the same
                logger.warning("no copy of the evidence on %s is kept: %s", evidence.version, error.message)
        return digest

    def _restore(self, evidence: Evidence) -> bool:
        """Puts the document back from the copy; whether there is one."""
        copy = self._copy(evidence)
        data = None if copy is None else read_file(copy)
        if data is None or gate_record.digest(data) != evidence.digest:
            return False
        self._claims.write_artifact(evidence.run_id, evidence.path, data)
        return True

    def _copy(self, evidence: Evidence) -> Path | None:
        return None if self._copies is None else self._copies / f"{evidence.digest}.json"
