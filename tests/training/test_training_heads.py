"""Training of draft heads on the inputs of serving, step by step."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.training import forward, heads, init, losses
from jax_impl.training.tasks import check_head_trained
from shared.drafts.config import DraftConfig
from tests.support.golden_models import SpecHead, SpecModel
from tests.support.tiny_heads import tiny_block_config, tiny_head_config
from tests.support.tiny_models import tiny_model
from tests.support.training import (
    GOLDEN,
    golden_head,
    golden_model,
    jitted,
    lowered,
    padded,
    small_hybrid,
    vectors,
)

DEPTH, LENGTH = 4, 32

# Float32 on both sides, magnitudes up to 10: only the orders of the sums differ.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)

KINDS = {"mtp": "qwen3_5_dense", "eagle1": "llama", "eagle1_nobias": "llama", "eagle3": "llama"}
"""Golden heads and their targets."""


class Subject:
    """A golden head in training and in the specification, and a text of its target."""

    def __init__(self, name: str) -> None:
        target, self.run = KINDS[name], None
        self.config, self.model = golden_model(target)
        want = vectors(target)
        self.tokens = np.append(want["short_ids"], want["decode_ids"])
        self.passed = jitted(forward.forward, self.config, compute_dtype=jnp.float32, remat=False)(
            self.model, padded(self.tokens, LENGTH)
        )
        length, L = len(self.tokens), self.config.num_layers
        hidden = np.asarray(self.passed.hidden[0, :length])
        if name == "mtp":
            self.kind, self.own = "mtp", (None, self.model.mtp)
            spec = SpecModel(GOLDEN / target)
            self.extend = lambda tokens, reads: spec.mtp(tokens, reads, 0)
            self.go_on = lambda token, hidden, at: spec.mtp(np.array([token]), hidden, at)
            self.reads = hidden
            return
        self.kind, self.own = name.removesuffix("1").split("1")[0], golden_head(name, target)
        spec = SpecHead(GOLDEN / name, GOLDEN / target)
        self.extend, self.go_on = spec.extend, spec.go_on
        streams = [np.asarray(self.passed.streams[i][0, :length]) for i in range(L + 1)]
        aux = [streams[i] for i in self.own[0].aux_streams]
        self.reads = np.concatenate(aux, axis=1) if aux else hidden

    def bound(self, model, own):
        config = self.own[0]
        return losses.bind(self.kind, config, own, self.config, model, jnp.float32)

    def unrolled(self, tokens: np.ndarray):
        """Hidden states and scores over the target's vocabulary, of all steps."""

        def run(model, own, tokens, passed):
            head = self.bound(model, own)
            steps = heads.unroll(head, tokens, head.read(passed), DEPTH, jnp.float32, False)
            return [(x[0], head.scores(x[0])) for x in steps]

        self.run = self.run or jitted(run)
        return self.run(self.model, self.own[1], padded(tokens, LENGTH), self.passed)


subject_of = lru_cache(Subject)


@pytest.mark.parametrize("name", KINDS)
def test_unrolled_steps_match_spec(name):
    """A request of any length drafts its next tokens from true rows, then from its own outputs."""
    subject = subject_of(name)
    tokens, reads = subject.tokens, subject.reads
    steps = subject.unrolled(tokens)
    ids = np.asarray(subject.own[1].draft_ids[...]) if name == "eagle3" else slice(None)
    for length in (1, 2, 9, 24):
        hidden, logits = subject.extend(tokens[1 : length + 1], reads[:length])
        for step, (ours, scores) in enumerate(steps):
            row = length - 1 + step
            close(ours[row], hidden[-1])
            close(scores[row], logits[-1][ids])
            if step + 1 < DEPTH:
                hidden, logits = subject.go_on(tokens[row + 2], hidden[-1:], row + 1)


@pytest.mark.parametrize("name", ["mtp", "eagle1", "eagle3"])
def test_first_unrolled_steps_match_golden(name):
    subject = subject_of(name)
    want = vectors("qwen3_5_dense" if name == "mtp" else name)
    prefix = "mtp_" if name == "mtp" else ""
    following = np.append(want[f"{prefix}next_ids"], want[f"{prefix}chain_ids"])
    steps = subject.unrolled(np.append(subject.tokens[:1], following))
    close(steps[0][1][:24], want[f"{prefix}logits"])
    for step in range(1, DEPTH):
        close(steps[step][1][23 + step], want[f"{prefix}chain_logits"][step - 1])


@pytest.mark.parametrize("kind", ["mtp", "eagle", "eagle3"])
def test_head_loss_decreases_after_gradient_step(kind):
    config, model = small_hybrid() if kind == "mtp" else golden_model("llama")
    if kind == "mtp":
        draft_config, head = None, init.fresh_mtp(config, model, 0)
    else:
        draft_config = DraftConfig.from_dict(tiny_head_config(config, kind.upper()), config)
        ids = np.arange(draft_config.draft_vocab) if draft_config.has_draft_vocab else None
        head = init.fresh_head(draft_config, config, model, 0, ids)
    tokens = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, config.vocab)

    def loss(head):
        what = (kind, draft_config, head, config, model, tokens, jnp.ones((1, LENGTH)))
        return losses.head_loss(*what, 2, jnp.float32, True)

    before, after = lowered(loss, head)
    assert after < before


def test_acceptance_metrics_count_agreement_from_first_draft():
    """Against a head that knows the text, but for the drafts that are spoilt."""
    vocab, T, depth = 8, 12, 3
    tokens = jnp.asarray(np.arange(T)[None] % vocab)
    says = jax.nn.one_hot((tokens + 1) % vocab, vocab) * 50  # the target: the next token
    spoilt = {(0, 5), (1, 8), (2, 8)}  # step and row

    class Told:
        draft_ids = None

        @staticmethod
        def scores(rows):
            return rows

    steps = [np.array(jax.nn.one_hot((tokens + 2) % vocab, vocab)) * 50 for _ in range(depth)]
    for step, row in spoilt:
        steps[step][0, row] = 0
    target = type("Target", (), {"head": jnp.eye(vocab)})()
    scored = losses._steps_scored(Told, target, jnp.roll(says, -1, 1), steps, jnp.float32)
    mask = np.ones((1, T), np.float32)
    mask[0, :3] = 0  # a prompt: rows 0 and 1 draft from it, so their chains do not count
    _, metrics = losses.weigh(scored, jnp.asarray(mask))
    # Chains begin at rows 1 to 9 and have one row more in each step; the text ends at row 9.
    assert metrics["agreement_1"] == pytest.approx(8 / 9)  # not that from row 5
    assert metrics["agreement_2"] == pytest.approx(6 / 8)  # nor that from row 7
    assert metrics["agreement_3"] == pytest.approx(4 / 7)  # nor that from row 6
    assert metrics["acceptance_length"] == pytest.approx(1 + 8 / 9 + 6 / 8 + 4 / 7)


UNTRAINED = {
    "norm_before_residual": ("EAGLE3", {"norm_before_residual": True}),
    "several layers": ("EAGLE", {"num_hidden_layers": 2}),
    "biases": ("EAGLE", {"qkv_bias": True}),
    "sliding windows": ("DFLASH", {}),
    "draft vocabulary": ("DFLASH", {"layer_types": None, "draft_vocab_size": 60}),
}


@pytest.mark.parametrize("named", UNTRAINED)
def test_check_head_trained_rejects_unsupported_head(named):
    kind, fields = UNTRAINED[named]
    target, _ = tiny_model("llama", 0)
    config_of = tiny_block_config if kind == "DFLASH" else partial(tiny_head_config, kind=kind)
    config = DraftConfig.from_dict(config_of(target, **fields), target)
    with pytest.raises(ValueError, match=named):
        check_head_trained(config)
