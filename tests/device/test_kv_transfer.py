"""KV transfer between engines on real models: output and acceptance equal those without it.

A source prefills the prompts without output, as a prefill server does. Its records are imported
into a sink with wiped memory, which serves the same prompts. The same backend has served them
without transfer before.
"""

from __future__ import annotations

from itertools import product

import pytest

from shared.engine.engine import Engine
from tests.support.equality import Oracle, assert_few_excused
from tests.support.run_engine import Outcome
from tests.support.tiny_models import HYBRIDS
from tests.support.transfers import (
    CHAIN,
    PLAIN,
    TOKENS,
    TRANSFERRED,
    TREE,
    Case,
    engine_of,
    exported,
    finish,
    model_of,
    requests,
    served,
    wipe,
)

KINDS = [
    ("llama", "none", PLAIN),
    ("llama", "NGRAM", CHAIN),
    ("llama", "EAGLE3", CHAIN),
    ("llama", "EAGLE3", TREE),
    ("llama", "DFLASH", CHAIN),
    ("llama", "STANDALONE", CHAIN),
    ("qwen3_5", "none", PLAIN),
    ("qwen3_5", "NEXTN", CHAIN),
    ("qwen3_5", "NEXTN", TREE),
    ("qwen3_5", "NGRAM", CHAIN),
    ("qwen3_5", "STANDALONE", CHAIN),
    ("qwen3_moe", "none", PLAIN),
    ("deepseek_v3", "none", PLAIN),
    ("glm4_moe_lite", "NEXTN", CHAIN),
]
MAMBA2 = [
    ("nemotron_h", "NEXTN", CHAIN),
    ("nemotron_h", "none", PLAIN),
    ("nemotron_h", "EAGLE3", CHAIN),
    ("granitemoehybrid", "EAGLE3", TREE),
    ("granitemoehybrid", "STANDALONE", CHAIN),
    ("falcon_h1", "NGRAM", CHAIN),
    ("bamba", "none", PLAIN),
]
PAGE_SIZES = (1, 16, 64)
PAIRS = list(product(("torch", "jax"), repeat=2))
DEFAULT = {
    ("torch", "torch", Case("qwen3_5", "NEXTN", CHAIN, 16)),
    ("torch", "torch", Case("nemotron_h", "NEXTN", CHAIN, 16)),
    ("torch", "torch", Case("llama", "EAGLE3", TREE, 64)),
    ("torch", "torch", Case("qwen3_moe", "none", PLAIN, 1)),
    ("torch", "torch ranks 2", Case("qwen3_5", "NEXTN", CHAIN, 16)),
    ("torch", "torch", Case("olmo3", "none", PLAIN, 4, 130)),
    ("torch", "reference", Case("deepseek_v3", "none", PLAIN, 16)),
}
RUNS = {
    (source, sink, Case(family, drafter, shape, page_size))
    for source, sink in PAIRS
    for family, drafter, shape in KINDS
    for page_size in PAGE_SIZES
}
TP_RUNS = {
    ("torch ranks 2", "torch", Case("qwen3_5", "NEXTN", CHAIN, 16)),
    ("torch ranks 2", "torch", Case("deepseek_v3", "none", PLAIN, 16)),
    ("torch", "torch ranks 2", Case("deepseek_v3", "none", PLAIN, 16)),
    ("torch", "torch ranks 2", Case("llama", "DFLASH", CHAIN, 16)),
    ("torch", "torch ranks 4", Case("llama", "none", PLAIN, 16)),
    ("torch ranks 4", "jax", Case("llama", "none", PLAIN, 16)),
    ("torch ranks 2", "torch", Case("nemotron_h", "NEXTN", CHAIN, 16)),
    ("torch", "torch ranks 2", Case("nemotron_h", "NEXTN", CHAIN, 16)),
    ("torch ranks 2", "torch", Case("falcon_h1", "NGRAM", CHAIN, 16)),
    ("torch", "torch ranks 2", Case("granitemoehybrid", "STANDALONE", CHAIN, 16)),
    ("torch", "torch ranks 4", Case("bamba", "none", PLAIN, 16)),
}
"""Ranks run every step next to one rank and compare its bits; 4 ranks share 2 KV heads."""
RUNS |= {
    (source, sink, Case(family, drafter, shape, 16))
    for source, sink in PAIRS
    for family, drafter, shape in MAMBA2
}
RUNS |= DEFAULT | TP_RUNS | {(*pair, Case("olmo3", "none", PLAIN, 4, 130)) for pair in PAIRS}


def marked(run: tuple[str, str, Case]):
    marks = [] if run in DEFAULT else [pytest.mark.matrix]
    source, sink, case = run
    return pytest.param(source, sink, case, id=f"{source}-{sink}-{case}", marks=marks)


def serve(engine: Engine, case: Case, *, max_tokens: int = TOKENS) -> dict[int, Outcome]:
    """Serves the prompts at once; with NGRAM one by one, since its trie has earlier outputs."""
    asked = requests(model_of(case.family, case.drafter)[0].vocab, max_tokens=max_tokens)
    if case.drafter != "NGRAM":
        return served(engine, asked)
    return {number: served(engine, [each])[number] for number, each in enumerate(asked)}


@pytest.mark.parametrize(("source", "sink", "case"), sorted(map(marked, RUNS), key=lambda p: p.id))
def test_transfer_preserves_output_and_acceptance(source, sink, case):
    config, weights = model_of(case.family, case.drafter)
    cold, prefill, asked = engine_of(sink, case), engine_of(source, case), requests(config.vocab)
    wanted = serve(cold, case)
    assert cold.cache.num_hit == 0
    serve(prefill, case, max_tokens=0)
    records = [exported(prefill, each) for each in asked]
    assert all(record.num_tokens >= TRANSFERRED for record in records)
    if case.family in HYBRIDS:
        assert {(x.num_tokens, x.header.has_snapshot) for x in records} == {(TRANSFERRED, True)}
    engine = engine_of(sink, case)
    wipe(engine)
    jobs = [engine.transfer.begin_import(record, holds=False) for record in records]
    finish(engine)
    assert all(job.is_done for job in jobs)
    found = serve(engine, case)
    assert engine.cache.num_hit >= len(asked) * TRANSFERRED
    if case.family in HYBRIDS:
        assert engine.cache.num_hit == len(asked) * TRANSFERRED
    for number, each in enumerate(asked):
        is_same = found[number].tokens == wanted[number].tokens
        if is_same:
            assert found[number].accepted == wanted[number].accepted
        else:
            Oracle(config, weights).check(each.prompt, found[number].tokens, each.sampling)
    assert_few_excused()
