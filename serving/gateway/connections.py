"""One client per replica URL, kept while the routing table names it."""

from __future__ import annotations

from collections.abc import Collection

from serving.engine.client import EngineClient


class Connections:
    """Clients of the replicas, made when first used."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._clients: dict[str, EngineClient] = {}

    def client(self, url: str) -> EngineClient:
        """The client of the replica at `url`."""
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = EngineClient(url, connect_timeout_s=self._connect_timeout_s)
        return client

    async def keep_only(self, urls: Collection[str]) -> None:
        """Closes the clients of all other URLs."""
        for url in [url for url in self._clients if url not in urls]:
            await self._clients.pop(url).close()

    async def close(self) -> None:
        """Closes every client."""
        await self.keep_only(())
