"""The limits of the host engine: how much runs at once, and what it keeps."""

from dataclasses import dataclass

from shared.options.flags import AUTO, NONE, ConfigError, check_rules, flag

CHUNK_ALIGNMENT = 64
"""Prefill chunks end at multiples of this, so that any chunking gives the same bits."""

LLGUIDANCE = "llguidance"
MAX_LOGPROBS = 20
"""Most tokens that are shown beside a token."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the host engine."""

    page_size: int | None = flag(
        None, "tokens in a KV page, a power of two (default: 16 on a CPU, 64 on a GPU)",
        aliases=("--block-size",), low=1, high=1024,
    )  # fmt: skip
    max_total_tokens: int | None = flag(
        None, "KV positions of all requests together (default: what fits)", low=1, high=1 << 30
    )
    max_running_requests: int | None = flag(
        None,
        "requests decoded at once (default: 8 on a CPU, 48 on a GPU)",
        aliases=("--max-num-seqs",),
        low=1,
        high=4096,
    )
    chunked_prefill_size: int | None = flag(
        None, "most prompt tokens in a step (default: 256 on a CPU, 2048 on a GPU)",
        low=CHUNK_ALIGNMENT, high=1 << 20, multiple_of=CHUNK_ALIGNMENT,
    )  # fmt: skip
    mem_fraction_static: float = flag(
        0.9, "share of the device's free memory that the server takes", low=0.01, high=1.0,
        is_share=True,
    )  # fmt: skip
    disable_radix_cache: bool = flag(
        False,
        "keep no text's KV and state for later requests",
        aliases=("--no-enable-prefix-caching",),
    )
    mamba_track_interval: int | None = flag(
        None, "positions of an output between two recurrent states that are kept for later "
        "requests, a multiple of 64 and of the page size (default: the least)", low=1, high=1 << 24,
    )  # fmt: skip
    overlap_depth: int | None = flag(
        None,
        "steps on the device while the host plans the next (default: 1)",
        low=0,
        high=2,
        old_names=("--overlap",),
    )
    disable_overlap_schedule: bool = flag(False, "the same as --overlap-depth 0")
    shadow_verify_rate: float = flag(
        0.0, "share of the requests whose texts are compared with plain decoding in steps in which "
        "the engine is idle; /metrics counts them, and the log names what differs",
        low=0.0, high=1.0, is_share=True, metavar="RATE", old_names=("--shadow-check",),
    )  # fmt: skip
    grammar_backend: str = flag(
        AUTO,
        "llguidance holds answers to a JSON schema, an expression, a grammar or a call of a tool, "
        "and makes programs for it at the start; none refuses such requests; auto is llguidance "
        "where the tokenizer and the other flags allow it",
        choices=(AUTO, LLGUIDANCE, NONE),
        metavar="NAME",
        aliases=("--guided-decoding-backend",),
        values={"guidance": LLGUIDANCE},
    )
    max_prompt_logprobs: int = flag(
        0, "most tokens that are shown beside each token of a prompt, for prompt_logprobs and for "
        "echo with logprobs; programs for it are made at the start, and with 0 such requests are "
        "refused",
        low=0, high=MAX_LOGPROBS, metavar="N",
    )  # fmt: skip
    max_image_tokens: int | None = flag(
        None, "most tokens that a picture of a prompt takes; larger pictures are shrunk, as the "
        "checkpoint shrinks those beyond its own bound (default: 1024 on a CPU, 4096 on a GPU, or "
        "the checkpoint's)", low=1, high=1 << 16, old_names=("--max-picture-tokens",),
    )  # fmt: skip
    mm_encoder_cache_tokens: int | None = flag(
        None, "tokens of pictures that stay encoded on the device, so that the next turn of a chat "
        "encodes nothing (default: four times the largest picture)", low=1, high=1 << 24,
        old_names=("--picture-pool-tokens",),
    )  # fmt: skip
    disable_cuda_graph: bool = flag(
        False, "torch on a GPU runs every step launch by launch", aliases=("--enforce-eager",)
    )
    disable_piecewise_cuda_graph: bool = flag(False, "the same for prompts and pictures alone")

    def __post_init__(self) -> None:
        check_rules(self)
        if self.page_size and self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size must be a power of two, got {self.page_size}")

    @property
    def has_grammars(self) -> bool:
        """Returns whether a text can be held to a grammar, once the start has resolved `auto`."""
        return self.grammar_backend == LLGUIDANCE

    @property
    def steps_in_flight(self) -> int:
        """Steps in flight beside the one being planned."""
        if self.disable_overlap_schedule:
            return 0
        return 1 if self.overlap_depth is None else self.overlap_depth
