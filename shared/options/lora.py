"""Options of LoRA adapters."""

from dataclasses import dataclass

from shared.options.flags import ConfigError, check_rules, flag

ALL = "all"
"""Value of `--lora-target-modules` for all linear layers of the decoder."""

MAX_SLOTS = 8
"""Default number of adapter slots, if no fewer adapters are named."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Options of LoRA adapters."""

    lora_paths: str | None = flag(
        None,
        "LoRA adapters in peft's format, each by its name and its folder; a request selects one "
        "with the field model",
        metavar="NAME=FOLDER ...",
        aliases=("--lora-modules",),
        is_list=True,
        names_paths=True,
    )
    max_loras_per_batch: int | None = flag(
        None,
        "adapter slots in device memory; further adapters stay in host memory and take the least "
        "recently used slot when they are requested (default: 8, or the number of adapters if "
        "it is lower)",
        aliases=("--max-loras",),
        low=1,
        high=1 << 10,
    )
    max_lora_rank: int | None = flag(
        None,
        "maximum rank of an adapter (default: the largest of those in --lora-paths)",
        low=1,
        high=1 << 12,
    )
    lora_target_modules: str | None = flag(
        None,
        "all: room for adapters of every linear layer, which /load_lora_adapter may load (default: "
        "the layers that an adapter in --lora-paths changes)",
        choices=(ALL,),
        metavar="all",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        names = [name for name, _ in self._entries]
        for name, folder in self._entries:
            if not name or not folder:
                entry = name or f"={folder}"
                raise ConfigError(f"--lora-paths must list NAME=FOLDER, got {entry!r:.60}")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--lora-paths has the name {min(twice)} twice; rename one")
        for name in ("max_lora_rank", "lora_target_modules"):
            if getattr(self, name) is not None and not self.is_enabled:
                raise ConfigError(
                    "without --lora-paths, LoRA requires both --max-lora-rank and "
                    "--lora-target-modules all; add the other one"
                )
        if self.max_loras_per_batch is not None and not self.is_enabled:
            raise ConfigError(
                "--max-loras-per-batch has no effect without adapters; give --lora-paths"
            )

    @property
    def is_enabled(self) -> bool:
        """True if requests may name adapters."""
        is_open = self.max_lora_rank is not None and self.lora_target_modules is not None
        return bool(self.lora_paths) or is_open

    @property
    def num_slots(self) -> int:
        """Adapter slots in device memory."""
        if self.max_loras_per_batch is not None:
            return self.max_loras_per_batch
        return MAX_SLOTS if self.lora_target_modules else min(MAX_SLOTS, len(self._entries))

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each adapter by its name."""
        return dict(self._entries)

    @property
    def _entries(self) -> list[tuple[str, str]]:
        given = self.lora_paths.split(",") if self.lora_paths else []
        parts = (entry.strip().partition("=") for entry in given)
        return [(name, folder) for name, _, folder in parts]
