"""Command line of `jax_impl.train`: options, defaults and checks."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_impl.devices import find_device
from jax_impl.training import tasks
from jax_impl.training.adapter import ALL_LINEAR
from jax_impl.training.candidate_loss import CROSS_ENTROPY, OBJECTIVES
from jax_impl.training.formats import AUTHORS, FORMATS, check_format
from shared.drafts.aux_hidden_states import IDS_FLAG, LayerIdMeaning

POSITIVE = (
    *("steps", "minutes", "batch_tokens", "learning_rate", "max_tokens", "depth", "shards"),
    *("prompts", "output_tokens", "output_slots", "draft_vocab", "block", "layers", "anchors"),
    *("lora_rank", "lora_alpha"),
)
"""Options that must be above 0."""

NOT_NEGATIVE = ("seed", "warmup", "save_minutes", "prompt_weight", "mtp_weight")

KINDS = ("mtp", "eagle", "eagle3", *tasks.CHOICES)
LAYERS, BLOCK = 3, 8
"""Number of layers and block size of a fresh block head."""

SHAPES = {
    "draft_vocab": ("eagle3",),
    **dict.fromkeys(("block", "layers", "mask_token"), (*tasks.CHOICES,)),
    "causal_head": ("dflash",),
}
"""Kinds of fresh heads that an option applies to."""

LAYER_ID_KINDS = ("eagle3", *tasks.CHOICES)
"""Kinds with a list of target layers in their config."""

TRAINING = "training"
OUTPUTS = "outputs.jsonl"


@dataclass(frozen=True)
class TrainingDefaults:
    """Default options on a kind of device."""

    dtype: str
    batch_tokens: int
    output_slots: int


DEFAULTS = {
    "cpu": TrainingDefaults("float32", 4096, 8),
    "gpu": TrainingDefaults("bfloat16", 65536, 128),
}
RATES = {"model": 2e-3, "head": 1e-3, "adapter": 2e-3}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    Args:
      description: Text below the usage line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_impl.train",
        description=description,
        usage="%(prog)s [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_subject(parser.add_argument_group("model and data"))
    _add_run(parser.add_argument_group("training run"))
    _add_outputs(parser.add_argument_group("training data of a head: greedy outputs of the target"))
    _add_shapes(parser.add_argument_group("shape of a head"))
    _add_adapter(parser.add_argument_group("LoRA adapter"))
    return parser


def _add_subject(group: Any) -> None:
    group.add_argument(
        "--target", type=Path, help="folder of the target model of a head or an adapter"
    )
    group.add_argument("--draft", choices=KINDS, help="kind of the draft head")
    group.add_argument("--model", type=Path, help="config.json of a model to train from scratch")
    group.add_argument("--tokenizer", type=Path, help="folder of the tokenizer for --model")
    group.add_argument(
        "--data", type=Path, nargs="+", required=True, help="JSONL files of chats or texts"
    )
    group.add_argument("--out", type=Path, required=True, help="folder to write")
    group.add_argument("--start", type=Path, help="folder of a model or head to start from")
    group.add_argument(
        IDS_FLAG,
        choices=[x.value for x in LayerIdMeaning],
        help="meaning of the layer ids in the config of --start",
    )
    group.add_argument(
        "--shards", type=int, default=1, help="number of safetensors files of a model; default 1"
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        default=AUTHORS,
        help=f"format of the written head; default {AUTHORS}",
    )


def _add_run(group: Any) -> None:
    cpu, gpu = DEFAULTS["cpu"], DEFAULTS["gpu"]
    group.add_argument("--steps", type=int, help="maximum number of steps")
    group.add_argument("--minutes", type=float, help="maximum wall-clock time in minutes")
    group.add_argument(
        "--batch-tokens",
        type=int,
        help="tokens per step, including padding; "
        f"default {cpu.batch_tokens} (CPU), {gpu.batch_tokens} (GPU)",
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        help=f"highest learning rate; default {RATES['model']} (model, adapter), "
        f"{RATES['head']} (head)",
    )
    group.add_argument("--warmup", type=int, default=100, help="warm-up steps; default 100")
    group.add_argument(
        "--seed", type=int, default=0, help="seed of parameters and batches; default 0"
    )
    group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="resume from the newest checkpoint; default on",
    )
    group.add_argument(
        "--save-minutes", type=float, default=3.0, help="minutes between checkpoints; default 3"
    )
    group.add_argument(
        "--max-tokens", type=int, default=1024, help="drop longer rows; default 1024"
    )
    group.add_argument(
        "--prompt-weight", type=float, default=0.1, help="loss weight of prompt tokens; default 0.1"
    )
    group.add_argument(
        "--mtp-weight", type=float, default=0.3, help="loss weight of an MTP layer; default 0.3"
    )
    group.add_argument(
        "--loss",
        choices=OBJECTIVES,
        help="loss of a block head: against the tokens, or the KL divergence from the target's "
        f"distribution, for draft trees and temperatures; default {CROSS_ENTROPY}",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help=f"dtype of the GEMMs; default {cpu.dtype} (CPU), {gpu.dtype} (GPU)",
    )
    group.add_argument(
        "--remat",
        action="store_true",
        help="recompute activations: less memory, a third more time",
    )


def _add_outputs(group: Any) -> None:
    group.add_argument(
        "--outputs",
        type=Path,
        help=f"JSONL file of target outputs, shared by heads; default OUT/{TRAINING}/{OUTPUTS}",
    )
    group.add_argument(
        "--prompts", type=int, default=20_000, help="maximum number of prompts; default 20000"
    )
    group.add_argument(
        "--output-tokens", type=int, default=256, help="maximum tokens of an output; default 256"
    )
    group.add_argument(
        "--output-slots",
        type=int,
        help="requests decoded at once; "
        f"default {DEFAULTS['cpu'].output_slots} (CPU), {DEFAULTS['gpu'].output_slots} (GPU)",
    )


def _add_shapes(group: Any) -> None:
    group.add_argument(
        "--depth",
        type=int,
        default=4,
        help="trained draft depth of mtp, eagle and eagle3 (training-time test); default 4",
    )
    group.add_argument(
        "--draft-vocab", type=int, help="size of the draft vocabulary of eagle3; default all tokens"
    )
    group.add_argument(
        "--block", type=int, help=f"tokens of a block of a block head; default {BLOCK}"
    )
    group.add_argument("--layers", type=int, help=f"layers of a block head; default {LAYERS}")
    group.add_argument(
        "--anchors", type=int, default=16, help="blocks per row of a block head; default 16"
    )
    group.add_argument(
        "--causal-head",
        action="store_true",
        default=None,
        help="train a JetSpec head: a dflash head with a causal block, for draft trees",
    )
    group.add_argument(
        "--mask-token", type=int, help="mask token id of a block head; default the padding token"
    )


def _add_adapter(group: Any) -> None:
    group.add_argument("--lora-rank", type=int, help="train an adapter of this rank for --target")
    group.add_argument(
        "--lora-alpha", type=float, help="numerator of the multiplier alpha / rank; default 2 rank"
    )
    group.add_argument(
        "--lora-target-modules",
        nargs="+",
        help=f"last words of the adapted modules' names; default {ALL_LINEAR}",
    )


def check(given: argparse.Namespace) -> None:
    """Checks the options and fills in the defaults of the device.

    Raises:
      ValueError: An option is invalid, missing or conflicts with another one.
    """
    if (given.target is None) == (given.model is None):
        raise ValueError(
            "the options do not name what to train; use either --target and --draft (a head), "
            "--target and --lora-rank (an adapter), or --model and --tokenizer (a model)"
        )
    _check_adapter(given)
    own = "draft" if given.lora_rank is None else "lora_rank"
    pair = ("target", own) if given.target else ("model", "tokenizer")
    for name in pair:
        if getattr(given, name) is None:
            raise ValueError(f"--{pair[0]} and --{pair[1]} require each other; use both")
    for name in ("draft", "tokenizer"):
        if name not in pair and getattr(given, name) is not None:
            raise ValueError(f"--{name} is not supported with --{pair[0]}; remove it")
    if given.steps is None and given.minutes is None:
        raise ValueError("the run has no length; set --steps or --minutes")
    for name in POSITIVE + NOT_NEGATIVE:
        value = getattr(given, name)
        is_valid = value is None or (math.isfinite(value) and value >= 0)
        if not is_valid or (value == 0 and name in POSITIVE):
            noun = "positive" if name in POSITIVE else "0 or more"
            raise ValueError(f"--{name.replace('_', '-')} must be {noun}, got {value}")
    check_format(given.format, given.draft, bool(given.causal_head))
    _check_shapes(given)
    if given.loss and given.draft not in tasks.CHOICES:
        raise ValueError(f"--loss requires --draft {', '.join(tasks.CHOICES)}; remove it")
    given.loss = given.loss or CROSS_ENTROPY
    for path in given.data:
        if not path.is_file():
            raise ValueError(f"the data file {path} does not exist; check --data")
    if given.out.resolve() in {p.resolve() for p in (given.target, given.start) if p}:
        raise ValueError(
            f"--out {given.out} is also --target or --start, which are inputs; use another folder"
        )
    defaults = DEFAULTS[find_device().kind]
    for name in ("dtype", "batch_tokens", "output_slots"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(defaults, name))
    if given.learning_rate is None:
        kind = "model" if given.model else "head" if given.draft else "adapter"
        given.learning_rate = RATES[kind]


def _check_adapter(given: argparse.Namespace) -> None:
    """Checks the options of an adapter and fills in their defaults.

    Raises:
      ValueError: An option applies only to adapters, or does not apply to them.
    """
    names = ("lora_rank", "lora_alpha", "lora_target_modules")
    for name in names:
        if getattr(given, name) is not None and (given.lora_rank is None or not given.target):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} requires --target and --lora-rank; use them or remove {flag}")
    if given.lora_rank is None:
        return
    for name in ("draft", "start"):
        if getattr(given, name) is not None:
            raise ValueError(f"--{name} is not supported with --lora-rank; remove one of them")
    given.lora_alpha = given.lora_alpha or 2.0 * given.lora_rank
    given.lora_target_modules = given.lora_target_modules or [ALL_LINEAR]


def _check_shapes(given: argparse.Namespace) -> None:
    """Checks that the options of a head's shape apply to the head.

    Raises:
      ValueError: An option applies to another kind of head, or only to fresh heads.
    """
    for name, kinds in SHAPES.items():
        flag = f"--{name.replace('_', '-')}"
        if getattr(given, name) is None:
            continue
        if given.draft not in kinds:
            raise ValueError(f"{flag} requires --draft {', '.join(kinds)}; remove it")
        if given.start:
            raise ValueError(
                f"{flag} is not supported with --start, whose config sets it; remove {flag}"
            )
    if given.speculative_aux_layer_convention and (
        given.draft not in LAYER_ID_KINDS or not given.start
    ):
        raise ValueError(
            f"{IDS_FLAG} requires --draft {', '.join(LAYER_ID_KINDS)} and --start; remove it"
        )
