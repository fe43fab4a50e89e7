"""Launch of a server: checks flags, packages and addresses before slow imports.

Errors that the user can correct end the startup with exit code 2 and a message as the last line.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from shared.options.command_line import parse
from shared.options.flags import check_files, raise_fault
from shared.options.options import PARTS
from shared.process import descriptors, logs
from shared.process.address import open_listeners
from shared.process.model_places import find_models

EXIT_REFUSED = 2
PROJECT = ("shared", "jax_impl", "torch_impl", "kernels", "tandem")
EXTRAS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "ray": "ray", "PIL": "images"}
EXTRAS |= {"flax": "train", "orbax": "train", "opentelemetry": "otel", "shtab": "completion"}
"""Pip extra of each optional package."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGINT end the process at once, like SIGTERM: Python's handler would wait for a
    compiler.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@_ended_by_signals()  # until the loop has handlers of its own
def launch(
    argv: Sequence[str],
    platform: Callable[[], Any],
    rank_module: str | None = None,
    packages: Sequence[str] = (),
    serve_module: str | None = None,
) -> int:
    """Runs a server until it is stopped.

    Args:
      argv: Command line without the program's name.
      platform: Returns the `shared.process.start.Platform`, after flags and files are checked and
        other ranks have started.
      rank_module: Module whose `PLATFORM` the process of another rank uses; None if one process has
        all devices.
      packages: Packages that `platform` will import.
      serve_module: Module that runs this command line, for the processes of replicas.

    Returns:
      The exit code: 0 after a signal, 2 for an invalid configuration, else 1.
    """
    descriptors.open_standard_streams()
    try:
        options = parse(argv)
        logs.set_up(options.observing)
        raise_fault(_packages_fault(packages))
        raise_fault(options.observing.exporter_fault())
        raise_fault(options.ranks.launcher_fault())
        raise_fault(options.disaggregation.backend_fault())
        raise_fault(options.replicas_fault())
        for part in PARTS:
            check_files(getattr(options, part))
        places = find_models(options)
        listeners = open_listeners(options.server)
        if options.router.replicas > 1:
            starting = import_module("shared.router.starting")
            serve = starting.start_replicas(options, places, listeners, serve_module)
        else:
            serving = import_module("shared.process.serving")
            serve = serving.start_serving(options, places, listeners, platform, rank_module)
    except ValueError as error:  # ConfigError, CheckpointError, errors of configs and backends
        return _refused(str(error))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", *PROJECT):
            raise
        return _refused(_missing(name))
    except OSError as error:
        if error.filename is None:
            raise
        return _refused(f"{error.filename} cannot be used: {error.strerror}")
    return serve()


def _refused(sentence: str) -> int:
    """Prints the reason for the end of a startup as the last line."""
    print(sentence, file=sys.stderr, flush=True)
    return EXIT_REFUSED


def _packages_fault(names: Sequence[str]) -> str | None:
    """Returns the first package that is not installed, with the command that installs it."""
    return next((_missing(name) for name in names if find_spec(name) is None), None)


def _missing(name: str) -> str:
    extra = EXTRAS.get(name)
    wanted = "tandem-llm" if extra is None else f"tandem-llm[{extra}]"
    return (
        f'the package {name} is not installed; install it with pip install "{wanted}", or in a '
        f"checkout with make venv{f' EXTRAS={extra}' if extra else ''}"
    )
