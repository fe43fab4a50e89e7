"""Starts random models, to check that every accepted size can be served.

    python -m bench.kernels.random_configs --language jax --count 200
    python -m bench.kernels.random_configs --language torch --count 200

Random are the family, heads and their sizes, latents, widths, vocabularies, experts, GDN heads,
FP8, the drafter and the batch size. Each model is started for an absent H200, as in
`bench.kernels.aot` and `bench.kernels.aot_torch`, in their environments. Programs of every kind are
lowered, and with `--compile` each kernel is compiled once. A seed gives the same models everywhere.
The exit code is 1 if a model does not start.
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
from typing import Any

import numpy as np

from bench.common.environment import write_results
from bench.kernels.aot import add_bounds
from bench.kernels.items import Found, Item
from bench.kernels.starts import Start
from bench.kernels.workers import Done, shared_out
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare

SEED, COUNT = 59, 200
DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM")
MIXTURES = ("Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM")
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
LATENT = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
VOCABULARIES = (64, 257, 259, 1000, 2048, 4095, 4096, 4097, 8192, 32000, 50257, 151936)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 71)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
Json = dict[str, Any]


class Draws:
    """Random choices of a model."""

    def __init__(self, seed: int, number: int) -> None:
        self._rng = np.random.default_rng([seed, number])

    def of(self, *values: Any) -> Any:
        """Returns one of the values."""
        return values[self._rng.integers(len(values))]

    def is_one_of(self, count: int) -> bool:
        """Returns True with probability 1 / n."""
        return not self._rng.integers(count)

    def multiple(self, unit: int, most: int) -> int:
        """Returns a random multiple of a unit, up to a maximum."""
        return unit * int(self._rng.integers(1, most // unit + 1))


def drawn(seed: int, number: int) -> tuple[Json, Json | None, str, tuple[str, ...]]:
    """A model's config.json, its draft head's, what drafts, and more flags of the server."""
    draws = Draws(seed, number)
    family = draws.of(*DENSE, *DENSE, *MIXTURES, *HYBRIDS, *HYBRIDS, *LATENT)
    is_fp8 = draws.is_one_of(4)
    unit = 128 if is_fp8 else draws.of(16, 32, 64)
    config = _target(draws, family, is_fp8, unit)
    flags = ("--max-running-requests", str(draws.of(1, 3, 8, 24)))
    flags += ("--context-length", str(draws.of(256, 1024)), "--chunked-prefill-size", "512")
    kinds = ["none", "none", "NGRAM", "EAGLE3", "EAGLE", "DFLASH", "DSPARK", "STANDALONE"]
    drafts = draws.of(*kinds, *(["NEXTN", "NEXTN"] if family in (*HYBRIDS, *LATENT) else []))
    head = None
    if drafts == "STANDALONE":
        family = draws.of(*DENSE)
        head = _target(draws, family, False, 16) | {"vocab_size": config["vocab_size"]}
    elif drafts not in ("none", "NGRAM", "NEXTN"):
        head = _head(draws, config, drafts)
    if drafts in ("EAGLE3", "EAGLE", "NEXTN") and draws.is_one_of(2):
        drafts += ":S=3,k=4,N=8"
    if is_fp8 and family in DENSE and draws.is_one_of(2):
        flags += ("--fp8-activations",)
    return config, head, drafts, flags


def _attention(draws: Draws, most: int = 142) -> Json:
    size, kv_heads = draws.multiple(16, 256), draws.of(1, 1, 2, 2, 3, 4, 5, 8)
    group = draws.of(*GROUPS)
    while kv_heads * group > most:
        kv_heads, group = max(1, kv_heads // 2), max(1, group // 2)
    return {
        "head_dim": draws.of(size, 64, 128),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
    }


def _target(draws: Draws, family: str, is_fp8: bool, unit: int) -> Json:
    config: Json = {
        "architectures": [family],
        "hidden_size": draws.multiple(unit, 2048),
        "intermediate_size": draws.multiple(unit, 4096),
        "num_hidden_layers": 4 if family in HYBRIDS else 3,
        "vocab_size": draws.of(*VOCABULARIES),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": draws.is_one_of(2),
        "eos_token_id": 1,
        **_attention(draws),
    }
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if is_fp8:
        config["quantization_config"] = FP8 | {"activation_scheme": "dynamic"}
    if family in MIXTURES:
        experts = draws.of(2, 4, 6, 8, 12, 16, 40, 60, 128)
        width = draws.multiple(unit, 512)
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": min(experts, draws.of(1, 2, 3, 4, 6, 8)),
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }
        if family in HYBRIDS:
            config["shared_expert_intermediate_size"] = width
    if family in HYBRIDS:
        config["rope_parameters"]["partial_rotary_factor"] = draws.of(0.25, 0.5)
        key_heads = draws.of(1, 2, 3, 4, 8)
        config |= {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "attn_output_gate": True,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draws.of(1, 2, 3, 4),
            "linear_key_head_dim": draws.of(16, 32, 64, 128),
            "linear_value_head_dim": draws.of(16, 32, 64, 128),
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
        }
    return _latent(draws, config, unit) if family in LATENT else config


def _latent(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with latent attention and grouped experts."""
    groups, size = draws.of(1, 1, 2, 4), draws.of(2, 4, 8, 16)
    latent = {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": draws.of(None, draws.multiple(16, 1536)),
        "kv_lora_rank": draws.of(512, draws.multiple(16, 512)),
        "qk_nope_head_dim": draws.multiple(16, 192),
        "qk_rope_head_dim": draws.of(16, 32, 64),
        "v_head_dim": draws.multiple(16, 256),
        "first_k_dense_replace": 1,
        "n_routed_experts": groups * size,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(size, draws.of(1, 2, 4, 8)),
        "moe_intermediate_size": draws.multiple(unit, 512),
        "n_group": groups,
        "topk_group": draws.of(1, groups),
        "num_nextn_predict_layers": 1,
    }
    return {name: value for name, value in config.items() if name != "head_dim"} | latent


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
        **_attention(draws),
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
