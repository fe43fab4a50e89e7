"""Accepting sampled chains by the rejection rule: their noise, and what each node chooses.

Trees that come with the plan were not sampled. For them the match rule is the rejection rule: each
draft x is accepted with the target's probability of x, else a token of the rest takes its place.
"""

from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.backend import Program
from shared.spec.sampling import RESIDUAL_STREAM, TARGET_STREAM
from torch_impl.device_state import Plan
from torch_impl.drafters import Noise
from torch_impl.machine import Machine
from torch_impl.ops import acceptance, any_row, sampling

RULES = {"rejection": acceptance.rejection_choices, "block": acceptance.block_choices}


def rejects(machine: Machine, program: Program) -> bool:
    """Whether a step samples its drafts from the drafter and may reject them."""
    return program.drafts_on_device and machine.limits.accept_rule in RULES


def draft_noise(
    machine: Machine, plan: Plan, program: Program, lengths: Int[Tensor, " B"]
) -> Noise | None:
    """The noise of each level's drafts, or None where no row has a temperature."""
    if not any_row(plan.sampling.temperature > 0):
        return None
    where = (plan.sampling.seed, lengths, program.shape.depth, machine.limits.vocab)
    return sampling.draft_noise(*where)


def choose(
    machine: Machine,
    plan: Plan,
    tokens: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    drafted: Float[Tensor, "B S vocab"],
    scores: Float[Tensor, "B N vocab"],
    lengths: Int[Tensor, " B"],
) -> Int[Tensor, "B N"]:
    """The token after each node of the chains.

    Args:
      drafted, scores: Processed logits of the drafter by level, and of the target by node.
    """
    (B, N, vocab), how = scores.shape, plan.sampling
    flat, warm = scores.flatten(0, 1), how.temperature.repeat_interleave(N)
    if not any_row(how.temperature > 0):
        return sampling.choose(flat, None, warm).view(B, N)
    # A chain's last node is the only one that asks for the target's noise.
    bonus = sampling.gumbel(how.seed, lengths + num_nodes, vocab, TARGET_STREAM)
    choices = sampling.choose(flat, bonus.repeat_interleave(N, dim=0), warm).view(B, N)
    return RULES[machine.limits.accept_rule](
        tokens,
        num_nodes,
        choices,
        sampling.probabilities(flat).view(B, N, vocab),
        acceptance.sampled_law(drafted, tokens),
        sampling.uniforms(how.seed, lengths, N - 1),
        sampling.gumbel(how.seed, lengths, vocab, RESIDUAL_STREAM),
        how.temperature,
    )
