"""Grammar compiler of the engine process: compiles on a background thread, and caches the results.

The server process has verified that each grammar compiles in time. Other requests are served
meanwhile, because the library releases the GIL.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module

from shared.engine.grammar import Grammar, GrammarState
from shared.engine.request import InvalidRequestError, Request
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.text.call_formats.registry import marks_of
from shared.text.tokenizer_files import TokenizerFiles
from shared.text.worker import WorkerError

MAX_KEPT_BYTES = 1 << 26
"""Maximum bytes of cached grammars, estimated by `_cost`."""

ENTRY_BYTES, BYTES_OF_A_CHARACTER = 1 << 17, 1 << 6
"""Measured memory of a compiled grammar: a constant, and an amount per character of its source."""


class GrammarQueue:
    """Requests that wait for their grammar, and cached grammars.

    Args:
      compile_text: Compiles a grammar for the model's tokens.
      vocab: Vocabulary size of the model.
    """

    def __init__(self, compile_text: Callable[[str], Grammar], vocab: int) -> None:
        self._compile, self._vocab = compile_text, vocab
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._waiting: dict[int, tuple[Request, Future[Grammar]]] = {}
        self._compiling: dict[str, Future[Grammar]] = {}

    @classmethod
    def of_options(cls, options: Options, vocab: int, files: TokenizerFiles) -> GrammarQueue | None:
        """Creates the compiler for a checkpoint's tokenizer; returns None without grammars.

        Args:
          options: Options of the server.
          vocab: Vocabulary size of the model.
          files: Tokenizer files of the model.

        Raises:
          ValueError: The checkpoint has no tokenizer.
        """
        if not options.engine.has_grammars:
            return None
        # The library is imported only if grammars are enabled.
        try:
            compiler = import_module("shared.text.grammar").Compiler
        except ModuleNotFoundError as error:
            if error.name != "llguidance":
                raise
            raise ConfigError(
                "structured output requires the package llguidance; install it, or remove"
                " --grammar-backend"
            ) from error
        marks = marks_of(options.server.tool_call_parser, options.server.reasoning_parser)
        return cls(compiler.of_files(files, vocab, marks).compile, vocab)

    @property
    def busy(self) -> bool:
        """True if a request waits for its grammar."""
        return bool(self._waiting)

    def ask(self, request: Request) -> None:
        """Queues a request with a grammar; `ready` returns it.

        A grammar is compiled once for all waiting requests that use it, such as the choices of one
        prompt.
        """
        grammar = _text_of(request)
        kept, future = self._kept.get(grammar), self._compiling.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            future = Future()
            future.set_result(kept)
        elif future is None:
            future = self._compiling[grammar] = self._thread.submit(self._compile, grammar)
        self._waiting[request.request_id] = request, future

    def drop(self, request_id: int) -> bool:
        """Removes a waiting request, and cancels a grammar that no other request uses; returns
        False if it was not waiting.
        """
        request, future = self._waiting.pop(request_id, (None, None))
        if request is None or future is None:
            return False
        if all(other is not future for _, other in self._waiting.values()):
            future.cancel()
            self._compiling.pop(_text_of(request), None)
        return True

    def ready(self) -> Iterator[tuple[Request, InvalidRequestError | None]]:
        """Yields requests whose grammar is compiled, in the order of arrival, or with its error."""
        for request_id, (request, future) in tuple(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            self._compiling.pop(_text_of(request), None)
            try:
                self._bind(request, future.result())
            except WorkerError as error:
                yield request, InvalidRequestError("grammar", str(error))
            else:
                yield request, None

    def close(self) -> None:
        """Ends the thread; a compilation in progress finishes by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _bind(self, request: Request, grammar: Grammar) -> None:
        sampling = request.sampling
        self._keep(_text_of(request), grammar)
        request.constraint = GrammarState(
            grammar, self._vocab, sampling.stop_token_ids, sampling.min_tokens
        )

    def _keep(self, text: str, grammar: Grammar) -> None:
        if text not in self._kept:
            self._kept[text] = grammar
            self._num_bytes += _cost(text)
        while self._num_bytes > MAX_KEPT_BYTES:
            oldest, _ = self._kept.popitem(last=False)
            self._num_bytes -= _cost(oldest)


def _text_of(request: Request) -> str:
    text = request.sampling.grammar
    assert text is not None
    return text


def _cost(text: str) -> int:
    return ENTRY_BYTES + BYTES_OF_A_CHARACTER * len(text)
