"""Context of the startup rules, and the rules' record type."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from shared.drafts.kinds import KINDS, DrafterKind, Form
from shared.models.config import ModelConfig
from shared.options.adaptive import MOST_NODES, MOST_STEPS, AdaptiveConfig, most_nodes
from shared.options.flags import spelling
from shared.options.ngram import NgramConfig
from shared.options.options import Options
from shared.options.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class RuleContext:
    """Inputs of the rules.

    Attributes:
      options: Options of the command line and the config file.
      model: Config of the checkpoint.
      has_mtp: True if the checkpoint has the tensors of an MTP layer that its config names.
      head_kind: Name of the kind of the draft head or MTP layer by its tensors; None without one.
      block: Nodes of the chain of a block drafter; None for other drafters.
    """

    options: Options
    model: ModelConfig
    has_mtp: bool
    head_kind: str | None
    block: int | None = None

    @property
    def draft(self) -> SpeculativeConfig:
        """Options of speculative decoding, resolved."""
        return self.options.speculative

    @property
    def algorithm(self) -> str | None:
        """Drafter of `--speculative-algorithm`; None for plain decoding."""
        return self.draft.drafter

    @property
    def kind(self) -> DrafterKind | None:
        """Record of that drafter."""
        return self.draft.kind

    @property
    def drafts_blocks(self) -> bool:
        """True if that drafter fills a block in one pass."""
        return self.draft.has_form(Form.BLOCK)

    @property
    def adaptive(self) -> AdaptiveConfig:
        """Options of adaptive speculation."""
        return self.options.adaptive

    @property
    def adaptive_flag(self) -> str | None:
        """First explicit flag of adaptive speculation."""
        names = [item.name for item in fields(AdaptiveConfig)]
        return next((spelling(name) for name in names if name in self.options.explicit_flags), None)

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a tree with S and k."""
        is_block = self.block is not None and self.draft.topk > 1
        return most_nodes(self.num_steps, self.draft.topk, is_block)

    @property
    def num_steps(self) -> int:
        """S; of a tree over a block that leaves it open, the levels of the block."""
        if self.block is None or self.draft.topk == 1:
            return self.draft.num_steps
        return self.draft.settled(self.model.drafts_trees, self.block).num_steps

    @property
    def num_copies(self) -> int:
        """C, number of n-gram nodes in a merged tree."""
        return self.options.ngram.num_copies

    @property
    def num_drafted_nodes(self) -> int:
        """N, number of drafted nodes with the root."""
        return self.draft.settled(self.model.drafts_trees, self.block).num_draft_tokens

    @property
    def num_levels(self) -> int:
        """S, draft depth; the maximum if it is chosen later."""
        if self.options.candidates:
            return max(each.steps for each in self.options.candidates)
        if self.adaptive.speculative_adaptive and self.draft.has_form(Form.TREE):
            return MOST_STEPS
        return self.draft.settled(self.model.drafts_trees, self.block).num_steps

    @property
    def ngram_flag(self) -> str | None:
        """First explicit flag of the n-gram drafter."""
        names = [item.name for item in fields(NgramConfig)]
        return next((spelling(name) for name in names if name in self.options.explicit_flags), None)

    @property
    def unused_transfer_flag(self) -> str | None:
        """First explicit flag of disaggregated prefill without effect in the server's mode."""
        return self.options.disaggregation.unused_flag(self.options.explicit_flags)

    def words(self) -> dict[str, Any]:
        """Returns the placeholders of the rules' sentences."""
        return {
            "algorithm": self.algorithm,
            "family": self.model.name,
            "mtp_tensors": f"{self.model.mtp.prefixes[0]}*" if self.model.mtp else None,
            "head_kind": self.head_kind,
            "head": KINDS[self.head_kind].described if self.head_kind else None,
            "S": self.num_steps,
            "k": self.draft.topk,
            "N": self.draft.num_draft_tokens,
            "chain": self.num_steps + 1,
            "most": self.max_nodes,
            "simulated": self.draft.speculative_simulate_accept_length,
            "levels": self.num_levels,
            "overlap": self.options.engine.overlap_depth,
            "grammars": self.options.engine.grammar_backend,
            "block": self.block,
            "block_levels": (self.block or 1) - 1,
            "window": self.draft.speculative_draft_window_size,
            "ngram_flag": self.ngram_flag,
            "adaptive_flag": self.adaptive_flag,
            "min_breadth": self.options.ngram.speculative_ngram_min_bfs_breadth,
            "max_breadth": self.options.ngram.speculative_ngram_max_bfs_breadth,
            "budget": self.options.ngram.sam_budget,
            "max_budget": self.draft.num_draft_tokens - 1,
            "copies": self.options.ngram.speculative_ngram_num_draft_tokens,
            "both": self.draft.speculative_algorithm,
            "context": self.options.model.context_length,
            "transfer_mode": self.options.disaggregation.disaggregation_mode,
            "transfer_flag": self.unused_transfer_flag,
            "model_context": self.model.context_length,
        }


WORDS = {
    "algorithm": "NAME",
    "family": "FAMILY",
    "mtp_tensors": "layers.L.*",
    "head_kind": "KIND",
    "head": "another head",
    "S": "S",
    "k": "k",
    "N": "N",
    "chain": "S + 1",
    "most": f"the lower of {MOST_NODES} and 1 + k + (S - 1) k^2",
    "simulated": "L",
    "levels": "S",
    "overlap": "N",
    "grammars": "NAME",
    "block": "B",
    "block_levels": "B - 1",
    "window": "N",
    "ngram_flag": "--speculative-ngram-*",
    "adaptive_flag": "--speculative-adaptive-*",
    "min_breadth": "N",
    "max_breadth": "M",
    "budget": "N",
    "max_budget": "N - 1",
    "copies": "C",
    "both": "NAME+NGRAM",
    "context": "N",
    "transfer_mode": "MODE",
    "transfer_flag": "--remote-prefill-*",
    "model_context": "own",
}
"""Placeholders of the sentences on the page of the rules."""


def flags_of(line: str) -> tuple[str, ...]:
    """Returns the words of a command line."""
    return tuple(line.split())


@dataclass(frozen=True, kw_only=True)
class Example:
    """Unsupported combination, as an example of a rule.

    Attributes:
      drafter: One of `shared.options.options.ALGORITHMS`.
      model_type: Of a model that the rule is about; None: of any.
      flags: Added to the plain start of that drafter.
      request: Fields added to a plain request.
    """

    drafter: str
    model_type: str | None = None
    flags: tuple[str, ...] = ()
    request: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON of `GET /capabilities`."""
        model = {} if self.model_type is None else {"model_type": self.model_type}
        rest = {"flags": list(self.flags), "request": dict(self.request)}
        return {"drafter": self.drafter, **model, **rest}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Unsupported combination.

    Attributes:
      applies: Returns True for an unsupported setup.
      reason: Reason, with the flag; a format string over `RuleContext.words`.
      hint: Alternative to use, also a format string.
      example: An unsupported setup; None if it depends on files that no flag can name.
    """

    applies: Callable[[RuleContext], bool]
    reason: str
    hint: str
    example: Example | None

    def sentence(self, words: dict[str, Any]) -> str:
        """Returns the reason and the hint."""
        return f"{self.reason}; {self.hint}".format(**words)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON of `GET /capabilities`, for a rule with an example."""
        assert self.example is not None  # what files decide is not listed
        sentences = {"reason": self.reason.format(**WORDS), "hint": self.hint.format(**WORDS)}
        return {**sentences, "example": self.example.to_json()}
