"""One `vllm serve` child process: started, watched, ended together with everything it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import aiohttp

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ServerGone(RuntimeError):
    """The server ended, or its engine is dead."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent goes, however it goes, so that no server is left behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """The child, in a session of its own, listening on a free port of the loopback interface."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)],
            env=os.environ | environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def healthy(self, session: aiohttp.ClientSession, timeout: float = 5) -> bool:
        """Whether it runs and says that its engine does."""
        if not self.running:
            return False
        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(timeout)) as response:
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    async def wait_until_healthy(self, session: aiohttp.ClientSession, timeout: float) -> None:
        """Raises ServerGone if it ends or takes longer."""
        deadline = time.monotonic() + timeout
        while not await self.healthy(session):
            if not self.running:
                raise ServerGone(f"vllm serve ended with exit code {self.process.returncode}; see its log above")
            if time.monotonic() > deadline:
                raise ServerGone(f"vllm serve was not healthy after --start-seconds {timeout:.0f}")
            await asyncio.sleep(0.2)

    def stop(self, grace: float = 10) -> None:
        """SIGTERM, and after `grace` seconds SIGKILL to all that it started."""
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.poll()
