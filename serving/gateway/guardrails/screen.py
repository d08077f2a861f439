"""A worker's guardrails: each tenant's policy, applied to its requests before any GPU time.

check()         on the event loop, without an await: enough for almost every request
check_slowly()  the rest: a check off the loop is on, or looking closer takes milliseconds
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from serving.core.errors import ErrorCode, Overloaded, Unavailable
from serving.core.policies.guardrails import CHECKS, Action, GuardrailSettings, OnFailure, actions, mistakes
from serving.core.tenancy import GuardrailPolicy, Tenant
from serving.gateway.guardrails.guard_model import Ask, GuardModelCheck
from serving.gateway.guardrails.off_loop import CheckFailed, Found, OffLoopCheck, ProcessCheck, is_installed
from serving.gateway.guardrails.patterns import blocklist, built_in, custom
from serving.gateway.guardrails.scanner import Laborious, Scanner
from serving.gateway.guardrails.screening import PASSED, Count, Ready, Screening, Verdict
from serving.gateway.guardrails.texts import collect

T = TypeVar("T")
MAX_POLICIES = 1_000
RETRY_AFTER_S = 1.0


class Guardrails:
    """All checks of a gateway worker.

    Args:
        settings: the gateway's.
        off_loop: the checks off the loop, by `off_loop_checks`.
        count: counts what came of checks that found something or failed.
    """

    def __init__(
        self, settings: GuardrailSettings, off_loop: Iterable[OffLoopCheck] = (), count: Count = lambda _, __: None
    ) -> None:
        """Raises ValueError, saying what is wrong, for settings that cannot be kept."""
        if found := mistakes(settings):
            raise ValueError("guardrails: " + "; ".join(found))
        self.settings = settings
        self.off_loop = {check.name: check for check in off_loop}
        self._count = count
        own = blocklist(settings.blocklist)
        patterns = [*built_in(), *(custom(*item) for item in settings.patterns.items())]
        self._scanner = Scanner(patterns if own is None else [*patterns, own])
        self._ready: dict[int, tuple[GuardrailPolicy, Ready]] = {}
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, "guardrails")
        for name in self.ready(GuardrailPolicy()).off_loop:
            if name not in self.off_loop:
                raise ValueError(f"guardrails: actions.{name}: {why_missing(name)}")

    def ready(self, policy: GuardrailPolicy) -> Ready:
        """The policy made ready; kept, for it costs 40 µs, and 30 ms with the longest blocklist."""
        kept = self._ready.get(id(policy))
        if kept is None:
            if len(self._ready) >= MAX_POLICIES:
                del self._ready[next(iter(self._ready))]
            kept = self._ready[id(policy)] = policy, self._make_ready(policy)  # held, so that its id stays its own
        return kept[1]

    def _make_ready(self, policy: GuardrailPolicy) -> Ready:
        chosen = actions(self.settings, policy)
        own = blocklist(policy.blocklist)
        scanners = (self._scanner,) if own is None else (self._scanner, Scanner([own]))
        off_loop = tuple(name for name, rule in CHECKS.items() if rule.off_loop and chosen[name] is not Action.ALLOW)
        return Ready(chosen, scanners, off_loop, self.settings.max_chars)

    # ---- requests

    def check(self, tenant: Tenant, body: dict[str, Any]) -> Verdict | None:
        """Lets a parsed body pass, redacts it in place, or raises; None when `check_slowly` has to be awaited instead.

        Raises:
            ContentBlocked: names the check and the field.
        """
        ready = self.ready(tenant.guardrails)
        if ready.off_loop:
            return None
        texts = collect(body)
        if ready.passes_at_once(texts):
            return PASSED
        screening = Screening(ready, texts, self._count)
        screening.weigh()
        try:
            screening.look(True)
        except Laborious:
            return None
        return screening.verdict

    async def check_slowly(self, tenant: Tenant, body: dict[str, Any]) -> Verdict:
        """As `check`, with the checks off the loop and without a bound on the time that the others take.

        Raises:
            ContentBlocked: names the check and the field.
            Overloaded: as many requests as may wait here do.
            Unavailable: a check off the loop could not be made, and the settings don't let the request pass then.
        """
        ready = self.ready(tenant.guardrails)
        screening = Screening(ready, collect(body), self._count)
        screening.weigh()
        if self._num_waiting >= self.settings.max_waiting:
            raise Overloaded("too many requests wait for checks of their content", retry_after_s=RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            await self.patiently(screening.look)
            await self._look_off_loop(ready, screening)
        finally:
            self._num_waiting -= 1
        return screening.end()

    async def patiently(self, work: Callable[[bool], T]) -> T:
        """What `work` gives: it is called with True on the loop, and with False in a thread when it takes too long."""
        try:
            return work(True)
        except Laborious:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, False)

    async def _look_off_loop(self, ready: Ready, screening: Screening) -> None:
        answers = await asyncio.gather(*(self._ask(name, screening.texts) for name in ready.off_loop))
        failed = []
        for name, answer in zip(ready.off_loop, answers, strict=True):
            if isinstance(answer, CheckFailed):
                failed.append((name, answer))
                self._count(name, f"failed_{answer.cause}")
            else:
                screening.take(name, answer, self.off_loop[name].threshold)
        if failed and self.settings.on_failure is OnFailure.CLOSED:
            raise unavailable(*failed[0])

    async def _ask(self, name: str, texts: Sequence[str]) -> Sequence[Found] | CheckFailed:
        try:
            return await self.ask(name, texts)
        except CheckFailed as error:
            return error

    async def ask(self, name: str, texts: Sequence[str]) -> Sequence[Found]:
        """What a check off the loop makes of the texts. Raises CheckFailed, also when it is late or not there."""
        check = self.off_loop.get(name)
        if check is None:
            raise CheckFailed("missing", why_missing(name))
        limit_s = self.settings.off_loop_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await check.find(texts)
        except TimeoutError as error:
            raise CheckFailed("late", f"it took longer than {limit_s:g} s") from error

    # ----

    def start(self) -> None:
        """Starts the processes of the checks that the gateway's own settings turn on; others start when needed."""
        for name in self.ready(GuardrailPolicy()).off_loop:
            if isinstance(check := self.off_loop[name], ProcessCheck):
                check.start()

    async def close(self) -> None:
        """Ends what it started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for check in self.off_loop.values():
            await check.close()


def off_loop_checks(settings: GuardrailSettings, ask_guard_model: Ask | None = None) -> list[OffLoopCheck]:
    """The checks off the loop that this installation can make."""
    checks: list[OffLoopCheck] = []
    if is_installed("toxicity"):
        checks.append(ProcessCheck("toxicity", settings.toxicity_threshold, settings.workers))
    if is_installed("presidio"):
        entities = list(settings.presidio_entities)
        checks.append(ProcessCheck("presidio", settings.presidio_threshold, settings.workers, entities=entities))
    if ask_guard_model is not None and settings.guard_model is not None:
        checks.append(GuardModelCheck(ask_guard_model))
    return checks


def why_missing(check: str) -> str:
    """What a check needs that is not there."""
    if check == "guard_model":
        return "needs guard_model, the served name of the model to ask"
    return "needs pip install 'llm-workbench[guardrails]'"


def unavailable(check: str, error: CheckFailed) -> Unavailable:
    """The refusal of a request that a check should have seen."""
    return Unavailable(
        f"the guardrail {check!r} could not check the content: {error}",
        code=ErrorCode.GUARDRAIL_UNAVAILABLE,
        retry_after_s=RETRY_AFTER_S,
    )
