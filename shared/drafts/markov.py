"""What the config.json of a DSpark draft model says beside that of a DFlash one."""

from dataclasses import dataclass

from shared.drafts.formats import Stated

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)


@dataclass(frozen=True, kw_only=True)
class MarkovConfig:
    """How a slot's scores know the token before it, and what tells that its draft is accepted.

    Attributes:
      rank: Width of the embedding of the token before.
      kind: "vanilla" scores that embedding, "gated" what a gate lets through of it, "rnn" what a
        state holds that each slot of the block advances.
      has_confidence: The head says how likely each draft is accepted.
      confidence_sees_previous: It reads the embedding of the token before too.
    """

    rank: int
    kind: str
    has_confidence: bool
    confidence_sees_previous: bool

    def mixed(self, hidden: int) -> tuple[int, int] | None:
        """Outputs and inputs of the projection that a gate or a state is made of; None: of none.

        Args:
          hidden: Size of a hidden state.
        """
        if self.kind == VANILLA:
            return None
        outputs, states = (1, 0) if self.kind == GATED else (3, 1)
        return outputs * self.rank, hidden + (1 + states) * self.rank

    def confidence_inputs(self, hidden: int) -> int:
        """Width of what the confidence reads."""
        return hidden + (self.rank if self.confidence_sees_previous else 0)


def markov_of(stated: Stated) -> MarkovConfig:
    """The Markov step and the confidence of a DSpark draft model.

    Raises:
      ValueError: A field is missing or out of range; one sentence that names it.
    """
    settings = stated.settings
    rank, kind = settings.get("markov_rank"), settings.get("markov_head_type") or VANILLA
    if type(rank) is not int or rank < 1:
        raise ValueError(
            f"the draft model's markov_rank must be a positive whole number, got {rank!r}; without "
            "a Markov step it is a DFLASH head"
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
