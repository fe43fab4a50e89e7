"""Image inputs on every backend: encoding into the encoder cache, prefill, decode and drafts.

The golden VLM has known greedy outputs. JAX runs with `-m matrix`, because its image programs are
compiled for these tests alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits, Prefill, StepPlan
from shared.boundary.buffers import empty_plan
from shared.boundary.images import EncodeImage, EncoderCacheSpec, ImageInputs
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.rows import Chunk
from shared.models.checkpoint import load_all
from shared.models.families import config_from_folder
from shared.spec import mrope
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_seeing_backend
from tests.support.contract_host import Host, emitted, joined
from tests.support.golden_images import (
    MODEL,
    WANT,
    fitted,
    image_config,
    patches_of,
    pixels_of,
    vision,
)
from tests.support.golden_models import Images as GoldenImages
from tests.support.golden_models import SpecModel
from tests.support.limits import make_limits
from tests.support.vision_encoders import of_specification

BATCH = 2
PLAIN, CHAIN = TreeShape.plain(BATCH), TreeShape.chain(7, BATCH)
"""Deep enough that M-RoPE positions without the position delta would change the drafts."""

PATCHES = 128
ROWS = 101
"""Rows of the encoder cache; two prompts with two images each need 80."""


def program(
    work: StepKind, shape: TreeShape, batch: int, tokens: int, blocks: range = range(0)
) -> Program:
    sizes = {"batch": batch, "pages": 64, "tokens": tokens, "shape": shape}
    return Program(work=work, **sizes, extras=ProgramFeature.NONE, blocks=blocks)


DEPTH = vision().depth
ENCODE = program(StepKind.ENCODE, TreeShape.plain(1), 1, PATCHES, range(DEPTH))
PIECES = [
    program(StepKind.ENCODE, TreeShape.plain(1), 1, 2 * PATCHES, blocks)
    for blocks in (range(1), range(1, DEPTH))
]
"""Programs of larger images, which are encoded in two steps."""


def capacity() -> BackendLimits:
    return make_limits(
        (
            program(StepKind.PREFILL, PLAIN, BATCH, 192),
            program(StepKind.DECODE, PLAIN, BATCH, 0),
            program(StepKind.DECODE, CHAIN, BATCH, 0),
            ENCODE,
            *PIECES,
        ),
        page_size=4,
        num_pages=161,
        num_slots=5,
        num_snapshots=3,
        context_length=200,
        vocab=config_from_folder(MODEL).vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=0,
        images=EncoderCacheSpec(vision(), image_config(), ROWS),
    )


FRAMEWORKS = ["reference", "torch", pytest.param("jax", marks=pytest.mark.matrix)]


@pytest.fixture(scope="module", params=FRAMEWORKS)
def backend(request) -> Backend:
    config = config_from_folder(MODEL)
    made = make_seeing_backend(
        request.param, MODEL, config, load_all(MODEL, config, True), capacity()
    )
    yield made
    made.close()


@pytest.fixture
def host(backend) -> Host:
    return Host(backend, {})


def image_plan(host: Host, number: int, place: int, program: Program = ENCODE) -> StepPlan:
    plan = empty_plan(program, host.capacity)
    assert isinstance(plan.work, EncodeImage)
    if plan.work.pixels is not None:
        given = pixels_of(fitted(number)).padded(program.tokens, vision())
        for name, values in vars(given).items():
            getattr(plan.work.pixels, name)[:] = values
    plan.work.place[0] = place
    return plan


def grid(number: int) -> tuple[int, int]:
    _, rows, columns = WANT[f"grid_{number}"] // 2
    return int(rows), int(columns)


class Prompt:
    """A golden prompt with its images at a given row of the encoder cache."""

    def __init__(self, name: str, numbers: tuple[int, ...], place: int) -> None:
        self.tokens, image = WANT[f"{name}_ids"], vision().image_token
        self.places = place + np.cumsum([0, *(a * b for a, b in map(grid, numbers))])
        self.numbers, self.text = numbers, WANT[f"{name}_greedy_ids"].tolist()
        self.turns, self.delta = mrope.mrope_positions(self.tokens, image, [*map(grid, numbers)])
        is_image = self.tokens == image
        self.sources = np.where(is_image, place - 1 + np.cumsum(is_image), 0)

    def encode(self, host: Host) -> None:
        for number, place in zip(self.numbers, self.places, strict=False):
            host.backend.submit(image_plan(host, number, int(place)))

    def plan(self, host: Host, request, first: int, end: int) -> StepPlan:
        plan = host.prefill_plan(Chunk(request, first, end))
        self.lay(plan, 0, first, end)
        return plan

    def lay(self, plan: StepPlan, row: int, first: int, end: int) -> None:
        assert isinstance(plan.work, Prefill)
        images, begins = plan.work.images, plan.work.row_starts[row]
        assert isinstance(images, ImageInputs)
        images.mrope_positions[begins : begins + end - first] = self.turns[first:end]
        images.sources[begins : begins + end - first] = self.sources[first:end]
        images.next_embed_sources[row] = self.sources[end] if end < len(self.tokens) else 0
        images.mrope_position_deltas[row] = self.delta

    def request(self, host: Host):
        return host.request(self.tokens.tolist(), positions=120)


TWO, ONE = Prompt("mm", (0, 1), 1), Prompt("one", (2,), 41)


@pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("ends", [(57,), (20, 57), (4, 36, 57)], ids=str)
def test_image_prompt_output_independent_of_chunks_and_drafts(host, ends, shape):
    TWO.encode(host)
    request, futures = TWO.request(host), []
    for first, end in zip((0, *ends), ends, strict=False):
        futures.append(host.backend.submit(TWO.plan(host, request, first, end)))
    text = [*joined(futures, 0), *host.go_on(request, 9, shape)]
    assert text == TWO.text


def test_image_and_text_prompts_run_together(host):
    """A slot with images before must not keep its position delta for a text prompt."""
    host.allocator.free(TWO.request(host).slot)
    ONE.encode(host)
    TWO.encode(host)  # its last padding would overlap the rows of the other
    before = TWO.request(host)
    host.run(TWO.plan(host, before, 0, 57))
    words = [*range(3, 60)]
    alone = host.request(words)
    text = host.text(alone, 10, PLAIN)
    host.allocator.free(alone.slot)
    second, first = host.heir(before, words), ONE.request(host)
    plan = host.prefill_plan(first, second)
    ONE.lay(plan, 0, 0, len(ONE.tokens))
    result = host.run(plan)
    texts = [emitted(result, row) for row in range(2)]
    while min(map(len, texts)) < 10:
        result = host.decode(first, second, shape=CHAIN)
        texts = [[*each, *emitted(result, row)] for row, each in enumerate(texts)]
    assert [each[:10] for each in texts] == [ONE.text, text]


def test_image_embeddings_independent_of_cache_placement(host):
    texts = []
    for place, neighbour in ((1, None), (50, 1), (50, 2)):
        if neighbour is not None:
            host.run(image_plan(host, neighbour, 1))
        moved = Prompt("one", (2,), place)
        moved.encode(host)
        request = moved.request(host)
        logged = host.run(moved.plan(host, request, 0, len(moved.tokens)))
        texts.append([*emitted(logged, 0), *host.go_on(request, 9, CHAIN)])
    assert texts == [ONE.text] * 3


def test_partial_encode_independent_of_interleaved_steps(host):
    """Decode steps, a smaller image and an abandoned image run between the encode steps."""
    ONE.encode(host)
    beside = ONE.request(host)
    host.run(ONE.plan(host, beside, 0, len(ONE.tokens)))
    begins, goes_on = PIECES
    host.run(image_plan(host, 2, 0, begins))  # abandoned
    for number, place in enumerate(TWO.places[:2].tolist()):
        host.run(image_plan(host, number, 0, begins))
        host.decode(beside, shape=CHAIN)
        host.run(image_plan(host, 2, 41))
        host.run(image_plan(host, number, place, goes_on))
    request = TWO.request(host)
    result = host.run(TWO.plan(host, request, 0, len(TWO.tokens)))
    assert [*emitted(result, 0), *host.go_on(request, 9, CHAIN)] == TWO.text


def test_encode_programs_missing_encoder_block_raise():
    config = config_from_folder(MODEL)
    weights = load_all(MODEL, config, True)
    fewer = tuple(each for each in capacity().programs if each is not PIECES[0])
    with pytest.raises(ValueError, match=f"run each of the {DEPTH} encoder blocks once"):
        make_seeing_backend(
            "reference", MODEL, config, weights, replace(capacity(), programs=fewer)
        )


def test_different_image_of_same_size_changes_output(host):
    TWO.encode(host)
    plan = image_plan(host, 0, 1)
    plan.work.pixels.bytes[:] = plan.work.pixels.bytes[::-1]
    host.run(plan)
    request = TWO.request(host)
    result = host.run(TWO.plan(host, request, 0, 57))
    assert [*emitted(result, 0), *host.go_on(request, 9, PLAIN)] != TWO.text


def expected_drafts(prompt: Prompt, rows: np.ndarray) -> list[int]:
    """The newest token and its drafts by the MTP layer of the golden specification."""
    model, end = SpecModel(MODEL), len(prompt.tokens)
    pool = np.concatenate([np.zeros((prompt.places[0], rows.shape[1]), np.float32), rows])
    images = GoldenImages(prompt.turns, prompt.delta, pool, prompt.sources)
    passed = model.prefill(prompt.tokens, None, images)
    tokens = [int(passed.logits[-1].argmax())]
    following = replace(images, sources=np.append(prompt.sources[1:], 0))
    named = np.append(prompt.tokens[1:], tokens)
    hidden, logits = model.mtp(named, passed.hidden, 0, following)
    for place in range(end, end + CHAIN.depth):
        tokens.append(int(logits[-1].argmax()))
        turn = np.full((1, 3), place + prompt.delta)
        behind = GoldenImages(turn, 0, pool, np.zeros(1, np.int32))
        hidden, logits = model.mtp(np.array(tokens[-1:]), hidden[-1:], place, behind)
    return tokens


@pytest.mark.parametrize("prompt", [TWO, ONE], ids=["two", "one"])
def test_image_drafts_match_golden_mtp(host, prompt):
    """Placeholder embeddings or text positions would change the drafts."""
    prompt.encode(host)
    request = prompt.request(host)
    host.run(prompt.plan(host, request, 0, len(prompt.tokens)))
    drafted = host.decode(request, shape=CHAIN)
    encoded = of_specification()
    rows = [encoded(patches_of(fitted(i))) for i in prompt.numbers]
    assert drafted.drafts[0].tolist() == expected_drafts(prompt, np.concatenate(rows))


def test_encode_programs_require_encoder_cache_and_vlm():
    config = config_from_folder(MODEL)
    weights = load_all(MODEL, config, True)
    with pytest.raises(ValueError, match="a vision encoder requires an encoder cache"):
        make_seeing_backend("reference", None, config, weights, capacity())
    with pytest.raises(ValueError, match="encode of .* requires a vision-language model"):
        make_seeing_backend("reference", None, config, weights, replace(capacity(), images=None))
    small = replace(capacity(), images=replace(capacity().images, num_rows=PATCHES // 4))
    with pytest.raises(
        ValueError, match="encode sizes must be multiples of .*, got encode of 1 rows, 128 patches"
    ):
        make_seeing_backend("reference", MODEL, config, weights, small)
