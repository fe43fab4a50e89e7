"""Options of adaptive speculation, and the file of candidate draft shapes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.drafts.kinds import BLOCK_KINDS, NGRAM
from shared.models.sentence_list import sentence_list
from shared.options.flags import ConfigError, check_rules, flag

CONFIG_FLAG = "--speculative-adaptive-config"
MOST_CANDIDATES = 8
MOST_STEPS, MOST_WIDTH, MOST_NODES = 16, 16, 64
LEAST_TREE_BLOCK = 4
"""Nodes of the shortest chain of a block head that has a tree by default."""
_KEYS = ("candidate_steps", "candidates")
_RULES_OF_SGLANG = (
    *("ema_alpha", "update_interval", "warmup_batches", "down_hysteresis", "up_hysteresis"),
    "ceiling_coeff",
)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Options of adaptive speculation."""

    speculative_adaptive: bool = flag(
        False,
        "choose the draft shape of each step, or plain decoding, by expected tokens per second; "
        "step times are measured at startup",
    )
    speculative_adaptive_config: str | None = flag(
        None,
        'JSON file of candidate draft shapes: {"candidate_steps": [1, 3, 7]} or {"candidates": '
        '[{"steps": 5, "topk": 4, "draft_tokens": 16, "rows": 0.5}]}; rows is the fraction of '
        "nodes that a batch verifies; plain decoding is always a candidate (default: chains of "
        "1, 3 and 7 and a tree of depth 5 with 16 nodes; only chains for STANDALONE; fractions "
        f"of the largest shape for {sentence_list((*BLOCK_KINDS, NGRAM.name), 'and')}, and a tree "
        "of 32 nodes for a causal block)",
        is_path=True,
        is_file="read",
    )
    speculative_adaptive_trace: str | None = flag(
        None,
        "JSONL file that receives one line per step with the chosen shape and its result",
        is_path=True,
        is_file="written",
    )

    def __post_init__(self) -> None:
        check_rules(self)

    def drafter_fault(self, has_drafter: bool) -> str | None:
        """Returns the lack of a drafter for adaptive speculation."""
        if has_drafter or not self.speculative_adaptive:
            return None
        return (
            "--speculative-adaptive requires a drafter; add --speculative-algorithm NEXTN, or "
            "remove the flag"
        )


def most_nodes(steps: int, topk: int, is_block: bool) -> int:
    """Returns the maximum number of nodes of a draft tree, root included.

    Args:
      steps, topk: S and k.
      is_block: True for a block head, which has the candidates of all prefixes; other drafters
        expand k nodes of a level.
    """
    if is_block:
        return min(1 + sum(topk**level for level in range(1, steps + 1)), MOST_NODES)
    return min(1 + topk + (steps - 1) * topk**2, MOST_NODES)


@dataclass(frozen=True)
class Candidate:
    """Candidate draft shape.

    Attributes:
      steps, topk, nodes: S, k and N, root included.
      rows: Fraction of the nodes of a batch that is verified.
      block: See `shared.spec.draft_tree.TreeShape`.

    Raises:
      ConfigError: The shape is invalid.
    """

    steps: int
    topk: int
    nodes: int
    rows: float = 1.0
    block: int = 0

    def __post_init__(self) -> None:
        most = most_nodes(self.steps, self.topk, bool(self.block))
        if not self.steps < self.nodes <= most:
            raise ConfigError(
                f"{CONFIG_FLAG}: draft_tokens must be {self.steps + 1} to {most} with steps "
                f"{self.steps} and topk {self.topk}, got {self.nodes}"
            )

    @classmethod
    def chain(cls, steps: int) -> "Candidate":
        """Returns a chain of draft tokens."""
        return cls(steps, 1, steps + 1)


def read_candidates(path: str) -> tuple[Candidate, ...]:
    """Reads the candidate draft shapes of a file, smallest first, without plain decoding.

    Raises:
      ConfigError: The file cannot be read, or a key or value is invalid.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} is not a JSON file: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f'{CONFIG_FLAG} {path} must contain an object such as {{"candidate_steps": [3]}}'
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
            f"{CONFIG_FLAG} {path} must contain 1 to {MOST_CANDIDATES} draft shapes, got "
            f"{len(shapes)}"
        )
    return tuple(shapes)


def _check_key(key: str) -> None:
    if key in _KEYS:
        return
    if key in _RULES_OF_SGLANG:
        raise ConfigError(
            f"{CONFIG_FLAG}: {key} is a parameter of SGLang without effect here: step times are "
            "measured; remove it"
        )
    if key.isdigit():
        raise ConfigError(
            f'{CONFIG_FLAG}: "{key}" lists shapes for a batch size; any batch may take any shape, '
            "by its measured time: give one list as candidate_steps"
        )
    raise ConfigError(f"{CONFIG_FLAG}: unknown key {key:.40}; known are {', '.join(_KEYS)}")


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
        raise ConfigError(f'{CONFIG_FLAG}: candidates must contain objects such as {{"steps": 3}}')
    if unknown := sorted(entry.keys() - {"steps", "topk", "draft_tokens", "rows"}):
        raise ConfigError(
            f"{CONFIG_FLAG}: unknown key {unknown[0]:.40} of a candidate; known are steps, topk, "
            "draft_tokens and rows"
        )
    if "steps" not in entry:
        raise ConfigError(f"{CONFIG_FLAG}: a candidate requires steps")
    steps = _whole("steps", entry["steps"], 1, MOST_STEPS)
    topk = _whole("topk", entry.get("topk", 1), 1, MOST_WIDTH)
    if topk > 1 and "draft_tokens" not in entry:
        raise ConfigError(f"{CONFIG_FLAG}: a candidate with topk {topk} requires draft_tokens")
    nodes = _whole("draft_tokens", entry.get("draft_tokens", steps + 1), 2, MOST_NODES)
    return Candidate(steps, topk, nodes, _share(entry.get("rows", 1)))


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{CONFIG_FLAG}: {name} must be an integer from {low} to {high}, got {value!r:.40}"
        )
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{CONFIG_FLAG}: rows must be above 0 and at most 1, got {value!r:.40}")
    return float(value)


def default_candidates(
    *, steps: int, nodes: int, has_trees: bool, block: int | None, on_host: bool, are_few: bool
) -> tuple[Candidate, ...]:
    """Returns the default candidates.

    Args:
      steps, nodes: S of the drafter, and N of trees of the host.
      has_trees: True for a one-layer drafter, whose trees cost little more than chains, and for a
        block head trained for trees.
      block: Chain length of a block-parallel head; None for other drafters.
      on_host: True if the host drafts.
      are_few: True if each candidate costs seconds of startup.
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
    if has_trees and steps > 1 and not are_few and (block is None or block >= LEAST_TREE_BLOCK):
        candidates.add(Candidate(5, 4, 16) if block is None else Candidate(block - 1, 8, 32))
    return tuple(sorted(candidates, key=lambda each: (each.nodes, each.steps)))
