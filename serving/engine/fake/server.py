"""The fake engine's socket and routes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from time import perf_counter
from typing import Any, Self

import orjson
from pydantic import ValidationError

from serving.core.errors import BadRequest, ServingError
from serving.engine.fake.agenda import Agenda
from serving.engine.fake.embed import Embedding
from serving.engine.fake.generation import Generation
from serving.engine.fake.http import HttpConnection, Request
from serving.engine.fake.metrics import metrics_page
from serving.engine.fake.openai import (
    Kind,
    asked_model,
    embeddings_body,
    error_body,
    parse_generate,
    parse_inputs,
    tokenize_body,
)
from serving.engine.fake.scheduler import Scheduler
from serving.engine.fake.settings import FakeSettings, Faults, ServerFaults
from serving.engine.fake.write_log import RequestLog, Write, WriteKind, WriteLog

Handler = Callable[[HttpConnection, Request], None]


class FakeEngine:
    """A vLLM look-alike; `async with FakeEngine(settings) as engine` serves on `engine.url` until the block ends.

    Attributes:
        log: what was asked and written; the truth for tests.
        faults: of all requests, until set to None again.
    """

    def __init__(self, settings: FakeSettings | None = None) -> None:
        self.settings = settings or FakeSettings()
        self.log = WriteLog(self.settings.log, self.settings.log_limit)
        self.faults: ServerFaults | None = None
        self.scheduler = Scheduler(self.settings)
        self.port = self.settings.port
        self._agenda = Agenda()
        self._server: asyncio.Server | None = None
        self._connections: set[HttpConnection] = set()
        self._paused: set[Generation] = set()
        self._changed = asyncio.Event()
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): lambda c, r: self._generate(Kind.CHAT, c, r),
            ("POST", "/v1/completions"): lambda c, r: self._generate(Kind.COMPLETION, c, r),
            ("POST", "/v1/embeddings"): self._embed,
            ("POST", "/tokenize"): lambda c, r: c.respond_json(200, tokenize_body(_json(r), self.settings)),
            ("GET", "/v1/models"): lambda c, _: c.respond_json(200, self._models()),
            ("GET", "/health"): lambda c, _: c.respond(
                self.faults.health_status if self.faults else 200, b"", "text/plain"
            ),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): lambda c, _: c.respond_json(200, {"version": "fake"}),
            ("POST", "/fake/faults"): self._set_faults,
            ("DELETE", "/fake/faults"): self._clear_faults,
            ("POST", "/fake/resume"): self._resume,
            ("GET", "/fake/log"): self._show_log,
        }

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.settings.host}:{self.port}"

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the port is taken.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(self._connections.add, self._on_closed, self._on_request),
            self.settings.host,
            self.settings.port,
            backlog=4096,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the socket and every connection at once, as a killed process would; its requests end as aborted."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.reset()
        await self.wait_until(lambda engine: not engine._connections)
        self.log.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def wait_until(self, condition: Callable[[FakeEngine], bool], timeout_s: float = 5.0) -> None:
        """Returns once `condition` holds; looked at whenever a request begins, writes or ends.

        Raises:
            TimeoutError: it did not come to hold.
        """
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    # ---- requests

    def _on_closed(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._changed.set()

    def _on_request(self, connection: HttpConnection, request: Request) -> None:
        """Answers when its turn comes: those that came with it are read, and so stamped, before that."""
        now_s = asyncio.get_running_loop().time()
        self._agenda.at(now_s, lambda: connection.answer(lambda: self._answer(connection, request)))

    def _answer(self, connection: HttpConnection, request: Request) -> None:
        path = request.path.partition("?")[0]
        handler = self._routes.get((request.method, path))
        try:
            if handler is None:
                connection.respond_json(404, {"detail": "Not Found"})
            else:
                handler(connection, request)
        except ServingError as error:
            connection.respond_json(error.status, error_body(error.status, error.message, error.param))

    def _generate(self, kind: Kind, connection: HttpConnection, request: Request) -> None:
        body = _json(request)
        faults = self._faults_of(request, body)
        log = self._begin_log(request, body)
        try:
            generate = parse_generate(kind, body, self.settings)
            log.num_prompt_tokens = len(generate.prompt_words)
            if self._answers_by_status(connection, log, faults):
                return
            generation = Generation(
                generate,
                connection=connection,
                log=log,
                settings=self.settings,
                faults=faults,
                scheduler=self.scheduler,
                agenda=self._agenda,
                paused=self._paused,
                on_change=self._changed.set,
                on_end=self._end_log,
            )
        except ServingError as error:
            self._end_refused(log, error.status)
            raise
        generation.begin()

    def _embed(self, connection: HttpConnection, request: Request) -> None:
        body = _json(request)
        faults = self._faults_of(request, body)
        log = self._begin_log(request, body)
        try:
            asked_model(body, self.settings)
            inputs = parse_inputs(body)
            answer = embeddings_body(body, inputs, log.id, self.settings)
        except ServingError as error:
            self._end_refused(log, error.status)
            raise
        log.num_prompt_tokens = sum(len(text.split()) for text in inputs)
        if self._answers_by_status(connection, log, faults):
            return
        Embedding(
            answer,
            connection=connection,
            log=log,
            settings=self.settings,
            faults=faults,
            scheduler=self.scheduler,
            on_end=self._end_log,
        ).begin()

    def _faults_of(self, request: Request, body: dict[str, Any]) -> Faults:
        """The server's faults, under those of the body, under those of the header."""
        faults: Faults = Faults()
        if self.faults is not None:
            faults = faults.overridden_by(self.faults)
            num_left = self.faults.num_requests
            if num_left == 1:
                self.faults = None
            elif num_left is not None:
                self.faults = self.faults.model_copy(update={"num_requests": num_left - 1})
        header = request.headers.get(b"x-fake")
        try:
            for own in (body.get("fake"), orjson.loads(header) if header else None):
                if own is not None:
                    faults = faults.overridden_by(Faults.model_validate(own))
        except (ValidationError, orjson.JSONDecodeError) as error:
            raise BadRequest(f"fake: {error}", param="fake") from error
        return faults

    def _answers_by_status(self, connection: HttpConnection, log: RequestLog, faults: Faults) -> bool:
        if faults.status is None:
            return False
        headers = {} if faults.retry_after_s is None else {"retry_after": str(faults.retry_after_s)}
        self._end_refused(log, faults.status)
        connection.respond_json(faults.status, error_body(faults.status, "A fault, as asked for."), **headers)
        return True

    def _begin_log(self, request: Request, body: dict[str, Any]) -> RequestLog:
        request_id = request.headers.get(b"x-request-id", b"").decode("latin-1") or secrets.token_hex(8)
        if request_id in self.log.active:
            request_id = f"{request_id}-{secrets.token_hex(4)}"
        log = RequestLog(request_id, request.path, request.received_at_s, request.headers, body)
        self.log.begin(log)
        self._changed.set()
        return log

    def _end_refused(self, log: RequestLog, status: int) -> None:
        log.status = status
        log.writes.append(Write(perf_counter(), 0, WriteKind.BODY))
        self._end_log(log, "error")

    def _end_log(self, log: RequestLog, finish_reason: str) -> None:
        self.log.end(log, finish_reason)
        self._changed.set()

    # ---- about the engine

    def _models(self) -> dict[str, Any]:
        card = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self.settings.max_model_len}
        model = self.settings.model
        cards = [{"id": model, **card, "root": model, "parent": None}]
        cards += [{"id": name, **card, "root": name, "parent": model} for name in self.settings.lora_modules]
        return {"object": "list", "data": cards}

    def _metrics(self, connection: HttpConnection, request: Request) -> None:
        page = metrics_page(self.scheduler, self.settings)
        connection.respond(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _set_faults(self, connection: HttpConnection, request: Request) -> None:
        try:
            self.faults = ServerFaults.model_validate(_json(request))
        except ValidationError as error:
            raise BadRequest(str(error)) from error
        connection.respond_json(200, self.faults.model_dump(exclude_unset=True))

    def _clear_faults(self, connection: HttpConnection, request: Request) -> None:
        self.faults = None
        connection.respond_json(200, {})

    def _resume(self, connection: HttpConnection, request: Request) -> None:
        """Lets all that are paused go on, and says how many they were."""
        paused = list(self._paused)
        for generation in paused:
            generation.resume()
        connection.respond_json(200, {"num_resumed": len(paused)})

    def _show_log(self, connection: HttpConnection, request: Request) -> None:
        requests = [*self.log.ended, *self.log.active.values()]
        connection.respond_json(200, [request_log.as_dict() for request_log in requests])


def _json(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("The body is no JSON object.")
    return body
