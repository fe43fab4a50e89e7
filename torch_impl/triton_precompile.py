"""The kernels of all steps, compiled side by side before one first runs.

Triton compiles a kernel at its first launch, one after the other. A pass over the steps that
launches none tells it of all: its memory is zeros, so that what no kernel has written names things
that exist, and they are steps of padding, whose results nobody reads. What has not been compiled on
this machine before is compiled by other processes, as much of a compile holds Python's lock, and
read from Triton's cache when it is first launched. Ranks that start together want the same kernels:
each is compiled by one of them, while the others go on with the next.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared import children

_MOST_COMPILERS = 32
"""Processes that compile, at most; fewer where there are fewer cores for each rank."""
_DONE = "compiled"
"""Of Triton's cache: a kernel that was compiled before has a file of this name."""
_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
)


class _Zeros(TorchDispatchMode):
    """New memory is zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


def compile_kernels(steps: Callable[[], object], ranks: int = 1) -> None:
    """Compiles every kernel that steps of padding launch, and launches none.

    Args:
      ranks: How many start together and share the cores.

    Raises:
      RuntimeError: A kernel cannot be compiled.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    before = knobs.runtime.jit_cache_hook
    with ExitStack() as stack:
        compilers = stack.enter_context(_Compilers(ranks))
        stack.callback(setattr, knobs.runtime, "jit_cache_hook", before)
        stack.callback(setattr, JITFunction, "run", launch)
        knobs.runtime.jit_cache_hook = compilers.ask
        JITFunction.run = compile_only
        with _Zeros():
            steps()


class _CompileRequest(NamedTuple):
    """A kernel that was not compiled before.

    Attributes:
      kept: Its place in Triton's cache.
      line: What is told of it.
      is_ours: Whether it is compiled now; not where another rank was at it.
    """

    kept: Any
    line: str
    is_ours: Future[bool]


class _Compilers:
    """Processes that compile, each as soon as there is something for it to do."""

    def __init__(self, ranks: int) -> None:
        cores = len(os.sched_getaffinity(0)) // ranks
        self._threads = ThreadPoolExecutor(min(max(cores, 1), _MOST_COMPILERS))
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen] = []
        self._asked: dict[str, _CompileRequest | None] = {}

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits for all; where anything has failed, what has not begun is left."""
        try:
            if error is None:
                self._finish()
        finally:
            self._threads.shutdown(cancel_futures=True)
            for process in self._processes:
                process.communicate()

    def _finish(self) -> None:
        """Waits for all kernels, and for those of other ranks when nothing else is left to do."""
        theirs = [x for x in self._asked.values() if x is not None and not x.is_ours.result()]
        for waits in [self._threads.submit(self._compile, x.kept, x.line, True) for x in theirs]:
            waits.result()

    def ask(self, *, fn: Any, compile: Any, **_: object) -> bool:
        """Stands where Triton would compile a kernel, or read it from its cache; True: neither."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        job = {"module": fn.module, "name": fn.name, "target": vars(target)}
        specialization = json.loads(compile["specialization_data"])
        specialization["signature"] = _encoded(compile["signature"])
        values = zip(compile["constants"].values(), specialization["constant_vals"], strict=True)
        specialization["constant_vals"] = [
            _encoded_constant(value, plain) for value, plain in values
        ]
        line = json.dumps(job | {"data": specialization})
        if line not in self._asked:
            kept = kept_of(fn.jit_function, line)
            asked = None
            if not kept.has_file(_DONE):
                asked = _CompileRequest(
                    kept, line, self._threads.submit(self._compile, kept, line, False)
                )
            self._asked[line] = asked
        return self._asked[line] is not None

    def _compile(self, kept: Any, line: str, waits: bool) -> bool:
        """Whether a kernel is compiled now; unless it waits, another rank may still be at it."""
        with _alone(kept, waits) as is_alone:
            if is_alone and not kept.has_file(_DONE):
                self._tell(line)
        return is_alone

    def _tell(self, line: str) -> None:
        """Has the process of this thread compile a kernel."""
        process = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = subprocess.Popen(
                children.command("torch_impl.triton_precompile"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=children.environment(),
            )
            self._processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"what compiles kernels has ended with code {process.wait()}")
        if error := json.loads(answer):
            raise RuntimeError(f"{json.loads(line)['name']} cannot be compiled: {error}")


def kept_of(function: Any, line: str) -> Any:
    """Where Triton's cache says whether a kernel was compiled before."""
    from triton.runtime.cache import get_cache_manager

    _name(function)
    return get_cache_manager(sha256(f"{function.cache_key} {line}".encode()).hexdigest())


def _name(function: Any) -> None:
    """Has Triton name a kernel in its cache, after all that it calls.

    A name holds the constants of what was named before: in another order it would be another one.
    """
    from triton.runtime.jit import JITFunction

    if function.hash is None:
        for name in function.fn.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, JITFunction) and called is not function:
                _name(called)
    _ = function.cache_key


def compile_line(line: str) -> None:
    """Compiles what `_Compilers.ask` was told of into Triton's cache."""
    job = json.loads(line)
    function = getattr(import_module(job["module"]), job["name"])
    _compile_into(kept_of(function, line), function, job)


@contextmanager
def _alone(kept: Any, waits: bool) -> Iterator[bool]:
    """Whether within it no other process compiles the kernel; one that dies holds nobody up.

    Args:
      waits: Until it is so.
    """
    is_alone = True
    with open(os.path.join(kept.cache_dir, "compiling"), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError:  # of a file system that locks nothing: it is compiled twice
            pass
        yield is_alone


def _compile_into(kept: Any, function: Any, job: dict[str, Any]) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource

    specialization = job["data"]

    def constant(value: Any) -> Any:
        if isinstance(value, dict) and "constexpr" in value:
            return tl.constexpr(_decoded(value["constexpr"]))
        return tl.dtype(value) if tl.dtype.is_dtype(value) else _decoded(value)

    language = GluonASTSource if function.is_gluon() else ASTSource
    source = language(
        function,
        _decoded(specialization["signature"]),
        dict(
            zip(
                _decoded(specialization["constant_keys"]),
                map(constant, specialization["constant_vals"]),
                strict=True,
            )
        ),
        dict(
            zip(_decoded(specialization["attrs_keys"]), specialization["attrs_vals"], strict=True)
        ),
    )
    target = GPUTarget(**job["target"])
    options = {name: _decoded(value) for name, value in specialization["options"].items()}
    options = make_backend(target).parse_options(options)
    triton.compile(source, target=target, options=vars(options))
    kept.put("", _DONE, binary=False)


def _encoded_constant(value: Any, plain: Any) -> Any:
    """A constant as Triton tells it, but that its named tuples keep their names."""
    if type(value).__name__ == "constexpr":
        return {"constexpr": _encoded(value.value)}
    return _encoded(value) if isinstance(value, tuple) else plain


def _encoded(value: Any) -> Any:
    """A value for JSON, which has lists only and no names: a named tuple says what it is."""
    if isinstance(value, dict):
        return {name: _encoded(x) for name, x in value.items()}
    if not isinstance(value, tuple | list):
        return value
    values = [_encoded(x) for x in value]
    kind = type(value)
    return (
        {"record": [kind.__module__, kind.__name__, values]} if hasattr(kind, "_fields") else values
    )


def _decoded(value: Any) -> Any:
    """What was encoded; what a kernel is given are tuples, never lists."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if isinstance(value, dict) and "record" in value:
        module, name, values = value["record"]
        return getattr(import_module(module), name)(*map(_decoded, values))
    return {k: _decoded(x) for k, x in value.items()} if isinstance(value, dict) else value


def root_cause(error: BaseException) -> str:
    """What went wrong first: Triton tells of every function that it was in."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Compiles a kernel a line, and answers each with what is wrong, or null."""
    for line in sys.stdin:
        try:
            compile_line(line.rstrip("\n"))
            error = None
        except Exception as failure:  # whatever a compiler raises is the answer
            error = root_cause(failure)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
