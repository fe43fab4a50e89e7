"""Start of a router: by `--replicas` of a server, or by `tandem route` for running servers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module

from shared.options.command_line import parse
from shared.options.flag_parser import make_parser
from shared.options.flags import ConfigError, raise_fault, spelling
from shared.options.options import Options
from shared.options.router import RAY, RouterOptions
from shared.process import descriptors, logs
from shared.process.address import Listeners, open_listeners
from shared.process.model_files import local_models
from shared.process.model_places import ModelPlace
from shared.process.progress import console_of
from shared.router import service
from shared.router.local_replicas import EXIT_REFUSED, LocalReplicas
from shared.router.service import ReplicaSource, RunningServers

RAY_MODULE = "shared.cluster.ray_serve"
ROUTE_FLAGS = {item.name for item in fields(RouterOptions)} - {"replicas"}
ROUTE_FLAGS |= {"host", "port", "admin_host", "admin_port", "allowed_hosts", "allowed_origins"}
ROUTE_FLAGS |= {"api_key", "admin_api_key", "allow_unauthenticated", "graceful_shutdown_timeout"}
ROUTE_FLAGS |= {"log_level", "log_format"}
"""Options of `tandem route`."""


def start_replicas(
    options: Options, places: Mapping[str, ModelPlace], listeners: Listeners, module: str | None
) -> Callable[[], int]:
    """Prepares the replicas of `--replicas`.

    Args:
      options: Options of the router and of the servers.
      places: Locations of the models.
      listeners: Sockets of the router.
      module: Module with the command line of a server.

    Returns:
      A function that runs the router and its replicas until a stop signal.

    Raises:
      ValueError: A flag or a model is invalid, or there are too few GPUs.
    """
    if module is None:
        raise ConfigError("--replicas is not supported by this command; use `tandem serve`")
    local_models(options, places, console_of(options.observing))  # downloads once for all replicas
    if options.router.replica_launcher == RAY:
        source: ReplicaSource = import_module(RAY_MODULE).DeployedReplicas(module, options)
    else:
        source = LocalReplicas(module, options)
    return partial(service.run, options, listeners, source)


def main(argv: Sequence[str]) -> int:
    """Runs `tandem route`; returns the exit code of the process."""
    descriptors.open_standard_streams()
    if {"-h", "--help"} & {*argv}:
        make_parser("tandem route", ROUTE_FLAGS).print_help()
        return 0
    try:
        options = parse(argv)
        logs.set_up(options.observing)
        raise_fault(_fault(options))
        source = _running(options)
        listeners = open_listeners(options.server)
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED
    return service.run(options, listeners, source)


def _running(options: Options) -> ReplicaSource:
    if options.router.replica_launcher == RAY:
        return import_module(RAY_MODULE).RunningReplicas()
    return RunningServers(options.router.urls)


def _fault(options: Options) -> str | None:
    """Returns the first fault of the options of `tandem route`."""
    others = sorted(options.explicit_flags - ROUTE_FLAGS)
    if others:
        return f"{spelling(others[0])} is not a flag of `tandem route`; set it where servers start"
    if options.router.replica_launcher == RAY:
        if options.router.servers is not None:
            return "--servers and --replica-launcher ray are mutually exclusive; remove one of them"
        return options.router.launcher_fault()
    if not options.router.urls:
        return "`tandem route` requires --servers; give the URLs of running servers"
    return None
