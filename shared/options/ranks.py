"""How many GPUs run one model together, and who starts their processes."""

from dataclasses import dataclass
from importlib.util import find_spec

from shared.options.flags import ConfigError, check_rules, flag

LOCAL, RAY = "local", "ray"


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How many GPUs run the model together."""

    tp_size: int = flag(
        1, "ranks that divide every product of the model among them, a GPU each; the text is that "
        "of one", aliases=("--tp", "--tensor-parallel-size"), low=1, high=64,
    )  # fmt: skip
    launcher: str = flag(
        LOCAL,
        "who starts the processes of other ranks: local on this host, ray where a running Ray has "
        "room for them, in its placement group",
        choices=(LOCAL, RAY),
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_rules(self)

    def check_launcher(self) -> None:
        """Looks for the package of the launcher.

        Raises:
          ConfigError: It is needed, and is not installed.
        """
        if self.launcher == RAY and find_spec("ray") is None:
            raise ConfigError(
                "--launcher ray needs Ray, which is not installed; install the extra ray, or leave "
                "the flag out"
            )
