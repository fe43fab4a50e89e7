"""Compares the bits of all logits between torch and JAX.

    python -m bench.quality.logit_bits --model models/demo/target --dtype bfloat16 --count 100
    python -m bench.quality.logit_bits --model models/demo/target --families granite mistral
    python -m bench.quality.logit_bits --model models/demo/target --tp-size 2

The tasks of `bench.quality.accuracy` run one by one without drafts. Each row of logits gives a
32-bit checksum: the sum of its bit patterns as integers, each times an odd number that depends on
its place, so the order of additions does not matter. Checksums are compared while both backends
have the same tokens. The exit code is 1 if two differ. With `--families` random checkpoints replace
the model, with its tokenizer. With `--tp-size` each backend is also compared with itself on that
number of GPUs.
"""

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes

from bench.common.environment import write_results
from bench.quality.logit_recorder import FOLDER, Sums, left, noted, of_all
from models.demo.data import KINDS
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_dict, config_from_folder
from shared.models.saving import save_checkpoint
from shared.text.tokenizer import Tokenizer
from tests.support.in_process_engine import serve_all, start
from tests.support.op_sides import SIDES
from tests.support.tasks import Tasks
from tests.support.tiny_models import DENSE, EXPERTS, tiny_config, tiny_weights

CONTEXT, MOST_TOKENS = 1024, 256
WIDER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Sizes of random checkpoints: TMA copies blocks of 64 columns or more."""

WIDER_DELTAS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
"""Sizes of GDN layers: heads for eight ranks."""

WIDER_MAMBA2 = {"mamba_head_dim": 32, "mamba_d_ssm": 256}
"""Sizes of Mamba2 layers: kernels require heads of 16 columns or more."""

WIDER_EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "moe_latent_size": 128,
}
"""Sizes of MoE layers: kernels require widths of whole units, equal for shared and routed
experts.
"""

RANK = "bench.quality.recorded_rank"
"""Entry point of the other ranks' processes."""

FAMILIES = (*DENSE, *EXPERTS)
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_random(folder: Path, family: str, model: Path) -> None:
    """Writes a random checkpoint in bfloat16 with the vocabulary and the tokenizer of a model."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(model / name, folder / name)
    config = tiny_config(family, nested=False, with_mtp=False, tied=False) | WIDER
    of_some = WIDER_DELTAS | WIDER_MAMBA2 | WIDER_EXPERTS | {"hidden_size_per_layer_input": 64}
    config |= {name: size for name, size in of_some.items() if config.get(name)}
    theirs = config_from_folder(model)
    config |= {name: theirs.vocab for name in VOCABULARIES if name in config}
    config |= {"eos_token_id": list(theirs.eos_ids)}
    weights = tiny_weights(config_from_dict(config), seed=3)
    save_checkpoint(folder, config, {n: a.astype(ml_dtypes.bfloat16) for n, a in weights.items()})


def sums_of(
    backend: str, model: Path, options: argparse.Namespace, ranks: int = 1
) -> dict[str, list[tuple[list[int], Sums]]]:
    """The output of each task and the sum behind each of its tokens, by the tasks' kind."""
    words = ["--model-path", str(model), "--dtype", options.dtype, "--overlap-depth", "0"]
    words += ["--disable-cuda-graph"] if backend == "torch" else []
    words += [*options.flags.split(), "--tp-size", str(ranks)]
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None, f"{model} has no tokenizer"
    texts: dict[str, list[tuple[list[int], int]]] = {}
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(patch.dict(os.environ, {FOLDER: str(folder)}))
        read = stack.enter_context(noted(backend, ranks if backend == "jax" else 1))
        how = {"batch": 1, "context": CONTEXT, "radix_cache": False, "rank_module": RANK}
        served = start(backend, words, **how)
        for kind in options.kinds.split(","):
            for prompt in Tasks.of(kind, options.count, 0, tokenizer).prompts:
                before = len(read()[0])
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=MOST_TOKENS, stop_token_ids=served.eos_ids
                )
                request = Request(request_id=before, prompt=prompt, sampling=sampling)
                (outcome,) = serve_all(served.engine, [request])
                texts.setdefault(kind, []).append((outcome.tokens, before))
        served.engine.close()
        sums = of_all([*read(), *left(folder)])
    tokens = sum(len(text) for each in texts.values() for text, _ in each)
    print(
        f"{backend}, {ranks} rank(s): {tokens} tokens, {time.monotonic() - began:.0f} s", flush=True
    )
    return {
        kind: [(text, sums[before : before + len(text)]) for text, before in each]
        for kind, each in texts.items()
    }


def compared(ours: list[tuple[list[int], Sums]], theirs: list[tuple[list[int], Sums]]) -> Any:
    """Positions up to the first other token, and how many of them have other bits."""
    positions = differ = 0
    for (own, own_sums), (other, other_sums) in zip(ours, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(own, other)) if x != y), None)  # noqa: B905
        until = min(len(own), len(other)) if same is None else same + 1
        positions += until
        pairs = zip(own_sums[:until], other_sums[:until], strict=True)
        differ += sum(x != y for x, y in pairs)
    return {"positions": positions, "with_other_bits": differ}


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--kinds", default="problems,copying", help=f"kinds of tasks, of {', '.join(KINDS)}"
    )
    parser.add_argument("--count", type=int, default=100, help="tasks of each kind")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=[],
        metavar="NAME",
        help=f"random checkpoints instead, of {', '.join(FAMILIES)}",
    )
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs")
    parser.add_argument("--flags", default="", help="more server flags, as one quoted word")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(words)


def main() -> int:
    """Prints and writes what differs."""
    given = options()
    command = shlex.join(["python", "-m", "bench.quality.logit_bits", *sys.argv[1:]])
    report: dict[str, Any] = {"command": command, "versions": {}, "devices": {}, "kinds": {}}
    with tempfile.TemporaryDirectory() as folder:
        models = {"": given.model}
        if given.families:
            models = {f"{family}, ": Path(folder) / family for family in given.families}
        for family in given.families:
            (Path(folder) / family).mkdir()
            write_random(Path(folder) / family, family, given.model)
        for name, model in models.items():
            for kind, found in differing(model, given, report).items():
                report["kinds"][f"{name}{kind}"] = found
                counts = f"{found['with_other_bits']} of {found['positions']} have other bits"
                print(f"{name}{kind}: {counts}", flush=True)
    if given.out:
        write_results(given.out, report)
    return int(any(found["with_other_bits"] for found in report["kinds"].values()))


def differing(model: Path, options: argparse.Namespace, report: dict[str, Any]) -> dict[str, Any]:
    """Returns `compared` of each kind, and adds versions and devices to the report."""
    sums, found = {}, {}
    for backend, make in SIDES.items():
        side = make()
        report["versions"][backend], report["devices"][backend] = side.version, side.device
        sums[backend] = sums_of(backend, model, options)
        if options.tp_size > 1:
            parted = sums_of(backend, model, options, options.tp_size)
            for kind, ours in sums[backend].items():
                name = f"{kind}, {backend} on {options.tp_size} ranks and on one"
                found[name] = compared(ours, parted[kind])
        side.release()
    for kind, ours in sums["torch"].items():
        found[kind] = compared(ours, sums["jax"][kind])
    return found


if __name__ == "__main__":
    sys.exit(main())
