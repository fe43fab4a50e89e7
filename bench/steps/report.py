"""Report of the decode-step benches: environment, lines, and compared outputs."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import gpu_clock
from bench.common.draft_config import PLAIN, Draft
from bench.common.environment import write_results
from tests.support.op_sides import SIDES

Line = dict[str, Any]
Texts = list[list[int]]

HEADER = (
    f"{'side':6}{'drafts':26}{'batch':>6}{'T':>5}{'ms':>9}{'low':>8}{'high':>8}{'tokens/s':>10}"
)
HEADER += f"{'length':>8}{'bytes':>8}{'GEMMs':>9}{'share':>7}{'kernels':>9}{'idle':>7}"
HEADER += f"{gpu_clock.HEADER}  outputs"


class Rates(NamedTuple):
    """Copy rate in bytes per second, and multiplications per second, of a device."""

    copied: float
    multiplied: float

    @property
    def teraflops(self) -> float:
        """Additions count too."""
        return 2 * self.multiplied / 1e12


class SideFacts(NamedTuple):
    """A framework's version, where it runs with which kernels, and how fast it is there."""

    version: str
    where: Line
    rates: Rates


def side_facts(backend: str) -> SideFacts:
    """Returns the facts of a backend on this machine, and frees the memory of measuring them."""
    side = SIDES[backend]()
    rates = Rates(side.copy_rate(), side.product_rate())
    where = {"device": side.device, "kernels": side.kernels}
    side.release()
    return SideFacts(side.version, where, rates)


class Report:
    """Results, printed and written as they come, after the name of the model if there are several.

    Attributes:
      found: All of it, as the file has it.
    """

    def __init__(
        self, command: str, out: Path | None, tells_kernels: bool = False, name: str = ""
    ) -> None:
        versions = {"python": platform.python_version(), "numpy": version("numpy")}
        self.found: dict[str, Any] = {"command": command, "versions": versions, "sides": {}}
        self.found |= {"lines": [], "refused": []}
        self._out, self._texts = out, dict[tuple, Texts]()
        self._tells_kernels, self._prefix = tells_kernels, f"{name}: " if name else ""

    def add_side(self, backend: str, facts: SideFacts | None = None) -> Rates:
        """Prints the device of a backend and its measured rates.

        Args:
          facts: None finds them here.
        """
        version, where, rates = facts or side_facts(backend)
        self.found["versions"][backend] = version
        speeds = {"copy_gigabytes_per_s": rates.copied / 1e9, "teraflops": rates.teraflops}
        self.found["sides"][backend] = where | speeds
        copies = f"copies {rates.copied / 1e9:.0f} GB/s"
        device = where["device"]
        self._say(f"{backend} on {device}, {copies}, products {rates.teraflops:.3g} TFLOP/s")
        return rates

    def refuse(self, backend: str, draft: Draft, error: Exception) -> None:
        """Notes what was not served, and why."""
        line = {"backend": backend, "drafts": str(draft), "error": str(error)}
        self.found["refused"].append(line)
        self._say(f"unsupported: {backend}, {draft}: {error}")

    def add(self, line: Line, texts: Texts, keeps_text: bool) -> None:
        """Takes a line over, with what its texts are compared with."""
        adapters = line["adapters"], line["lora_rank"] if line["adapters"] else 0
        served = (line["batch"], line["temperature"], line["top_p"], adapters)
        drafts = line["drafts"] if not keeps_text else PLAIN
        known = self._texts.setdefault((served, drafts), texts)
        line["texts"] = compared(texts, known) if known is not texts else None
        self.found["lines"].append(line)
        longest = (line["trace"] or {}).get("longest", {}) if self._tells_kernels else {}
        self._say("\n".join([line_of(line), *kernels_of(longest)]))

    def add_count(self, line: Line) -> None:
        """Takes over the experts that a step reads."""
        self.found["lines"].append(line)
        less = line["bytes"] / line["even_bytes"]
        self._say(
            f"{line['drafts']:26}{line['batch']:6}  {line['routed']:.1f} routed experts in "
            f"{line['router_calls']} router calls, {less:.1%} of the bytes of even choices"
        )

    @property
    def has_other_texts(self) -> bool:
        """True if an output differs from one that it is guaranteed to equal."""
        return any(not line["texts"]["equal"] for line in self.found["lines"] if line["texts"])

    def _say(self, text: str) -> None:
        print(f"{self._prefix}{text}", flush=True)
        if self._out:
            write_results(self._out, self.found)


def compared(texts: Texts, others: Texts) -> Line:
    """Compares two sets of outputs; tokens after the first difference are not compared."""
    first = [_common(a, b) for a, b in zip(texts, others, strict=True)]
    differ = sum(length < len(text) for length, text in zip(first, texts, strict=True))
    return {
        "equal": not differ,
        "texts_that_differ": differ,
        "tokens": sum(map(len, texts)),
        "tokens_before_a_difference": sum(first),
    }


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def line_of(line: Line) -> str:
    """A line for a terminal."""
    trace, texts = line["trace"] or {}, line["texts"]
    kernels = f"{trace['kernels']:9.1f}" if "kernels" in trace else f"{'-':>9}"
    idle = f"{trace['idle_share']:7.1%}" if "idle_share" in trace else f"{'-':>7}"
    comparison = "first" if texts is None else "equal" if texts["equal"] else "DIFFER"
    lot = line["simulated_accept_length"]
    notes = [] if lot is None else [f"simulated {lot:g}"]
    if line["adapters"]:
        notes.append(f"{line['adapters']} adapters of rank {line['lora_rank']}")
    notes += [f"{line['ranks']} ranks"] * (line["ranks"] > 1)
    for key in ("greedy", "base"):
        if f"over_{key}" in line:
            notes.append(f"{line[f'over_{key}']:+.1%} over {key}")
    notes += ["NOT REPEATED"] * (not line["rounds_are_equal"])
    notes += ["COMPILED WHILE TIMED"] * bool(line["programs_made_while_timed"])
    return (
        f"{line['backend']:6}{line['drafts']:26}{line['batch']:6}{line['temperature']:5g}"
        f"{line['ms']:9.3f}{line['ms_low']:8.3f}{line['ms_high']:8.3f}{line['tokens_per_s']:10.1f}"
        f"{line['accept_length']:8.3f}{line['limit_ms']:8.3f}{line['products_ms']:9.3f}"
        f"{line['share_of_both']:7.1%}{kernels}{idle}"
        f"{gpu_clock.format_card(line['card'])}  {' '.join([comparison, *notes])}"
    )


def _short(name: str) -> str:
    """Both ends of a long name: what it is, and the blocks that it has."""
    return name if len(name) < 100 else f"{name[:70]} .. {name[-25:]}"


def kernels_of(longest: Mapping[str, tuple[float, float]]) -> list[str]:
    """The kernels that take the most: how often, and microseconds in all."""
    return [
        f"{1e3 * ms:12.1f} us {count:7.1f} x  {_short(n)}" for n, (count, ms) in longest.items()
    ]
