"""Application builder of a Ray Serve config file: `import_path: tandem.ray_serve:servers`."""

from typing import Any

from shared.cluster.ray_serve import application
from shared.options.command_line import parse
from tandem import backends


def servers(args: dict[str, Any]) -> Any:
    """Returns an application with one complete server for each replica.

    Args:
      args: `flags`, the command line of a server as a list; `backend`, "torch" or "jax";
        `num_gpus`, the GPUs of each replica, by default `--tp-size`, or 0 without GPUs.
    """
    options = parse(args.get("flags", []))
    module = f"{args.get('backend', backends.default())}_impl.serve"
    return application(module, options, args.get("num_gpus"))
