"""Starts random models, to check that every accepted size can be served.

    python -m bench.kernels.random_configs --language jax --count 200
    python -m bench.kernels.random_configs --language torch --count 200

Random are the fields of `bench.kernels.random_targets`, FP8, the drafter and the batch size. Each
model is started for an absent H200, as in `bench.kernels.aot` and `bench.kernels.aot_torch`, in
their environments. Programs of every kind are lowered, and with `--compile` each kernel is compiled
once. A seed gives the same models everywhere. The exit code is 1 if a model does not start.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from bench.common.environment import write_results
from bench.kernels.aot import add_bounds
from bench.kernels.items import Found, Item
from bench.kernels.random_targets import DENSE, FAMILIES, WITH_MTP, Draws, Json, attention, target
from bench.kernels.starts import Start
from bench.kernels.workers import Done, shared_out
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare

SEED, COUNT = 59, 200


def drawn(seed: int, number: int) -> tuple[Json, Json | None, str, tuple[str, ...]]:
    """A model's config.json, its draft head's, what drafts, and more flags of the server."""
    draws = Draws(seed, number)
    family = draws.of(*FAMILIES)
    is_fp8 = draws.is_one_of(4)
    unit = 128 if is_fp8 else draws.of(16, 32, 64)
    config = target(draws, family, is_fp8, unit)
    flags = ("--max-running-requests", str(draws.of(1, 3, 8, 24)))
    flags += ("--context-length", str(draws.of(256, 1024)), "--chunked-prefill-size", "512")
    kinds = ["none", "none", "NGRAM", "EAGLE3", "EAGLE", "DFLASH", "DSPARK", "STANDALONE"]
    drafts = draws.of(*kinds, *(["NEXTN", "NEXTN"] if family in WITH_MTP else []))
    head = None
    if drafts == "STANDALONE":
        head = target(draws, draws.of(*DENSE), False, 16) | {"vocab_size": config["vocab_size"]}
    elif drafts not in ("none", "NGRAM", "NEXTN"):
        head = _head(draws, config, drafts)
    if drafts in ("EAGLE3", "EAGLE", "NEXTN") and draws.is_one_of(2):
        drafts += ":S=3,k=4,N=8"
    if is_fp8 and family in DENSE and draws.is_one_of(2):
        flags += ("--fp8-activations",)
    return config, head, drafts, flags


def _head(draws: Draws, target: Json, drafts: str) -> Json:
    vocab, layers = target["vocab_size"], target["num_hidden_layers"]
    head: Json = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target["hidden_size"],
        "intermediate_size": draws.multiple(16, 2048),
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        **attention(draws),
    }
    if drafts == "EAGLE":
        return head | {"architectures": ["LlamaForCausalLMEagle"]}
    if drafts == "EAGLE3":
        streams = {"eagle_aux_hidden_state_layer_ids": [0, 1, layers - 1]}
        own = draws.of(vocab, max(64, vocab // 2), max(64, vocab // 3))
        return head | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": min(vocab, own),
            "eagle_config": streams,
        }
    read = {"mask_token_id": vocab - 1, "target_layer_ids": [0, layers - 1]}
    block = {"model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": layers}
    block |= {"block_size": draws.of(4, 5, 8, 16), "rope_theta": 10000.0}
    if drafts == "DFLASH":
        return head | block | {"architectures": ["DFlashDraftModel"], "dflash_config": read}
    rank = {"markov_rank": draws.of(16, 64, 256), "markov_head_type": "vanilla"}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    spark = {"architectures": ["DSparkDraftModel"], "dflash_config": read}
    return head | block | spark | rank | confidence


def random_starts(count: int, seed: int, folder: Path, language: str) -> Iterator[Start]:
    """Yields the first `count` random models that can be served, with their files in a folder."""
    number = found = 0
    while found < count:
        config, head, drafts, flags = drawn(seed, number)
        number += 1
        model = _written(folder / f"random_{number}", config)
        beside = None if head is None else _written(folder / f"random_{number}_head", head)
        start = Start(model, drafts, 1, flags, beside)
        try:
            _prepared(start, folder, language)
        except ValueError as error:
            print(f"{model.name} is not served: {error}", flush=True)
            continue
        yield start
        found += 1


def _prepared(start: Start, folder: Path, language: str) -> None:
    """Runs the startup checks of a server, before memory is allocated."""
    device = Device("gpu", "NVIDIA H200", 110 * 2**30)
    theirs = import_module(f"{language}_impl.platform").PLATFORM
    absent = replace(theirs, find_device=lambda: device, take_devices=lambda count: None)
    prepare(parse(start.all_flags(folder)), absent)


def _written(folder: Path, config: Json) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def results(options: argparse.Namespace, starts: Sequence[Start], scratch: Path) -> Iterator[Done]:
    """Yields the result of each start as it ends."""
    items = [Item("start", str(start), start, scratch) for start in starts]
    if options.language == "jax":
        examined = import_module("bench.kernels.aot_items").examined
        work = partial(examined, compiles=options.compile, is_brief=options.brief)
    else:
        work = partial(import_module("bench.kernels.aot_torch").found_of, is_whole=options.compile)
        work = partial(work, is_brief=options.brief)
    return shared_out(work, items, options.jobs, options.limit_s)


def main() -> int:
    """Prints what does not start; the exit code is 1 where anything does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--language", choices=("jax", "torch"), required=True)
    parser.add_argument("--count", type=int, default=COUNT, help="number of models")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--compile", action="store_true", help="compile each kernel once")
    parser.add_argument("--brief", action="store_true", help="only the programs of the most rows")
    parser.add_argument("--out", type=Path, help="JSON file")
    add_bounds(parser)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    began, faults, programs, calls, ended = time.monotonic(), list[str](), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        starts = list(random_starts(options.count, options.seed, Path(folder), options.language))
        for number, done in enumerate(results(options, starts, Path(folder)), 1):
            found = done.value or Found(faults=(f"{done.item.name}: {done.error}",))
            programs, calls = programs + found.programs, calls + found.calls
            ended += not found.faults
            faults += found.faults
            print(f"{number}/{options.count} {done.item.name}, {done.seconds:.1f} s", flush=True)
            for fault in found.faults:
                print(f"FAULT: {fault}\n  {_config_of(done.item.what)}", flush=True)
    result = {
        "command": " ".join(["python -m bench.kernels.random_configs", *sys.argv[1:]]),
        "language": options.language,
        "versions": _versions(options.language),
        "models": options.count,
        "started": ended,
        "programs": programs,
        "kernels_compiled": calls,
        "seconds": round(time.monotonic() - began),
        "jobs": options.jobs,
        "faults": faults,
    }
    if options.out:
        write_results(options.out, result)
    print(
        f"{ended} of {options.count} models start in {options.language}: {programs} programs, "
        f"{calls} kernels compiled, {result['seconds']} s"
    )
    return int(bool(faults))


def _versions(language: str) -> dict[str, str]:
    names = ("jax",) if language == "jax" else ("torch", "triton")
    found = {name: str(import_module(name).__version__) for name in names}
    return {"python": platform.python_version(), **found}


def _config_of(start: Start) -> str:
    folders = [folder for folder in (start.model, start.head) if folder is not None]
    return " ".join((folder / "config.json").read_text(encoding="utf-8") for folder in folders)


if __name__ == "__main__":
    sys.exit(main())
