"""Counts the operations and kernels of step programs, to compare two revisions without a GPU.

    python -m bench.kernels.step_counts jax --out before.json
    python -m bench.kernels.step_counts torch --out before.json
    python -m bench.kernels.step_counts compare before.json after.json

Nothing that is written depends on names of functions, parameters, kernels or files, nor on source
locations. A change that renames or moves code leaves the file as it was.

- JAX (the environment of `make lowered`): StableHLO operations by name, kernel calls by target,
  primitives of the program and its kernels, and a digest of the traced program.
- torch: the sequence of ATen operations and kernel launches with shapes and dtypes, in which
  kernels are numbered by their first launch, and the operations of each newly compiled kernel.

Both files need the same `--only`, since a kernel is compiled for the first start that launches it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.kernels.starts import Start, one_of_each
from shared.boundary.program import Program, ProgramFeature

_OPERATION = re.compile(r"\"?\b((?:stablehlo|chlo|sdy)\.\w+)\"?[ (]")
_TARGET = re.compile(r"custom_call @([\w.$]+)|call_target_name = \"([^\"]+)\"")
_OF_KERNEL = re.compile(
    r"(?:= |^\s*)\"?((?:tt|ttg|ttng|arith|math|scf|gluon|nvvm)\.[\w.]+)\"?", re.M
)


STARTS = (
    *("demo/target", "demo/vlm", "random", "qwen3-8b, DSPARK", "qwen3-8b, DFLASH2"),
    *("qwen3-8b-fp8", "qwen3.5-35b-a3b-fp8"),
)
"""Texts of the starts that are compared: every drafter, image input, MoE and FP8."""


def selected(programs: Sequence[Program]) -> list[Program]:
    """The largest program of each kind of work, the smallest of decoding and one with logprobs."""
    kinds: dict[str, list[Program]] = {}
    for program in programs:
        kind = f"{program.work.name}{' with logprobs' * program.has(ProgramFeature.LOGPROBS)}"
        kinds.setdefault(kind, []).append(program)
    found = list[Program]()
    for kind, group in sorted(kinds.items()):
        ordered = sorted(group, key=lambda each: (each.shape.nodes, each.batch, each.tokens))
        if kind in ("COUNT", "PREFILL with logprobs"):
            continue
        found += ordered[:1] * (kind == "DECODE" and len(group) > 1) + ordered[-1:]
    return found


def stablehlo_counts(text: str) -> dict[str, dict[str, int]]:
    """Counts of operations by name, and of custom calls by target."""
    targets = (direct or named for direct, named in _TARGET.findall(text))
    return {
        "operations": dict(sorted(Counter(_OPERATION.findall(text)).items())),
        "targets": dict(sorted(Counter(targets).items())),
    }


class Trace:
    """Counts and digest of a traced program of JAX, with the kernels in it.

    Attributes:
      counts: Primitives by name.
    """

    def __init__(self, closed: Any) -> None:
        self.counts, self._numbers, self._hash = Counter[str](), dict[Any, int](), sha256()
        self._walk(closed)

    @property
    def digest(self) -> str:
        """Hash of primitives, shapes, dtypes, constants and data flow."""
        return self._hash.hexdigest()

    def _number(self, variable: Any) -> str:
        if hasattr(variable, "val"):
            return f"{variable.aval}={variable.val}"
        number = self._numbers.setdefault(variable, len(self._numbers))
        return f"{number}:{_type(variable.aval)}"

    def _walk(self, jaxpr: Any) -> None:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self._add("of", (*jaxpr.constvars, *jaxpr.invars))
        for equation in jaxpr.eqns:
            self.counts[equation.primitive.name] += 1
            self._add(equation.primitive.name, (*equation.invars, *equation.outvars))
            for name in sorted(equation.params):
                self._parameter(equation.params[name])
        self._add("return", jaxpr.outvars)

    def _add(self, name: str, variables: Sequence[Any]) -> None:
        self._hash.update(" ".join([name, *map(self._number, variables), "\n"]).encode())

    def _parameter(self, value: Any) -> None:
        """Follows inner programs, and hashes numbers."""
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            self._walk(value)
        elif isinstance(value, bool | int | float | None):
            self._hash.update(f"{value}\n".encode())
        elif isinstance(value, tuple | list):
            for each in value:
                self._parameter(each)
        elif hasattr(value, "block_mappings"):
            self._parameter(tuple(x for x in value.grid if isinstance(x, int)))
            for mapping in value.block_mappings:
                self._parameter(mapping.index_map_jaxpr)


def _type(aval: Any) -> str:
    """Dtype and shape; other types, as those of references, by what they refer to."""
    aval = getattr(aval, "inner_aval", aval)
    return f"{getattr(aval, 'dtype', '')}{getattr(aval, 'shape', '')}"


def jax_programs(starts: Sequence[Start], scratch: Path) -> Iterator[dict[str, Any]]:
    """Yields the counts of each program, lowered for an H200 by a jax without CUDA's packages."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    lowered, target = map(import_module, ("bench.kernels.lowered", "bench.kernels.aot_target"))
    gpu = lowered.described_gpu()
    with lowered.as_on_a_gpu():
        for start in starts:
            made = target.AbsentStart(gpu, start.all_flags(scratch))
            for program in selected(made.programs):
                trace = Trace(made.traced(program).jaxpr)
                yield {
                    "program": f"{start}, {program}",
                    **stablehlo_counts(made.lowered(program).as_text()),
                    "primitives": dict(sorted(trace.counts.items())),
                    "digest": trace.digest,
                }


@contextmanager
def _recorded(log: list[str], kernels: list[dict[str, int]]) -> Iterator[None]:
    """Within it ATen operations and launches go to `log`, compiled kernels to `kernels`."""
    modes, jit = import_module("torch.utils._python_dispatch"), import_module("triton.runtime.jit")
    compiler, torch = map(import_module, ("triton.compiler.compiler", "torch"))
    launch, numbers = jit.JITFunction.run, dict[int, int]()

    def described(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        return str(value) if isinstance(value, bool | int | float | torch.dtype | None) else "-"

    class Recorder(modes.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            outputs = made if isinstance(made, tuple | list) else (made,)
            shapes = " ".join(map(described, (*args, "to", *outputs)))
            log.append(f"{func} {shapes}")
            return made

    def run(kernel: Any, *args: Any, **how: Any) -> Any:
        number = numbers.setdefault(id(kernel), len(numbers))
        log.append(f"kernel {number} " + " ".join(map(described, args)))
        return launch(kernel, *args, **how)

    def make_ir(source: Any, *args: Any, **how: Any) -> Any:
        made = make[type(source)](source, *args, **how)
        kernels.append(dict(sorted(Counter(_OF_KERNEL.findall(str(made))).items())))
        return made

    sources = [
        compiler.ASTSource,
        import_module("triton.experimental.gluon._runtime").GluonASTSource,
    ]
    make = {source: source.make_ir for source in sources}
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit.JITFunction, "run", run))
        for source in sources:
            stack.enter_context(patch.object(source, "make_ir", make_ir))
        stack.enter_context(Recorder())
        yield


def torch_programs(starts: Sequence[Start], scratch: Path) -> Iterator[dict[str, Any]]:
    """Yields the sequence of each program of torch, on a GPU that runs nothing."""
    os.environ.pop("TRITON_INTERPRET", None)
    absent = import_module("bench.kernels.aot_cuda")
    with absent.absent_cuda(False):
        for start in starts:
            made = absent.AbsentStart(start.all_flags(scratch))
            for program in selected(made.programs):
                log, kernels = list[str](), list[dict[str, int]]()
                with _recorded(log, kernels):
                    made.step(program)
                operations = Counter(line.partition(" ")[0] for line in log)
                yield {
                    "program": f"{start}, {program}",
                    "operations": dict(sorted(operations.items())),
                    "new kernels": sorted(kernels, key=str),
                    "digest": sha256("\n".join(log).encode()).hexdigest(),
                    "sequence": log,
                }


SIDES = {"jax": jax_programs, "torch": torch_programs}


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each field that differs between programs of the same place."""
    if len(before) != len(after):
        yield f"{len(before)} programs before, {len(after)} after"
    for old, new in zip(before, after, strict=False):
        for name in old.keys() - {"program"}:
            if old[name] != new.get(name):
                yield f"{new['program']}: {name} differs: {_changed(old[name], new.get(name))}"


def _changed(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return ", ".join(
            f"{k} {old.get(k, 0)} -> {new.get(k, 0)}"
            for k in sorted(old.keys() | new.keys())
            if old.get(k) != new.get(k)
        )
    if isinstance(old, list) and isinstance(new, list):
        places = (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
        at = next(places, min(len(old), len(new)))
        return f"from entry {at}: {old[at : at + 1]} -> {new[at : at + 1]}"
    return f"{old} -> {new}"


def main() -> int:
    """Writes the counts, or prints differences; the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=(*SIDES, "compare"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="two, for compare")
    parser.add_argument("--out", type=Path, help="JSON file of the counts")
    parser.add_argument("--only", nargs="+", default=STARTS, help="text in the name of a start")
    options = parser.parse_args()
    if options.side == "compare":
        found = [*differences(*(json.loads(path.read_text()) for path in options.files))]
        print("\n".join(found) or "no difference")
        return int(bool(found))
    starts = [x for x in one_of_each() if any(part in str(x) for part in options.only)]
    programs, began = list[dict[str, Any]](), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for program in SIDES[options.side](starts, Path(scratch)):
            print(f"{time.monotonic() - began:6.0f} s  {program['program']}", flush=True)
            programs.append(program)
            if options.out:
                options.out.write_text(json.dumps(programs, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
