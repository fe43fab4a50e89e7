"""Startup report on the terminal: the memory plan, and notes and warnings on steps and outputs."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.drafts.aux_hidden_states import ambiguities
from shared.drafts.config_formats import read_raw_config
from shared.models.active_parameters import active_numbers
from shared.models.formats import fp8
from shared.models.parameters import parameters
from shared.models.sampling import unapplied
from shared.options.options import Options
from shared.process import logs
from shared.process.memory_plan import MemoryPlan
from shared.process.opened_models import OpenedDraft
from shared.process.start import ValidatedStartup

READ_PER_S = 4.2e12
"""Memory bandwidth of an H200 in bytes per second, and the time in seconds that an all-gather
adds to a layer, measured on two H200s."""
GATHERED_S = 22e-6


def start_notes(start: ValidatedStartup) -> Iterator[str]:
    """Yields warnings on fallbacks, dummy weights and simulated acceptance, and notes on
    defaults.
    """
    memory, target = start.memory, start.opened.target
    for each in start.fallback_ops:
        yield (
            f"warning: {each.name} falls back to the reference implementation in "
            f"{each.programs} programs: its kernel requires {each.reason}"
        )
    if named := str(start.defaults):
        yield f"sampling defaults from generation_config.json: {named}"
    options = memory.settled.options
    others = unapplied(target.folder.generation_config)
    if others and options.server.sampling_defaults == "model":
        yield f"generation_config.json also sets {', '.join(others)}, which is not applied"
    if options.model.is_dummy:
        yield "warning: dummy weights (--load-format dummy); outputs are meaningless"
    if memory.blueprint.config.tied != target.stated_config.tied:
        yield (
            "lm_head.weight differs from the embedding and is used, although config.json "
            "has tie_word_embeddings: true"
        )
    yield from options.reasons
    if options.model.chat_template is not None:
        yield f"chat template: {options.model.chat_template}"
    yield from kv_scale_notes(start)
    yield from tokenizer_notes(target.folder.path)
    yield from head_notes(options, start.opened.draft)
    yield from rank_notes(memory)
    if start.adapter_files is not None:
        yield from start.adapter_files.notes
    simulated = options.speculative.speculative_simulate_accept_length
    if simulated is not None:
        yield (
            "warning: acceptance is simulated (--speculative-simulate-accept-length "
            f"{simulated}); outputs are meaningless"
        )


def kv_scale_notes(start: ValidatedStartup) -> Iterator[str]:
    """Yields a note if the checkpoint has scales of an FP8 KV cache."""
    if any(name.endswith(fp8.OF_KV) for name in start.opened.checkpoint.names):
        yield (
            "the scales of an FP8 KV cache in the checkpoint are ignored: "
            f"the KV cache is {start.memory.settled.dtype}"
        )


def tokenizer_notes(folder: Path) -> Iterator[str]:
    """Yields a warning if the model folder has a tokenizer that cannot be read."""
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        yield (
            "warning: the model folder has tokenizer.model and no tokenizer.json: prompts"
            " and outputs are token ids only"
        )


def head_notes(options: Options, draft: OpenedDraft | None) -> Iterator[str]:
    """Yields a note for each ambiguity in a draft head's config.json that no flag resolves."""
    speculative = options.speculative
    is_resolved = speculative.speculative_aux_layer_convention is not None
    if draft is not None and not speculative.drafts_with_a_model and not is_resolved:
        yield from ambiguities(read_raw_config(draft.folder.config))


def rank_notes(memory: MemoryPlan) -> Iterator[str]:
    """Yields a note if several GPUs are not faster than one, because a layer has few weights."""
    config, count = memory.blueprint.config, memory.blueprint.ranks.count
    if count == 1 or not memory.blueprint.on_gpu:
        return
    wanted = parameters(config, False)
    share = active_numbers(wanted, config, config.tied) / sum(prod(p.shape) for p in wanted)
    (weights,) = (line.num_bytes for line in memory.lines if line.name == "weights")
    layer = share * weights * count / config.num_layers
    if layer * (1 - 1 / count) / READ_PER_S < GATHERED_S:
        yield (
            f"one request decodes about as fast on {count} GPUs as on one: each layer "
            f"reads only {layer / 1e6:.0f} MB of weights; more GPUs add memory and "
            "throughput"
        )


def report_plan(console: Console, memory: MemoryPlan) -> None:
    """Logs what the model runs on and prints the memory plan, which a JSON line has as fields."""
    capacity, count = memory.capacity, memory.blueprint.ranks.count
    is_json = memory.settled.options.observing.log_format == "json"
    plan = {line.name: line.num_bytes for line in memory.lines}
    logs.report(
        f"{memory.settled.dtype} on {memory.device.name}: context length "
        f"{capacity.context_length}, at most {capacity.num_slots - 1} running requests of "
        f"at most {memory.max_request_tokens} tokens",
        dtype=memory.settled.dtype,
        device=memory.device.name,
        ranks=count,
        memory_plan_bytes=plan,
        total_bytes=memory.total_bytes,
        free_bytes=memory.device.free_bytes,
    )
    if is_json:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("memory plan" if count == 1 else f"memory plan per rank ({count} ranks)")
    table.add_column("")
    table.add_column("bytes", justify="right")
    for line in memory.lines:
        table.add_row(line.name, line.detail, f"{line.num_bytes:,}")
    free = f"of {memory.device.free_bytes:,} free"
    table.add_row("total", free, f"{memory.total_bytes:,}")
    console.print(table)
