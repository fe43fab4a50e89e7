"""Program that creates and drops engines; `test_lifetimes.py` runs it and reads its output."""

import asyncio
import gc
import os
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from multiprocessing import get_context

from shared.offline.llm import LLM
from shared.offline.params import SamplingParams
from tests.support.serve_reference import PLATFORM

SHORT = SamplingParams(max_tokens=2, temperature=0)


backends = weakref.WeakSet()


def load(*given):
    """Loads a reference backend and records it in a weak set."""
    backends.add(backend := PLATFORM.load(*given))
    return backend


class ReferenceLLM(LLM):
    PLATFORM = replace(PLATFORM, load=load)
    RANK_MODULE = None


def made() -> ReferenceLLM:
    return ReferenceLLM(sys.argv[2], max_running_requests=1, context_length=32)


def left() -> str:
    return f"{threading.active_count()} threads, {len(backends)} backends"


def freed() -> None:
    """Creates, uses and drops four engines; prints remaining threads and backends after each."""
    warnings.simplefilter("always")
    for _ in range(4):
        llm = made()
        llm.generate([5, 6, 7], SHORT)
        print(left())
        del llm
        print(left())
    llm = made()
    stream = llm.stream([5, 6, 7], SHORT)
    del llm
    print(len(stream.result().outputs[0].token_ids), left())  # a stream keeps its engine
    del stream
    print(left())
    with made() as llm:
        llm.generate([5, 6, 7], SHORT)
    print(left())
    weakref.finalize(PLATFORM, lambda: print(left()))  # finalizers run in reverse order
    kept = made()
    parts = iter(kept.stream([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)))
    next(parts)
    globals().update(kept=kept, parts=parts)  # keeps both until the interpreter exits


def forked() -> None:
    """Calls every method in a forked process, prints its error, and exits normally."""
    llm = made()
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=9, temperature=0))
    parts = iter(stream)
    next(parts)

    async def read() -> None:
        async for _ in stream:
            pass

    calls = {
        "generate": lambda: llm.generate([5]),
        "chat": lambda: llm.chat([{"role": "user", "content": "a"}]),
        "stream": lambda: llm.stream([5]),
        "next": lambda: next(parts),
        "result": stream.result,
        "async": lambda: asyncio.run(read()),
        "close": llm.close,
    }
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                print(name, error)
        with llm:
            pass
        calls.clear()
        del llm, stream, parts
        gc.collect()
        sys.exit(7)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    process = get_context("fork").Process(target=llm.generate, args=([5],))
    process.start()
    process.join(30)
    print("exit code", process.exitcode)
    print("parent", len(list(parts)) > 0, len(llm.generate([5, 6, 7], SHORT)))


if __name__ == "__main__":
    {"freed": freed, "forked": forked}[sys.argv[1]]()
