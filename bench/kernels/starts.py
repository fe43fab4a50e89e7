"""Server starts for absent GPUs, and the programs of each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.common.draft_config import PLAIN, WITH_FOLDER, Draft, folders_of
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.models.families import config_from_folder

ROOT = Path(__file__).parents[2]
SHAPES, DEMO, RANDOM = (ROOT / name for name in ("bench/shapes", "models/demo", "models/random"))
UNSUPPORTED_RANKS = {
    *((f"gemma-4-26b-a4b{form}", 8) for form in ("", "-int4")),
    *((f"nemotron-3-nano{form}", 8) for form in ("", "-fp8")),
    ("gpt-oss-20b", 8),
}
"""Models and ranks that startup rejects: 8 ranks have 88, 232 and 360 columns of an expert."""
ADAPTERS = ("--max-lora-rank", "16", "--lora-target-modules", "all")
"""Flags of a server with slots for LoRA adapters of all linear layers."""
COUNTS = (1, 2, 4, 8)
"""Ranks of a startup; numbers by which a model cannot be sharded are skipped."""
LAYERS, LAYERS_BELOW_HEADS = 4, 8
"""Layers that remain of a model: all kinds, and those that a draft head reads."""


@dataclass(frozen=True)
class Start:
    """Startup with dummy weights.

    Attributes:
      model: Folder of the model.
      drafts: Drafter settings, see `bench.common.draft_config`.
      ranks: Number of GPUs.
      flags: Further flags of the server.
      head: Folder of the draft model; None: default folder beside `model`.
    """

    model: Path
    drafts: str = PLAIN
    ranks: int = 1
    flags: tuple[str, ...] = ()
    head: Path | None = None

    def __str__(self) -> str:
        place = self.model.parent.name if self.model.parent == DEMO else self.model.parent.parent
        name = f"{place}/{self.model.name}" if self.model.parent == DEMO else self.model.name
        more = "".join(f" {flag}" for flag in self.flags)
        ranks = f", {self.ranks} ranks" * (self.ranks > 1)
        return f"start of {name}, {Draft.parse(self.drafts)}{more}{ranks}"

    def all_flags(self, scratch: Path) -> list[str]:
        """The server's flags, of a model of few layers.

        Args:
          scratch: Where files of the smaller model go.
        """
        draft = Draft.parse(self.drafts)
        has_head = draft.of_files in WITH_FOLDER
        layers = LAYERS_BELOW_HEADS if has_head else LAYERS
        heads, model = folders_of(self.model, {}), with_layers(self.model, layers, scratch)
        if has_head:
            head = self.head or heads[draft.of_files]
            is_whole = model == self.model
            heads[draft.of_files] = head if is_whole else with_layers(head, layers, scratch)
        flags = ["--model-path", str(model), "--load-format", "dummy", *draft.flags(heads)]
        return [*flags, *self.flags, "--tp-size", str(self.ranks)]


def shipped() -> Iterator[Start]:
    """All models of the repository with all that drafts for them, on one rank and on several."""
    for model, drafts, flags in _models():
        for ranks in COUNTS:
            if (model.name, ranks) not in UNSUPPORTED_RANKS:
                yield Start(model, drafts, ranks, flags)


def one_of_each() -> Iterator[Start]:
    """Yields a start of each shipped folder on one rank; its MTP layer drafts if it has one."""
    starts = [start for start in shipped() if start.ranks == 1]
    with_mtp = {start.model for start in starts if start.drafts == "NEXTN"}
    for start in starts:
        if start.drafts != PLAIN or start.flags or start.model not in with_mtp:
            yield start


def _models() -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    targets = [folder for folder in sorted(SHAPES.iterdir()) if not _is_head(folder)]
    for model in [DEMO / "target", DEMO / "vlm", RANDOM, *targets]:
        yield model, PLAIN, ()
        if config_from_folder(model).has_mtp:
            yield model, "NEXTN", ()
        if model == SHAPES / "qwen3-8b-fp8":  # the others have experts or gated-delta layers
            yield model, PLAIN, ("--fp8-activations",)
        # Gated-delta layers, experts and latent attention.
        if model.name in ("qwen3.5-9b", "qwen3.5-35b-a3b-fp8", "glm-4.7-flash"):
            yield model, PLAIN, ADAPTERS
        if model == DEMO / "vlm":
            continue
        for name, folder in folders_of(model, {}).items():
            if (folder / "config.json").is_file():
                yield model, name, ()
    yield DEMO / "target", "NGRAM", ("--speculative-ngram-backend", "device")
    yield DEMO / "target", "NEXTN+NGRAM", ()


def _is_head(folder: Path) -> bool:
    return folder.name.rpartition("-")[2].upper() in WITH_FOLDER


def with_layers(folder: Path, layers: int, scratch: Path) -> Path:
    """Returns a folder with the files of a model that is cut to its first layers.

    A draft head keeps its own, and reads other layers of its target.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = _fewer(config, layers)
    if changed == config:
        return folder
    made = scratch / f"{folder.parent.name}-{folder.name}-{layers}"
    if made.exists():
        return made
    # Several processes share the scratch folder: it appears whole, and the first one stays.
    partial = Path(mkdtemp(dir=scratch))
    for path in folder.iterdir():
        if path.name != "config.json":
            (partial / path.name).symlink_to(path.resolve())
    (partial / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    try:
        partial.rename(made)
    except OSError:
        if not made.exists():
            raise
    return made


def _fewer(config: dict[str, Any], layers: int) -> dict[str, Any]:
    reads = any(name in config for name in ("num_target_layers", "dflash_config", "eagle_config"))
    own = layers if not reads else len(config.get("layer_types", ())) or layers
    changed = dict(config)
    for name, value in config.items():
        if name.endswith("layer_ids"):
            changed[name] = [*range(1, 1 + len(value))]
        elif name == "num_target_layers":
            changed[name] = layers
        elif name == "num_hidden_layers" and not reads:
            changed[name] = min(value, own)
        elif name == "layer_types":
            changed[name] = value[:own]
        elif name == "hybrid_override_pattern":
            changed[name] = _with_all_kinds(value, own)
        elif isinstance(value, dict) and name != "vision_config":
            changed[name] = _fewer(value, layers)
    return changed


def _with_all_kinds(pattern: str, count: int) -> str:
    """Returns the first `count` neighbouring layers that have every kind of the pattern."""
    parts = (pattern[i : i + count] for i in range(len(pattern)))
    return next(part for part in parts if {*part} == {*pattern})


def chosen(programs: Sequence[Program], is_brief: bool) -> list[Program]:
    """Programs of every kind of work: those of the fewest and the most rows, and one with logprobs.

    Args:
      is_brief: The largest program of each kind of work and draft shape alone.
    """
    found = list[Program]()
    for work in StepKind:
        every = sorted((p for p in programs if p.work is work), key=_size)
        plain = [program for program in every if not program.has(ProgramFeature.LOGPROBS)]
        if is_brief:
            found += {p.shape.tree: p for p in plain}.values() if work is not StepKind.COUNT else []
            continue
        middle = plain[len(plain) // 2 :][:1] if work is StepKind.DECODE else []
        found += [*plain[:1], *middle, *plain[-1:]]
        found += every[-1:] if work is StepKind.DECODE else []
    return list(dict.fromkeys(found))


def _size(program: Program) -> tuple[int, int, int]:
    return program.batch, program.tokens, program.shape.nodes
