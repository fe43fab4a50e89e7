"""Accepting sampled chains by the rejection rule: their noise, and what each node chooses.

Trees that come with the plan were not sampled. For them the match rule is the rejection rule: each
draft x is accepted with the target's probability of x, else a token of the rest takes its place.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jax_impl.machine import Machine
from jax_impl.ops import acceptance, sampling
from jax_impl.ops.sampling import RESIDUAL_STREAM, TARGET_STREAM
from shared.boundary.backend import Program

RULES = {"rejection": acceptance.rejection_choices, "block": acceptance.block_choices}


def rejects(machine: Machine, program: Program) -> bool:
    """Whether a step samples its drafts from the drafter and may reject them."""
    is_sampled = not (program.host_draft or program.shape.is_plain)
    return is_sampled and machine.limits.accept_rule in RULES


def draft_noise(
    machine: Machine, plan: SimpleNamespace, program: Program, lengths: Int[jax.Array, " B"]
) -> Float[jax.Array, "B S vocab"]:
    """The noise of each level's drafts; zeros where no row samples."""
    how, levels, vocab = plan.sampling, program.shape.depth, machine.limits.vocab
    none = jnp.zeros((len(lengths), levels, vocab), jnp.float32)

    def make() -> Float[jax.Array, "B S vocab"]:
        return sampling.draft_noise(how.seed, lengths, levels, vocab)

    return lax.cond((how.temperature > 0).any(), make, lambda: none)


def choose(
    machine: Machine,
    plan: SimpleNamespace,
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    drafted: Float[jax.Array, "B S vocab"],
    scores: Float[jax.Array, "B N vocab"],
    lengths: Int[jax.Array, " B"],
) -> Int[jax.Array, "B N"]:
    """The token after each node of the chains.

    Args:
      drafted, scores: Processed logits of the drafter by level, and of the target by node.
    """
    (B, N, vocab), how = scores.shape, plan.sampling
    flat, warm = scores.reshape(B * N, vocab), jnp.repeat(how.temperature, N)

    def greedy() -> Int[jax.Array, "B N"]:
        return jnp.argmax(scores, axis=2).astype(jnp.int32)

    def judged() -> Int[jax.Array, "B N"]:
        # A chain's last node is the only one that asks for the target's noise.
        bonus = sampling.gumbel(how.seed, lengths + num_nodes, vocab, TARGET_STREAM)
        choices = sampling.choose(flat, jnp.repeat(bonus, N, axis=0), warm).reshape(B, N)
        return RULES[machine.limits.accept_rule](
            tokens,
            num_nodes,
            choices,
            sampling.probabilities(flat).reshape(B, N, vocab),
            acceptance.sampled_law(drafted, tokens),
            sampling.uniforms(how.seed, lengths, N - 1),
            sampling.gumbel(how.seed, lengths, vocab, RESIDUAL_STREAM),
            how.temperature,
        )

    return lax.cond((how.temperature > 0).any(), judged, greedy)
