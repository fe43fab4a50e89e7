"""Startup of a server with checked flags: checkpoint, memory plan, weights, engine, HTTP."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from shared.boundary.backend import Backend
from shared.boundary.kernel_coverage import fallback_gauges
from shared.engine.engine import Engine
from shared.engine.request_limits import request_limits
from shared.options.options import Options
from shared.process import gc_freeze, logs, loop
from shared.process.adapter_loads import AdapterHandler
from shared.process.address import Listeners, admin_host, host_names
from shared.process.disaggregation.kv_transfers import (
    KVTransfers,
    open_record_listeners,
    transfer_notes,
)
from shared.process.engines import make_engine, with_shadow_verify
from shared.process.ipc_messages import ServerInfo
from shared.process.kv_transfer_plan import fingerprint_of
from shared.process.model_files import local_models
from shared.process.model_places import ModelPlace
from shared.process.progress import console_of, loading_progress, preparing_progress
from shared.process.start import Platform, ValidatedStartup
from shared.process.startup_report import report_plan, start_notes
from shared.process.tp.startup import TPStartup, tp_startup
from shared.process.tp.workers import RankError
from shared.process.watchdog import EXIT_FAILED, Watchdog, WatchedBackend
from shared.process.weight_files_digest import weight_files_digest


def start_serving(
    options: Options,
    places: Mapping[str, ModelPlace],
    listeners: Listeners,
    platform: Callable[[], Platform],
    rank_module: str | None,
) -> Callable[[], int]:
    """Starts the engine.

    Args:
      options: Options of the command line.
      places: Locations of its models.
      listeners: Sockets of the server.
      platform, rank_module: See `shared.process.launch.launch`.

    Returns:
      A function that serves until the server is stopped, and returns the exit code. With
      `--compile-only` it only frees the device.

    Raises:
      ValueError: A flag or a file is invalid, or the device does not support it.
    """
    console = console_of(options.observing)
    watchdog = Watchdog(options.server.watchdog_timeout)
    records = open_record_listeners(options)
    options = local_models(options, places, console)
    try:
        with tp_startup(options, platform, rank_module, watchdog.fail) as ranked:
            start = ranked.prepare()
            report_plan(console, start.memory)
            for note in (*ranked.notes, *start_notes(start), *transfer_notes(options, records)):
                logs.info(note)
            backend = ready(start, ranked, console)
            watchdog.ranks_progress = ranked.progress_report
            named = WatchedBackend(backend, watchdog)
            engine = make_engine(
                named, start.memory, transfer_fingerprint(start), start.read_adapters()
            )
            engine.metrics.show(ranked.gauges)
            if start.memory.blueprint.on_gpu:
                engine.metrics.show(fallback_gauges(start.fallback_ops))
            served = with_shadow_verify(engine, named, options.engine.shadow_verify_rate)
    except RankError as error:
        watchdog.claim_end()  # the thread that detected it reports it
        print(error, file=sys.stderr, flush=True)
        return lambda: EXIT_FAILED
    for note in engine.controller.notes:
        logs.info(note)
    if options.server.compile_only:
        return partial(_end_compiled, engine, watchdog)
    facts, drain_s = server_info(start, listeners), options.server.graceful_shutdown_timeout
    index = engine.controller.index
    transfers = None
    if engine.transfer is not None:
        chunk = start.memory.settled.prefill_chunk_size
        transfers = KVTransfers.of_options(options, records, served, engine.transfer, chunk)
    gc_freeze.freeze_gc()
    adapters = AdapterHandler(engine.adapters, start.adapter_reader)
    return partial(
        loop.run,
        served,
        facts,
        listeners,
        index,
        watchdog,
        drain_s,
        start.grammars,
        transfers,
        adapters,
    )


def _end_compiled(engine: Engine, watchdog: Watchdog) -> int:
    """Frees the device after all programs were compiled; returns the exit code."""
    watchdog.claim_end()
    engine.close()
    logs.info("All programs are compiled; later starts with the same flags load them")
    return 0


def transfer_fingerprint(start: ValidatedStartup) -> str:
    """Returns the fingerprint of KV transfer; empty for a server without it."""
    blueprint = start.memory.blueprint
    if blueprint.capacity.transfer is None:
        return ""
    return fingerprint_of(blueprint, weight_files_digest(start))


def ready(start: ValidatedStartup, ranked: TPStartup, console: Console) -> Backend:
    """Loads the weights and prepares all programs: nothing is compiled or captured later."""
    with loading_progress(console, start.num_bytes) as progress:
        backend = ranked.load(start, progress)
    programs = backend.capacity.programs
    with preparing_progress(console, len(programs)) as begin:
        backend.prepare(programs, begin)
    return backend


def server_info(start: ValidatedStartup, listeners: Listeners) -> ServerInfo:
    """Returns the properties of model and engine for the server process."""
    memory = start.memory
    options, capacity, model = memory.settled.options, memory.capacity, memory.blueprint.config
    server, folder = options.server, Path(options.model.model_path).resolve()
    queued = server.max_queued_requests
    return ServerInfo(
        model_name=server.served_model_name or folder.name,
        model_folder=str(folder),
        chat_template=options.model.chat_template,
        limits=request_limits(capacity, memory.max_request_tokens),
        eos_ids=model.eos_ids,
        sampling_defaults=start.defaults,
        max_open_requests=None if queued is None else capacity.num_slots - 1 + queued,
        max_draft_depth=capacity.max_depth,
        host_names=host_names(server, server.host, listeners.clients),
        admin_host_names=host_names(server, admin_host(server), listeners.admin),
        admin_api_key=server.admin_api_key,
        corpus_path=options.ngram.speculative_ngram_external_corpus_path,
        api_key=server.api_key,
        reasoning_parser=server.reasoning_parser,
        tool_call_parser=server.tool_call_parser,
        drafter=options.speculative.speculative_algorithm,
        trace_all_requests=server.trace_all_requests,
        store_responses=server.store_responses,
        strict_fields=server.strict_fields,
        allowed_origins=server.origins,
        observing=options.observing,
        ranks=memory.blueprint.ranks.count,
        images=capacity.images and capacity.images.processor,
        disaggregation_mode=options.disaggregation.disaggregation_mode,
        serves_kv_transfer=options.disaggregation.mode.serves,
        transfer_secret=options.disaggregation.secret(),
        adapters=options.lora.folders,
    )
