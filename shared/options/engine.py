"""Options of the engine: batch and memory limits, prefix cache, structured output, images."""

from dataclasses import dataclass

from shared.options.flags import AUTO, NONE, ConfigError, check_rules, flag

CHUNK_ALIGNMENT = 64
"""Prefill chunks end at multiples of this, so that results do not depend on the chunking."""

LLGUIDANCE = "llguidance"
MAX_LOGPROBS = 20
"""Maximum number of alternatives per token."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine."""

    page_size: int | None = flag(
        None,
        "tokens per KV page, a power of two (default: 16 on a CPU, 64 on a GPU)",
        aliases=("--block-size",),
        low=1,
        high=1024,
    )
    max_total_tokens: int | None = flag(
        None,
        "capacity of the KV cache in tokens (default: all that fits in memory)",
        low=1,
        high=1 << 30,
    )
    max_running_requests: int | None = flag(
        None,
        "maximum number of requests in a decode batch (default: 8 on a CPU, 48 on a GPU)",
        aliases=("--max-num-seqs",),
        low=1,
        high=4096,
    )
    chunked_prefill_size: int | None = flag(
        None,
        "maximum number of prompt tokens in a prefill step (default: 256 on a CPU, 2048 on a GPU)",
        low=CHUNK_ALIGNMENT,
        high=1 << 20,
        multiple_of=CHUNK_ALIGNMENT,
    )
    mem_fraction_static: float = flag(
        0.9,
        "fraction of the free device memory for weights, KV cache and workspace",
        low=0.01,
        high=1.0,
        is_share=True,
    )
    disable_radix_cache: bool = flag(
        False,
        "turn the prefix cache off",
        aliases=("--no-enable-prefix-caching",),
    )
    disable_output_caching: bool = flag(
        False,
        "insert only prompts into the prefix cache; an output is prefilled again in the next "
        "prompt, so that in bfloat16 too no output depends on what is cached",
    )
    mamba_track_interval: int | None = flag(
        None,
        "output tokens between two state snapshots in the prefix cache, a multiple of 64 and of "
        "the page size; for models with recurrent state (default: the minimum)",
        low=1,
        high=1 << 24,
    )
    overlap_depth: int | None = flag(
        None,
        "steps in flight on the device while the host plans the next one (default: 1)",
        low=0,
        high=2,
        old_names=("--overlap",),
    )
    disable_overlap_schedule: bool = flag(
        False,
        "the same as --overlap-depth 0",
    )
    shadow_verify_rate: float = flag(
        0.0,
        "fraction of finished requests that are recomputed with plain decoding while the engine "
        "is idle; differences are counted in /metrics and logged",
        low=0.0,
        high=1.0,
        is_share=True,
        metavar="RATE",
        old_names=("--shadow-check",),
    )
    grammar_backend: str = flag(
        AUTO,
        "backend of structured output (JSON schema, regex, grammar, forced tool calls); none: "
        "requests that need it are rejected; auto: llguidance if the tokenizer and the other "
        "flags support it",
        choices=(AUTO, LLGUIDANCE, NONE),
        metavar="NAME",
        aliases=("--guided-decoding-backend",),
        values={"guidance": LLGUIDANCE},
    )
    max_prompt_logprobs: int = flag(
        0,
        "maximum value of prompt_logprobs, and of logprobs with echo; 0: such requests are "
        "rejected",
        low=0,
        high=MAX_LOGPROBS,
        metavar="N",
    )
    max_image_tokens: int | None = flag(
        None,
        "maximum number of tokens of an image; larger images are resized (default: 1024 on a "
        "CPU, 4096 on a GPU, or the checkpoint's limit if lower)",
        low=1,
        high=1 << 16,
        old_names=("--max-picture-tokens",),
    )
    mm_encoder_cache_tokens: int | None = flag(
        None,
        "size of the encoder cache in image tokens (default: four times --max-image-tokens)",
        low=1,
        high=1 << 24,
        old_names=("--picture-pool-tokens",),
    )
    disable_cuda_graph: bool = flag(
        False,
        "run steps without CUDA graphs (torch)",
        aliases=("--enforce-eager",),
    )
    disable_piecewise_cuda_graph: bool = flag(
        False,
        "run prefill and image encoding without CUDA graphs (torch)",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        if self.page_size and self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size must be a power of two, got {self.page_size}")

    @property
    def has_grammars(self) -> bool:
        """True if structured output is on; valid once startup has resolved `auto`."""
        return self.grammar_backend == LLGUIDANCE

    @property
    def steps_in_flight(self) -> int:
        """Steps in flight while the next one is planned."""
        if self.disable_overlap_schedule:
            return 0
        return 1 if self.overlap_depth is None else self.overlap_depth
