"""Programs with grammar masks: prepared buckets and their memory."""

from dataclasses import replace

import pytest

from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.adaptive.tiers import Shapes
from tests.support.planned import GB, PLATFORMS, planned

GRAMMARS = "--grammar-backend llguidance "
SHADOW = "--shadow-verify-rate 0.1 "
HOST_NGRAM = "NGRAM --speculative-ngram-backend host"
ON_DEVICE = ("NEXTN", "NGRAM")


@pytest.mark.parametrize(("framework", "kind"), [("jax", "cpu"), ("torch", "cpu"), ("jax", "gpu")])
@pytest.mark.parametrize("drafter", ["", *ON_DEVICE, HOST_NGRAM])
def test_grammar_masks_add_own_programs(framework, kind, drafter):
    """Every second batch on a GPU, all on a CPU, the widest if each compiles for seconds."""
    flags = f"--speculative-algorithm {drafter}" if drafter else ""
    made = (planned(framework, 140 * GB, more + flags, kind=kind) for more in ("", GRAMMARS))
    without, with_masks = (found.capacity.programs for found in made)
    added = [program for program in with_masks if program not in without]
    assert not any(program.has(ProgramFeature.MASK) for program in without)
    masked = [program for program in added if program.has(ProgramFeature.MASK)]
    batches = sorted({p.batch for p in without if p.work is StepKind.DECODE}, reverse=True)
    if kind == "gpu":
        batches = batches[::2]
    elif framework == "jax":
        batches = batches[:1]
    assert {program.batch for program in masked} == {*batches}
    assert {program.work for program in masked} == {StepKind.DECODE}
    assert all(
        program.has(ProgramFeature.HOST_DRAFT) is not program.shape.is_plain for program in masked
    )
    drafts = [program for program in added if not program.has(ProgramFeature.MASK)]
    assert {program.batch for program in drafts} == ({*batches} if drafter in ON_DEVICE else set())
    assert max(p.batch for p in masked) == max(
        p.batch for p in masked if p.has(ProgramFeature.LOGPROBS)
    )
    if framework == "jax":
        assert len(masked) == len(batches) * (2 if drafter == HOST_NGRAM else 1)
    if (framework, kind) == ("jax", "cpu") and drafter not in ON_DEVICE:
        assert len(with_masks) == len(without)  # the same step serves batches without a grammar
    else:
        assert {program for program in with_masks if program not in added} == set(without)


@pytest.mark.parametrize("flags", ["", f"--speculative-algorithm {HOST_NGRAM} ", SHADOW])
def test_grammar_masks_preserve_unmasked_program_shapes(flags):
    for framework, kind in [("jax", "cpu"), ("torch", "cpu"), ("jax", "gpu")]:
        made = (planned(framework, 140 * GB, more + flags, kind=kind) for more in ("", GRAMMARS))
        without, with_masks = (
            {
                (p.work, p.batch, p.pages, p.tokens, p.shape)
                for p in found.capacity.unmasked_programs
            }
            for found in made
        )
        assert with_masks == without


@pytest.mark.parametrize("framework", PLATFORMS)
@pytest.mark.parametrize(("drafter", "sizes"), [("NEXTN", {(4, 3)}), ("NGRAM", {(1, 0), (12, 11)})])
def test_one_adaptive_draft_shape_has_grammar_masks(framework, drafter, sizes):
    """Shapes with grammar masks are no tiers; tier costs are measured without masks."""
    flags = f"{GRAMMARS}--speculative-adaptive --speculative-algorithm {drafter}"
    capacity = planned(framework, 140 * GB, flags).capacity
    programs = capacity.programs
    decodes = [program for program in programs if program.work is StepKind.DECODE]
    masked = [program for program in decodes if program.has(ProgramFeature.MASK)]
    assert {(p.shape.nodes, p.shape.depth) for p in masked} == sizes
    drafts = {(p.batch, p.shape) for p in programs if p.work is StepKind.DRAFT}
    trees = {(p.batch, p.shape) for p in masked if not p.shape.is_plain}
    assert drafts == (set() if drafter == "NGRAM" else trees)
    batches = sorted({program.batch for program in decodes}, reverse=True)
    assert {batch for batch, _ in trees} == {*batches[::2]}
    without = replace(capacity, programs=tuple(p for p in programs if p not in masked))
    on_host = drafter == "NGRAM"
    assert Shapes.of(capacity, host_draft=on_host) == Shapes.of(without, host_draft=on_host)


def test_grammar_masks_counted_in_memory_plan():
    flags = "--max-total-tokens 4096"
    without, with_masks = (planned("torch", 140 * GB, more + flags) for more in ("", GRAMMARS))
    lines = {line.name: line.num_bytes for line in without.lines}
    more = {line.name: line.num_bytes - lines[line.name] for line in with_masks.lines}
    grown = {name for name, num_bytes in more.items() if num_bytes}
    assert {"plans and results", "graph workspace"} <= grown
    masks = 49 * -(-with_masks.capacity.vocab // 32)  # 48 rows and the all-ones mask
    assert more["plans and results"] >= 3 * 4 * masks
