"""A drafter and its shape as one word: `none`, `NEXTN:S=3`, `EAGLE3:S=5,k=4,N=16`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PLAIN = "none"
SHAPE_FLAGS = {
    "S": "--speculative-num-steps",
    "k": "--speculative-eagle-topk",
    "N": "--speculative-num-draft-tokens",
}
WITH_FOLDER = ("EAGLE", "EAGLE3", "STANDALONE", "DFLASH")
"""Algorithms whose drafter has files of its own."""


@dataclass(frozen=True)
class Draft:
    """A drafter with its settings.

    Attributes:
      algorithm: `none`, or a value of `--speculative-algorithm`.
      settings: Names and values; S, k and N are the shape, any other name is the flag `--NAME`.
    """

    algorithm: str
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `ALGORITHM` or `ALGORITHM:NAME=VALUE,...`.

        Raises:
          ValueError: A setting has no value.
        """
        algorithm, _, rest = text.partition(":")
        pairs = [item.partition("=") for item in rest.split(",") if item]
        for name, _, value in pairs:
            if not name or not value:
                raise ValueError(f"{text}: a setting is NAME=VALUE, got {name or value!r}")
        return cls(algorithm, tuple((name, value) for name, _, value in pairs))

    def __str__(self) -> str:
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.settings)])

    @property
    def remembers(self) -> bool:
        """Whether it drafts from texts that the engine has served before."""
        return self.algorithm == "NGRAM"

    def flags(self, folders: Mapping[str, Path]) -> list[str]:
        """The flags of a start.

        Args:
          folders: Of the drafters that have files of their own, by algorithm.
        """
        if self.algorithm == PLAIN:
            return []
        found = ["--speculative-algorithm", self.algorithm]
        if self.algorithm in WITH_FOLDER:
            found += ["--speculative-draft-model-path", str(folders[self.algorithm])]
        for name, value in self.settings:
            found += [SHAPE_FLAGS.get(name, f"--{name}"), value]
        return found


def folders_beside(model: Path) -> dict[str, Path]:
    """Where the drafters of a model are looked for: `eagle3` beside its folder, and so on."""
    return {name: model.resolve().parent / name.lower() for name in WITH_FOLDER}
