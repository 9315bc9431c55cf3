"""An event loop on virtual time: what waits costs nothing, and what happens when is exact."""

from __future__ import annotations

import asyncio
import selectors

import pytest


class _Clock(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout=None):
        if timeout:
            self.now_s += timeout
        return super().select(0 if timeout is not None else None)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self):
        return self.clock.now_s


@pytest.fixture
def virtually():
    """Return what runs a coroutine on virtual time and insists that it leaves no task behind."""

    def run(main):
        async def checked():
            try:
                return await main
            finally:
                await asyncio.sleep(0)
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not left, left

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(checked())

    return run
