"""Tiers: the draft shapes that an adaptive controller chooses from, independent of the batch
size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.spec.draft_tree import TreeShape

CANDIDATE_EXPONENT = 0.7
"""A level of b candidates misses as b ** CANDIDATE_EXPONENT independent ones would. In a simulation
of the match rule one candidate agreed in 0.70 of all cases and the best of four in 0.96: 0.7."""

_NAME = re.compile(r"none|S(\d+)(?:k(\d+)N(\d+))?(?:R([\d.]+))?")


@dataclass(frozen=True, order=True)
class Tier:
    """Draft shape shared by decode programs of all batch sizes.

    Attributes:
      nodes, depth, width: N, S and k of the tree; 1, 0 and 0 for plain decoding.
      share: R / (B N), the fraction of all nodes that has verify rows.
    """

    nodes: int
    depth: int
    width: int
    share: float = 1.0

    @classmethod
    def of(cls, shape: TreeShape, batch: int) -> Tier:
        """Returns the tier of a program's shape."""
        share = shape.rows / (batch * shape.nodes)
        return cls(shape.nodes, shape.depth, shape.width, share)

    @classmethod
    def parse(cls, name: str) -> Tier:
        """Parses a name in the format of `str`.

        Raises:
          ValueError: The name is invalid.
        """
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise ValueError(f"{name:.40} is no tier")
        if name == "none":
            return cls(1, 0, 0)
        steps, width, nodes, share = parts.groups()
        depth = int(steps)
        return cls(int(nodes or depth + 1), depth, int(width or 1), float(share or 1))

    @property
    def tree(self) -> tuple[int, int, int]:
        """N, S and k, same as `TreeShape.tree`."""
        return self.nodes, self.depth, self.width

    def shape(self, batch: int) -> TreeShape:
        """Returns the shape in a batch bucket; each request has at least the row of its root."""
        rows = max(batch, round(batch * self.nodes * self.share))
        return TreeShape(self.nodes, self.depth, self.width, rows)

    @property
    def is_off(self) -> bool:
        """True for plain decoding."""
        return self.nodes == 1

    @property
    def family(self) -> tuple[float, ...]:
        """Family of the tier: tiers of one family accept the same tokens up to the common depth, as
        all chains do.
        """
        return () if self.width <= 1 else (*self.tree, self.share)

    @property
    def independent_candidates(self) -> float:
        """Number of independent candidates that a level is equivalent to; 1 for a chain."""
        if self.width <= 1:
            return 1.0
        per_level = (self.nodes - 1) * self.share / self.depth
        return max(1.0, min(self.width, per_level)) ** CANDIDATE_EXPONENT

    def __str__(self) -> str:
        if self.is_off:
            return "none"
        tree = "" if self.width <= 1 else f"k{self.width}N{self.nodes}"
        return f"S{self.depth}{tree}" + ("" if self.share == 1 else f"R{self.share:g}")


@dataclass(frozen=True)
class Shapes:
    """Shape of each tier in each batch bucket.

    Attributes:
      batches: Rows of the buckets, ascending.
      tiers: Plain decoding first, then by nodes.
      by_size: Shape of each batch and tier.
    """

    batches: tuple[int, ...]
    tiers: tuple[Tier, ...]
    by_size: dict[tuple[int, int], TreeShape]

    @classmethod
    def of(cls, capacity: BackendLimits, *, host_draft: bool) -> Shapes:
        """Returns the shapes of a backend's decode programs.

        Args:
          capacity: Limits and programs of the backend.
          host_draft: True for programs with host-built trees, False for programs that draft.

        Raises:
          ValueError: No program drafts, or a bucket lacks a tree.
        """
        shapes_of: dict[int, set[TreeShape]] = {}
        for program in capacity.unmasked_programs:
            is_ours = program.shape.is_plain or program.has(ProgramFeature.HOST_DRAFT) is host_draft
            if program.work is StepKind.DECODE and is_ours:
                shapes_of.setdefault(program.batch, set()).add(program.shape)
        batches = tuple(sorted(shapes_of))
        if len({frozenset(shape.tree for shape in shapes) for shapes in shapes_of.values()}) > 1:
            raise ValueError(f"all batches ({batches}) must have the same draft shapes")
        widest = sorted(shapes_of[batches[-1]], key=_order)
        tiers = tuple(Tier.of(shape, batches[-1]) for shape in widest)
        if len(tiers) < 2 or not tiers[0].is_off:
            raise ValueError(
                "nothing to choose from: plain decoding and a draft shape are required"
            )
        by_size = {
            (batch, number): _nearest(shapes_of[batch], tier, batch)
            for batch in batches
            for number, tier in enumerate(tiers)
        }
        return cls(batches, tiers, by_size)

    def bucket(self, num_rows: int) -> int:
        """Returns the smallest batch bucket for a number of requests."""
        return next(batch for batch in self.batches if batch >= num_rows)


def _nearest(shapes: Collection[TreeShape], tier: Tier, batch: int) -> TreeShape:
    """Returns a tier's shape in a batch; tiers that differ only in rows may share one in a small
    batch.
    """
    rows = batch * tier.nodes * tier.share
    alike = sorted((shape for shape in shapes if shape.tree == tier.tree), key=_order)
    return min(alike, key=lambda shape: abs(shape.rows - rows))


def _order(shape: TreeShape) -> tuple[int, ...]:
    return (*shape.tree, shape.rows)


def families_of(tiers: Sequence[Tier]) -> tuple[list[int], list[float]]:
    """Returns the family index of each tier, and the independent candidates per level of each
    family.
    """
    names = sorted({tier.family for tier in tiers})
    candidates = {tier.family: tier.independent_candidates for tier in tiers}
    return [names.index(tier.family) for tier in tiers], [candidates[name] for name in names]
