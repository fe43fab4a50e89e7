"""Time of one decode step through the whole engine, beside the time its bytes need.

    python -m bench.step_time --backend torch --device cuda --out bench/results/step_time_torch.json

Every case serves a full batch of random prompts on a random model and times decode steps after a
warm-up, host work included. On a GPU each case is also a check: captured graphs give the eager
tokens, nothing is compiled after the warm-up, and no step waits for the device.
"""

import argparse
import gc
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.models import SIZES, limits_for, random_weights, step_bytes
from shared.boundary.backend import Backend, Limits
from shared.drafts.drafts import Drafts
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape

PROMPT = 128
CONTEXT = 1536
WARM_UP = 20
STEPS = 200
COPY_BYTES_PER_SECOND = 4.3e12
"""What a large device-to-device copy reaches on an H200, bytes read and written."""


@dataclass(frozen=True)
class Case:
    """One line of the table; depth 0 is plain decoding."""

    model: str
    dtype: str
    depth: int
    batch: int


CASES = [
    Case(model, dtype, depth, batch)
    for model, dtype, depths in (
        ("tiny-hybrid", "float32", (0, 3)),
        ("qwen3-0.6b", "bfloat16", (0,)),
        ("qwen3.5-0.8b", "bfloat16", (0, 3)),
    )
    for depth in depths
    for batch in (1, 8)
]


def make_backend(
    framework: str,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    limits: Limits,
    case: Case,
    device: str,
    cuda_graphs: bool,
) -> Backend:
    """The backend of a case; only the framework that is measured is imported."""
    drafts = Drafts.of_mtp(config) if case.depth else Drafts.none()
    made_from = (config, weights, limits, drafts, None)
    if framework == "torch":
        from torch_impl.backend import TorchBackend

        how = {"dtype": case.dtype, "device": device, "cuda_graphs": cuda_graphs}
        backend = TorchBackend(*made_from, **how)
    else:
        from jax_impl.backend import JaxBackend

        platform = "gpu" if device == "cuda" else "cpu"
        how = {"dtype": case.dtype, "device": platform, "quick_compile": False}
        backend = JaxBackend(*made_from, **how)
    backend.prepare(limits.programs, lambda program: None)
    return backend


@contextmanager
def nothing_waits(framework: str, device: str) -> Iterator[None]:
    """Turns every hidden wait or transfer of a step into an error."""
    if framework == "jax":
        import jax

        with jax.transfer_guard("disallow"):
            yield
    elif device == "cuda":
        import torch

        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield


def requests(case: Case, vocab: int, temperature: float) -> list[Request]:
    """A full batch that lasts longer than the measurement."""
    rng = np.random.default_rng(1)
    sampling = {
        "temperature": temperature,
        "max_tokens": CONTEXT - PROMPT,
        "presence_penalty": 0.2 if temperature else 0.0,
    }
    return [
        Request(
            request_id=index,
            prompt=tuple(rng.integers(2, vocab, PROMPT).tolist()),
            sampling=SamplingParams(seed32=index, **sampling),
        )
        for index in range(case.batch)
    ]


@dataclass
class Run:
    """What a run of `STEPS` decode steps gave."""

    texts: list[list[int]]
    step_ms: float
    tokens_per_step: float
    compiles_after_warm_up: int


def serve(
    framework: str, backend: Backend, case: Case, device: str, temperature: float, overlap: int
) -> Run:
    """Prefills a batch, warms up, and times `STEPS` decode steps."""
    shape = TreeShape.chain(case.depth, case.batch)
    controller = StaticController(
        backend.limits, nodes=shape.nodes, depth=shape.depth, width=shape.width
    )
    chunk = backend.limits.token_sizes[-1]
    engine = Engine(backend, controller, overlap=overlap, chunked_prefill_size=chunk)
    batch = requests(case, backend.limits.vocab, temperature)
    for request in batch:
        engine.add(request)
    while not all(request.decodes for request in batch):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    compiled, num_tokens = backend.compiles, sum(len(r.output) for r in batch)
    began = time.perf_counter()
    with nothing_waits(framework, device):
        for _ in range(STEPS):
            engine.step()
    seconds = time.perf_counter() - began
    grown = sum(len(request.output) for request in batch) - num_tokens
    texts = [list(request.output) for request in batch]
    for request in batch:
        engine.abort(request.request_id)
    while engine.busy:
        engine.step()
    return Run(
        texts, 1e3 * seconds / STEPS, grown / STEPS / case.batch, backend.compiles - compiled
    )


def measure(framework: str, case: Case, device: str) -> dict:
    """One line of the table; raises AssertionError where a promise does not hold."""
    config = ModelConfig.from_dict(SIZES[case.model])
    weights = random_weights(config, bool(case.depth), case.dtype, seed=0)
    shape = TreeShape.chain(case.depth, case.batch)
    limits = limits_for(config, case.batch, CONTEXT, 64, 512, (shape,), overlap=2)
    graphs = framework == "torch" and device == "cuda"
    began = time.perf_counter()
    backend = make_backend(framework, config, weights, limits, case, device, graphs)
    run = serve(framework, backend, case, device, 0.0, overlap=1)
    sampled = serve(framework, backend, case, device, 0.8, overlap=1)
    line = asdict(case) | {
        "step_ms": round(run.step_ms, 3),
        "sampled_step_ms": round(sampled.step_ms, 3),
        "tokens_per_step": round(run.tokens_per_step, 3),
        "bytes_limit_ms": round(
            1e3
            * step_bytes(config, weights, case.batch, PROMPT + STEPS, case.depth)
            / COPY_BYTES_PER_SECOND,
            4,
        ),
        "compiles_after_warm_up": run.compiles_after_warm_up + sampled.compiles_after_warm_up,
        "seconds_with_start": round(time.perf_counter() - began, 1),
    }
    assert line["compiles_after_warm_up"] == 0, line
    if graphs:
        line |= {"captures": backend.captures, "replays": backend.replays}
        assert backend.captures == 1, line
        assert backend.replays >= STEPS, line
    backend.close()
    if graphs:
        del backend
        gc.collect()
        line |= _eager(framework, config, weights, limits, case, device, (run, sampled))
    return line


def _eager(framework, config, weights, limits, case, device, graph_runs) -> dict:
    """The same steps without graphs: the tokens must be the same."""
    backend = make_backend(framework, config, weights, limits, case, device, cuda_graphs=False)
    eager = [
        serve(framework, backend, case, device, temperature, overlap=1)
        for temperature in (0.0, 0.8)
    ]
    backend.close()
    for graph_run, eager_run in zip(graph_runs, eager, strict=True):
        assert graph_run.texts == eager_run.texts, f"graphs changed the text of {case}"
    return {"eager_step_ms": round(eager[0].step_ms, 3), "graph_text_is_eager_text": True}


def versions(framework: str, device: str) -> dict:
    """What ran where."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    if framework == "torch":
        import torch

        name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
        return found | {"torch": torch.__version__, "device": name}
    import jax

    return found | {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


def main() -> None:
    """Runs the cases and prints and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--ops", choices=("kernels", "plain"), help="kernels, where there is a GPU")
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ops = args.ops or ("kernels" if args.device == "cuda" else "plain")
    if ops == "kernels" and args.device != "cuda":
        parser.error("--ops kernels needs --device cuda")
    models = " ".join(args.models)
    asked = f"--backend {args.backend} --device {args.device} --ops {ops} --models {models}"
    found = {"command": f"python -m bench.step_time {asked}"}
    found |= versions(args.backend, args.device)
    package = import_module(f"{args.backend}_impl.ops")
    with package.plain() if ops == "plain" else nullcontext():
        found |= {"kernels": package.kernel_names(), "cases": []}
        for case in CASES:
            if case.model in args.models:
                found["cases"].append(measure(args.backend, case, args.device))
                print(json.dumps(found["cases"][-1]), flush=True)
                if args.out:  # after every case: a long run that is cut keeps what it has
                    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
