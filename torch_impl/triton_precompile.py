"""Parallel compilation of the Triton kernels of all steps before the first launch.

Triton compiles each kernel at its first launch, sequentially. Here a pass over padded steps records
all kernels and launches none. New memory is zeroed in this pass, so that indices that no kernel has
written are valid. Kernels that are missing in Triton's cache are compiled in other processes,
because compilation mostly holds the GIL. The first launch reads them from the cache. Ranks that
start together need the same kernels: one rank compiles each kernel, and the others continue with
the next.
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
"""Maximum number of compiler processes; at most one per core of a rank."""
_DONE = "compiled"
"""Name of the file in Triton's cache that marks a compiled kernel."""
_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
)


class _Zeros(TorchDispatchMode):
    """Dispatch mode that zeroes new memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


def compile_kernels(steps: Callable[[], object], ranks: int = 1) -> None:
    """Compiles all kernels of padded steps without launching them.

    Args:
      steps: Runs the steps.
      ranks: Number of ranks that start together and share the cores.

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
        knobs.runtime.jit_cache_hook = compilers.request
        JITFunction.run = compile_only
        with _Zeros():
            steps()


class _CompileRequest(NamedTuple):
    """Kernel that is missing in Triton's cache.

    Attributes:
      kept: Its entry in Triton's cache.
      line: Specialization of the kernel, as JSON.
      is_ours: Result is True after this rank compiled it, False if another rank was compiling it.
    """

    kept: Any
    line: str
    is_ours: Future[bool]


class _Compilers:
    """Pool of compiler processes, started on demand."""

    def __init__(self, ranks: int) -> None:
        cores = len(os.sched_getaffinity(0)) // ranks
        self._threads = ThreadPoolExecutor(min(max(cores, 1), _MOST_COMPILERS))
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen] = []
        self._requests: dict[str, _CompileRequest | None] = {}

    def __enter__(self) -> "_Compilers":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Waits for all kernels; after an error, cancels those that have not started."""
        try:
            if error is None:
                self._finish()
        finally:
            self._threads.shutdown(cancel_futures=True)
            for process in self._processes:
                process.communicate()

    def _finish(self) -> None:
        """Waits for this rank's kernels, then for the kernels that other ranks compile."""
        theirs = [x for x in self._requests.values() if x is not None and not x.is_ours.result()]
        for waits in [self._threads.submit(self._compile, x.kept, x.line, True) for x in theirs]:
            waits.result()

    def request(self, *, fn: Any, compile: Any, **_: object) -> bool:
        """Triton's hook before it compiles or loads a kernel; requests a missing kernel.

        Returns:
          True if Triton must neither compile nor load the kernel.
        """
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
        if line not in self._requests:
            kept = kept_of(fn.jit_function, line)
            request = None
            if not kept.has_file(_DONE):
                request = _CompileRequest(
                    kept, line, self._threads.submit(self._compile, kept, line, False)
                )
            self._requests[line] = request
        return self._requests[line] is not None

    def _compile(self, kept: Any, line: str, waits: bool) -> bool:
        """Compiles a kernel; returns False if another rank is compiling it and `waits` is False."""
        with _locked(kept, waits) as is_locked:
            if is_locked and not kept.has_file(_DONE):
                self._send(line)
        return is_locked

    def _send(self, line: str) -> None:
        """Sends a kernel to the compiler process of this thread, and waits for it."""
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
            raise RuntimeError(
                f"the kernel compiler process ended with code {process.wait()}; see its output "
                "above"
            )
        if error := json.loads(answer):
            raise RuntimeError(f"{json.loads(line)['name']} cannot be compiled: {error}")


def kept_of(function: Any, line: str) -> Any:
    """Returns the entry of a kernel in Triton's cache."""
    from triton.runtime.cache import get_cache_manager

    _name(function)
    return get_cache_manager(sha256(f"{function.cache_key} {line}".encode()).hexdigest())


def _name(function: Any) -> None:
    """Computes Triton's cache key of a kernel, after the keys of the functions that it calls.

    A key depends on the constants of previously hashed functions, so it depends on the order.
    """
    from triton.runtime.jit import JITFunction

    if function.hash is None:
        for name in function.fn.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, JITFunction) and called is not function:
                _name(called)
    _ = function.cache_key


def compile_line(line: str) -> None:
    """Compiles a kernel that `_Compilers.request` has recorded into Triton's cache."""
    job = json.loads(line)
    function = getattr(import_module(job["module"]), job["name"])
    _compile_into(kept_of(function, line), function, job)


@contextmanager
def _locked(kept: Any, waits: bool) -> Iterator[bool]:
    """Locks a kernel against compilation by other processes; the lock of a dead process is free.

    Args:
      kept: The kernel's entry in Triton's cache.
      waits: Wait for the lock.

    Yields:
      False if another process has the lock.
    """
    is_locked = True
    with open(os.path.join(kept.cache_dir, "compiling"), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = False
        except OSError:  # file system without locks: the kernel is compiled twice
            pass
        yield is_locked


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
    """Encodes a constant of Triton's specialization, with the types of named tuples."""
    if type(value).__name__ == "constexpr":
        return {"constexpr": _encoded(value.value)}
    return _encoded(value) if isinstance(value, tuple) else plain


def _encoded(value: Any) -> Any:
    """Encodes a value for JSON; a named tuple becomes a record with its type."""
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
    """Decodes a value; lists become tuples, because kernels take no lists."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if isinstance(value, dict) and "record" in value:
        module, name, values = value["record"]
        return getattr(import_module(module), name)(*map(_decoded, values))
    return {k: _decoded(x) for k, x in value.items()} if isinstance(value, dict) else value


def root_cause(error: BaseException) -> str:
    """Returns the first error of a chain; Triton raises one per function of its call stack."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Compiles one kernel per line of stdin, and prints its error or null."""
    for line in sys.stdin:
        try:
            compile_line(line.rstrip("\n"))
            error = None
        except Exception as failure:  # any error of the compiler is sent back
            error = root_cause(failure)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
