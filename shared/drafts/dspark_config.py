"""Config of a DSpark draft model, in addition to that of a DFlash model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.drafts.block_part import BlockPart, PartTensor
from shared.drafts.raw_config import RawDraftConfig
from shared.models.config import ModelConfig

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
MARKOV_TYPES = (VANILLA, GATED, RNN)

MARKOV = "markov."
"""Prefix of the parameters of the Markov head."""

MARKOV_EMBEDDING = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"


@dataclass(frozen=True, kw_only=True)
class MarkovConfig(BlockPart):
    """Markov head, which conditions a slot's logits on the token before, and confidence head.

    Attributes:
      rank: Width of the embedding of the previous token.
      kind: "vanilla" scores that embedding, "gated" a gated embedding, "rnn" a recurrent state that
        each slot of the block advances.
      has_confidence: True if the head predicts the acceptance probability of each draft token.
      confidence_sees_previous: True if the confidence head also reads the embedding of the previous
        token.
    """

    rank: int
    kind: str
    has_confidence: bool
    confidence_sees_previous: bool

    def mixed(self, hidden: int) -> tuple[int, int] | None:
        """Returns outputs and inputs of the projection for the gate or the recurrent state; None
        without one.

        Args:
          hidden: Hidden size.
        """
        if self.kind == VANILLA:
            return None
        outputs, states = (1, 0) if self.kind == GATED else (3, 1)
        return outputs * self.rank, hidden + (1 + states) * self.rank

    def confidence_inputs(self, hidden: int) -> int:
        """Returns the input width of the confidence head."""
        return hidden + (self.rank if self.confidence_sees_previous else 0)

    def tensors(self, layer: ModelConfig, draft_vocab: int) -> list[PartTensor]:
        """Same as `BlockPart.tensors`."""
        before, scored = (layer.vocab, self.rank), (draft_vocab, self.rank)
        output = PartTensor(
            name=f"{MARKOV}lm_head",
            tensor="markov_head.markov_w2.weight",
            shape=scored,
            is_lm_head=True,
        )
        tensors = [
            PartTensor(name=f"{MARKOV}embed", tensor=MARKOV_EMBEDDING, shape=before),
            output,
        ]
        if mixed := self.mixed(layer.hidden):
            joint = f"markov_head.{'gate' if self.kind == GATED else 'joint'}_proj"
            tensors.append(_linear(f"{MARKOV}mix", joint, mixed))
        if self.has_confidence:
            read = (1, self.confidence_inputs(layer.hidden))
            tensors.append(_linear("confidence", CONFIDENCE.removesuffix(".weight"), read))
        return tensors

    def inferred(
        self, shape_of: Callable[[str], tuple[int, ...] | None], layer: ModelConfig
    ) -> "MarkovConfig":
        """Returns the part with the confidence head of its tensors, if there is one."""
        shape = shape_of(CONFIDENCE)
        is_wide = shape is not None and shape[-1] != layer.hidden
        return replace(self, has_confidence=shape is not None, confidence_sees_previous=is_wide)


def _linear(name: str, tensor: str, shape: tuple[int, int]) -> PartTensor:
    """Returns a matrix with a bias."""
    return PartTensor(name=name, tensor=f"{tensor}.weight", shape=shape, bias=f"{tensor}.bias")


def markov_of(stated: RawDraftConfig) -> MarkovConfig:
    """Reads the Markov head and the confidence head of a DSpark draft model.

    Raises:
      ValueError: A field is missing or out of range; the message names it.
    """
    settings = stated.settings
    rank, kind = settings.get("markov_rank"), settings.get("markov_head_type") or VANILLA
    if type(rank) is not int or rank < 1:
        raise ValueError(
            f"the draft model's markov_rank must be a positive integer, got {rank!r}; a model "
            "without a Markov head is a DFLASH head"
        )
    if kind not in MARKOV_TYPES:
        raise ValueError(
            f"the draft model's markov_head_type must be one of {', '.join(MARKOV_TYPES)}, "
            f"got {kind!r}"
        )
    return MarkovConfig(
        rank=rank,
        kind=kind,
        has_confidence=stated.flag("enable_confidence_head", True),
        confidence_sees_previous=stated.flag("confidence_head_with_markov", True),
    )
