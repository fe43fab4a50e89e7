"""Reads the sublayer of each layer of a model with one sublayer per layer."""

from enum import Enum

from shared.models.config_fields import Json, listed, word


class BlockType(Enum):
    """Sublayer of a layer, by its letter in a pattern."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    EXPERTS = "E"


_NAMES = {
    "mamba": BlockType.MAMBA,
    "linear_attention": BlockType.MAMBA,
    "attention": BlockType.ATTENTION,
    "full_attention": BlockType.ATTENTION,
    "mlp": BlockType.MLP,
    "moe": BlockType.EXPERTS,
}
"""Sublayer of each name in a list."""

_PATTERN, _LIST = "hybrid_override_pattern", "layers_block_type"


def check_mtp_types(text: Json) -> None:
    """Checks that an MTP layer consists of attention and experts.

    Raises:
      ValueError: It has other sublayers; the message names the field.
    """
    pattern = word(text, "mtp_hybrid_override_pattern", "*E")
    names = listed(text, "mtp_layers_block_type", str) or ["attention", "moe"]
    if pattern != "*E" or [_NAMES.get(x) for x in names] != [
        BlockType.ATTENTION,
        BlockType.EXPERTS,
    ]:
        raise ValueError(
            "mtp_hybrid_override_pattern must be '*E' and mtp_layers_block_type attention and moe, "
            f"got {pattern!r:.60} and {names!r:.60}"
        )


def read_block_types(text: Json) -> list[BlockType]:
    """Returns the sublayer of each layer, from a list of names or a pattern of letters.

    Raises:
      ValueError: Both fields are absent, contain something else, or differ in length from
        `num_hidden_layers`.
    """
    names, known = listed(text, _LIST, str), {each.value: each for each in BlockType}
    field, given = (_LIST, names) if names is not None else (_PATTERN, [*word(text, _PATTERN, "")])
    spellings = _NAMES if names is not None else known
    if unknown := sorted({*given} - spellings.keys()):
        raise ValueError(f"{field} contains {unknown[0]!r}; supported are {', '.join(spellings)}")
    if not given:
        raise ValueError(f"config.json must have {_PATTERN} or {_LIST}")
    if text["num_hidden_layers"] not in (None, len(given)):
        raise ValueError(
            f"{field} names {len(given)} layers, num_hidden_layers is {text['num_hidden_layers']}"
        )
    return [spellings[each] for each in given]
