"""Routing policies: the replica of a request by its known prefix and by load.

Prefixes are identified by a running hash over the messages of a chat, or over blocks of a prompt,
so the router needs no tokenizer. The hash starts with everything that separates prefix caches or
precedes the messages in a chat template: the model, the tenant (field `user`) and the tools.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shared.options.router import CACHE_AWARE, ROUND_ROBIN

LOAD_BOUND, LOAD_SLACK = 1.25, 1
"""Maximum load of a replica that a prefix selects: multiple of the mean load, and further requests.

The mean includes the new request. Without the slack, differences by chance move conversations
while few requests are open: on the workload of `bench.serving.router_hit_rate` the hit rate of four
replicas is 0.90 of the hit rate of a single cache without slack, and 0.98 with it.
"""

MAX_CONTINUATIONS = 8
"""Maximum continuations of a prefix that selects a replica.

A prefix with more continuations is shared by many conversations, as a system prompt is. It would
select one replica for all of them, and each replica soon has it.
"""

MAX_PREFIXES = 1 << 17
MAX_KEYS = 256
"""Maximum hashed messages or blocks of a request."""

BLOCK_CHARACTERS, BLOCK_TOKENS = 512, 128
_PRECEDES_MESSAGES = ("model", "user", "system", "instructions", "tools")
_PRECEDES_MESSAGES += ("chat_template_kwargs",)


def prefix_keys(body: Mapping[str, Any]) -> list[bytes]:
    """Returns the running hash after each message of a chat or each whole block of a prompt.

    Args:
      body: Fields of a request; of a list of prompts the first one counts.
    """
    messages = body.get("messages", body.get("input"))
    parts = messages if isinstance(messages, list) else _blocks(body.get("prompt", messages))
    state = hashlib.blake2b(digest_size=16)
    state.update(_encoded([body.get(name) for name in _PRECEDES_MESSAGES]))
    keys = []
    for part in islice(parts, MAX_KEYS):
        state.update(_encoded(part))
        keys.append(state.digest())
    return keys


def _blocks(prompt: Any) -> Iterator[Any]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str | list):
        size = BLOCK_CHARACTERS if isinstance(prompt, str) else BLOCK_TOKENS
        for end in range(size, len(prompt) + 1, size):
            yield prompt[end - size : end]


def _encoded(part: Any) -> bytes:
    return repr(part).encode() + b"\0"


@dataclass(slots=True)
class _Prefix:
    """Known prefix.

    Attributes:
      replicas: Bit i: replica i has received a request with the prefix.
      continuations: Number of different messages or blocks that followed it.
    """

    replicas: int = 0
    continuations: int = 0


class PrefixTable:
    """Known prefixes by their hash, with eviction of the least recently used one."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max, self._prefixes = max_prefixes, OrderedDict[bytes, _Prefix]()

    def __len__(self) -> int:
        return len(self._prefixes)

    def replicas(self, keys: Sequence[bytes]) -> Iterator[list[int]]:
        """Yields the replicas of each known prefix of a request, from the longest one on.

        The iteration ends at a prefix with more than `MAX_CONTINUATIONS` continuations.
        """
        for key in reversed(keys):
            prefix = self._prefixes.get(key)
            if prefix is None:
                continue
            if prefix.continuations > MAX_CONTINUATIONS:
                return
            yield [i for i in range(prefix.replicas.bit_length()) if prefix.replicas >> i & 1]

    def add(self, keys: Iterable[bytes], replica: int) -> None:
        """Records that a replica receives a request with these prefixes."""
        before = None
        for key in keys:
            prefix = self._prefixes.get(key)
            if prefix is None:
                prefix = self._prefixes[key] = _Prefix()
                if before is not None:
                    before.continuations += 1
            else:
                self._prefixes.move_to_end(key)
            prefix.replicas |= 1 << replica
            before = prefix
        while len(self._prefixes) > self._max:
            self._prefixes.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Removes a replica after the loss of its cache."""
        for key, prefix in [*self._prefixes.items()]:
            prefix.replicas &= ~(1 << replica)
            if not prefix.replicas:
                del self._prefixes[key]


class RoutingPolicy:
    """Routing policy of `--routing-policy`.

    Attributes:
      name: One of `shared.options.router.POLICIES`.
      load_bound: See `LOAD_BOUND`.
      num_by_prefix: Requests with a replica selected by a known prefix.
    """

    def __init__(self, name: str, load_bound: float = LOAD_BOUND) -> None:
        self.name, self.load_bound, self.num_by_prefix = name, load_bound, 0
        self._table, self._order = PrefixTable(), OrderedDict[int, None]()

    def choose(self, keys: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """Returns the replica for a request.

        Args:
          keys: Prefixes of the request, from `prefix_keys`.
          loads: Open requests of each replica that can serve it; not empty.
        """
        chosen = self._by_prefix(keys, loads) if self.name == CACHE_AWARE else None
        self.num_by_prefix += chosen is not None
        if chosen is None:
            chosen = self._least(loads if self.name != ROUND_ROBIN else dict.fromkeys(loads, 0))
        self._order[chosen] = None
        self._order.move_to_end(chosen)
        if self.name == CACHE_AWARE:
            self._table.add(keys, chosen)
        return chosen

    def forget(self, replica: int) -> None:
        """Removes the prefixes of a replica after the loss of its cache."""
        self._table.forget(replica)
        self._order.pop(replica, None)

    def _by_prefix(self, keys: Sequence[bytes], loads: Mapping[int, int]) -> int | None:
        mean = (sum(loads.values()) + 1) / len(loads)
        bound = math.ceil(self.load_bound * mean) + LOAD_SLACK
        for replicas in self._table.replicas(keys):
            free = {i: loads[i] for i in replicas if loads.get(i, bound) < bound}
            if free:
                return self._least(free)
        return None

    def _least(self, loads: Mapping[int, int]) -> int:
        """Returns the replica with the least load, among equals the least recently chosen one."""
        places = {replica: place for place, replica in enumerate(self._order)}
        return min(loads, key=lambda replica: (loads[replica], places.get(replica, -1)))
