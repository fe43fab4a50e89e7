"""`python -m jax_impl.train` trains a model, a draft head or a LoRA adapter.

    python -m jax_impl.train --target DIR --draft eagle3 --data FILE --out DIR --minutes 10
    python -m jax_impl.train --target DIR --lora-rank 16 --data FILE --out DIR --minutes 10
    python -m jax_impl.train --model CONFIG.json --tokenizer DIR --data FILE --out DIR --minutes 10

OUT receives a folder that the server loads, and OUT/training the checkpoints, the log and the
curves. The same command resumes from the newest checkpoint. See docs/training_drafts.md and, for
adapters, docs/lora.md.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from jax_impl.training import export, target_outputs, tasks, tree_acceptance
from jax_impl.training.adapter import LoraSettings, adapter_task, parts_of, save_adapter
from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.checkpoints import note_run
from jax_impl.training.examples import Batches, RaggedRows, open_tokenizer, read_prompts, read_rows
from jax_impl.training.file_lock import locked
from jax_impl.training.formats import SPECULATORS, check_format, speculators_json
from jax_impl.training.forward import check_drafted_for, check_trained
from jax_impl.training.loop import Schedule, train
from jax_impl.training.nnx_modules import DraftModel
from jax_impl.training.options import BLOCK, LAYERS, OUTPUTS, TRAINING, check, make_parser
from jax_impl.training.tasks import Module, Precision, Target, Trainable
from shared.drafts.aux_hidden_states import LayerIdMeaning
from shared.drafts.config import DraftConfig
from shared.engine.request import SamplingParams
from shared.models.checkpoint import open_checkpoint
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, is_number, read_json
from shared.models.families import config_from_dict, config_from_folder
from shared.models.parameters import parameters
from shared.models.saving import tensor_prefix
from shared.models.tied import as_stored

EXIT_INVALID = 2
RUN_SETTINGS = (
    *("draft", "seed", "batch_tokens", "max_tokens", "prompt_weight", "mtp_weight", "dtype"),
    *("depth", "anchors", "loss", "prompts", "output_tokens"),
    *("lora_rank", "lora_alpha", "lora_target_modules"),
)
"""Options that must be equal to resume a run, because its batches and loss depend on them."""

BALANCE_WEIGHT = 0.001
"""Default of `router_aux_loss_coef` for MoE models, as in Qwen3-MoE."""


def main(argv: Sequence[str]) -> int:
    """Trains; returns the exit code: 2, with one line on stderr, for invalid input."""
    given = make_parser(__doc__).parse_args(argv)
    try:
        check(given)
        if given.draft:
            _train_head(given)
        elif given.lora_rank:
            _train_adapter(given)
        else:
            _train_model(given)
    except (ValueError, OSError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    return 0


def _train_model(given: argparse.Namespace) -> None:
    config_json = read_json(given.model)
    config = config_from_dict(config_json)
    check_trained(config)
    end_id = open_tokenizer(given.tokenizer).end_id
    if end_id not in config.eos_ids:
        raise ValueError(
            f"eos_token_id in {given.model} is {list(config.eos_ids)} and must contain {end_id}, "
            "the tokenizer's eos_token; add it"
        )
    rows = read_rows(given.data, given.tokenizer, given.max_tokens)
    _note(given, {"config": config_json})
    task = tasks.model_task(
        config,
        given.start,
        given.seed,
        given.mtp_weight,
        balance_weight(config_json),
        _precision(given),
    )
    model = _run(given, task, rows)
    export.save_model(given.out, config_json, model, given.tokenizer, given.shards)


def balance_weight(config_json: Json) -> float:
    """Returns the weight of the load-balancing loss of the experts in config.json.

    Raises:
      ValueError: It is not a number, or below 0.
    """
    field = "router_aux_loss_coef"
    weight = config_json.get("text_config", config_json).get(field, BALANCE_WEIGHT)
    if not is_number(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(f"{field} in config.json must be a number of at least 0, got {weight!r}")
    return weight


def _train_adapter(given: argparse.Namespace) -> None:
    """Trains an adapter of a target on the answers of the data, with its MTP layer if it has one.

    Raises:
      ValueError: The target has a feature that training does not support.
    """
    stored, config_json = open_checkpoint(given.target), read_json(given.target / "config.json")
    config = as_stored(config_from_folder(given.target), stored)
    check_drafted_for(config)
    settings = LoraSettings(
        rank=given.lora_rank,
        alpha=given.lora_alpha,
        target_modules=tuple(given.lora_target_modules),
    )
    with_mtp = config.has_mtp and given.mtp_weight > 0
    parts = parts_of(parameters(config, with_mtp), settings)
    rows = read_rows(given.data, given.target, given.max_tokens)
    _note(given, {"target": target_outputs.fingerprint(stored)})
    target = Target(config, tasks.load_model(given.target, config, with_mtp, given.dtype))
    task = adapter_task(
        target, parts, settings, given.seed, given.mtp_weight, given.depth, _precision(given)
    )
    adapter = _run(given, task, rows)
    prefix = tensor_prefix(config_json)
    save_adapter(given.out, given.target, prefix, adapter, parts, settings)


def _train_head(given: argparse.Namespace) -> None:
    """Trains a head. All checks precede the target's outputs, which may take hours."""
    stored = open_checkpoint(given.target)
    config = as_stored(config_from_folder(given.target), stored)
    check_drafted_for(config)
    target_id = target_outputs.fingerprint(stored)
    if given.draft == "mtp":
        if not config.has_mtp:
            raise ValueError(
                "--draft mtp requires a target with an MTP layer in its config.json "
                "(mtp_num_hidden_layers: 1, in Qwen3.5 models)"
            )
        prompts = _prompts(given, config)
        _note(given, {"target": target_id})
        target, rows = _target_and_outputs(given, config, target_id, prompts)
        task = tasks.mtp_task(target, given.start, given.seed, given.depth, _precision(given))
        export.save_mtp(given.out, given.target, config, _run(given, task, rows))
        return
    head_json = _head_json(given, config)
    convention = given.speculative_aux_layer_convention
    draft_config = DraftConfig.from_dict(
        head_json, config, convention and LayerIdMeaning(convention)
    )
    if given.start:
        draft_config = tasks.started(draft_config, given.draft, given.start, stored)
    tasks.check_head_trained(draft_config)
    is_causal = draft_config.block is not None and any(draft_config.block.causal)
    check_format(given.format, given.draft, is_causal)
    prompts = _prompts(given, config)
    _note(given, {"target": target_id, "config": dict(head_json)})
    target, rows = _target_and_outputs(given, config, target_id, prompts)
    task = _head_task(given, draft_config, target, rows)
    head = _run(given, task, rows)
    if draft_config.block is not None and not draft_config.block.parts:
        _print_tree_acceptance(given, draft_config, target, rows, head)
    if given.format == SPECULATORS and not head_json.get("speculators_model_type"):
        head_json = speculators_json(head_json, draft_config, given.target, given.depth)
    export.save_head(given.out, head_json, draft_config, head)


def _target_and_outputs(
    given: argparse.Namespace, config: ModelConfig, target_id: str, prompts: list[list[int]]
) -> tuple[Target, RaggedRows]:
    target = Target(config, tasks.load_model(given.target, config, False, given.dtype))
    return target, _own_outputs(given, target, target_id, prompts)


def _head_json(given: argparse.Namespace, target: ModelConfig) -> Json:
    if given.start:
        return read_json(given.start / "config.json")
    mask = given.mask_token
    if given.draft in tasks.CHOICES and mask is None:
        mask = open_tokenizer(given.target).pad_id
        if mask is None:
            raise ValueError(
                "the target's tokenizer has no pad_token, the default mask token; set --mask-token"
            )
    layers, block = given.layers or LAYERS, given.block or BLOCK
    is_causal = bool(given.causal_head)
    return tasks.head_json(
        given.draft, target, given.draft_vocab, layers, block, mask or 0, is_causal
    )


def _head_task(
    given: argparse.Namespace, config: DraftConfig, target: Target, rows: RaggedRows
) -> Trainable[DraftModel]:
    if config.block is not None:
        return tasks.block_task(
            config, target, given.start, given.seed, given.anchors, given.loss, _precision(given)
        )
    ids = None
    if config.has_draft_vocab:
        ids = target_outputs.frequent_tokens(rows, config.layer.vocab, config.draft_vocab)
    return tasks.head_task(
        config, target, given.start, given.seed, ids, given.depth, _precision(given)
    )


def _print_tree_acceptance(
    given: argparse.Namespace,
    config: DraftConfig,
    target: Target,
    rows: RaggedRows,
    head: DraftModel,
) -> None:
    """Prints the acceptance lengths of a chain and of trees on the answers of the training data."""
    block = BlockHeadConfig.of(config)
    batch = Batches(rows, given.batch_tokens, given.seed, given.prompt_weight, 1).at(0)
    lengths = tree_acceptance.measure(
        block, head, target.config, target.model, batch, given.seed, given.anchors, given.dtype
    )
    shown = ", ".join(f"{name} {length:.2f}" for name, length in lengths.items())
    print(f"Acceptance length on training answers: {shown or 'no answer fills a block'}")


def _max_tokens(given: argparse.Namespace, config: ModelConfig) -> int:
    """Returns the maximum number of tokens of a prompt with its output."""
    return min(given.max_tokens, config.context_length)


def _prompts(given: argparse.Namespace, config: ModelConfig) -> list[list[int]]:
    """Returns the prompts of the data that leave room for an output."""
    max_tokens = _max_tokens(given, config)
    room = max_tokens - given.output_tokens
    read = read_prompts(given.data, open_tokenizer(given.target), given.prompts)
    prompts = [prompt for prompt in read if 0 < len(prompt) <= room]
    if len(prompts) < len(read):
        print(
            f"Dropped {len(read) - len(prompts):,} of {len(read):,} prompts: empty, or longer than "
            f"{room:,} tokens, which leaves no room for {given.output_tokens:,} output tokens",
            flush=True,
        )
    if not prompts:
        raise ValueError(
            f"no prompt leaves room for {given.output_tokens} output tokens within {max_tokens} "
            "tokens; raise --max-tokens or lower --output-tokens"
        )
    return prompts


def _own_outputs(
    given: argparse.Namespace, target: Target, target_id: str, prompts: list[list[int]]
) -> RaggedRows:
    """Returns rows of prompts with the target's outputs; generates those missing in the file."""
    path = given.outputs or given.out / TRAINING / OUTPUTS
    config = target.config
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given.output_tokens, stop_token_ids=config.eos_ids
    )
    with locked(path):
        if target_outputs.missing(path, target_id, prompts, sampling):
            quick = jax.devices()[0].platform == "cpu" and len(prompts) < FEW_PROMPTS
            slots = min(given.output_slots, len(prompts))
            context = _max_tokens(given, config)
            engine = target_outputs.make_engine(
                config, target.model, slots, context, given.dtype, quick
            )
            target_outputs.write_outputs(path, engine, target_id, prompts, sampling)
            engine.close()
    return target_outputs.read_outputs(path, target_id, prompts, sampling, given.max_tokens)


FEW_PROMPTS = 64
"""Fewer prompts compile with `quick_compile` on a CPU."""


def _run(given: argparse.Namespace, task: Trainable[Module], rows: RaggedRows) -> Module:
    num_devices = jax.device_count()
    batches = Batches(rows, given.batch_tokens, given.seed, given.prompt_weight, num_devices)
    print(
        f"Read {len(rows.lengths):,} rows with {rows.tokens.size:,} tokens; dropped "
        f"{rows.num_dropped:,} rows above --max-tokens; {len(batches):,} batches per epoch, "
        f"padded to {', '.join(map(str, batches.widths))} tokens",
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
    params = train(task.task, batches, schedule, given.seed, given.out / TRAINING)
    print(f"Trained in {time.monotonic() - began:.0f} s", flush=True)
    return task.merge(params)


def _note(given: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Prepares the run's folder: resumes the same run, or clears it with `--no-resume`."""
    folder = given.out / TRAINING
    if not given.resume:
        for name in ("checkpoints", "log.jsonl", "run.json"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    files = {"data": [path.name for path in given.data], "devices": jax.device_count()}
    files["start"] = given.start and str(given.start.resolve())
    files["layer_ids"] = given.speculative_aux_layer_convention
    note_run(folder, {name: getattr(given, name) for name in RUN_SETTINGS} | files | facts)


def _precision(given: argparse.Namespace) -> Precision:
    return Precision(dtype=given.dtype, remat=given.remat)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
