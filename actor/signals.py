"""A wake-up that several tasks of one event loop can wait for."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes all that wait now. Check the state first, then wait, with no `await` between: no wake-up is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`; False when `timeout_s` passed first."""
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the wake-up.
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
