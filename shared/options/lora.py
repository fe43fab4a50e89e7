"""Options of LoRA adapters."""

from dataclasses import dataclass

from shared.options.flags import ConfigError, check_rules, flag


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

    def __post_init__(self) -> None:
        check_rules(self)
        names = [name for name, _ in self._entries]
        for name, folder in self._entries:
            if not name or not folder:
                entry = name or f"={folder}"
                raise ConfigError(f"--lora-paths must list NAME=FOLDER, got {entry!r:.60}")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"--lora-paths has the name {min(twice)} twice; rename one")

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each adapter by its name."""
        return dict(self._entries)

    @property
    def _entries(self) -> list[tuple[str, str]]:
        given = self.lora_paths.split(",") if self.lora_paths else []
        parts = (entry.strip().partition("=") for entry in given)
        return [(name, folder) for name, _, folder in parts]
