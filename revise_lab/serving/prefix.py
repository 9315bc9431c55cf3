"""The KV memory of a replica: what requests hold, and prefixes that are kept for the next one (LRU).

Token-free: a prompt is a chain of segments, each with a key that stands for everything up to its end, as in a radix tree
of hashed blocks. A segment is shared only within a tenant. What somebody uses is pinned; the rest is *idle* and leaves,
least recently used first, when room is needed. Releasing a chain touches its end before its root, so that a root never
leaves before what hangs on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Key = tuple[str, str]
"""Tenant and segment."""


class KvMemory:
    """Tokens in use and tokens kept, never more than the capacity.

    Attributes
    ----------
    used_tokens, idle_tokens : int
        Held by requests (a shared segment counts once), and kept for later.
    """

    def __init__(self, capacity_tokens: int, *, keep: bool = True) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self.idle_tokens = 0
        self._keep = keep
        self._size: dict[Key, int] = {}
        self._users: dict[Key, int] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()

    def match(self, chain: Iterable[tuple[Key, int]]) -> tuple[list[Key], int, int]:
        """Return the segments that are here, their tokens, and how many of these are idle."""
        found: list[Key] = []
        tokens = idle = 0
        for key, size in chain:
            if key not in self._size:
                break
            found.append(key)
            tokens += size
            idle += size if key in self._idle else 0
        return found, tokens, idle

    def take(self, tokens: int) -> None:
        """Hand out tokens; idle segments make room."""
        self.used_tokens += tokens
        while self.used_tokens + self.idle_tokens > self.capacity_tokens and self._idle:
            key, _ = self._idle.popitem(last=False)
            self.idle_tokens -= self._size.pop(key)
            del self._users[key]

    def give(self, tokens: int) -> None:
        """Take tokens back."""
        self.used_tokens -= tokens

    def pin(self, keys: Iterable[Key]) -> None:
        """Hold segments that are here."""
        for key in keys:
            self._users[key] += 1
            if self._users[key] == 1:
                del self._idle[key]
                self.idle_tokens -= self._size[key]
                self.used_tokens += self._size[key]

    def share(self, key: Key, size: int) -> bool:
        """Turn tokens that their only user holds into a segment held by it; where one is here already, hold that."""
        if not self._keep:
            return False
        if key in self._size:
            self.pin((key,))
            self.give(size)
        else:
            self._size[key], self._users[key] = size, 1
        return True

    def release(self, keys: list[Key]) -> None:
        """Let go of segments, in the order of their chain."""
        for key in reversed(keys):
            self._users[key] -= 1
            if not self._users[key]:
                self._idle[key] = None
                self.idle_tokens += self._size[key]
                self.used_tokens -= self._size[key]
