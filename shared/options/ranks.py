"""How many GPUs run one model together, and who starts their processes."""

from dataclasses import dataclass
from importlib.util import find_spec

from shared.options.flags import ConfigError, check_rules, flag

LOCAL, RAY = "mp", "ray"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How many GPUs run the model together."""

    tp_size: int = flag(
        1, "ranks that divide every product of the model among them, a GPU each; the text is that "
        "of one", aliases=("--tp", "--tensor-parallel-size"), low=1, high=64,
    )  # fmt: skip
    distributed_executor_backend: str = flag(
        LOCAL,
        "how worker processes are started: mp as child processes on this host, ray as actors of a "
        "running Ray cluster, in one placement group",
        choices=(LOCAL, RAY),
        metavar="NAME",
        old_names=("--launcher",),
        values={"local": LOCAL},
        switches={"--use-ray": RAY},
    )

    def __post_init__(self) -> None:
        check_rules(self)

    def check_launcher(self) -> None:
        """Looks for the package of the launcher.

        Raises:
          ConfigError: It is needed, and is not installed.
        """
        if self.distributed_executor_backend == RAY and find_spec("ray") is None:
            raise ConfigError(
                "--distributed-executor-backend ray requires the package ray; install the "
                "extra ray, or remove the flag"
            )
