"""What a start can be told: frozen dataclasses; each field is the command-line flag of its name.

Spellings and defaults are those that users of SGLang know. `parse` refuses what it does not know,
what is known but not served yet, and what contradicts itself, each by name.
"""

import argparse
import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from shared.options.adaptive import MOST_STEPS, AdaptiveConfig, Candidate
from shared.options.engine import EngineConfig
from shared.options.flags import ConfigError, check_rules, flag, spelling
from shared.options.lot import rates_of
from shared.options.ngram import DEFAULT_NODES, INDEXES, TABLE, NgramConfig
from shared.options.not_served import NOT_SUPPORTED, NOT_SUPPORTED_PREFIXES
from shared.options.observing import ObservingOptions
from shared.options.ranks import RankOptions
from shared.options.server import ServerOptions

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
DTYPES = ("auto", "float32", "bfloat16")
DUMMY = "dummy"
"""Weights are made from config.json alone."""

LOAD_FORMATS = ("auto", DUMMY)
BLOCK_ALGORITHMS = ("DFLASH", "DSPARK", "DFLASH2")
"""Draft a chain as long as the block of their head."""

HEAD_ALGORITHMS = ("EAGLE", "EAGLE3", *BLOCK_ALGORITHMS)
"""Draft with a head of its own files."""

HOST_ALGORITHM = "NGRAM"
"""Drafts from text that was seen."""
MODEL_ALGORITHM = "STANDALONE"
"""Drafts with a small model that has the target's tokenizer."""

ALGORITHMS = ("NEXTN", *HEAD_ALGORITHMS, "NAIVE_EAGLE", MODEL_ALGORITHM, HOST_ALGORITHM)
WITH_COPIES = f"+{HOST_ALGORITHM}"
"""Behind the name of a drafter: copies of seen text join what it drafts."""

JOINED_ALGORITHMS = tuple(
    f"{name}{WITH_COPIES}" for name in ("NEXTN", *HEAD_ALGORITHMS, MODEL_ALGORITHM)
)

ACCEPT_RULES = ("match", "rejection")

LAYER_IDS = ("inputs", "outputs")
"""What layers that a head lists may mean; see `shared.drafts.streams`."""

CHAIN_SHAPE = (3, 1, 4)
TREE_SHAPE = (5, 4, 8)
NAIVE_SHAPE = (1, 1, 2)
"""S, k and N where no flag says otherwise; the tree is that of a Llama model with a head."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is served."""

    model_path: str = flag(
        str(DEFAULT_MODEL), "folder of a Hugging Face checkpoint (default: the model that ships)",
        aliases=("--model",), is_path=True,
    )  # fmt: skip
    dtype: str = flag(
        "auto", "auto is float32 on a CPU and bfloat16 on a GPU", choices=DTYPES, metavar="DTYPE"
    )
    load_format: str = flag(
        "auto",
        "auto reads the folder's weights, dummy makes random ones of its config.json alone, which "
        "say nothing and take the time of real ones",
        choices=LOAD_FORMATS,
        metavar="FORMAT",
    )
    fp8_activations: bool = flag(
        False, "multiply with FP8 weights as codes, the rows quantised too, as their file asks; "
        "another model than that of the weights widened, faster and less exact",
    )  # fmt: skip
    context_length: int | None = flag(
        None, "most tokens of prompt and output (default: the model's)", low=2, high=1 << 24
    )
    language_only: bool = flag(False, "leave a model's vision tower out, and serve its text alone")

    def __post_init__(self) -> None:
        check_rules(self)

    @property
    def is_dummy(self) -> bool:
        """Whether the weights come from no file."""
        return self.load_format == DUMMY


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made, and how wide a draft tree is."""

    speculative_algorithm: str | None = flag(
        None, "NEXTN drafts with the checkpoint's own mtp layer, EAGLE, EAGLE3, DFLASH, DSPARK "
        "and DFLASH2 with a head, NAIVE_EAGLE one token with either, STANDALONE with a small "
        "model, NGRAM from seen text and corpora; NEXTN+NGRAM, and so with a head or a model, both "
        "in one tree (default: no drafts)",
        aliases=("--speculative-algo",),
    )  # fmt: skip
    speculative_draft_model_path: str | None = flag(
        None, "folder of a draft head, of a small model, or with NEXTN of an mtp layer in the "
        "speculators format", aliases=("--speculative-draft-model",), is_path=True,
    )  # fmt: skip
    speculative_num_steps: int | None = flag(
        None, "S, levels of a draft tree (default: 3; 5 for a Llama model with a head)",
        low=1, high=16,
    )  # fmt: skip
    speculative_eagle_topk: int | None = flag(
        None, "k, nodes that a level expands (default: 1, a chain; 4 for a Llama model with a "
        "head)", low=1, high=16,
    )  # fmt: skip
    speculative_num_draft_tokens: int | None = flag(
        None, "N, nodes of a draft tree with its root (default: S + 1 of a chain; 8 for a Llama "
        "model with a head; 12 with NGRAM)", low=2, high=64,
    )  # fmt: skip
    speculative_draft_window_size: int | None = flag(
        None, "positions that a DFLASH, DSPARK or DFLASH2 head looks back, at least the nodes "
        "of its chain (default: what its config.json says)", low=2, high=1 << 24,
    )  # fmt: skip
    speculative_draft_layer_ids: str | None = flag(
        None, "whether a head that lists layers of its target reads their inputs or their outputs "
        "(default: what its list tells)", choices=LAYER_IDS, metavar="WHICH",
    )  # fmt: skip
    speculative_token_map: str | None = flag(
        None, "JSON file with the ids of the tokens that are drafted, whose rows of the target's "
        "lm_head are read for a draft in place of all (default: all tokens are drafted); "
        "python -m models.token_map makes one", metavar="FILE", is_path=True,
    )  # fmt: skip
    speculative_ngram_index: str | None = flag(
        None, "where NGRAM keeps n-grams: in a table on the device, and steps wait for nobody, or "
        "in a trie on the host (default: trie)",
        choices=INDEXES, metavar="INDEX",
    )  # fmt: skip
    accept_rule: str | None = flag(
        None, "match keeps the text of plain decoding, rejection its law only, and accepts more of "
        "a chain (default: match)", choices=ACCEPT_RULES, metavar="RULE",
    )  # fmt: skip
    block_verification: bool = flag(False, "reject chains as a whole, not token by token")
    speculative_simulate_accept_length: str | None = flag(
        None, "accept drafts by lot, for measurements: tokens of a step on average with the bonus "
        "token, such as 2.5, or how often each level's draft is accepted, such as 0.9,0.6,0; the "
        "texts are not the model's", metavar="L",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_rules(self)
        rates_of(self.speculative_simulate_accept_length)
        if self.speculative_algorithm is None:
            self._refuse_draft_flags()
            return
        self._check_algorithm()

    def _refuse_draft_flags(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) not in (None, False):
                raise ConfigError(
                    f"{spelling(item.name)} needs a drafter; add --speculative-algorithm "
                    f"{ALGORITHMS[0]} or leave the flag out"
                )

    def _check_algorithm(self) -> None:
        name = self.speculative_algorithm
        known = (*ALGORITHMS, *JOINED_ALGORITHMS)
        if name not in known:
            raise ConfigError(
                f"--speculative-algorithm must be one of {', '.join(known)}, got {name}"
            )

    def settled(self, drafts_trees: bool, block: int | None) -> Self:
        """With no shape left open, in a start that drafts.

        Args:
          drafts_trees: See `ModelConfig`.
          block: Nodes of the chain of a head with a block; None without one.
        """
        if self.speculative_algorithm is None:
            return self
        if self.from_text:
            return replace(self, speculative_num_draft_tokens=self.num_draft_tokens)
        shape = (self.num_steps, self.topk, self.num_draft_tokens)
        is_open = all(getattr(self, item) is None for item in _SHAPE_FIELDS)
        has_trees = self.drafter in HEAD_ALGORITHMS and self.verification == "match"
        if is_open and drafts_trees and has_trees:
            shape = TREE_SHAPE
        if block is not None:
            shape = (block - 1, 1, block)
        return replace(self, **dict(zip(_SHAPE_FIELDS, shape, strict=True)))

    @property
    def drafts(self) -> bool:
        """Whether anything drafts, on the host or on the device."""
        return self.speculative_algorithm is not None

    @property
    def drafter(self) -> str | None:
        """What drafts, without the copies that join; None without drafts."""
        name = self.speculative_algorithm
        return None if name is None else name.removesuffix(WITH_COPIES)

    @property
    def joins_copies(self) -> bool:
        """Whether copies of seen text join what the device drafts."""
        return self.speculative_algorithm in JOINED_ALGORITHMS

    @property
    def with_mtp(self) -> bool:
        """Whether an mtp layer drafts, the checkpoint's own or that of the draft model."""
        has_path = self.speculative_draft_model_path is not None
        is_own = self.drafts and not (has_path or self.from_text)
        return is_own or self.drafter == "NEXTN"

    @property
    def mtp_path(self) -> str | None:
        """Folder of an mtp layer that drafts in place of the checkpoint's own; None without one."""
        return self.speculative_draft_model_path if self.drafter == "NEXTN" else None

    @property
    def head_path(self) -> str | None:
        """Folder of a head or a small model; None of a drafter that has none."""
        has_none = self.drafter in ("NEXTN", HOST_ALGORITHM)
        return None if has_none else self.speculative_draft_model_path

    @property
    def drafts_with_a_model(self) -> bool:
        """Whether the draft model is a whole model."""
        return self.drafter == MODEL_ALGORITHM

    @property
    def from_text(self) -> bool:
        """Whether drafts come from text that was seen alone, not from a model."""
        return self.speculative_algorithm == HOST_ALGORITHM

    @property
    def drafts_on_host(self) -> bool:
        """Whether the host has that text, and brings the drafts."""
        return self.from_text and not self.drafts_from_table

    @property
    def drafts_from_table(self) -> bool:
        """Whether the device has that text, in a table of n-grams."""
        return self.speculative_ngram_index == TABLE

    @property
    def copies_text(self) -> bool:
        """Whether drafts come from text that was seen, alone or beside a drafter's."""
        return self.from_text or self.joins_copies

    @property
    def verification(self) -> str:
        """Which of `shared.spec.acceptance.RULES` accepts drafts."""
        return "block" if self.block_verification else self.accept_rule or ACCEPT_RULES[0]

    @property
    def accept_rates(self) -> tuple[float, ...] | None:
        """How often the draft of each level is accepted by lot; None where drafts are judged."""
        return rates_of(self.speculative_simulate_accept_length)

    @property
    def topk(self) -> int:
        """k, nodes that a level expands."""
        return self.speculative_eagle_topk or 1

    @property
    def num_steps(self) -> int:
        """S, levels below the root; a chain's follow from its number of nodes."""
        if self.speculative_num_steps:
            return self.speculative_num_steps
        if self.speculative_algorithm == "NAIVE_EAGLE":
            return NAIVE_SHAPE[0]
        if self.from_text:
            return (self.speculative_num_draft_tokens or DEFAULT_NODES) - 1
        nodes = self.speculative_num_draft_tokens
        return min(nodes - 1, MOST_STEPS) if nodes and self.topk == 1 else CHAIN_SHAPE[0]

    @property
    def num_draft_tokens(self) -> int:
        """N, nodes with the root."""
        return self.speculative_num_draft_tokens or self.num_steps + 1


_SHAPE_FIELDS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that a start was told.

    Attributes:
      given: Names of the fields that were named, of any part.
      candidates: Draft shapes that an adaptive start chooses from, once they are known.
    """

    model: ModelOptions
    server: ServerOptions
    observing: ObservingOptions
    engine: EngineConfig
    ranks: RankOptions
    speculative: SpeculativeConfig
    ngram: NgramConfig
    adaptive: AdaptiveConfig
    given: frozenset[str] = frozenset()
    candidates: tuple[Candidate, ...] = ()

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Options of the given fields, whatever part they belong to; the rest have their defaults.

        Raises:
          ConfigError: A value is out of range.
        """
        made = {}
        for part, made_of in PARTS.items():
            names = {item.name for item in fields(made_of)} & values.keys()
            made[part] = made_of(**{name: values[name] for name in names})
        made["adaptive"].check_drafter(made["speculative"].drafts)
        return cls(**made, given=frozenset(values))


PARTS = {
    "model": ModelOptions,
    "server": ServerOptions,
    "observing": ObservingOptions,
    "engine": EngineConfig,
    "ranks": RankOptions,
    "speculative": SpeculativeConfig,
    "ngram": NgramConfig,
    "adaptive": AdaptiveConfig,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        flag_names, _, fault = message.removeprefix("argument ").partition(": ")
        fault = "needs a value" if "expected one argument" in fault else f"is wrong: {fault}"
        raise ConfigError(f"{flag_names} {fault}; --help lists the flags")


class _Once(argparse.Action):
    """Stores a flag's value and refuses a second, other one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == "":
            raise ConfigError(f"{option_string} is empty; give a value or leave the flag out")
        if getattr(namespace, self.dest, values) != values:
            raise ConfigError(f"{option_string} is given twice; leave one out")
        setattr(namespace, self.dest, values)


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
      ConfigError: A flag is unknown, not supported, out of range or contradicts another.
    """
    parser = _make_parser()
    known = set(parser._option_string_actions)
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            _check_known(word.split("=", 1)[0], known)
    parsed, stray = parser.parse_known_args(list(argv))
    if stray:
        raise ConfigError(f"{stray[0]} belongs to no flag; --help lists the flags")
    given = vars(parsed)
    kinds = {name: kind for part in PARTS.values() for name, kind in _kinds(part).items()}
    return Options.from_values({name: kinds[name](name, given[name]) for name in given})


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="serve", allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=True
    )
    for part in PARTS.values():
        group = parser.add_argument_group(part.__doc__)
        for item in fields(part):
            _add(group, item)
    return parser


def _add(group: Any, item: "Field[Any]") -> None:
    names = (spelling(item.name), *item.metadata.get("aliases", ()))
    text = item.metadata["help"].replace("%", "%%")
    if item.default not in (None, MISSING, False) and "default" not in text:
        text += f" (default: {item.default})"
    if item.default is False:
        group.add_argument(*names, dest=item.name, action="store_true", help=text)
    else:
        metavar = item.metadata.get("metavar", "N" if "low" in item.metadata else "X")
        group.add_argument(*names, dest=item.name, action=_Once, metavar=metavar, help=text)


def _kinds(part: type) -> dict[str, Callable[[str, Any], Any]]:
    """How the text of each field's flag becomes its value."""
    return {item.name: _kind(item.metadata) for item in fields(part)}


def _kind(rules: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    if "is_share" in rules:
        return _share
    return _whole_number if "low" in rules else lambda name, value: value


def _share(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{spelling(name)} must be a number, got {text}") from None


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{spelling(name)} must be a whole number, got {text}") from None


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "").isdigit()


def _check_known(word: str, known: set[str]) -> None:
    if word in known:
        return
    if word in NOT_SUPPORTED:
        raise ConfigError(f"{word} is not supported: {NOT_SUPPORTED[word]}")
    if word.startswith(NOT_SUPPORTED_PREFIXES):
        raise ConfigError(f"{word} is not supported; leave the flag out")
    near = difflib.get_close_matches(word, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
    raise ConfigError(f"{word} is no flag of this server; {hint}")
