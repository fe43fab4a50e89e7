"""What a start can be told: frozen dataclasses; each field is the command-line flag of its name.

Spellings and defaults are those that users of SGLang know. `shared.options.command_line` reads the
flags.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from shared.options.adaptive import AdaptiveConfig, Candidate
from shared.options.engine import EngineConfig
from shared.options.flags import check_rules, flag
from shared.options.ngram import NgramConfig
from shared.options.observing import ObservingOptions
from shared.options.ranks import RankOptions
from shared.options.server import ServerOptions
from shared.options.speculative import SpeculativeConfig

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
DTYPES = ("auto", "float32", "bfloat16")
DUMMY = "dummy"
"""Weights are made from config.json alone."""

LOAD_FORMATS = ("auto", DUMMY)
FP8, W8A8_FP8 = "fp8", "w8a8_fp8"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is served."""

    model_path: str = flag(
        str(DEFAULT_MODEL), "folder of a Hugging Face checkpoint, or the id of one on the hub, as "
        "ORG/NAME or ORG/NAME@REVISION; a folder of that name comes first (default: the model that "
        "ships)", aliases=("--model",), is_path=True,
    )  # fmt: skip
    revision: str | None = flag(
        None, "branch, tag or commit of the hub id of --model-path (default: main)"
    )
    download_dir: str | None = flag(
        None, "cache that hub models are read from and downloaded to (default: HF_HUB_CACHE, or "
        "hub in HF_HOME)", metavar="FOLDER", is_path=True,
    )  # fmt: skip
    dtype: str = flag(
        "auto",
        "auto is float32 on a CPU and bfloat16 on a GPU",
        choices=DTYPES,
        metavar="DTYPE",
        values={"float": "float32"},
    )
    load_format: str = flag(
        "auto",
        "auto reads the folder's weights, dummy makes random ones of its config.json alone, which "
        "say nothing and take the time of real ones",
        choices=LOAD_FORMATS,
        metavar="FORMAT",
        values={"safetensors": "auto"},
    )
    quantization: str | None = flag(
        None, "fp8: require a checkpoint with FP8 weights, which are detected without the flag; "
        "w8a8_fp8: the same with --fp8-activations; weights are not quantized at startup",
        choices=(FP8, W8A8_FP8), metavar="NAME",
    )  # fmt: skip
    fp8_activations: bool = flag(
        False, "multiply with FP8 weights as codes, the rows quantised too, as their file asks; "
        "another model than that of the weights widened, faster and less exact",
    )  # fmt: skip
    context_length: int | None = flag(
        None,
        "most tokens of prompt and output (default: the model's)",
        aliases=("--max-model-len",),
        low=2,
        high=1 << 24,
    )
    chat_template: str | None = flag(
        None, "Jinja file that writes conversations as the model's prompt (default: the model "
        "folder's)", metavar="FILE", is_path=True,
    )  # fmt: skip
    language_model_only: bool = flag(
        False, "leave a model's vision tower out, and serve its text alone"
    )

    def __post_init__(self) -> None:
        check_rules(self)
        if self.quantization == W8A8_FP8:  # SGLang's name of two flags
            object.__setattr__(self, "quantization", FP8)  # while it is being made
            object.__setattr__(self, "fp8_activations", True)

    @property
    def is_dummy(self) -> bool:
        """Whether the weights come from no file."""
        return self.load_format == DUMMY


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that a start was told.

    Attributes:
      given: Names of the fields that were named, of any part.
      candidates: Draft shapes that an adaptive start chooses from, once they are known.
      reasons: Options that the start has chosen by itself, each with the reason.
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
    reasons: tuple[str, ...] = ()

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

HEADINGS = {
    "model": "Model",
    "server": "HTTP server",
    "observing": "Log and traces",
    "engine": "Engine limits",
    "ranks": "Tensor parallelism",
    "speculative": "Speculative decoding",
    "ngram": "NGRAM drafter",
    "adaptive": "Adaptive speculation",
}
"""Headings of the parts in `--help` and in `docs/server_flags.md`."""
