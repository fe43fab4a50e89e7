"""What is refused, and why: a short list of rules that the start holds a setup against.

`GET /capabilities`, `docs/capabilities.md` (`python -m shared.capabilities` prints it) and the test
that tries every combination read the same list. A flag whose value alone is wrong is refused by
`shared.config`. Nothing is refused for the fields of a request that choose tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.config import (
    ALGORITHMS,
    BLOCK_ALGORITHM,
    HEAD_ALGORITHMS,
    HOST_ALGORITHM,
    MODEL_ALGORITHM,
    NAIVE_SHAPE,
    Options,
    SpeculativeConfig,
)
from shared.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the rules look at.

    Attributes:
      options: What the start was told.
      model: The checkpoint's config.json.
      has_mtp: Whether the checkpoint holds `mtp.*` tensors.
      head_kind: What the draft model is by its tensors, "EAGLE", "EAGLE3" or "DFLASH"; None
        without one, and of a whole model.
    """

    options: Options
    model: ModelConfig
    has_mtp: bool
    head_kind: str | None

    @property
    def draft(self) -> SpeculativeConfig:
        """How drafts are made."""
        return self.options.speculative

    @property
    def algorithm(self) -> str | None:
        """The drafter's name."""
        return self.draft.speculative_algorithm

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree with the S and k of the setup."""
        k = self.draft.topk
        return 1 + k + (self.draft.num_steps - 1) * k * k

    def words(self) -> dict[str, Any]:
        """What the sentences of the rules speak of."""
        return {
            "algorithm": self.algorithm,
            "family": self.model.family,
            "head_kind": self.head_kind,
            "head": f"{'a' if self.head_kind == BLOCK_ALGORITHM else 'an'} {self.head_kind} head",
            "S": self.draft.num_steps,
            "k": self.draft.topk,
            "N": self.draft.num_draft_tokens,
            "chain": self.draft.num_steps + 1,
            "most": self.most_nodes,
            "overlap": self.options.engine.overlap,
            "context": self.options.model.context_length,
            "model_context": self.model.context_length,
        }


WORDS = {
    "algorithm": "NAME",
    "family": "FAMILY",
    "head_kind": "KIND",
    "head": "another head",
    "S": "S",
    "k": "k",
    "N": "N",
    "chain": "S + 1",
    "most": "1 + k + (S - 1) k^2",
    "overlap": "N",
    "context": "N",
    "model_context": "own",
}
"""The same words where no setup is at hand."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A combination that a rule refuses.

    Attributes:
      drafter: One of `shared.config.ALGORITHMS`.
      model_type: Of a model that the rule is about; None: of any.
      flags: Added to the plain start of that drafter.
      request: Fields added to a plain request.
    """

    drafter: str
    model_type: str | None = None
    flags: tuple[str, ...] = ()
    request: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `GET /capabilities` shows it."""
        model = {} if self.model_type is None else {"model_type": self.model_type}
        rest = {"flags": list(self.flags), "request": dict(self.request)}
        return {"drafter": self.drafter, **model, **rest}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One combination that does not work.

    Attributes:
      refuses: Whether a setup is one of them.
      reason: Why, with the flag; a format string over `Setup.words`.
      way_out: What to do instead, a format string too.
      example: One that is refused; None where files decide, which no flag can name.
    """

    refuses: Callable[[Setup], bool]
    reason: str
    way_out: str
    example: Example | None

    def sentence(self, words: dict[str, Any]) -> str:
        """Why, and what to do instead."""
        return f"{self.reason}; {self.way_out}".format(**words)

    def to_json(self) -> dict[str, Any]:
        """As `GET /capabilities` shows it; only of a rule with an example."""
        assert self.example is not None  # what files decide is not listed
        told = {"reason": self.reason.format(**WORDS), "way_out": self.way_out.format(**WORDS)}
        return {**told, "example": self.example.to_json()}


def _wants_mtp(s: Setup) -> bool:
    return s.algorithm in ("NEXTN", "NAIVE_EAGLE") and s.draft.with_mtp


def _shapes_naive(s: Setup) -> bool:
    draft = s.draft
    given = (
        draft.speculative_num_steps,
        draft.speculative_eagle_topk,
        draft.speculative_num_draft_tokens,
    )
    fits = all(g in (None, fixed) for g, fixed in zip(given, NAIVE_SHAPE, strict=True))
    return s.algorithm == "NAIVE_EAGLE" and not fits


def _shapes_text(s: Setup) -> bool:
    draft = s.draft
    given = (
        draft.speculative_draft_model_path,
        draft.speculative_num_steps,
        draft.speculative_eagle_topk,
    )
    return draft.drafts_on_host and given != (None, None, None)


def _shapes_itself(s: Setup) -> bool:
    """Whether the drafter's shape follows from the flags of a tree."""
    return s.draft.drafts and s.algorithm not in ("NAIVE_EAGLE", HOST_ALGORITHM)


def _lacks_nodes(s: Setup) -> bool:
    return _shapes_itself(s) and s.draft.topk > 1 and s.draft.speculative_num_draft_tokens is None


def _flags(line: str) -> tuple[str, ...]:
    return tuple(line.split())


RULES = (
    Rule(
        refuses=lambda s: _wants_mtp(s) and not (s.has_mtp and s.model.has_mtp),
        reason="--speculative-algorithm {algorithm} drafts with the checkpoint's own mtp layer, "
        "and this {family} checkpoint has none",
        way_out="give a draft head with --speculative-algorithm EAGLE or EAGLE3 and "
        "--speculative-draft-model-path, or leave the flag out",
        example=Example(drafter="NEXTN", model_type="llama"),
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm == "NEXTN" and s.draft.speculative_draft_model_path is not None
        ),
        reason="--speculative-draft-model-path contradicts --speculative-algorithm NEXTN, which "
        "drafts with the checkpoint's own mtp layer",
        way_out="leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-draft-model-path head")),
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm in HEAD_ALGORITHMS and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm {algorithm} drafts with a head of its own",
        way_out="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        refuses=lambda s: (
            s.algorithm == MODEL_ALGORITHM and s.draft.speculative_draft_model_path is None
        ),
        reason="--speculative-algorithm STANDALONE drafts with a small model that has the target's "
        "tokenizer",
        way_out="give its folder as --speculative-draft-model-path",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.algorithm == MODEL_ALGORITHM and s.head_kind is not None,
        reason="--speculative-algorithm STANDALONE drafts with a whole model, and the draft "
        "model's tensors are those of {head}",
        way_out="give --speculative-algorithm {head_kind}, or a model",
        example=None,
    ),
    Rule(
        refuses=lambda s: (
            s.head_kind is not None
            and s.algorithm in HEAD_ALGORITHMS
            and s.algorithm != s.head_kind
        ),
        reason="--speculative-algorithm {algorithm} does not fit the draft model, whose tensors "
        "are those of {head}",
        way_out="give --speculative-algorithm {head_kind}, or another head",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.algorithm == "NAIVE_EAGLE" and s.head_kind == BLOCK_ALGORITHM,
        reason="--speculative-algorithm NAIVE_EAGLE drafts one token, and the draft model drafts "
        "blocks",
        way_out="give --speculative-algorithm DFLASH",
        example=None,
    ),
    Rule(
        refuses=lambda s: s.algorithm == BLOCK_ALGORITHM and s.draft.topk > 1,
        reason="--speculative-eagle-topk {k} contradicts --speculative-algorithm DFLASH, which "
        "drafts chains",
        way_out="leave the flag out",
        example=Example(
            drafter=BLOCK_ALGORITHM,
            flags=_flags("--speculative-eagle-topk 2 --speculative-num-draft-tokens 6"),
        ),
    ),
    Rule(
        refuses=lambda s: (
            s.draft.speculative_draft_window_size is not None and s.algorithm != BLOCK_ALGORITHM
        ),
        reason="--speculative-draft-window-size is for --speculative-algorithm DFLASH",
        way_out="leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-draft-window-size 512")),
    ),
    Rule(
        refuses=_shapes_naive,
        reason="--speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens contradict --speculative-algorithm NAIVE_EAGLE, which "
        "always drafts one token",
        way_out="leave them out",
        example=Example(drafter="NAIVE_EAGLE", flags=_flags("--speculative-num-steps 2")),
    ),
    Rule(
        refuses=_shapes_text,
        reason="--speculative-draft-model-path, --speculative-num-steps and "
        "--speculative-eagle-topk contradict --speculative-algorithm NGRAM, whose trees have "
        "--speculative-num-draft-tokens nodes of seen text",
        way_out="leave them out",
        example=Example(drafter="NGRAM", flags=_flags("--speculative-num-steps 3")),
    ),
    Rule(
        refuses=_lacks_nodes,
        reason="--speculative-eagle-topk {k} asks for a draft tree",
        way_out="give its size as --speculative-num-draft-tokens",
        example=Example(drafter="NEXTN", flags=_flags("--speculative-eagle-topk 2")),
    ),
    Rule(
        refuses=lambda s: (
            _shapes_itself(s) and s.draft.topk == 1 and s.draft.num_draft_tokens != s.most_nodes
        ),
        reason="--speculative-num-draft-tokens {N} must be --speculative-num-steps + 1 = {chain} "
        "with --speculative-eagle-topk 1",
        way_out="leave it out",
        example=Example(
            drafter="NEXTN",
            flags=_flags("--speculative-num-steps 2 --speculative-num-draft-tokens 8"),
        ),
    ),
    Rule(
        refuses=lambda s: (
            _shapes_itself(s)
            and s.draft.topk > 1
            and not _lacks_nodes(s)
            and not s.draft.num_steps < s.draft.num_draft_tokens <= s.most_nodes
        ),
        reason="--speculative-num-draft-tokens must be {chain} to {most} with "
        "--speculative-num-steps {S} and --speculative-eagle-topk {k}, got {N}",
        way_out="give a number of that range",
        example=Example(
            drafter="NEXTN",
            flags=_flags(
                "--speculative-num-steps 2 --speculative-eagle-topk 2 "
                "--speculative-num-draft-tokens 64"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.verification != "match" and s.draft.topk > 1,
        reason="--accept-rule rejection accepts chains, and --speculative-eagle-topk {k} asks for "
        "a draft tree",
        way_out="give --accept-rule match, or leave --speculative-eagle-topk out",
        example=Example(
            drafter="NEXTN",
            flags=_flags(
                "--accept-rule rejection --speculative-num-steps 2 --speculative-eagle-topk 2 "
                "--speculative-num-draft-tokens 6"
            ),
        ),
    ),
    Rule(
        refuses=lambda s: s.draft.block_verification and s.draft.accept_rule != "rejection",
        reason="--block-verification is a way to reject chains",
        way_out="add --accept-rule rejection, or leave it out",
        example=Example(drafter="NEXTN", flags=("--block-verification",)),
    ),
    Rule(
        refuses=lambda s: (
            s.options.engine.disable_overlap_schedule and bool(s.options.engine.overlap)
        ),
        reason="--disable-overlap-schedule contradicts --overlap {overlap}",
        way_out="give one of them",
        example=Example(drafter="NEXTN", flags=_flags("--overlap 2 --disable-overlap-schedule")),
    ),
    Rule(
        refuses=lambda s: (s.options.model.context_length or 0) > s.model.context_length,
        reason="--context-length {context} is beyond the model's {model_context} positions",
        way_out="give a smaller one or leave the flag out",
        example=Example(drafter="NEXTN", flags=_flags("--context-length 16777216")),
    ),
)


def refusals(setup: Setup) -> list[str]:
    """One sentence for every rule that refuses the setup; an empty list where it can be served."""
    words = setup.words()
    return [rule.sentence(words) for rule in RULES if rule.refuses(setup)]


def to_json() -> dict[str, Any]:
    """What `GET /capabilities` answers."""
    listed = [rule.to_json() for rule in RULES if rule.example is not None]
    return {"drafters": list(ALGORITHMS), "refused": listed}


def to_markdown() -> str:
    """The page `docs/capabilities.md`."""
    lines = [_HEAD.format(drafters=", ".join(f"`{name}`" for name in ALGORITHMS))]
    for rule in RULES:
        lines.append(f"- {rule.reason.format(**WORDS)}; {rule.way_out.format(**WORDS)}.")
        example = rule.example
        if example is None:
            lines.append("  The files decide.")
            continue
        model = f" with a {example.model_type} model" if example.model_type else ""
        flags = f" and `{' '.join(example.flags)}`" if example.flags else ""
        lines.append(f"  Example: `{example.drafter}`{model}{flags}.")
    return "\n".join(lines) + "\n"


_HEAD = """<!-- Made by `python -m shared.capabilities`; a test compares. -->
# What works with what

The drafters are {drafters};
a start without `--speculative-algorithm` decodes plainly. Every drafter works with every model
family, page size, overlap depth and field of a request, but for what is listed here. What is listed
is refused at the start by exit code 2, all that applies at once; the running server answers the
same list at `GET /capabilities`. No field of a request that chooses tokens is
refused with any drafter.
"""

if __name__ == "__main__":
    print(to_markdown(), end="")
