"""One replica: a vLLM server and the way to it. It exits when its server can't serve any more, and is then replaced."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator

import aiohttp

from . import exposition
from .options import ServeOptions
from .server import Server, ServerGone
from .wire import HOP_BY_HOP, Forward, Head, ReplicaLost

logger = logging.getLogger("vllm.ktx.serving")
WATCH_SECONDS = 0.5
EXIT_AFTER = 1.0  # seconds in which requests under way can say that their server is gone


class Replica:
    """Forwards requests to its server. Made by `await Replica.start(name, options)`."""

    def __init__(self, name: str, options: ServeOptions, server: Server, session: aiohttp.ClientSession) -> None:
        self.name, self.options, self.server, self.session = name, options, server, session
        self._watch = asyncio.create_task(self._exit_with_server())
        self.free_tokens: int | None = None

    @classmethod
    async def start(cls, name: str, options: ServeOptions) -> Replica:
        """Returns when the server is healthy. Raises ServerGone if it doesn't get there."""
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        server = Server((*options.command, *options.arguments), options.server_environment())
        try:
            await server.wait_until_healthy(session, options.start_seconds)
        except BaseException:
            server.stop(0)
            await session.close()
            raise
        return cls(name, options, server, session)

    async def forward(self, request: Forward) -> AsyncIterator[Head | bytes]:
        """A Head, then the body as it comes; a body that isn't a stream comes whole.

        Raises ReplicaLost if the server is gone, before the Head or, for a stream, in its middle.
        """
        headers = {key: value for key, value in request.headers.items() if key not in HOP_BY_HOP}
        try:
            async with self.session.request(
                request.method, self.server.url + request.target, headers=headers, data=request.body or None
            ) as response:
                head = Head(
                    response.status,
                    {k.lower(): v for k, v in response.headers.items() if k.lower() not in HOP_BY_HOP},
                    self.name,
                )
                if head.streams:
                    async for part in self._stream(head, response.content.iter_any()):
                        yield part
                    return
                body = await response.read()
                if head.status >= 500 and not await self.server.healthy(self.session):
                    raise ReplicaLost(f"its server answered {head.status} and is not healthy", self.name)
                yield head
                yield body
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ReplicaLost(f"{type(error).__name__} from its server", self.name) from error

    async def _stream(self, head: Head, chunks: AsyncIterator[bytes]) -> AsyncIterator[Head | bytes]:
        """The Head waits for the first bytes: a stream that begins with a dead engine's error can still be retried."""
        begun = False
        async for chunk in chunks:
            if not begun:
                if chunk.startswith(b'data: {"error"') and not await self.server.healthy(self.session):
                    raise ReplicaLost("its engine died before the first token", self.name)
                yield head
                begun = True
            yield chunk
        if not begun:
            yield head

    async def metrics(self) -> str:
        """Its server's Prometheus text."""
        async with self.session.get(f"{self.server.url}/metrics", timeout=aiohttp.ClientTimeout(10)) as response:
            return await response.text()

    async def refresh_room(self) -> int | None:
        """Tokens that its KV cache has room for, as its server's gauges say."""
        try:
            self.free_tokens = exposition.free_tokens(await self.metrics())
        except (aiohttp.ClientError, asyncio.TimeoutError):
            self.free_tokens = None
        return self.free_tokens

    async def check(self) -> None:
        """Raises ServerGone unless the server says that it is healthy."""
        if not await self.server.healthy(self.session):
            raise ServerGone(f"the server of replica {self.name} is not healthy")

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.to_thread(self.server.stop)
        await self.session.close()

    async def _exit_with_server(self) -> None:
        """Ends this process when the server has ended or its engine is dead; vLLM answers 503 to /health then."""
        while self.server.running:
            await asyncio.sleep(WATCH_SECONDS)
            if self.server.running and await self._engine_is_dead():
                break
        logger.error("KTX: the server of replica %s is gone (exit code %s)", self.name, self.server.process.poll())
        await asyncio.sleep(EXIT_AFTER)
        self.server.stop(0)
        os._exit(1)

    async def _engine_is_dead(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(30)  # a busy server may be slow to answer: that is not a dead engine
            async with self.session.get(f"{self.server.url}/health", timeout=timeout) as response:
                return response.status == 503
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False
