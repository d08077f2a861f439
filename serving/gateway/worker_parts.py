"""What a worker is made of, put together from its settings, and its life in the background.

store, pipe     what it reads and writes beside its files; None where there is no store
feed, identity  keep the fleet and the authenticator fresh
hot             answers requests on hot routes with all of the others
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from serving.core.fleet import Fleet
from serving.core.ports import Clock, RoutingTableSource
from serving.gateway.accounting import Accounts, Outcome
from serving.gateway.connections import Connections
from serving.gateway.cors import cors_headers
from serving.gateway.dispatch import Dispatcher
from serving.gateway.fleet_feed import FleetFeed
from serving.gateway.guard_asker import GuardAsker
from serving.gateway.guardrails.screen import Guardrails, off_loop_checks
from serving.gateway.idempotency import Replays
from serving.gateway.identity import Identity
from serving.gateway.limits import LimitKeeper
from serving.gateway.observer import Observer
from serving.gateway.openai_routes import HotParts, HotRoutes, new_id
from serving.gateway.request import CacheSalts, CallBuilder
from serving.gateway.sessions import Sessions
from serving.gateway.shadow import Shadow
from serving.gateway.usage import Usage
from serving.metering.spool import UsageSpool
from serving.settings import GatewaySettings
from serving.store.connection import connect
from serving.store.pipelined import StorePipe
from serving.store.replicas import ReplicaReports
from serving.store.routing_table import FileRoutingTable, StoreRoutingTable
from serving.telemetry.decision_log import DecisionLog
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.25
"""How long counts wait before the other workers' pages show them."""


class WorkerParts:
    """The state of one worker.

    Attributes:
        fleet, builder, identity: what FastAPI's routes read too.
        hot: answers on hot routes.
        feed: keeps the fleet fresh.
        observer: tells running rollouts; None without a store.
    """

    def __init__(self, settings: GatewaySettings, clock: Clock, metrics: GatewayMetrics, seed: int) -> None:
        """Raises ValueError for settings that do not fit together, OSError for a folder that cannot be written."""
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._rng = random.Random(seed)
        url = settings.redis_url
        self._store = None if url is None else connect(url)
        self._pipe = None if url is None else StorePipe(url, rng=self._own_chance())
        self._connections = Connections(settings.connect_timeout_s)
        self._decisions = self._make_decision_log()
        self._spool = self._make_spool()
        self.fleet = Fleet()
        self.feed = self._make_feed()
        self.identity = Identity(settings, self._store, clock, self._own_chance())
        secret = _shared_secret(settings)
        self.builder = CallBuilder(self.fleet, CacheSalts(secret), Sessions(secret), settings.default_output_tokens)
        self.observer = None if self._store is None else Observer(self._store, clock)
        dispatcher = self._make_dispatcher()
        accounts = Accounts(metrics, self._spool, clock, settings.access_log, self._observe)
        self._guardrails = self._make_guardrails(dispatcher, accounts)
        self._shadow = None if self.observer is None else Shadow(dispatcher, self.observer, self._own_chance())
        self.limits = LimitKeeper(self._pipe, clock, num_workers=settings.num_workers, on_trip=metrics.count_trip)
        self._replays = self._make_replays()
        self.hot = HotRoutes(
            HotParts(
                authenticator=self.identity.authenticator,
                builder=self.builder,
                replays=self._replays,
                guardrails=self._guardrails,
                limits=self.limits,
                dispatcher=dispatcher,
                accounts=accounts,
                metrics=metrics,
                clock=clock,
                keep_alive_s=settings.sse_keep_alive_s,
                cors_headers=cors_headers(settings.cors_origins),
            )
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything in the background of serving. What is entered first ends last."""
        async with AsyncExitStack() as stack:
            stack.callback(self._metrics.flush)
            flushing = asyncio.create_task(self._keep_flushing())
            stack.callback(flushing.cancel)
            if self._spool is not None:
                stack.callback(self._spool.close)
                spooling = asyncio.create_task(self._spool.run())
                stack.callback(spooling.cancel)
            if self.observer is not None:
                observing = asyncio.create_task(self.observer.run())
                stack.callback(observing.cancel)
            if self._decisions is not None:
                stack.callback(self._decisions.close)
            if self._store is not None and self._pipe is not None:
                stack.push_async_callback(self._store.aclose)
                stack.push_async_callback(self._pipe.close)
            stack.push_async_callback(self._connections.close)
            if self._shadow is not None:
                stack.push_async_callback(self._shadow.stop)
            stack.push_async_callback(self._guardrails.close)
            self._guardrails.start()
            if self._replays is not None:
                stack.push_async_callback(self._replays.close)
                self._replays.start()
            stack.push_async_callback(self.limits.stop)
            await self.limits.start()
            stack.push_async_callback(self.identity.stop)
            await self.identity.start()
            stack.push_async_callback(self.feed.stop)
            await self.feed.start()
            yield

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self._metrics.flush()

    def _observe(self, accounts: Accounts, outcome: Outcome, usage: Usage | None, usd: float | None) -> None:
        if outcome.call is None or outcome.call.trial is None:
            return  # no rollout is told of it
        if self.observer is not None and self._shadow is not None:
            self.observer.offer(outcome, usage, usd)
            self._shadow.offer(accounts, outcome, usage, usd)

    def _own_chance(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def _make_decision_log(self) -> DecisionLog | None:
        settings = self._settings
        if settings.decision_log_path is None:
            return None
        return DecisionLog(settings.decision_log_path, settings.decision_log_frac, self._own_chance())

    def _make_spool(self) -> UsageSpool | None:
        folder, show = self._settings.usage_dir, self._metrics.show_spool
        if folder is None:
            return None
        return UsageSpool(
            folder,
            str(os.getpid()),
            clock=self._clock,
            on_counts=lambda counts: show(counts.num_backlog, counts.num_lost),
        )

    def _make_feed(self) -> FleetFeed:
        settings = self._settings
        sources: list[RoutingTableSource] = []
        if self._store is not None:
            sources.append(StoreRoutingTable(self._store))
        if settings.routing_table_path is not None:
            sources.append(FileRoutingTable(settings.routing_table_path))
        if not sources:
            raise ValueError(
                "the gateway has no routing table to serve from: set WORKBENCH_GATEWAY_REDIS_URL, "
                "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH or both"
            )
        return FleetFeed(
            self.fleet,
            sources,
            None if self._store is None else ReplicaReports(self._store),
            self._connections,
            self._metrics,
            self._clock,
            table_poll_s=settings.table_poll_s,
            report_poll_s=settings.report_poll_s,
        )

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self.fleet,
            self._connections,
            self._metrics,
            self._clock,
            self._own_chance(),
            upstream_timeout_s=self._settings.upstream_timeout_s,
            decisions=self._decisions,
        )

    def _make_guardrails(self, dispatcher: Dispatcher, accounts: Accounts) -> Guardrails:
        settings = self._settings.guardrails
        model = settings.guard_model
        ask = None if model is None else GuardAsker(model, self.builder, dispatcher, accounts, self._clock, new_id)
        return Guardrails(settings, off_loop_checks(settings, ask), self._metrics.count_guardrail)

    def _make_replays(self) -> Replays | None:
        if self._pipe is None:
            return None
        secret = self._settings.replay_secret
        if secret is None:
            logger.warning("WORKBENCH_GATEWAY_REPLAY_SECRET is not set: no other worker can read what this one stores")
        return Replays(
            self._pipe,
            secrets.token_bytes(32) if secret is None else secret.get_secret_value().encode(),
            self._clock,
            self._settings.replays,
            count=self._metrics.count_idempotency,
        )


def _shared_secret(settings: GatewaySettings) -> bytes:
    """Keys of tenants' caches and of sessions that no client named: both mean something only if all workers agree."""
    if settings.cache_salt_secret is not None:
        return settings.cache_salt_secret.get_secret_value().encode()
    logger.warning(
        "WORKBENCH_GATEWAY_CACHE_SALT_SECRET is not set: cached prefixes are shared with no other worker, and a "
        "session that its client does not name may get another version from each"
    )
    return secrets.token_bytes(32)
