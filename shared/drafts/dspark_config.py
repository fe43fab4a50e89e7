"""Config of a DSpark draft model, in addition to that of a DFlash model."""

from dataclasses import dataclass

from shared.drafts.config_formats import RawDraftConfig

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)


@dataclass(frozen=True, kw_only=True)
class MarkovConfig:
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
    if kind not in KINDS:
        raise ValueError(
            f"the draft model's markov_head_type must be one of {', '.join(KINDS)}, got {kind!r}"
        )
    return MarkovConfig(
        rank=rank,
        kind=kind,
        has_confidence=stated.flag("enable_confidence_head", True),
        confidence_sees_previous=stated.flag("confidence_head_with_markov", True),
    )
