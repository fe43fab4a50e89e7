"""Application builder of Ray Serve for servers without a model."""

from collections.abc import Sequence
from typing import Any

from shared.cluster.ray_serve import application
from shared.options.command_line import parse


def servers(args: dict[str, Sequence[str]]) -> Any:
    """Returns the application of `tandem.ray_serve.servers` with fake servers."""
    return application("tests.support.fake_server", parse(args["flags"]), None)
