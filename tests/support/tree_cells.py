"""Cells with any drafter that grows trees, and the drafters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shared.drafts.config import DraftHead
from shared.spec.draft_tree import TreeShape
from shared.spec.standalone import SmallModel
from tests.support.cells import BATCH, Cell, model_of
from tests.support.tiny_assistants import tiny_assistant
from tests.support.tiny_heads import tiny_head
from tests.support.tiny_models import DENSE, EXPERTS
from tests.support.tiny_small import same_model, small_model


def tree(depth: int, width: int, nodes: int) -> TreeShape:
    return TreeShape(nodes=nodes, depth=depth, width=width, rows=BATCH * nodes)


TREES = (tree(3, 1, 4), tree(3, 2, 6), tree(4, 4, 16), tree(5, 8, 64), tree(5, 8, 8))
SMALL_OF = {"qwen3": "llama", "llama": "qwen3", "qwen3_5": "qwen3_5"}
"""The family of the small model that drafts for a target: of the first two each pads another
vocabulary than its target, and the hybrid has states of its own. A copy drafts for any other."""


@dataclass(frozen=True)
class TreeCell(Cell):
    """A cell with any drafter and tree; `depth` is the tree's."""

    head: str
    tree: TreeShape

    @property
    def drafter(self) -> str:
        return self.head

    @property
    def shape(self) -> TreeShape:
        return self.tree

    def __str__(self) -> str:
        tree = f"s{self.depth}k{self.tree.width}n{self.tree.nodes}"
        return (
            f"{self.family}-{self.head.lower()}-{tree}-{self.sampling}-{self.load}"
            f"-overlap{self.overlap}-page{self.page_size}"
        )


def cell(family, head, shape, sampling, load, overlap, page_size) -> TreeCell:
    return TreeCell(family, shape.depth, sampling, load, overlap, page_size, head, shape)


@lru_cache
def head_of(family: str, drafter: str) -> str | DraftHead | SmallModel:
    if drafter in ("none", "NEXTN"):
        return drafter
    if drafter == "STANDALONE" and family in (*DENSE, *EXPERTS):
        return same_model(*model_of(family))
    if drafter == "STANDALONE":
        return small_model(*model_of(family), SMALL_OF[family], seed=4)
    if drafter == "ASSISTANT":
        return tiny_assistant(*model_of(family), seed=4)
    return tiny_head(*model_of(family), drafter, seed=4)
