"""Measurement settings of the drafter benches, and their command-line options."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.draft_config import WITH_FOLDER, Draft, folders_beside, named_folder
from models.demo.data import KINDS

FRAMEWORKS = ("torch", "jax")
MAX_TOKENS = 384  # more than twice the longest answer of the data


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement.

    Attributes:
      folders: Of the drafters that have files of their own, by algorithm.
      batch: Requests at once; None: 8 on a CPU, 64 on a GPU.
      repeat: Runs of each line, of which the fastest counts; a drafter that remembers texts runs
        once.
    """

    model: Path
    backends: list[str]
    drafts: list[Draft]
    folders: dict[str, Path]
    kinds: list[str]
    temperatures: list[float]
    count: int
    seed: int
    batch: int | None
    repeat: int
    max_tokens: int
    dtype: str
    device: str | None


def add_options(parser: argparse.ArgumentParser, drafts: Sequence[str], count: int) -> None:
    """The options of both commands; see `settings_of`."""
    parser.add_argument("--model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--backend", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="required device; an error on another one"
    )
    parser.add_argument(
        "--drafts",
        nargs="+",
        default=list(drafts),
        metavar="SPEC",
        help="none, or ALGORITHM:NAME=VALUE,... with S, k, N, a setting of "
        "bench/common/draft_config.py, or any flag of the server as NAME",
    )
    parser.add_argument(
        "--folders",
        nargs="*",
        default=[],
        metavar="ALGORITHM=DIR",
        help=f"folders of drafters (default: beside the model: {', '.join(WITH_FOLDER)})",
    )
    parser.add_argument(
        "--kinds", default="problems,copying", help=f"kinds of tasks, of {', '.join(KINDS)}"
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=count, help="tasks of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    parser.add_argument("--batch", type=int, help="requests at once (default: 8, on a GPU 64)")
    parser.add_argument("--repeat", type=int, default=1, help="number of runs; the fastest counts")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")


def settings_of(args: argparse.Namespace) -> Settings:
    """Returns the settings of parsed options.

    Raises:
      ValueError: One of them is wrong; one sentence.
    """
    if args.model is None:
        raise ValueError("--model is needed")
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"--kinds {','.join(unknown)} is not one of {', '.join(KINDS)}")
    return Settings(
        model=args.model,
        backends=args.backend,
        drafts=[Draft.parse(text) for text in args.drafts],
        folders=folders_beside(args.model) | dict(map(named_folder, args.folders)),
        kinds=kinds,
        temperatures=args.temperature,
        count=args.count,
        seed=args.seed,
        batch=args.batch,
        repeat=args.repeat,
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        device=args.device,
    )
