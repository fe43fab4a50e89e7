"""Options of tensor parallelism."""

from dataclasses import dataclass
from importlib.util import find_spec

from shared.options.flags import check_rules, flag

LOCAL, RAY = "mp", "ray"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options of tensor parallelism."""

    tp_size: int = flag(
        1,
        "number of tensor-parallel ranks, one GPU each; the output does not depend on it",
        aliases=("--tp", "--tensor-parallel-size"),
        low=1,
        high=64,
    )
    distributed_executor_backend: str = flag(
        LOCAL,
        "how worker processes are started; mp: child processes on this host; ray: actors of a "
        "running Ray cluster, in one placement group",
        choices=(LOCAL, RAY),
        metavar="NAME",
        old_names=("--launcher",),
        values={"local": LOCAL},
        switches={"--use-ray": RAY},
    )

    def __post_init__(self) -> None:
        check_rules(self)

    def launcher_fault(self) -> str | None:
        """Returns the lack of the package of the executor backend."""
        if self.distributed_executor_backend != RAY or find_spec("ray") is not None:
            return None
        return (
            "--distributed-executor-backend ray requires the package ray; install the "
            "extra ray, or remove the flag"
        )
