"""Images in the engine: encoded when a prompt needs them, distinguished by the prefix cache.

The golden VLM is compared with its greedy outputs and with the golden specification, which
reads a whole prompt at once and has no pages, no encoder cache and no drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shared.boundary.backend import StepFuture, StepPlan
from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program, StepKind
from shared.engine import shadow_verify
from shared.engine.allocator import Allocator
from shared.engine.encoder_cache import EncoderCache, min_rows
from shared.engine.engine import Engine
from shared.engine.image_inputs import MropePositions, PromptImage, cache_key, first_difference
from shared.engine.ngram.index import NgramIndex
from shared.engine.radix_cache import RadixCache
from shared.engine.request import InvalidRequestError, Request
from shared.engine.rows import Chunk, ScheduledRows, chunk_end
from shared.engine.shadow_verify import ShadowVerifier
from shared.options.ngram import NgramConfig
from shared.spec.mrope import mrope_positions
from tests.support import jax_vlm_ranks
from tests.support.backends import GPU_FRAMEWORKS
from tests.support.golden_images import WANT, resized
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.vlm import (
    CHUNK,
    FACTOR,
    IMAGE,
    LARGEST,
    ON_A_GPU,
    PAGE,
    SHAPES,
    Prompt,
    backend_of,
    engine_of,
    pixels,
    words,
)

GOLDEN = {"mm": (0, 1), "one": (2,)}
LONG = Prompt(words(20, 1), pixels(8, 10, 1), words(20, 1), pixels(9, 5, 2), words(9, 2))
"""A prompt with chunks of 64 tokens that begin and end inside images."""


def golden(name: str) -> Prompt:
    """A golden prompt with the preprocessed pixels of the golden images."""
    tokens, numbers = WANT[f"{name}_ids"].tolist(), GOLDEN[name]
    parts: list[list[int] | np.ndarray] = [[]]
    left = [resized(WANT[f"image_{i}"]) for i in numbers]
    for token in tokens:
        if token != IMAGE:
            parts[-1].append(token)
        elif not (len(parts) > 1 and not parts[-1]):
            parts += [left.pop(0), []]
    made = Prompt(*parts)
    assert made.tokens == tokens
    return made


def served(engine: Engine, *prompts: Prompt, tenant: str = "") -> list[list[int]]:
    """The outputs of prompts that arrive together."""
    given = [prompt.request(number, tenant) for number, prompt in enumerate(prompts)]
    return [outcome.tokens for outcome in drive(engine, given).values()]


ON_GPUS = [f"{name}{ON_A_GPU}" for name in GPU_FRAMEWORKS]
FRAMEWORKS = [
    "reference",
    "torch",
    pytest.param("jax", marks=pytest.mark.matrix),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPUS),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_golden_image_prompts_match_golden_outputs(framework):
    engine = engine_of(framework, "NEXTN")
    texts = served(engine, golden("mm"), golden("one"))
    assert [text[:10] for text in texts] == [WANT[f"{name}_greedy_ids"].tolist() for name in GOLDEN]
    assert engine.images.num_encoded == 3


def traffic() -> list[Prompt]:
    """Prompts that share images and prefixes, and one text prompt."""
    return [
        LONG,
        Prompt(words(70, 3), pixels(8, 10, 1), words(3, 1)),
        Prompt(pixels(9, 5, 2), words(30, 1)),
        Prompt(words(90, 2)),
        Prompt(words(20, 1), pixels(8, 10, 3), words(20, 1), pixels(9, 5, 2), words(9, 2)),
    ]


CASES = [
    pytest.param("NEXTN", ["reference", "torch"], id="NEXTN"),
    pytest.param("NGRAM", ["torch"], id="NGRAM"),
    pytest.param("NEXTN tree", ["torch ranks 2"], id="ranks", marks=pytest.mark.matrix),
    *(
        pytest.param(name, ["reference", *ON_GPUS], id=f"{name} gpu", marks=pytest.mark.gpu)
        for name in ("NEXTN tree", "EAGLE3", "NGRAM")
    ),
    *(
        pytest.param(name, ["reference", "torch", "jax"], id=f"{name} x3", marks=pytest.mark.matrix)
        for name in SHAPES
    ),
]


@pytest.mark.parametrize(("drafter", "frameworks"), CASES)
def test_image_output_equals_plain_with_preemption_and_drafts(drafter, frameworks):
    """Few pages: requests are preempted midway and find the rest of their cached prefix."""
    texts, drafted = [each.text() for each in traffic()], {}
    for framework in frameworks:
        engine, outcomes = engine_of(framework, drafter, texts, num_pages=48), {}
        for number, prompt in enumerate(traffic()):
            engine.add(prompt.request(number))
            outcomes[number] = Outcome()
        sent_back = {is_inside: False, has_text: False}
        while engine.busy:
            for event in checked_step(engine):
                outcomes[event.request_id].take(event)
            for which, is_done in sent_back.items():
                sent_back[which] = is_done or preempted(engine, which)
        assert all(sent_back.values()), "requests lose their pages inside an image and after one"
        assert [x.tokens for x in outcomes.values()] == texts
        steps = [event.step for x in outcomes.values() for event in x.traced]
        drafted[framework] = str([(step.drafts, step.parents, step.path) for step in steps if step])
        if drafter.endswith("NGRAM"):
            assert max(max(x.accepted) for x in outcomes.values()) > 1
    assert len({*drafted.values()}) == 1, "drafts, or what is accepted of them, differ"


def is_inside(request: Request) -> bool:
    """True if the prefilled tokens end inside an image."""
    inside = any(each.first < request.prefilled < each.end for each in request.images)
    return inside and request.cached_tokens == 0


def has_text(request: Request) -> bool:
    return bool(request.images) and len(request.output) > 3


def preempted(engine: Engine, which: Callable[[Request], bool]) -> bool:
    """Preempts a matching request without a step in flight; False if there is none."""
    for request in engine.scheduler.running:
        if request.has_no_step_in_flight and which(request):
            engine.scheduler.preempt(request)
            return True
    return False


@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_prefix_cache_distinguishes_images_of_equal_size(framework):
    engine = engine_of(framework, "NEXTN")
    other = Prompt(words(20, 1), pixels(8, 10, 3), words(20, 1), pixels(9, 5, 2), words(9, 2))
    assert LONG.tokens == other.tokens
    assert served(engine, LONG) == [LONG.text()]
    assert engine.images.num_encoded == 2
    found = cached(engine, LONG)
    assert found > LONG.images[1].first, "its last state is inside the second image"
    assert engine.images.num_encoded == 2, "the second request encodes nothing"
    assert cached(engine, other) == 0, "the first state follows the rows of the other image"
    assert engine.images.num_encoded == 3
    assert cached(engine, LONG, tenant="another") == 0
    assert engine.images.num_encoded == 5, "tenants do not share image embeddings"


def cached(engine: Engine, prompt: Prompt, tenant: str = "") -> int:
    """Cached tokens of a prompt; its output must equal the output of the specification."""
    request = prompt.request(7, tenant)
    assert drive(engine, [request])[7].tokens == prompt.text()
    return request.cached_tokens or 0


def test_prompts_with_different_images_prefill_concurrently():
    """A prompt waits for the pages of another one only if their images are equal."""
    other = Prompt(words(20, 1), pixels(8, 10, 3), words(40, 1))
    same = Prompt(words(20, 1), pixels(8, 10, 1), words(40, 1))
    engine, outcomes = engine_of("reference", "none"), [Outcome() for _ in range(3)]
    for number, prompt in enumerate((same, other, same)):
        engine.add(prompt.request(number))
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == [0, 1]
    while engine.busy:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
    assert [x.tokens for x in outcomes] == [same.text(), other.text(), same.text()]
    assert engine.images.num_encoded == 2


def test_small_encoder_cache_reencodes_images():
    many = Prompt(*(part for i in range(5) for part in (words(3, i), pixels(4, 6, i))), words(9, 1))
    large = Prompt(words(50, 1), pixels(8, 12, 8), pixels(8, 12, 9), words(5, 1))
    fewer = replace(backend_of("reference", "none").capacity.images, num_rows=1 + min_rows(96))
    engine = engine_of("reference", "none", images=fewer)
    assert served(engine, many, large, many) == [many.text(), large.text(), many.text()]
    assert engine.images.num_held <= min_rows(96)


def test_image_encoded_after_prompt_with_cached_image():
    """The image of the first prompt is cached, and the second prompt waits for its encoding."""
    engine = engine_of("reference", "none")
    served(engine, Prompt(words(9, 1), pixels(3, 4, 1), words(5, 2)))
    first = Prompt(words(9, 3), pixels(3, 4, 1), words(5, 4))
    second = Prompt(words(9, 5), pixels(3, 4, 2), words(5, 6))
    assert served(engine, first, second) == [first.text(), second.text()]


def test_image_encoded_before_prefill_of_shared_step():
    """A step prefills several short prompts; those with unencoded images are deferred."""
    seen = [Prompt(words(3, n), pixels(2, 3, n % 2), words(5, n)) for n in range(3)]
    together = [Prompt(words(9, 7)), *seen]
    engine = engine_of("reference", "none")
    assert served(engine, *together) == [each.text() for each in together]
    assert engine.images.num_encoded == 2


def test_decode_runs_between_partial_image_encodes():
    """One prompt aborts after the first step of its image; one waits for a higher priority."""
    engine, submitted = engine_of("reference", "none"), list[Program]()
    submit = engine.backend.submit

    def noted(plan: StepPlan) -> StepFuture:
        submitted.append(plan.program)
        return submit(plan)

    def blocks() -> list[int]:
        return [each.blocks.start for each in submitted if each.work is StepKind.ENCODE]

    engine.backend.submit = noted
    stream = Prompt(words(9, 1))
    large = [Prompt(words(3, n), pixels(8, 10, n), words(5, n)) for n in range(4)]
    asked = [stream.request(0, tokens=30), *(large[n].request(n) for n in (1, 2, 3))]
    asked[3].priority = -1
    outcomes = {number: Outcome() for number in (0, 2, 3)}

    def step() -> None:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)

    engine.add(asked[0])
    while not outcomes[0].tokens:
        step()
    for number in (1, 2):
        engine.add(asked[number])
        while len(blocks()) < number:
            step()
        if number == 1:
            engine.abort(1)
    engine.add(asked[3])
    while engine.busy:
        step()
    assert blocks() == [0, 0, *(0, 1), *(0, 1)]
    works = [each.work for each in submitted]
    assert (StepKind.ENCODE, StepKind.ENCODE) not in [*pairwise(works)]
    assert outcomes[0].tokens == stream.text(30)
    assert all(outcomes[n].tokens == large[n].text() for n in (2, 3))
    assert engine.images.num_encoded == 2


def test_engine_add_rejects_mismatched_images():
    engine, image = engine_of("reference", "none"), PromptImage.of(1, pixels(2, 3, 1), FACTOR)
    given = Prompt([1], pixels(2, 3, 1), [2])

    def refused(words: str, prompt: list[int], *images: PromptImage) -> None:
        request = Request(
            request_id=1,
            prompt=tuple(prompt),
            images=images,
            sampling=given.request().sampling,
        )
        with pytest.raises(InvalidRequestError, match=words):
            engine.add(request)

    refused("do not match its 1 images", given.tokens[:-2], image)
    refused("do not match its 0 images", [1, IMAGE, 2])
    refused("do not match its 1 images", [*given.tokens, IMAGE], image)
    too_large = Prompt([1], pixels(10, 10, 1), [2])
    refused("image 1 of prompt has 100 tokens, at most 96", too_large.tokens, *too_large.images)
    assert not engine.busy


@pytest.mark.matrix
def test_jax_vlm_ranks_equal_single_rank():
    jax_vlm_ranks.check()


def test_ngram_index_ignores_image_tokens():
    indices = []
    for parts in ((words(9, 1), words(5, 2)), (words(9, 1), pixels(2, 3, 1), words(5, 2))):
        index = NgramIndex(NgramConfig(), nodes=4, depth=3, vocab=256, chain=False)
        request = Prompt(*parts).request()
        request.assign_slot(1)
        for end in range(2, len(request.prompt) + 1, 2):  # some chunks end inside the image
            index.add_prompt(request, end)
            index.learn()
        index.add_prompt(request, len(request.prompt))
        index.add_tokens(request, words(9, 1)[:4])
        request.append_tokens(words(9, 1)[:4])
        indices.append((index.draft([request]).tokens.tolist(), index.num_ngrams))
        index.end(request, is_learnt=True)
        index.truncate(request.request_id, 0)
        indices[-1] += (index.num_ngrams,)
    assert indices[0] == indices[1]
    assert any(indices[0][0][0])


# Rows of the encoder cache


def test_encoder_cache_rows_of_chunk_images_disjoint():
    """The images of a chunk have disjoint rows after any sequence of encodings."""
    rng = np.random.default_rng(0)
    pool = replace(backend_of("reference", "none").capacity.images, num_rows=1 + min_rows(LARGEST))
    rows, sizes = (
        EncoderCache(pool, backend_of("reference", "none").capacity.programs),
        [(1, 1), (3, 5), (8, 12), (6, 16), (2, 30)],
    )
    for number in range(60):
        parts: list[list[int] | np.ndarray] = []
        while sum(len(part) if isinstance(part, list) else 9 for part in parts) < 60:
            size = sizes[rng.integers(len(sizes))]
            parts += [words(int(rng.integers(0, 9)), 1), pixels(*size, int(rng.integers(9)))]
        request = Prompt(*parts, [1]).request(number)
        request.assign_slot(1)
        encoded = 0
        while not request.decodes:
            chunk = rows.chunk_of(request, chunk_end(request, 2 * CHUNK), may_encode=True)
            assert chunk is not None
            if isinstance(chunk, ScheduledRows):
                assert chunk.work is StepKind.ENCODE
                encoded += 1
                assert encoded < 40, "no progress"
                continue
            spans = {(place, place + each.count) for each, place in chunk.images}
            bounds = [bound for span in sorted(spans) for bound in span]
            assert bounds == sorted(bounds), "two images have a row"
            assert all(0 < bound <= pool.num_rows for bound in bounds)
            encoded = 0
            request.prefill(chunk.end)


def test_encoder_cache_keeps_images_of_current_chunk():
    pool = replace(backend_of("reference", "none").capacity.images, num_rows=1 + min_rows(LARGEST))
    rows = EncoderCache(pool, backend_of("reference", "none").capacity.programs)
    first, other, last = (pixels(8, 12, seed) for seed in (1, 2, 3))
    for parts, encoded in (((first, [1]), 1), ((other, [1]), 2), ((first, last, [1]), 3)):
        request = Prompt(*parts).request()
        request.assign_slot(1)
        while isinstance(
            rows.chunk_of(request, min(len(request.prompt), 128), may_encode=True), ScheduledRows
        ):
            pass
        assert rows.num_encoded == encoded


def test_radix_cache_key_lookahead_includes_next_image():
    """The last draft KV row of the page depends on the first row of the image."""
    prompts = [Prompt(words(PAGE, 1), pixels(4, 6, seed), [1, 2]) for seed in (1, 2)]
    capacity = backend_of("reference", "none").capacity
    for key_reach in (0, 1):
        allocator = Allocator(capacity)
        tree, slot = RadixCache(allocator, key_reach), allocator.take_slot()
        allocator.reserve(slot, 4 * PAGE)
        tokens, pages = np.array(prompts[0].tokens, np.int32), allocator.pages.page_table[slot, :4]
        tree.insert("", None, tokens, pages, [True] * 4, prompts[0].images, is_running=True)
        found = [len(tree.path("", tokens, prompt.images)) for prompt in prompts]
        assert found == [4, 1 - key_reach]


def test_cache_key_includes_image_and_offset():
    one, two = (PromptImage.of(3, pixels(2, 3, seed), FACTOR) for seed in (1, 2))
    assert cache_key([one], 0, 3) == cache_key([one], 9, 12) == b""
    keys = [cache_key([each], first, first + 4) for each in (one, two) for first in (0, 3, 4, 8)]
    assert len({*keys}) == len(keys)
    assert first_difference([one], [one]) is None
    assert first_difference([one], [two]) == first_difference([one], []) == 3
    turned = PromptImage.of(3, pixels(2, 3, 1).reshape(pixels(3, 2, 1).shape), FACTOR)
    assert turned.digest != one.digest, "the same bytes with other sides are another image"


def test_shadow_verify_limits_waiting_image_bytes(monkeypatch):
    engine = engine_of("torch", "NEXTN")
    monkeypatch.setattr(
        shadow_verify, "ReferenceRunner", lambda *given: None
    )  # no request is verified here
    checked = ShadowVerifier(engine, engine.backend, rate=1.0, report=print)
    few, many = (Prompt(words(9, 1), pixels(rows, 4, 1), words(9, 2)) for rows in (2, 4))
    most = sum(each.images[0].pixels.nbytes for each in (few, few, few))
    monkeypatch.setattr(shadow_verify, "MOST_IMAGE_BYTES", most)
    for number, prompt in enumerate((few, many, few)):
        checked.add(prompt.request(number, tokens=2 + 2 * number))  # they end one after the other
    while engine.busy:
        checked.step()
    dropped = 'shadow_verify_requests_total{result="dropped"}'
    names = ("shadow_verify_requests_waiting", dropped)
    assert [checked.metrics.snapshot()[name] for name in names] == [2, 1]


@pytest.mark.parametrize("end", [4, 8, 10])
def test_scheduled_rows_fill_writes_image_sources(end):
    prompt = Prompt(words(2, 1), pixels(2, 3, 1), words(2, 1))
    request, capacity = prompt.request(), backend_of("reference", "none").capacity
    request.mrope = MropePositions.of(prompt.tokens, IMAGE, prompt.images)
    request.assign_slot(1)
    program = next(p for p in capacity.programs if p.work is StepKind.PREFILL)
    plan = empty_plan(program, capacity)
    ScheduledRows.prefill([Chunk(request, 1, end, ((prompt.images[0], 7),))]).fill(plan)
    sources = [0, 0, 7, 8, 9, 10, 11, 12, 0, 0, 0]
    laid, count = plan.work.images, end - 1
    assert laid.sources[: count + 1].tolist() == [*sources[1:end], 0]
    assert laid.next_embed_sources.tolist() == [sources[end], 0, 0]
    found, delta = mrope_positions(np.array(prompt.tokens), IMAGE, [(2, 3)])
    assert laid.mrope_positions[:count].tolist() == found[1:end].tolist()
    assert laid.mrope_position_deltas.tolist() == [delta, 0, 0]
    behind = request.mrope.between(9, 12).tolist()  # one of the prompt, two of the output
    assert behind == [found[9].tolist(), [10 + delta] * 3, [11 + delta] * 3]
