"""Parser of server-sent events."""

from __future__ import annotations


def parse_events(text: str) -> list[tuple[str | None, str]]:
    """Returns name and data of each event; an event without a name has None."""
    found = []
    for block in text.strip().split("\n\n"):
        *names, data = block.split("\n")
        name = names[0].removeprefix("event: ") if names else None
        found.append((name, data.removeprefix("data: ")))
    return found
