"""An HTTP server in a thread of this process, on loopback: bind, start, stop, and the pages that say how it stands."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from revise_lab.errors import ConfigError, EndpointError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

START_LIMIT_S = 20.0
KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that is idle, so that none is closed while a call is on its way."""
SEND_BUFFER_BYTES = 32_768
"""Kernel memory for what a slow reader has not fetched; without a limit it grows to megabytes a connection."""


class LoopbackServer(ABC):
    """A chat endpoint whose connections live in one event loop in one thread.

    Parameters
    ----------
    host : str
        Address to bind.
    port : int
        Port to bind; 0 takes a free one.
    allow_remote : bool
        Must be set to bind anything but loopback: the endpoint has no authentication.

    Raises
    ------
    ConfigError
        For a host that is not loopback without ``allow_remote``.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> None:
        if not allow_remote and not _is_loopback(host):
            raise ConfigError(
                f"host {host!r} is not loopback and the emulated endpoint has no authentication; "
                "bind 127.0.0.1, or pass allow_remote=True on a network that you trust",
                host=host,
            )
        if not 0 <= port < 65_536:
            raise ConfigError(f"port={port} is out of range; give 0 to 65535, 0 for a free one", port=port)
        self.host, self.port = host, port
        self._live: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Base URL for a client, with ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def start(self) -> Self:
        """Bind, start the thread and wait until the server answers.

        Returns
        -------
        LoopbackServer
            Itself, with the real port.

        Raises
        ------
        EndpointError
            If the port is taken or the server does not come up.
        """
        import uvicorn

        if self._thread is not None:
            return self
        self._loop = None
        try:
            bound = socket.create_server((self.host, self.port), backlog=1024)
        except OSError as error:
            raise EndpointError(
                f"cannot bind {self.host}:{self.port} ({error.strerror}); choose another port, or 0 for a free one",
                port=self.port,
            ) from error
        try:
            self._begin()
        except BaseException:
            bound.close()
            raise
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # asyncio sets this only on sockets that name their protocol, which create_server's do not; without it the first
        # token of a short prompt waits some 40 ms for a delayed acknowledgement
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(
            self.app(),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [bound]}, name=f"revise-lab-endpoint-{self.port}", daemon=True
        )
        self._thread.start()
        limit = time.monotonic() + START_LIMIT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > limit:
                bound.close()
                raise EndpointError(f"the embedded endpoint did not come up on {self.url}", port=self.port)
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """Abort what is running, close all connections and join the thread; twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._server.should_exit = True
        if self._loop is not None:
            # The loop may be closed already if the thread ended by itself.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._live])
        thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def app(self) -> Starlette:
        """Build the ASGI application, for a server of one's own.

        Returns
        -------
        Starlette
            The routes of the endpoint.
        """
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/v1/chat/completions", self._entered, methods=["POST"])]
        return Starlette(routes=routes + [Route(path, _page(page)) for path, page in self._pages().items()])

    async def _entered(self, request: Request) -> Any:
        self._loop = asyncio.get_running_loop()
        return await self._chat(request)

    @abstractmethod
    def _begin(self) -> None:
        """Prepare for an event loop that is new."""

    @abstractmethod
    async def _chat(self, request: Request) -> Any:
        """Answer a chat request with an ASGI response."""

    @abstractmethod
    def _pages(self) -> Mapping[str, Callable[[], Any]]:
        """Name the pages and what makes them: a text, or what becomes JSON."""


def _page(content: Callable[[], Any]) -> Any:
    async def page(_: Request) -> Response:
        from starlette.responses import PlainTextResponse, Response

        made = content()
        if isinstance(made, str):
            return PlainTextResponse(made)
        return Response(json.dumps(made), media_type="application/json")  # in ASCII: a client may send half a character

    return page


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
