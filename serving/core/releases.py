"""The control plane's own record of releases: who is champion, and which evidence it was shown of a version.

    champion    version and digest of its weights: what requests without a version get, whatever the registry says
    evidence    what the gates said of a version, and the SHA-256 of the document that they wrote

The registry shows the same to people, as an alias and as tags, and is put right where it differs. The book is published
whole, with an epoch, like the tenant directory; each change here gives a new book.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serving.core.sequential import Verdict

RELEASE_BOOK_SCHEMA = 1
MAX_EVIDENCE = 20
"""So much evidence is remembered a model: enough to tell a stale approval from a wrong one."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Champion:
    """Who a model's champion is.

    `previous` is the version before it: what the registry may still say right after a change. `why` is for people.
    """

    version: str
    weights_digest: str | None
    since_s: float
    why: str
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the gates said of a version, as the control plane was told when they had run.

    Attributes:
        version: whose.
        digest: SHA-256 of the evidence document, 64 hex digits.
        run_id: the registry's run that holds the document.
        path: of the document among the run's artifacts.
        verdicts: by the name of the tag that shows it, such as `gate.quality`.
        weights_digest: of the weights that were judged; None where the registry names none.
        recorded_at_s: Unix seconds; its age counts from here.
    """

    version: str
    digest: str
    run_id: str
    path: str
    verdicts: Mapping[str, Verdict]
    weights_digest: str | None
    recorded_at_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for what no document can have."""
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"the digest of evidence has 64 hex digits; got {self.digest!r}")
        if not (self.run_id.isalnum() and self.path):
            raise ValueError(f"evidence lies at a path of a run; got run {self.run_id!r}, path {self.path!r}")

    @property
    def place(self) -> str:
        """Where the document lies, as the registry names places."""
        return f"runs:/{self.run_id}/{self.path}"


@dataclass(frozen=True, slots=True)
class Release:
    """A model's champion, and the evidence on its versions, oldest first."""

    model: str
    champion: Champion | None = None
    evidence: tuple[Evidence, ...] = ()

    def evidence_of(self, version: str) -> tuple[Evidence, ...]:
        """All that is remembered of a version, newest first."""
        return tuple(one for one in reversed(self.evidence) if one.version == version)


@dataclass(frozen=True, slots=True)
class ReleaseBook:
    """All releases. `epoch` rises with each publication.

    `registry` is the one whose versions are meant, by what it is called nowhere else; empty until it was seen.
    """

    epoch: int = 0
    published_at_s: float = 0.0
    releases: tuple[Release, ...] = ()
    registry: str = ""
    schema: int = field(default=RELEASE_BOOK_SCHEMA)

    def of(self, model: str) -> Release:
        """The model's release; an empty one for a model that nobody wrote of."""
        return next((one for one in self.releases if one.model == model), Release(model))


def of_registry(book: ReleaseBook, registry: str) -> ReleaseBook:
    """The book for that registry: the same where it is its own, an empty one where it was another's.

    A number of a version means nothing in another registry, nor in one that began anew.
    """
    if book.registry in ("", registry):
        return replace(book, registry=registry)
    return replace(book, registry=registry, releases=())


def appointed(
    book: ReleaseBook, model: str, version: str, weights_digest: str | None, at_s: float, why: str
) -> ReleaseBook:
    """The book with that version as champion; the same book when it is."""
    release = book.of(model)
    there = release.champion
    if there is not None and there.version == version:
        return book
    champion = Champion(version, weights_digest, at_s, why, None if there is None else there.version)
    return _with(book, replace(release, champion=champion))


def recorded(book: ReleaseBook, model: str, evidence: Evidence) -> ReleaseBook:
    """The book with the evidence as the newest; the oldest falls out after `MAX_EVIDENCE`.

    The very same document again, by its digest, renews its age.
    """
    release = book.of(model)
    others = tuple(one for one in release.evidence if (one.version, one.digest) != (evidence.version, evidence.digest))
    return _with(book, replace(release, evidence=(*others, evidence)[-MAX_EVIDENCE:]))


def _with(book: ReleaseBook, release: Release) -> ReleaseBook:
    others = [one for one in book.releases if one.model != release.model]
    return replace(book, releases=tuple(sorted([*others, release], key=lambda one: one.model)))
