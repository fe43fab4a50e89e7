"""Names of the speculative algorithms, and their other spellings."""

import difflib

from shared.options.flags import AUTO, ConfigError

BLOCK_ALGORITHMS = ("DFLASH", "DSPARK", "DFLASH2")
"""Draft a chain as long as the block of their head."""

HEAD_ALGORITHMS = ("EAGLE", "EAGLE3", *BLOCK_ALGORITHMS)
"""Draft with a head of its own files."""

HOST_ALGORITHM = "NGRAM"
"""Drafts from text that was seen."""
MODEL_ALGORITHM = "STANDALONE"
"""Drafts with a small model that has the target's tokenizer."""

ALGORITHMS = ("NEXTN", *HEAD_ALGORITHMS, "NAIVE_EAGLE", MODEL_ALGORITHM, HOST_ALGORITHM)
WITH_COPIES = f"+{HOST_ALGORITHM}"
"""Behind the name of a drafter: copies of seen text join what it drafts."""

JOINED_ALGORITHMS = tuple(
    f"{name}{WITH_COPIES}" for name in ("NEXTN", *HEAD_ALGORITHMS, MODEL_ALGORITHM)
)

KNOWN_ALGORITHMS = (*ALGORITHMS, *JOINED_ALGORITHMS)
OFF_NAMES = ("none", "off")
"""Name no algorithm: the same as leaving the flag out."""

_OF_PEERS = {
    "mtp": "NEXTN",
    "draft_mtp": "NEXTN",
    "draft_model": MODEL_ALGORITHM,
    "draft_target": MODEL_ALGORITHM,
    "draft_simple": MODEL_ALGORITHM,
    "draft_eagle3": "EAGLE3",
    "draft_dflash": "DFLASH",
    "prompt_lookup": HOST_ALGORITHM,
    "prompt_lookup_decoding": HOST_ALGORITHM,
}
"""Names of vLLM, TensorRT-LLM, llama.cpp and Hugging Face."""

_OTHER_MTP = "frozen_kv_mtp"
"""A method of SGLang that is not `NEXTN`; every other `FAMILY_mtp` is vLLM's name of it."""


def _bare(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


_BY_BARE_NAME = {_bare(name): name for name in ALGORITHMS} | {
    _bare(name): algorithm for name, algorithm in _OF_PEERS.items()
}


def algorithm_of(name: str) -> str | None:
    """Reads the name of an algorithm in any spelling of this server or of its peers.

    Args:
      name: Upper and lower case, hyphens and underscores do not matter; two names joined by `+`
        are a drafter with copies of seen text.

    Returns:
      One of `KNOWN_ALGORITHMS`, or `AUTO`; None where the name turns speculative decoding off.

    Raises:
      ConfigError: There is no such algorithm.
    """
    if name.lower() in OFF_NAMES:
        return None
    if name.lower() == AUTO:
        return AUTO
    parts = [_BY_BARE_NAME.get(_bare(part)) or _of_family(part) for part in name.split("+")]
    found = "+".join(parts)
    if found not in KNOWN_ALGORITHMS:
        raise ConfigError(
            f"--speculative-algorithm must be one of {', '.join(KNOWN_ALGORITHMS)}, auto or "
            f"none, got {name}"
            f"{_did_you_mean(name)}"
        )
    return found


def _of_family(part: str) -> str:
    """An mtp layer by the name of its family, as `deepseek_mtp`; else the name as it is."""
    bare = _bare(part)
    return "NEXTN" if bare.endswith("mtp") and bare != _bare(_OTHER_MTP) else part


def _did_you_mean(name: str) -> str:
    known = {**_BY_BARE_NAME, **{_bare(each): each for each in JOINED_ALGORITHMS}}
    near = difflib.get_close_matches(_bare(name), known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""
