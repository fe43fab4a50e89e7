"""Flags of the adaptive choice of draft shapes, and the file that names the shapes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.options.flags import ConfigError, check_rules, flag

CONFIG_FLAG = "--speculative-adaptive-config"
TREE_ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3")
"""Draft with one layer, so that trees cost little more than chains."""

MOST_CANDIDATES = 8
MOST_STEPS, MOST_WIDTH, MOST_NODES = 16, 16, 64
_KEYS = ("candidate_steps", "candidates")
_RULES_OF_SGLANG = (
    *("ema_alpha", "update_interval", "warmup_batches", "down_hysteresis", "up_hysteresis"),
    "ceiling_coeff",
)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """How much is drafted in each step."""

    speculative_adaptive: bool = flag(
        False,
        "picks the draft shape of every step, or none, by expected tokens per second; the start "
        "measures what each shape costs",
    )
    speculative_adaptive_config: str | None = flag(
        None,
        "JSON file with the draft shapes to choose from, "
        '{"candidate_steps": [1, 3, 7]} or {"candidates": [{"steps": 5, "topk": 4, '
        '"draft_tokens": 16, "rows": 0.5}]}, where rows is the share of the nodes that a batch '
        "verifies, the best; off always competes (default: chains of 1, 3 and 7 and a tree of 5 "
        "levels with 16 nodes; STANDALONE chains alone, DFLASH, DSPARK, DFLASH2 and NGRAM parts of "
        "their largest)",
        is_path=True,
        is_file="read",
    )
    speculative_adaptive_trace: str | None = flag(
        None, "JSONL file that gets a line for each step: what was chosen, and what came of it",
        is_path=True,
        is_file="written",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_rules(self)

    def check_drafter(self, drafts: bool) -> None:
        """Refuses a choice of how much is drafted where nothing drafts.

        Raises:
          ConfigError: Nothing does.
        """
        if self.speculative_adaptive and not drafts:
            raise ConfigError(
                "--speculative-adaptive chooses how much is drafted, and nothing drafts; add "
                "--speculative-algorithm NEXTN or leave the flag out"
            )


@dataclass(frozen=True)
class Candidate:
    """A draft shape to choose from.

    Attributes:
      steps, topk, nodes: S, k and N, root included.
      rows: Share of all nodes of a batch that get verify rows.
      block: See `shared.spec.draft_tree.TreeShape`.

    Raises:
      ConfigError: No draft tree has this shape.
    """

    steps: int
    topk: int
    nodes: int
    rows: float = 1.0
    block: int = 0

    def __post_init__(self) -> None:
        most = min(1 + self.topk + (self.steps - 1) * self.topk**2, MOST_NODES)
        if not self.steps < self.nodes <= most:
            raise ConfigError(
                f"{CONFIG_FLAG}: draft_tokens must be {self.steps + 1} to {most} with steps "
                f"{self.steps} and topk {self.topk}, got {self.nodes}"
            )

    @classmethod
    def chain(cls, steps: int) -> "Candidate":
        """So many drafts in a row."""
        return cls(steps, 1, steps + 1)


def read_candidates(path: str) -> tuple[Candidate, ...]:
    """The draft shapes that a file names, the smallest first; plain decoding is always another.

    Raises:
      ConfigError: There is no such file, or a key or a value of it is wrong; one sentence.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is no JSON file: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f'{CONFIG_FLAG} {path} must hold an object like {{"candidate_steps": [3]}}'
        )
    for key in document:
        _check_key(key)
    chains = [
        Candidate.chain(steps) for steps in _steps(document.get("candidate_steps", [])) if steps
    ]
    trees = [_candidate(entry) for entry in _list(document, "candidates")]
    shapes = sorted({*chains, *trees}, key=lambda each: (each.nodes, each.steps, each.rows))
    if not 0 < len(shapes) <= MOST_CANDIDATES:
        raise ConfigError(
            f"{CONFIG_FLAG} {path} must name 1 to {MOST_CANDIDATES} shapes that draft, "
            f"got {len(shapes)}"
        )
    return tuple(shapes)


def _check_key(key: str) -> None:
    if key in _KEYS:
        return
    if key in _RULES_OF_SGLANG:
        raise ConfigError(
            f"{CONFIG_FLAG}: {key} tunes a rule that is not used here, where measured seconds and "
            "expected tokens decide; leave it out"
        )
    if key.isdigit():
        raise ConfigError(
            f'{CONFIG_FLAG}: "{key}" lists shapes for a batch size, and here each may be taken at '
            "any, as its measured seconds say; give one list as candidate_steps"
        )
    raise ConfigError(f"{CONFIG_FLAG}: {key:.40} is no key; known are {', '.join(_KEYS)}")


def _list(document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{CONFIG_FLAG}: {key} must be a list")
    return value


def _steps(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{CONFIG_FLAG}: candidate_steps must be a list")
    return [_whole("candidate_steps", steps, 0, MOST_STEPS) for steps in value]


def _candidate(entry: Any) -> Candidate:
    if not isinstance(entry, dict):
        raise ConfigError(f'{CONFIG_FLAG}: candidates holds objects like {{"steps": 3}}')
    if unknown := sorted(entry.keys() - {"steps", "topk", "draft_tokens", "rows"}):
        raise ConfigError(
            f"{CONFIG_FLAG}: {unknown[0]:.40} is no key of a candidate; known are steps, topk, "
            "draft_tokens and rows"
        )
    if "steps" not in entry:
        raise ConfigError(f"{CONFIG_FLAG}: a candidate needs steps")
    steps = _whole("steps", entry["steps"], 1, MOST_STEPS)
    topk = _whole("topk", entry.get("topk", 1), 1, MOST_WIDTH)
    if topk > 1 and "draft_tokens" not in entry:
        raise ConfigError(f"{CONFIG_FLAG}: a candidate with topk {topk} needs draft_tokens")
    nodes = _whole("draft_tokens", entry.get("draft_tokens", steps + 1), 2, MOST_NODES)
    return Candidate(steps, topk, nodes, _share(entry.get("rows", 1)))


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{CONFIG_FLAG}: {name} must be a whole number from {low} to {high}, got {value!r:.40}"
        )
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(
            f"{CONFIG_FLAG}: rows must be a share above 0 and up to 1, got {value!r:.40}"
        )
    return float(value)


def default_candidates(
    *, steps: int, nodes: int, has_trees: bool, block: int | None, on_host: bool, are_few: bool
) -> tuple[Candidate, ...]:
    """The draft shapes to choose from where no file names any.

    Args:
      steps, nodes: S of a drafter that makes one draft alone, and N of the host's trees.
      has_trees: Whether the drafter has a head or an mtp layer, whose trees cost little more.
      block: Nodes of the chain of a head with a block; None without one.
      on_host: Whether the host drafts.
      are_few: Whether each costs seconds of the start.
    """
    if on_host:
        sizes = {max(2, nodes // 3), nodes} | (set() if are_few else {max(2, nodes // 6)})
        chains = [size - 1 for size in sizes]
    elif block is not None:
        sizes = {block, max(2, block // 2)} | (set() if are_few else {max(2, block // 4)})
        chains = [size - 1 for size in sizes]
    elif steps == 1:
        chains = [1]
    else:
        chains = [1, 3] if are_few else [1, 3, 7]
    candidates = {Candidate.chain(count) for count in chains}
    if has_trees and steps > 1 and not are_few:
        candidates.add(Candidate(5, 4, 16))
    return tuple(sorted(candidates, key=lambda each: (each.nodes, each.steps)))
