"""Requests with images on the golden VLM, and their expected outputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.images import EncoderCacheSpec
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.image_inputs import MropePositions, PromptImage
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.ngram_controllers.merged_drafts import MergedDraftController
from shared.engine.request import Request, SamplingParams
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import Drafter, make_seeing_backend
from tests.support.cache_policies import policy_of
from tests.support.golden_images import IMAGES, MODEL, image_config, patches_of, vision
from tests.support.golden_models import Images as GoldenImages
from tests.support.golden_models import SpecModel
from tests.support.http_fixtures import save_tokenizer
from tests.support.limits import make_limits
from tests.support.tiny_heads import tiny_block_head, tiny_head
from tests.support.transfers import with_transfer
from tests.support.vision_encoders import of_specification

IMAGE, FACTOR, PAGE = vision().image_token, image_config().multiple, 8
CHUNK, BATCH, LARGEST = 64, 3, 96
"""Tokens of a step's prompts, requests that run, and tokens of the largest image."""

TOKENS = 12
CONTEXT = 320
PLAIN, CHAIN = TreeShape.plain(BATCH), TreeShape.chain(3, BATCH)
TREE = TreeShape(6, 3, 2, BATCH * 6)
BLOCK = TreeShape(4, 3, 1, BATCH * 4, 4)
BLOCK_TREE = TreeShape(12, 3, 3, BATCH * 12, 4)
SHAPES = {
    "none": PLAIN,
    "NEXTN": CHAIN,
    "NEXTN tree": TREE,
    "EAGLE3": TREE,
    "DFLASH": BLOCK,
    "DFLASH tree": BLOCK_TREE,
    "NGRAM": TREE,
    "NEXTN+NGRAM": CHAIN,
}
"""Drafters, and the shapes of their drafts."""


@cache
def pixels(rows: int, columns: int, seed: int) -> np.ndarray:
    """An image with the given rows and columns of image tokens."""
    shape = (rows * FACTOR, columns * FACTOR, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


TEXTS: dict[tuple, list[int]] = {}
"""Outputs by prompt, cached because several tests request the same."""


class Prompt:
    """A prompt of words and images, and the plain text that follows it."""

    def __init__(self, *parts: list[int] | np.ndarray) -> None:
        self.tokens: list[int] = []
        self.images: tuple[PromptImage, ...] = ()
        for part in parts:
            if isinstance(part, list):
                self.tokens += part
                continue
            image = PromptImage.of(len(self.tokens), part, FACTOR)
            self.tokens += [IMAGE] * image.count
            self.images += (image,)

    def request(self, number: int = 0, tenant: str = "", tokens: int = TOKENS) -> Request:
        return Request(
            request_id=number,
            prompt=tuple(self.tokens),
            images=self.images,
            tenant=tenant,
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, traces=True),
        )

    def text(self, count: int = TOKENS, allowed: Sequence[int] | None = None) -> list[int]:
        """By the golden specification alone, its images read in one go.

        Args:
          allowed: The only tokens that it may have; None: all.
        """
        known = (*self.tokens, *(each.digest for each in self.images), count, allowed)
        if known not in TEXTS:
            TEXTS[known] = self._text(count, allowed)
        return TEXTS[known]

    def _text(self, count: int, allowed: Sequence[int] | None) -> list[int]:
        encoded = of_specification()
        rows = [encoded(patches_of(each.pixels)) for each in self.images]
        tokens = np.array(self.tokens)
        sight, is_image = MropePositions.of(self.tokens, IMAGE, self.images), tokens == IMAGE
        pool = np.concatenate([np.zeros((1, vision().out), np.float32), *rows])
        sources = np.where(is_image, np.cumsum(is_image), 0)
        model = SpecModel(MODEL)
        images = GoldenImages(sight.turns, sight.delta, pool, sources)
        logits, text = model.prefill(tokens, None, images).logits, []
        while len(text) < count:
            tokens = np.arange(logits.shape[1]) if allowed is None else np.array(allowed)
            text.append(int(tokens[logits[-1][tokens].argmax()]))
            logits = model.verify(np.array(text[-1:]), np.zeros(1, np.int32)).logits
            model.commit(np.arange(1))
        return text


def words(count: int, seed: int) -> list[int]:
    """Repeating tokens without image tokens, so that n-grams have drafts to propose."""
    return (np.random.default_rng(seed).integers(1, 240, 5).tolist() * count)[:count]


def _drafter(name: str) -> Drafter:
    config = config_from_folder(MODEL)
    if name.startswith("NEXTN"):
        return "NEXTN"
    if name == "EAGLE3":
        weights = dict(load_all(MODEL, config, False))
        return tiny_head(config, weights | {"lm_head": weights["embed"]}, "EAGLE3", 5)
    return tiny_block_head(config, 4) if name.startswith("DFLASH") else "none"


def capacity_of(drafter: str, pool_rows: int, num_pages: int) -> BackendLimits:
    """A prefill, plain steps, the drafter's, and encodings: of small images, and in two steps."""

    def program(
        work: StepKind, shape: TreeShape, tokens: int, extras: ProgramFeature = ProgramFeature.NONE
    ) -> Program:
        return Program(
            work=work,
            batch=BATCH,
            pages=1 + CONTEXT // PAGE,
            tokens=tokens,
            shape=shape,
            extras=extras,
        )

    def encoding(rows: int, *bounds: int) -> list[Program]:
        single = program(StepKind.ENCODE, TreeShape.plain(1), rows * vision().merged)
        pieces = pairwise((0, *bounds, vision().depth))
        return [replace(single, batch=1, pages=1, blocks=range(*each)) for each in pieces]

    shape = SHAPES[drafter]
    decodes = [program(StepKind.DECODE, PLAIN, 0)]
    if drafter == "NGRAM":
        decodes.append(program(StepKind.DECODE, shape, 0, ProgramFeature.HOST_DRAFT))
    elif drafter != "none":
        decodes.append(program(StepKind.DECODE, shape, 0))
    if drafter == "NEXTN+NGRAM":
        for own in (PLAIN, CHAIN):
            joined = TreeShape(own.nodes + 4, 4, 1, BATCH * (own.nodes + 4), grown=own, copied=9)
            decodes.append(program(StepKind.DECODE, joined, 0, ProgramFeature.NGRAM_DRAFTS))
    return make_limits(
        (
            program(StepKind.PREFILL, PLAIN, CHUNK),
            *decodes,
            *encoding(32),
            *encoding(LARGEST, 1),
        ),
        page_size=PAGE,
        num_pages=1 + num_pages,
        num_snapshots=9,
        overlap=1,
        context_length=CONTEXT - 40,
        vocab=config_from_folder(MODEL).vocab,
        max_logprobs=0,
        images=EncoderCacheSpec(vision(), image_config(), 1 + pool_rows),
    )


MADE: dict[tuple[str, str], Backend] = {}
"""Backends by framework and drafter: their state changes no output."""

ON_A_GPU = " on a GPU"
POOL_ROWS, NUM_PAGES = 2 * LARGEST + CHUNK, 96


def backend_of(framework: str, drafter: str) -> Backend:
    """A framework of `FRAMEWORKS` or `MAKERS`, or one of `GPU_FRAMEWORKS` with " on a GPU"."""
    if (framework, drafter) not in MADE:
        config = config_from_folder(MODEL)
        weights = load_all(MODEL, config, drafter.startswith("NEXTN"))
        capacity, head = capacity_of(drafter, POOL_ROWS, NUM_PAGES), _drafter(drafter)
        capacity = with_transfer(capacity, config, head)
        made_of = (MODEL, config, weights, capacity, head)
        name, on_gpu = framework.removesuffix(ON_A_GPU), framework.endswith(ON_A_GPU)
        MADE[framework, drafter] = make_seeing_backend(name, *made_of, on_gpu=on_gpu)
    return MADE[framework, drafter]


class Fewer:
    """A backend that admits to fewer pages, or rows of images, than it has."""

    def __init__(self, backend: Backend, **fewer: object) -> None:
        self.capacity = replace(backend.capacity, **fewer)
        self.submit, self.launch = backend.submit, backend.launch

    def close(self) -> None: ...


def controller_of(drafter: str, capacity: BackendLimits, texts: Sequence[list[int]]) -> Controller:
    """Returns the controller; a corpus of `texts` makes some n-gram drafts acceptable."""
    shape = SHAPES[drafter]
    if not drafter.endswith("NGRAM"):
        return StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    config = NgramConfig(
        speculative_ngram_min_bfs_breadth=1, speculative_ngram_external_sam_budget=2
    )
    sizes = {"vocab": capacity.vocab, "chain": False}
    if drafter == "NGRAM":
        index = NgramIndex(config, nodes=shape.nodes, depth=shape.depth, **sizes)
        controller = NgramController(capacity, index)
    else:
        index = NgramIndex(config, nodes=9, depth=8, ahead=4, path=8, **sizes)
        controller = MergedDraftController(capacity, index, 0.0, {})
    index.corpora.add("", Corpus.build(np.array([x for t in texts for x in [*t, SEPARATOR]])))
    return controller


def engine_of(
    framework: str, drafter: str, texts: Sequence[list[int]] = ((1,),), **fewer: object
) -> Engine:
    backend = Fewer(backend_of(framework, drafter), **fewer)
    return Engine(
        backend,
        controller_of(drafter, backend.capacity, texts),
        overlap=1,
        chunked_prefill_size=CHUNK,
        cache=policy_of(drafter.split()[0].removesuffix("+NGRAM"), is_hybrid=True),
        transfer_fingerprint="vlm",
    )


def write_seeing(folder: Path) -> Path:
    """The folder of the golden model, with a processor config and a byte tokenizer."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL / name, folder / name)
    given = json.loads((IMAGES / "config.json").read_text(encoding="utf-8"))
    processor = json.dumps(given["preprocessor_config"])
    (folder / "preprocessor_config.json").write_text(processor, encoding="utf-8")
    save_tokenizer(folder)
    return folder
