"""Drafter settings in one word: `none`, `NEXTN:S=3`, `EAGLE3:S=5,k=4,N=16`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.drafts.kinds import KINDS
from shared.options.algorithms import WITH_COPIES, algorithm_of

PLAIN = "none"
SHAPE_FLAGS = {
    "S": "--speculative-num-steps",
    "k": "--speculative-eagle-topk",
    "N": "--speculative-num-draft-tokens",
    "sam": "--speculative-ngram-external-sam-budget",
    "L": "--speculative-simulate-accept-length",
}
RULE_FLAGS = {
    "exact": ("--speculative-accept-rule", "exact"),
    "rejection": ("--speculative-accept-rule", "rejection"),
    "block": ("--speculative-accept-rule", "rejection", "--speculative-use-block-verification"),
}
"""Flags of the setting `rule`."""

OURS = {"corpus": ("none", "own"), "most": None}
"""Settings of a measurement without a server flag, and their values; the first is the default.

`corpus=own` gives NGRAM the model's outputs of another run of the same prompts
(`bench.quality.self_corpus`), and `most` is the requests' `max_draft_tokens`.
"""
WITH_FOLDER = tuple(name for name, kind in KINDS.items() if kind.needs_folder)
"""Algorithms with separate draft files."""


@dataclass(frozen=True)
class Draft:
    """A drafter with its settings.

    Attributes:
      algorithm: `none`, or a value of `--speculative-algorithm`.
      settings: Names and values; S, k and N are the shape, sam, L, rule and `OURS` as above, any
        other name is the flag `--NAME`.
    """

    algorithm: str
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `ALGORITHM` or `ALGORITHM:NAME=VALUE,...`.

        Raises:
          ValueError: The algorithm is unknown, or a setting has no value or an invalid one.
        """
        name, _, rest = text.partition(":")
        algorithm = algorithm_of(name) or PLAIN
        pairs = [item.partition("=") for item in rest.split(",") if item]
        for name, _, value in pairs:
            if not name or not value:
                raise ValueError(f"{text}: a setting is NAME=VALUE, got {name or value!r}")
            values = RULE_FLAGS if name == "rule" else OURS.get(name)
            if values and value not in values:
                raise ValueError(f"{text}: {name} is one of {', '.join(values)}, got {value}")
            if name == "most" and not value.isdigit():
                raise ValueError(f"{text}: most is a number of drafts, got {value}")
        return cls(algorithm, tuple((name, value) for name, _, value in pairs))

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def of_files(self) -> str:
        """The drafter alone, without merged n-gram drafts."""
        return self.algorithm.removesuffix(WITH_COPIES)

    @property
    def remembers(self) -> bool:
        """True if it drafts from outputs of earlier requests."""
        return self.algorithm.endswith("NGRAM")

    @property
    def has_own_corpus(self) -> bool:
        """True if it drafts from the model's outputs of another run."""
        return dict(self.settings).get("corpus") == "own"

    @property
    def max_drafts(self) -> int | None:
        """Maximum draft tokens of a request in a step; None: all of the draft shape."""
        most = dict(self.settings).get("most")
        return None if most is None else int(most)

    def flags(self, folders: Mapping[str, Path]) -> list[str]:
        """Returns the flags of a server.

        Args:
          folders: Folders of drafters with separate files, by algorithm.
        """
        if self.algorithm == PLAIN:
            return []
        found = ["--speculative-algorithm", self.algorithm]
        if self.of_files in WITH_FOLDER:
            found += ["--speculative-draft-model-path", str(folders[self.of_files])]
        for name, value in self.settings:
            if name in OURS:
                continue
            if name == "rule":
                found += RULE_FLAGS[value]
                continue
            found += [SHAPE_FLAGS.get(name, f"--{name}"), value]
        return found


def named_folder(text: str) -> tuple[str, Path]:
    """Reads `ALGORITHM=DIR` of `--folders`.

    Raises:
      ValueError: The form is invalid, or the drafter has no files.
    """
    given, _, folder = text.partition("=")
    name = algorithm_of(given)
    if name not in WITH_FOLDER or not folder:
        raise ValueError(f"--folders {text}: give ALGORITHM=DIR of {', '.join(WITH_FOLDER)}")
    return name, Path(folder)


def folders_beside(model: Path) -> dict[str, Path]:
    """Returns the default folders of drafters: `eagle3` beside the model's folder, and so on."""
    return {name: model.resolve().parent / name.lower() for name in WITH_FOLDER}


def folders_of(model: Path, named: dict[str, Path]) -> dict[str, Path]:
    """Returns the folders of drafters: as named, or `MODEL-eagle3` and so on, or `eagle3`."""
    beside = folders_beside(model)
    for name in WITH_FOLDER:
        own = model.resolve().parent / f"{model.resolve().name}-{name.lower()}"
        if own.is_dir():
            beside[name] = own
    return beside | named
