"""Distinct experts that a decode step of a mixture-of-experts model reads.

    python -m bench.steps.experts_read --model bench/shapes/qwen3.5-35b-a3b-fp8 \
        --batch 1 8 32 --drafts none NEXTN:S=3 --out bench/results/experts_read_MODEL.json

Tokens that share experts read fewer bytes than tokens that choose evenly, so a limit for even
choices can be too high. The router's choices of some decode steps are recorded in torch without
CUDA graphs, apart from all timed steps. They depend on model, prompts and drafts alone, since both
backends have equal bits. `bench.performance` uses the counted bytes in its limits.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from bench.common.draft_config import PLAIN, Draft
from bench.common.session import Load, Session
from bench.steps.decode_steps import begun, decode_options, with_lot
from bench.steps.report import Line, Report
from tests.support.op_sides import SIDES

STEPS = 8
"""Decode steps that are counted."""
ROUTERS = {
    "cpu": ("torch_impl.ops.moe.experts", "choose"),
    "gpu": ("kernels.triton_gpu.moe.experts", "route"),
}
"""Module and function that select the experts, by device: the operation and the kernel."""


@contextmanager
def recorded_choices(device: str, num_experts: int) -> Iterator[list[int]]:
    """Collects the number of distinct routed experts of each call of a router.

    Padding is -1, and the shared expert has the number after the routed ones.
    """
    found: list[int] = []

    def recording(router: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            chosen = router(*args, **kwargs)
            ids = chosen.ids
            is_routed = (ids >= 0) & (ids < num_experts)
            found.append(int(ids[is_routed].unique().numel()))
            return chosen

        return record

    name, function = ROUTERS[device]
    module = import_module(name)
    with patch.object(module, function, recording(getattr(module, function))):
        yield found


def count(session: Session, load: Load) -> Line:
    """Returns the experts that a step reads, and its bytes with them and with even choices.

    Raises:
      ValueError: The model has no experts.
    """
    sizes = session.served.memory.blueprint.config.experts
    if sizes is None:
        raise ValueError("the model has no experts; give a mixture-of-experts model")
    run = session.steps_of(load, STEPS)
    with recorded_choices(session.served.device, sizes.num_experts) as found:
        run()
    calls, rest = divmod(len(found), STEPS)
    assert not rest, f"{len(found)} calls of routers in {STEPS} steps"
    routed = sum(found) / STEPS
    return {
        "drafts": str(session.draft),
        "batch": load.batch,
        "prompt": load.prompt,
        "output": load.output,
        "router_calls": calls,
        "routed": routed,
        "bytes": session.bytes_of(load, routed),
        "even_bytes": session.bytes_of(load),
    }


def run(options: argparse.Namespace, command: str) -> Report:
    """Counts for each drafter and batch."""
    report = Report(command, options.out)
    side = SIDES["torch"]()
    report.add_side("torch")
    for text in options.drafts:
        draft = with_lot(Draft.parse(text), options.accept_length)
        for batch in options.batch:
            load = Load(
                batch=batch, prompt=options.input, output=options.output, temperature=0, top_p=1
            )
            report.add_count(started_count(draft, load, options))
            side.release()
    return report


def started_count(draft: Draft, load: Load, options: argparse.Namespace) -> Line:
    """Starts an engine, and returns its counts."""
    # Without overlap a step has ended when the next one is submitted.
    with begun("torch", draft, load, options, 0, 1, more=["--disable-cuda-graph"]) as session:
        return count(session, load)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = decode_options(__doc__)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--drafts", nargs="+", default=[PLAIN], metavar="SPEC")
    return parser


def main(argv: Sequence[str]) -> None:
    """Prints and writes the counts."""
    command = shlex.join(["python", "-m", "bench.steps.experts_read", *argv])
    run(options().parse_args(argv), command)


if __name__ == "__main__":
    main(sys.argv[1:])
