"""The kernels of all steps, compiled side by side before one first runs.

Triton compiles a kernel at its first launch, one after the other. A pass over the steps that
launches none tells it of all: its memory is zeros, so that what no kernel has written names things
that exist, and they are steps of padding, whose results nobody reads. What has not been compiled on
this machine before is compiled by other processes, as much of a compile holds Python's lock, and
read from Triton's cache when it is first launched. Ranks that start together want the same kernels,
and each is compiled by one of them.
"""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_COMPILERS = 32
"""Processes that compile, at most; fewer where this one may use fewer cores."""
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


def compile_kernels(steps: Callable[[], object]) -> None:
    """Compiles every kernel that steps of padding launch, and launches none.

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
        compilers = stack.enter_context(_Compilers())
        stack.callback(setattr, knobs.runtime, "jit_cache_hook", before)
        stack.callback(setattr, JITFunction, "run", launch)
        knobs.runtime.jit_cache_hook = compilers.ask
        JITFunction.run = compile_only
        with _Zeros():
            steps()


class _Compilers:
    """Processes that compile, each as soon as there is something for it to do."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_COMPILERS))
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen] = []
        self._asked: dict[str, Future | None] = {}

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits for all; where the steps have failed, what has not begun is left."""
        self._threads.shutdown(cancel_futures=error is not None)
        for process in self._processes:
            process.communicate()
        if error is None:
            for future in filter(None, self._asked.values()):
                future.result()

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
            is_new = not kept.has_file(_DONE)
            self._asked[line] = self._threads.submit(self._compile, line) if is_new else None
        return self._asked[line] is not None

    def _compile(self, line: str) -> None:
        """Runs in a thread, which has a process of its own."""
        process = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = subprocess.Popen(
                [sys.executable, "-m", "torch_impl.compiling"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
    """Compiles what `_Compilers.ask` was told of into Triton's cache, unless others have by now."""
    job = json.loads(line)
    function = getattr(import_module(job["module"]), job["name"])
    kept = kept_of(function, line)
    with _alone(kept):
        if not kept.has_file(_DONE):
            _compile_into(kept, function, job)


@contextmanager
def _alone(kept: Any) -> Iterator[None]:
    """Within it no other process compiles the kernel; one that dies is waited for no longer."""
    with open(os.path.join(kept.cache_dir, "compiling"), "w", encoding="utf-8") as file:
        with suppress(OSError):  # of a file system that locks nothing: it is compiled twice
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


def told(error: BaseException) -> str:
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
            error = told(failure)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
