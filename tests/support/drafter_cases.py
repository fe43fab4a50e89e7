"""A small model with a drafter of each kind, and engines with few pages."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.drafts.kinds import BLOCK_KINDS
from shared.engine.controller import Controller, StaticController
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Drafter
from tests.support.cells import MODEL_SEEDS
from tests.support.limits import make_limits, make_program
from tests.support.tiny_assistants import tiny_assistant
from tests.support.tiny_heads import (
    cyclic,
    tiny_block_head,
    tiny_head,
    tiny_pair_head,
    tiny_spark_head,
)
from tests.support.tiny_models import HYBRIDS, tiny_model
from tests.support.tiny_small import small_model

BATCH, PAGE_SIZE, PAGES, CONTEXT, CHUNK = 3, 16, 24, 320, 64
TURNS, OVERLAP = 2, 2
CHAIN = TreeShape.chain(3, BATCH)
TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH)
BLOCK_TREE = TreeShape(nodes=12, depth=3, width=4, rows=12 * BATCH, block=4)
PLAIN = TreeShape.plain(BATCH)
CASES = [
    ("llama", "none", PLAIN),
    ("qwen3_5", "NEXTN", CHAIN),
    ("llama", "EAGLE3", TREE),
    ("qwen3_5", "STANDALONE", CHAIN),
    ("llama", "DFLASH", CHAIN),
    ("qwen3_5", "EAGLE", TREE),
    ("qwen3_5", "NGRAM", CHAIN),
    ("llama", "DSPARK", CHAIN),
    ("llama", "DFLASH2", CHAIN),
    ("llama", "DFLASH", BLOCK_TREE),
    ("qwen3_5", "DFLASH", BLOCK_TREE),
    ("llama", "DSPARK", BLOCK_TREE),
    ("llama", "DFLASH2", BLOCK_TREE),
    ("gemma4", "ASSISTANT", CHAIN),
    ("gemma4", "ASSISTANT", TREE),
]


@lru_cache
def model_of(family: str, drafter: str):
    config, weights = tiny_model(family, MODEL_SEEDS[family])
    return config, cyclic(config, weights) if drafter in BLOCK_KINDS else weights


def drafter_of(family: str, drafter: str) -> Drafter:
    target = model_of(family, drafter)
    match drafter:
        case "NEXTN":
            return "NEXTN"
        case "EAGLE" | "EAGLE3":
            return tiny_head(*target, drafter, 5)
        case "STANDALONE":
            return small_model(*target, family, 4)
        case "DFLASH":
            return tiny_block_head(target[0], 4)
        case "DSPARK":
            return tiny_spark_head(*target, 4)
        case "DFLASH2":
            return tiny_pair_head(target[0], 4)
        case "ASSISTANT":
            return tiny_assistant(target[0], target[1], 4)
    return "none"


def programs_of(
    drafter: str, shape: TreeShape, *, batch: int, pages: int, chunk: int
) -> tuple[Program, ...]:
    """Returns the programs of a prompt's chunk, of counting it, and of steps with and without
    drafts.
    """

    def program(work: StepKind, shape: TreeShape, tokens: int) -> Program:
        return make_program(work, shape, tokens, batch=batch, pages=pages).with_features(
            {ProgramFeature.HOST_DRAFT: drafter == "NGRAM" and not shape.is_plain}
        )

    plain = TreeShape.plain(batch)
    decodes = [program(StepKind.DECODE, each, 0) for each in dict.fromkeys((shape, plain))]
    count = replace(program(StepKind.COUNT, TreeShape.plain(1), chunk), batch=1)
    return program(StepKind.PREFILL, plain, chunk), count, *decodes


def capacity_of(family: str, drafter: str, shape: TreeShape) -> BackendLimits:
    return make_limits(
        programs_of(drafter, shape, batch=BATCH, pages=PAGES, chunk=CHUNK),
        page_size=PAGE_SIZE,
        num_snapshots=13 if family in HYBRIDS else 1,
        overlap=OVERLAP,
        context_length=CONTEXT,
        vocab=model_of(family, drafter)[0].vocab,
    )


class Fewer:
    """A backend that admits to fewer pages than it has."""

    def __init__(self, backend: Backend, num_pages: int) -> None:
        self.capacity = replace(backend.capacity, num_pages=num_pages)
        self.submit, self.launch = backend.submit, backend.launch

    def close(self) -> None: ...


def controller_of(capacity: BackendLimits, drafter: str, shape: TreeShape) -> Controller:
    if drafter != "NGRAM":
        sizes = {"nodes": shape.nodes, "depth": shape.depth, "width": shape.width}
        return StaticController(capacity, **sizes)
    sizes = {"nodes": shape.nodes, "depth": shape.depth}
    return NgramController(
        capacity, NgramIndex(NgramConfig(), **sizes, vocab=capacity.vocab, chain=False)
    )
