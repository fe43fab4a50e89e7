"""Options of the server as frozen dataclasses; each field is the command-line flag of its name.

Names and defaults follow SGLang. `shared.options.command_line` parses the flags.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from shared.models.formats.names import ENCODINGS, FP8, INT4
from shared.options.adaptive import AdaptiveConfig, Candidate
from shared.options.disaggregation import DisaggregationOptions
from shared.options.engine import EngineConfig
from shared.options.flags import check_rules, flag, raise_fault, spelling
from shared.options.lora import LoraOptions
from shared.options.ngram import DEVICE, HOST, NEEDS_HOST, NgramConfig
from shared.options.observing import ObservingOptions
from shared.options.ranks import RAY, RankOptions
from shared.options.router import RouterOptions
from shared.options.server import ServerOptions
from shared.options.speculative import SpeculativeConfig

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
DTYPES = ("auto", "float32", "bfloat16")
DUMMY = "dummy"
"""Random weights from config.json."""

LOAD_FORMATS = ("auto", DUMMY)
W8A8_FP8 = "w8a8_fp8"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model."""

    model_path: str = flag(
        str(DEFAULT_MODEL),
        "Hugging Face checkpoint: a local folder, or a hub id as ORG/NAME or ORG/NAME@REVISION; "
        "a folder of that name takes precedence (default: the demo model)",
        aliases=("--model",),
        is_path=True,
    )
    revision: str | None = flag(
        None,
        "branch, tag or commit of the hub id in --model-path (default: main)",
    )
    download_dir: str | None = flag(
        None,
        "cache folder for hub models (default: HF_HUB_CACHE, or hub in HF_HOME)",
        metavar="FOLDER",
        is_path=True,
    )
    dtype: str = flag(
        "auto",
        "type of weights, activations and KV cache; auto: float32 on a CPU, bfloat16 on a GPU",
        choices=DTYPES,
        metavar="DTYPE",
        values={"float": "float32"},
    )
    load_format: str = flag(
        "auto",
        "auto: read the safetensors files of the checkpoint; dummy: random weights from "
        "config.json, for benchmarks",
        choices=LOAD_FORMATS,
        metavar="FORMAT",
        values={"safetensors": "auto"},
    )
    quantization: str | None = flag(
        None,
        "require a checkpoint with such weights, which are also detected without the flag; "
        "w8a8_fp8: fp8 and --fp8-activations; weights are never quantized at startup",
        choices=(*ENCODINGS, W8A8_FP8),
        metavar="NAME",
        values=dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), INT4),
    )
    fp8_activations: bool = flag(
        False,
        "quantize activations to FP8 as well (W8A8), with the scheme of the checkpoint; faster "
        "and less exact than FP8 weights alone; dense models on a Hopper GPU or a CPU",
    )
    context_length: int | None = flag(
        None,
        "maximum number of tokens of a request, prompt and output together (default: the model's)",
        aliases=("--max-model-len",),
        low=2,
        high=1 << 24,
    )
    chat_template: str | None = flag(
        None,
        "Jinja file of the chat template (default: the chat template of the model folder)",
        metavar="FILE",
        is_path=True,
    )
    language_model_only: bool = flag(
        False,
        "serve only the text model of a vision-language checkpoint",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        if self.quantization == W8A8_FP8:  # SGLang's name of two flags
            object.__setattr__(self, "quantization", FP8)  # frozen, but not in use yet
            object.__setattr__(self, "fp8_activations", True)

    @property
    def is_dummy(self) -> bool:
        """True if the weights are random."""
        return self.load_format == DUMMY


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a server.

    Attributes:
      explicit_flags: Names of the fields that were set explicitly.
      candidates: Candidate draft shapes of `--speculative-adaptive`, once they are known.
      reasons: Options that startup chose, each with the reason.
    """

    model: ModelOptions
    lora: LoraOptions
    server: ServerOptions
    observing: ObservingOptions
    engine: EngineConfig
    ranks: RankOptions
    router: RouterOptions
    disaggregation: DisaggregationOptions
    speculative: SpeculativeConfig
    ngram: NgramConfig
    adaptive: AdaptiveConfig
    explicit_flags: frozenset[str] = frozenset()
    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Returns options from field values; other fields have their defaults.

        Raises:
          ConfigError: A value is invalid.
        """
        made = {}
        for part, made_of in PARTS.items():
            names = {item.name for item in fields(made_of)} & values.keys()
            made[part] = made_of(**{name: values[name] for name in names})
        raise_fault(made["adaptive"].drafter_fault(made["speculative"].drafts))
        return cls(**made, explicit_flags=frozenset(values))._with_ngram_backend()

    def replicas_fault(self) -> str | None:
        """Returns the first fault of the options of replicas, for a server."""
        router = self.router
        if router.servers is not None:
            return "--servers is a flag of `tandem route`; use that command, or remove the flag"
        if router.replicas > 1 and self.server.compile_only:
            return (
                "--compile-only is not supported with --replicas: replicas on one host share the "
                "caches; compile for one server first, without --replicas"
            )
        if router.replicas == 1 or self.ranks.distributed_executor_backend != RAY:
            return router.launcher_fault()
        return (
            "--distributed-executor-backend ray is not supported with --replicas: each replica "
            "starts its ranks on its own host; give --replica-launcher ray for several hosts"
        )

    @property
    def flags_of_host_index(self) -> tuple[str, ...]:
        """Explicit flags that require NGRAM's index on the host."""
        names = [name for name in NEEDS_HOST if name in self.explicit_flags]
        if self.adaptive.speculative_adaptive:
            names.append("speculative_adaptive")
        return tuple(map(spelling, names))

    def _with_ngram_backend(self) -> Self:
        """Puts the NGRAM index on the device, unless a flag requires the host."""
        draft = self.speculative
        if not draft.from_text or draft.speculative_ngram_backend is not None:
            return self
        flags = self.flags_of_host_index
        chosen = replace(draft, speculative_ngram_backend=HOST if flags else DEVICE)
        reason = f"--speculative-ngram-backend {HOST}: required by {', '.join(flags)}"
        reasons = (*self.reasons, reason) if flags else self.reasons
        return replace(self, speculative=chosen, reasons=reasons)


PARTS = {
    "model": ModelOptions,
    "lora": LoraOptions,
    "server": ServerOptions,
    "observing": ObservingOptions,
    "engine": EngineConfig,
    "ranks": RankOptions,
    "router": RouterOptions,
    "disaggregation": DisaggregationOptions,
    "speculative": SpeculativeConfig,
    "ngram": NgramConfig,
    "adaptive": AdaptiveConfig,
}

HEADINGS = {
    "model": "Model",
    "lora": "LoRA adapters",
    "server": "HTTP server",
    "observing": "Log and traces",
    "engine": "Engine limits",
    "ranks": "Tensor parallelism",
    "router": "Replicas and router",
    "disaggregation": "Disaggregated prefill",
    "speculative": "Speculative decoding",
    "ngram": "NGRAM drafter",
    "adaptive": "Adaptive speculation",
}
"""Headings in `--help` and in `docs/server_flags.md`."""
