"""Settings of a LoRA adapter: `adapter_config.json` as peft writes it.

Source: peft 0.21.2, `LoraConfig`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.models.config_fields import (
    LARGEST,
    Json,
    flag,
    is_number,
    object_of,
    positive,
    read_json,
)
from shared.models.file_kind import ADAPTER_FILE
from shared.models.weight_files import CheckpointError

MAX_RANK = 1 << 12
"""Largest rank of an adapter."""

NEUTRAL_INITS = (None, True, False, "gaussian")
"""Values of `init_lora_weights` that leave the base weights unchanged."""

REPLACED = ("modules_to_save", "trainable_token_indices")
CHANGED = (
    *(
        "alora_invocation_tokens",
        "arrow_config",
        "fan_in_fan_out",
        "kasa_config",
        "layer_replication",
    ),
    *("lora_bias", "lora_ga_config", "monteclora_config", "use_bdlora", "use_qalora"),
    "velora_config",
)
"""Fields that replace modules or rows of the base model, and that change the forward pass; only
absent, null, false and empty values are supported."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of a LoRA adapter.

    Attributes:
      rank, alpha: Rank and alpha of modules without a pattern.
      rank_pattern, alpha_pattern: Rank and alpha by a regular expression for the end of a module's
        name; the first match counts.
      use_rslora: True if alpha is divided by the square root of the rank, not by the rank.
      use_dora: True if the adapter has a magnitude per output (DoRA).
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "LoraConfig":
        """Reads the settings of an adapter folder.

        Raises:
          CheckpointError: The file is missing or invalid, or a setting is not supported.
        """
        path = folder / ADAPTER_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {ADAPTER_FILE}; give the folder of an adapter")
        try:
            return cls._of(read_json(path))
        except ValueError as error:
            raise CheckpointError(f"adapter {folder}: {error}") from error

    @classmethod
    def _of(cls, fields: Json) -> "LoraConfig":
        _refuse_others(fields)
        ranks, alphas = (
            object_of(fields, x, ADAPTER_FILE) for x in ("rank_pattern", "alpha_pattern")
        )
        for pattern, rank in ranks.items():
            _check(pattern, "rank_pattern", is_number(rank, int) and 0 < rank <= MAX_RANK)
        for pattern, alpha in alphas.items():
            _check(pattern, "alpha_pattern", _is_alpha(alpha))
        alpha = fields.get("lora_alpha", 8)
        if not _is_alpha(alpha):
            raise ValueError(f"lora_alpha in {ADAPTER_FILE} must be a number, got {alpha!r:.60}")
        return cls(
            rank=positive(fields, "r", 8, ADAPTER_FILE, MAX_RANK),
            alpha=float(alpha),
            rank_pattern=ranks,
            alpha_pattern=alphas,
            use_rslora=flag(fields, "use_rslora", place=ADAPTER_FILE),
            use_dora=flag(fields, "use_dora", place=ADAPTER_FILE),
        )

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, by its name in the adapter's base model."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the multiplier of a module's `B A x`."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    found = (x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _is_alpha(value: Any) -> bool:
    return is_number(value, (int, float)) and abs(value) <= LARGEST


def _check(pattern: str, field: str, is_valid: bool) -> None:
    """Checks a pattern and its value."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field} has the invalid pattern {pattern!r:.60}: {error}") from error
    if not is_valid:
        raise ValueError(f"{field} must have positive ranks or numbers, invalid is {pattern!r:.60}")


def _refuse_others(fields: Json) -> None:
    """Checks that no setting changes the forward pass in an unsupported way."""
    if (kind := fields.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"peft_type {kind!r:.60} is not supported; use a LORA adapter")
    if (bias := fields.get("bias", "none")) != "none":
        raise ValueError(f"bias: {bias!r:.60} is not supported; train with bias: none")
    init = fields.get("init_lora_weights")
    if not any(init is each or init == each for each in NEUTRAL_INITS):
        raise ValueError(
            f"init_lora_weights: {init!r:.60} is not supported, because it changes the base "
            "weights; convert the adapter when it is saved"
        )
    for field in REPLACED:
        if fields.get(field):
            raise ValueError(
                f"{field} is not supported, because it replaces weights of the base model; "
                "train without it, or merge the adapter"
            )
    for field in CHANGED:
        if fields.get(field):
            raise ValueError(f"{field} is not supported; train without it, or merge the adapter")
