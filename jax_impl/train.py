"""`python -m jax_impl.train` trains a model from scratch, or a draft head for a checkpoint.

    python -m jax_impl.train --target DIR --draft eagle3 --data FILE --out DIR --minutes 10
    python -m jax_impl.train --model CONFIG.json --tokenizer DIR --data FILE --out DIR --minutes 10

OUT gets a folder that serves, and `OUT/training` the checkpoints that the same command goes on
from, the log and the curves. `docs/training_drafts.md` says what to expect.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_impl.devices import find_device
from jax_impl.training import export, target_outputs, tasks
from jax_impl.training.checkpoints import note_run
from jax_impl.training.examples import Batches, RaggedRows, open_tokenizer, read_prompts, read_rows
from jax_impl.training.formats import (
    AUTHORS,
    FORMATS,
    SPECULATORS,
    check_format,
    speculators_json,
)
from jax_impl.training.forward import check_drafted_for, check_trained
from jax_impl.training.loop import Schedule, train
from jax_impl.training.nnx_modules import DraftModel
from jax_impl.training.tasks import Module, Precision, Target, Trainable
from shared.drafts.aux_hidden_states import IDS_FLAG, LayerIdMeaning
from shared.drafts.config import DraftConfig
from shared.engine.request import SamplingParams
from shared.models.checkpoint import open_checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, is_number, read_json
from shared.models.families import config_from_dict, config_from_folder
from shared.models.tied import as_stored

EXIT_REFUSED = 2
POSITIVE = (
    *("steps", "minutes", "batch_tokens", "learning_rate", "max_tokens", "depth", "shards"),
    *("prompts", "output_tokens", "output_slots", "draft_vocab", "block", "layers", "anchors"),
)
"""Numbers that must be above 0 where they are given."""

NOT_NEGATIVE = ("seed", "warmup", "save_minutes", "prompt_weight", "mtp_weight")

KINDS = ("mtp", "eagle", "eagle3", *tasks.CHOICES)
OF_A_RUN = (
    *("draft", "seed", "batch_tokens", "max_tokens", "prompt_weight", "mtp_weight", "dtype"),
    *("depth", "anchors", "prompts", "output_tokens"),
)
"""What must be the same for a run to go on, as its batches and its loss follow from it."""

LAYERS, BLOCK = 3, 8
"""Of a fresh head with blocks."""

SHAPES = {
    "draft_vocab": ("eagle3",),
    **dict.fromkeys(("block", "layers", "mask_token"), (*tasks.CHOICES,)),
}
"""The kinds whose fresh heads a flag is about."""

LISTING = ("eagle3", *tasks.CHOICES)
"""The kinds that list layers of their target."""

TRAINING = "training"
OUTPUTS = "outputs.jsonl"


@dataclass(frozen=True)
class TrainingDefaults:
    """What is taken on a kind of device where a flag is not given."""

    dtype: str
    batch_tokens: int
    output_slots: int


DEFAULTS = {
    "cpu": TrainingDefaults("float32", 4096, 8),
    "gpu": TrainingDefaults("bfloat16", 65536, 128),
}
RATES = {"model": 2e-3, "head": 1e-3}

BALANCE_WEIGHT = 0.001
"""Of a mixture of experts whose config.json does not say it; the default of Qwen3-MoE."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_impl.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_subject(parser.add_argument_group("what is trained"))
    _add_run(parser.add_argument_group("the run"))
    _add_outputs(parser.add_argument_group("a head's data: the target's own greedy answers"))
    _add_shapes(parser.add_argument_group("a head's shape"))
    return parser


def _add_subject(group: Any) -> None:
    group.add_argument("--target", type=Path, help="folder of the model that a head drafts for")
    group.add_argument("--draft", choices=KINDS, help="kind of the head")
    group.add_argument("--model", type=Path, help="config.json of a model to train from scratch")
    group.add_argument("--tokenizer", type=Path, help="folder of its tokenizer")
    group.add_argument("--data", type=Path, nargs="+", required=True, help="JSONL files")
    group.add_argument("--out", type=Path, required=True, help="folder to write")
    group.add_argument("--start", type=Path, help="folder whose weights to start from")
    group.add_argument(
        IDS_FLAG, choices=[x.value for x in LayerIdMeaning], help="what --start's layers mean"
    )
    group.add_argument("--shards", type=int, default=1, help="files that a model is written in")
    group.add_argument(
        "--format", choices=FORMATS, default=AUTHORS, help="that a head is written in"
    )


def _add_run(group: Any) -> None:
    group.add_argument("--steps", type=int, help="end after so many steps")
    group.add_argument("--minutes", type=float, help="end after so many minutes")
    group.add_argument("--batch-tokens", type=int, help="tokens of a step, padding included")
    group.add_argument("--learning-rate", type=float, help="the highest; default 2e-3, a head 1e-3")
    group.add_argument("--warmup", type=int, default=100, help="steps until it is reached")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--save-minutes", type=float, default=3.0, help="between two checkpoints")
    group.add_argument("--max-tokens", type=int, default=1024, help="longer rows are left out")
    group.add_argument("--prompt-weight", type=float, default=0.1, help="loss weight of prompts")
    group.add_argument("--mtp-weight", type=float, default=0.3, help="loss weight of an mtp layer")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the products")
    group.add_argument("--remat", action="store_true", help="spare memory, take a third more time")


def _add_outputs(group: Any) -> None:
    group.add_argument("--outputs", type=Path, help="JSONL file that several heads may share")
    group.add_argument("--prompts", type=int, default=20_000, help="prompts to answer, at most")
    group.add_argument("--output-tokens", type=int, default=256, help="most tokens of an answer")
    group.add_argument("--output-slots", type=int, help="prompts answered at once")


def _add_shapes(group: Any) -> None:
    group.add_argument("--depth", type=int, default=4, help="draft steps that are trained (TTT)")
    group.add_argument("--draft-vocab", type=int, help="EAGLE3: tokens that it drafts; all")
    group.add_argument("--block", type=int, help=f"tokens of a block; {BLOCK}")
    group.add_argument("--layers", type=int, help=f"layers of a head with blocks; {LAYERS}")
    group.add_argument("--anchors", type=int, default=16, help="blocks of a row in a step")
    group.add_argument("--mask-token", type=int, help="id of a mask; the padding token's")


def main(argv: Sequence[str]) -> int:
    """Trains; returns the process's exit code: 2 with one sentence where it is refused."""
    given = make_parser().parse_args(argv)
    try:
        _check(given)
        if given.draft:
            _train_head(given)
        else:
            _train_model(given)
    except (ValueError, OSError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _check(given: argparse.Namespace) -> None:
    """Refuses what contradicts itself, and fills in what was left open."""
    if (given.target is None) == (given.model is None):
        raise ValueError("give either --target and --draft, or --model and --tokenizer")
    pair = ("target", "draft") if given.target else ("model", "tokenizer")
    for name in pair:
        if getattr(given, name) is None:
            raise ValueError(f"--{pair[0]} needs --{pair[1]}; give both")
    for name in ("draft", "tokenizer"):
        if name not in pair and getattr(given, name) is not None:
            raise ValueError(f"--{name} does not go with --{pair[0]}; leave it out")
    if given.steps is None and given.minutes is None:
        raise ValueError("give the length of the run as --steps or --minutes")
    for name in POSITIVE + NOT_NEGATIVE:
        value = getattr(given, name)
        is_in = value is None or (math.isfinite(value) and value >= 0)
        if not is_in or (value == 0 and name in POSITIVE):
            noun = "positive" if name in POSITIVE else "0 or more"
            raise ValueError(f"--{name.replace('_', '-')} must be {noun}, got {value}")
    check_format(given.format, given.draft)
    _refuse_shapes(given)
    for path in given.data:
        if not path.is_file():
            raise ValueError(f"the data file {path} does not exist")
    if given.out.resolve() in {p.resolve() for p in (given.target, given.start) if p}:
        raise ValueError(f"--out {given.out} is a folder that is read; name another")
    defaults = DEFAULTS[find_device().kind]
    for name in ("dtype", "batch_tokens", "output_slots"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(defaults, name))
    if given.learning_rate is None:
        given.learning_rate = RATES["model" if given.model else "head"]


def _refuse_shapes(given: argparse.Namespace) -> None:
    """Refuses flags of a shape that the head does not take from them."""
    for name, kinds in SHAPES.items():
        flag = f"--{name.replace('_', '-')}"
        if getattr(given, name) is None:
            continue
        if given.draft not in kinds:
            raise ValueError(f"{flag} is for --draft {', '.join(kinds)}; leave it out")
        if given.start:
            raise ValueError(f"{flag} is of a fresh head, and --start has one; leave {flag} out")
    if given.speculative_aux_layer_convention and (given.draft not in LISTING or not given.start):
        raise ValueError(
            f"{IDS_FLAG} is for --draft {', '.join(LISTING)} with a head as --start; leave it out"
        )


def _train_model(given: argparse.Namespace) -> None:
    config_json = read_json(given.model)
    config = config_from_dict(config_json)
    check_trained(config)
    end = open_tokenizer(given.tokenizer).end_id
    if end not in config.eos_ids:
        raise ValueError(f"eos_token_id in {given.model} lacks {end}, the tokenizer's eos_token")
    rows = read_rows(given.data, given.tokenizer, given.max_tokens)
    _note(given, {"config": config_json})
    weights = given.mtp_weight, balance_weight(config_json)
    made = tasks.model_task(config, given.start, given.seed, *weights, _precision(given))
    model = _run(given, made, rows)
    export.save_model(given.out, config_json, model, given.tokenizer, given.shards)


def balance_weight(config_json: Json) -> float:
    """Weight of the loss that keeps all experts in use, as config.json has it.

    Raises:
      ValueError: It is no number, or below 0.
    """
    field = "router_aux_loss_coef"
    weight = config_json.get("text_config", config_json).get(field, BALANCE_WEIGHT)
    if not is_number(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(f"{field} in config.json must be a number from 0 on, got {weight!r}")
    return weight


def _train_head(given: argparse.Namespace) -> None:
    """What can be refused is, before the target answers: that may take hours."""
    stored = open_checkpoint(given.target)
    config = as_stored(config_from_folder(given.target), stored)
    check_drafted_for(config)
    mark = target_outputs.fingerprint(stored)
    if given.draft == "mtp":
        if not config.has_mtp:
            raise ValueError(
                "--draft mtp needs a target whose config.json names an mtp layer "
                "(mtp_num_hidden_layers: 1, of Qwen3.5 models)"
            )
        prompts = _prompts(given, config)
        _note(given, {"target": mark})
        target, rows = _target_and_outputs(given, config, mark, prompts)
        made = tasks.mtp_task(target, given.start, given.seed, given.depth, _precision(given))
        export.save_mtp(given.out, given.target, config, _run(given, made, rows))
        return
    head_json = _head_json(given, config)
    told = given.speculative_aux_layer_convention
    draft_config = DraftConfig.from_dict(head_json, config, told and LayerIdMeaning(told))
    if given.start:
        draft_config = tasks.started(draft_config, given.draft, given.start, stored)
    tasks.check_head_trained(draft_config)
    prompts = _prompts(given, config)
    _note(given, {"target": mark, "config": dict(head_json)})
    target, rows = _target_and_outputs(given, config, mark, prompts)
    made = _head_task(given, draft_config, target, rows)
    head = _run(given, made, rows)
    if given.format == SPECULATORS and not head_json.get("speculators_model_type"):
        head_json = speculators_json(head_json, draft_config, given.target, given.depth)
    export.save_head(given.out, head_json, draft_config, head)


def _target_and_outputs(
    given: argparse.Namespace, config: ModelConfig, mark: str, prompts: list[list[int]]
) -> tuple[Target, RaggedRows]:
    target = Target(config, tasks.load_model(given.target, config, False, given.dtype))
    return target, _own_outputs(given, target, mark, prompts)


def _head_json(given: argparse.Namespace, target: ModelConfig) -> Json:
    if given.start:
        return read_json(given.start / "config.json")
    mask = given.mask_token
    if given.draft in tasks.CHOICES and mask is None:
        mask = open_tokenizer(given.target).pad_id
        if mask is None:
            raise ValueError("the target's tokenizer names no pad_token; give --mask-token")
    layers, block = given.layers or LAYERS, given.block or BLOCK
    return tasks.head_json(given.draft, target, given.draft_vocab, layers, block, mask or 0)


def _head_task(
    given: argparse.Namespace, config: DraftConfig, target: Target, rows: RaggedRows
) -> Trainable[DraftModel]:
    if config.block is not None:
        return tasks.block_task(
            config, target, given.start, given.seed, given.anchors, _precision(given)
        )
    ids = None
    if config.has_draft_vocab:
        ids = target_outputs.frequent_tokens(rows, config.layer.vocab, config.draft_vocab)
    return tasks.head_task(
        config, target, given.start, given.seed, ids, given.depth, _precision(given)
    )


def _most(given: argparse.Namespace, config: ModelConfig) -> int:
    """Tokens that a prompt and its answer may have."""
    return min(given.max_tokens, config.context_length)


def _prompts(given: argparse.Namespace, config: ModelConfig) -> list[list[int]]:
    """The data's prompts that leave room for an answer."""
    most = _most(given, config)
    room = most - given.output_tokens
    read = read_prompts(given.data, open_tokenizer(given.target), given.prompts)
    prompts = [prompt for prompt in read if 0 < len(prompt) <= room]
    if len(prompts) < len(read):
        print(
            f"{len(read) - len(prompts):,} of {len(read):,} prompts are left out: they are empty, "
            f"or leave no room for {given.output_tokens:,} tokens of answer in {most:,}",
            flush=True,
        )
    if not prompts:
        raise ValueError(
            f"no prompt leaves room for {given.output_tokens} tokens of answer in {most}; raise "
            "--max-tokens or lower --output-tokens"
        )
    return prompts


def _own_outputs(
    given: argparse.Namespace, target: Target, mark: str, prompts: list[list[int]]
) -> RaggedRows:
    """Rows of the target's own answers, which are made where the file does not hold them yet."""
    path = given.outputs or given.out / TRAINING / OUTPUTS
    config = target.config
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.output_tokens, stop_token_ids=config.eos_ids
    )
    if target_outputs.missing(path, mark, prompts, sampling):
        quick = jax.devices()[0].platform == "cpu" and len(prompts) < FEW_PROMPTS
        slots = min(given.output_slots, len(prompts))
        most = _most(given, config)
        engine = target_outputs.make_engine(config, target.model, slots, most, given.dtype, quick)
        target_outputs.write_outputs(path, engine, mark, prompts, sampling)
        engine.close()
    return target_outputs.read_outputs(path, mark, prompts, sampling, given.max_tokens)


FEW_PROMPTS = 64
"""Fewer do not repay the time in which a CPU's program is compiled well."""


def _run(given: argparse.Namespace, made: Trainable[Module], rows: RaggedRows) -> Module:
    shares = jax.device_count()
    batches = Batches(rows, given.batch_tokens, given.seed, given.prompt_weight, shares)
    print(
        f"{len(rows.lengths):,} rows, {rows.tokens.size:,} tokens, {rows.num_dropped:,} rows too "
        f"long; {len(batches):,} batches an epoch, of widths {list(batches.widths)}",
        flush=True,
    )
    schedule = Schedule(
        steps=given.steps,
        minutes=given.minutes,
        learning_rate=given.learning_rate,
        warmup=given.warmup,
        save_minutes=given.save_minutes,
    )
    began = time.monotonic()
    params = train(made.task, batches, schedule, given.seed, given.out / TRAINING)
    print(f"trained in {time.monotonic() - began:.0f} s", flush=True)
    return made.merge(params)


def _note(given: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Starts the run's folder anew, or goes on in it where it is the same run."""
    folder = given.out / TRAINING
    if not given.resume:
        for name in ("checkpoints", "log.jsonl", "run.json"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    files = {"data": [path.name for path in given.data], "devices": jax.device_count()}
    files["start"] = given.start and str(given.start.resolve())
    files["layer_ids"] = given.speculative_aux_layer_convention
    note_run(folder, {name: getattr(given, name) for name in OF_A_RUN} | files | facts)


def _precision(given: argparse.Namespace) -> Precision:
    return Precision(dtype=given.dtype, remat=given.remat)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
