"""Auxiliary hidden states: the residual streams of the target that a draft head reads.

Stream i is the input of layer i, and the embedding for i = 0. Stream L is the output of the last of
L layers, before the final norm. Authors list layers under one name with two meanings: layers whose
input is read (stream i), or layers whose output is read (stream i + 1). A head read with the wrong
meaning loads and silently drafts badly, so an ambiguous list is an error.
"""

from collections.abc import Iterator
from enum import Enum

from shared.drafts.raw_config import RawDraftConfig

IDS_FLAG = "--speculative-aux-layer-convention"
"""Flag that selects the meaning of a list."""

NESTED = "eagle_aux_hidden_state_layer_ids"
OUTER = "aux_hidden_state_layer_ids"
BLOCK = "target_layer_ids"
"""Fields with a list: of an EAGLE-3 head, of a DFlash head in the speculators format, and of a
DFlash head in the format of its authors."""


class LayerIdMeaning(Enum):
    """Meaning of listed layers, by the value of the flag."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"


def eagle3_streams(
    stated: RawDraftConfig,
    num_head_layers: int,
    num_layers: int,
    meaning: LayerIdMeaning | None,
) -> tuple[int, ...]:
    """Returns the streams of an EAGLE-3 head; by default the inputs of layers 2, L/2 and L-3.

    Args:
      stated: Normalised fields of its config.json.
      num_head_layers: Number of layers of the head.
      num_layers: L, the number of layers of the target.
      meaning: Meaning of the list from the flag; None to infer it from the list.

    Raises:
      ValueError: The streams do not exist in this target, or the list is ambiguous.
    """
    field = NESTED if NESTED in stated.settings else OUTER
    count = stated.settings.get("num_aux_hidden_states")
    listed = _listed(stated, field)
    if listed is None:
        _refuse_flag(meaning, field)
        listed, meaning = (2, num_layers // 2, num_layers - 3), LayerIdMeaning.INPUTS
        if not listed[0] < listed[1] < listed[2]:
            raise ValueError(
                f"the draft model's {field} is missing, and a target of {num_layers} layers has "
                "no default; use a config.json that lists them"
            )
    if count is not None and count != len(listed):
        raise ValueError(
            f"the draft model's num_aux_hidden_states is {count}, but its {field} "
            f"{_said(stated, field)} {len(listed)}; use a config.json whose fields agree"
        )
    means = meaning or _meant(stated, field, listed, num_layers)
    return _checked(stated, field, listed, means, num_layers)


def block_streams(
    stated: RawDraftConfig,
    num_head_layers: int,
    num_layers: int,
    meaning: LayerIdMeaning | None,
) -> tuple[int, ...]:
    """Returns the streams of a block head; by default the outputs of `default_layers`.

    Args:
      stated, num_head_layers, num_layers, meaning: See `eagle3_streams`.

    Raises:
      ValueError: The streams do not exist in this target, or the head is for another target.
    """
    named = stated.settings.get("num_target_layers")
    if named not in (None, num_layers):
        raise ValueError(
            f"the draft model's num_target_layers is {named}, but the target has {num_layers} "
            "layers; use a draft model that was trained for this model"
        )
    field = OUTER if stated.is_speculators else BLOCK
    listed = _listed(stated, field)
    if listed is None:
        if stated.is_speculators:
            raise ValueError(
                f"the draft model's {field} is missing and has no default; use a config.json "
                "that lists the layers"
            )
        _refuse_flag(meaning, field)
        listed = default_layers(num_head_layers, num_layers)
    means = meaning or (LayerIdMeaning.INPUTS if stated.is_speculators else LayerIdMeaning.OUTPUTS)
    return _checked(stated, field, listed, means, num_layers)


def default_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns the default target layers whose output is read: from the second to the third last,
    evenly spaced.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def ambiguities(stated: RawDraftConfig) -> Iterator[str]:
    """Yields a warning for each setting that has two possible meanings."""
    listed = _listed(stated, NESTED) or _listed(stated, OUTER) or ()
    if stated.is_speculators and listed[:1] == (1,):
        yield (
            "the draft model lists layers from 1 on, which are read as inputs, as its format "
            "specifies; "
            f"if few draft tokens are accepted, try {IDS_FLAG} outputs"
        )
    settings = stated.settings
    if settings.get("norm_output") and not (stated.is_speculators or settings.get("fc_norm")):
        yield (
            "the draft model's norm_output is read as: the next draft step reads the hidden state "
            "after the last norm; some trainers write it and mean the scores alone"
        )


def _listed(stated: RawDraftConfig, field: str) -> tuple[int, ...] | None:
    listed = stated.settings.get(field)
    if listed in (None, []):
        return None
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise ValueError(f"the draft model's {field} must list integers, got {listed!r}")
    return tuple(sorted(listed))


def _meant(
    stated: RawDraftConfig, field: str, ids: tuple[int, ...], num_layers: int
) -> LayerIdMeaning:
    """Infers the meaning of a list: only inputs can contain the number of layers, and only outputs
    are known to start at 1.

    That applies outside the speculators format, where a list always names inputs. The default
    inputs start at 2.
    """
    if stated.is_speculators or num_layers in ids or ids[0] == 2:
        return LayerIdMeaning.INPUTS
    if ids[0] == 1 or (ids[0] == 0 and field in stated.nested):
        return LayerIdMeaning.OUTPUTS
    raise ValueError(
        f"the draft model's {field} {list(ids)} is ambiguous: outputs or inputs of these layers "
        f"may be meant; give {IDS_FLAG} outputs or {IDS_FLAG} inputs"
    )


def _checked(
    stated: RawDraftConfig, field: str, ids: tuple[int, ...], means: LayerIdMeaning, num_layers: int
) -> tuple[int, ...]:
    streams = tuple(i + (means is LayerIdMeaning.OUTPUTS) for i in ids)
    lowest = 1 if means is LayerIdMeaning.OUTPUTS else 0
    if len(set(ids)) != len(ids) or streams[0] < lowest or streams[-1] > num_layers:
        raise ValueError(
            f"the draft model's {field} {_said(stated, field)}; they must be different layers of "
            f"the target's {num_layers}, whose {means.value} are read"
        )
    return streams


def _said(stated: RawDraftConfig, field: str) -> str:
    listed = _listed(stated, field)
    return "are not given" if listed is None else f"are {list(listed)}"


def _refuse_flag(meaning: LayerIdMeaning | None, field: str) -> None:
    if meaning is not None:
        raise ValueError(f"the draft model's {field} is missing; remove {IDS_FLAG}")
