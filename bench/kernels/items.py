"""Items to compile for an absent GPU: cases of kernels, steps, layers of ranks, starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.draft_config import Draft
from bench.kernels.compiled import Kernel
from bench.kernels.starts import SHAPES, Start, shipped
from tests.support.op_case import OpCase, table, tables

STEP_HEADER = f"{'step':66}{'kernels':>8}{'temp KiB':>10}{'plan KiB':>10}{'copied KiB':>12}{'s':>7}"


@dataclass(frozen=True)
class Step:
    """A step of a server: of decoding, or of a prompt.

    Attributes:
      model: A folder of `bench/shapes`.
      drafts: What drafts, as `bench.common.draft_config` reads it.
      batch: Requests at once.
      max_copied: Bytes that XLA may take out of weights, pools and states at once. The embeddings
        of some rows are fewer; a weight of a layer has more, and so has the state of a slot.
      tokens: Of a prompt; 0: it decodes.
      scores: The prompt's tokens are all scored.
      flags: More of the server's.
      ranks: How many GPUs run it.
    """

    model: str
    drafts: str
    batch: int
    max_copied: int
    tokens: int = 0
    scores: bool = False
    flags: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def start(self) -> Start:
        """The start that has it; it compiles the model's first layers, which all others equal."""
        scored = ("--max-prompt-logprobs", "1") if self.scores else ()
        return Start(SHAPES / self.model, self.drafts, self.ranks, (*self.flags, *scored))

    def __str__(self) -> str:
        work = f"prompt of {self.tokens}" if self.tokens else f"batch {self.batch}"
        work += " with scores" * self.scores
        work += f", {self.ranks} ranks" * (self.ranks > 1)
        return f"{self.model}, {Draft.parse(self.drafts)}, {work}"


ON_DEVICE = ("--speculative-ngram-backend", "device")
STEPS = (
    Step("qwen3-8b", "none", 1, 2**20),
    Step("qwen3-8b", "EAGLE3:S=3,k=1,N=4", 1, 2**20),
    Step("qwen3-8b", "EAGLE3:S=3,L=2.5", 8, 2**20),
    # The rule takes the scores of 15 drafts in one array, which is 9 MiB.
    Step("qwen3-8b", "DFLASH:rule=rejection", 1, 10 * 2**20),
    # Its bias of a step is as large as the scores: 7 drafts of 8 requests.
    Step("qwen3-8b", "DSPARK", 8, 2**20),
    Step("qwen3-8b", "DFLASH2", 8, 2**20),
    # Of 100 MB of n-grams nothing is copied.
    Step("qwen3-8b", "NGRAM:N=8", 8, 2**20, flags=ON_DEVICE),
    Step("qwen3-8b", "NGRAM:N=8", 1, 2**24, tokens=2048, flags=ON_DEVICE),
    Step("qwen3.5-9b", "NEXTN:S=5,k=4,N=16", 8, 2**20),
    Step("qwen3.5-35b-a3b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20),
    # The embeddings of 2,048 rows are 16 MiB.
    Step("qwen3-8b", "none", 1, 2**24, tokens=2048),
    Step("qwen3.5-9b", "NEXTN:S=3,k=1,N=4", 1, 2**24, tokens=2048),
    Step("qwen3-8b", "none", 8, 2**24, tokens=2048, scores=True),
    Step("qwen3.5-35b-a3b-fp8", "none", 1, 2**24, tokens=2048),
    Step("qwen3-8b-fp8", "none", 8, 2**20, flags=("--fp8-activations",)),
    Step("qwen3-8b-fp8", "none", 1, 2**24, tokens=2048, flags=("--fp8-activations",)),
    Step("qwen3-8b-int4", "none", 1, 2**20),
    Step("qwen3-8b-awq", "none", 1, 2**24, tokens=2048),
    Step("qwen3.5-9b-int4", "NEXTN:S=3,k=1,N=4", 8, 2**20),
    Step("gpt-oss-20b", "none", 8, 2**20),
    Step("gemma-4-31b", "ASSISTANT:S=3,k=1,N=4", 8, 2**20),
    Step("glm-4.7-flash", "NEXTN:S=3,k=1,N=4", 8, 2**20),
    Step("deepseek-v3-8-layers-fp8", "none", 8, 2**20),
    Step("nemotron-3-nano", "NEXTN:S=3,k=1,N=4", 8, 2**20),
    Step("qwen3-8b", "EAGLE3:S=3,k=1,N=4", 8, 2**20, ranks=2),
    Step("nemotron-3-nano", "NEXTN:S=3,k=1,N=4", 8, 2**20, ranks=2),
    Step("qwen3.5-35b-a3b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20, ranks=2),
    Step("qwen3.5-122b-a10b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20, ranks=4),
)
RANKS = {f"{ranks} ranks, {rows} rows": (ranks, rows) for ranks in (2, 8) for rows in (8, 512)}
"""Ranks and rows of layers with gathered GEMMs: few rows gather within them, many after them."""


@dataclass(frozen=True)
class Item:
    """Something to compile.

    Attributes:
      kind: "case", "step", "layer" or "start".
      name: Of it.
      what: The module of a case's operation, the step, the name of a layer, or the start.
      scratch: A folder that all items share.
    """

    kind: str
    name: str
    what: Any
    scratch: Path

    @property
    def case(self) -> str:
        """Name of the case in `known_spills`, without its operation."""
        return self.name.partition(", ")[2] if self.kind == "case" else self.name


@dataclass(frozen=True)
class Found:
    """Result of an item.

    Attributes:
      kernels: Those that were compiled and looked at.
      faults: What is wrong, a sentence each.
      line: More to print.
      programs, calls: Programs that were lowered, and kernels in them that no item before had.
    """

    kernels: tuple[Kernel, ...] = ()
    faults: tuple[str, ...] = ()
    line: str = ""
    programs: int = 0
    calls: int = 0


def items_of(only: Sequence[str], scratch: Path) -> list[Item]:
    """Returns the items with one of the texts in their name; all items without texts."""
    found = [Item("case", f"{case.op}: {case}", case.op, scratch) for case in cases_of(only)]
    found += [Item("step", str(step), step, scratch) for step in STEPS]
    found += [Item("layer", name, name, scratch) for name in RANKS]
    found += [Item("start", str(start), start, scratch) for start in shipped()]
    return [item for item in found if is_wanted(item.name, only)]


def cases_of(only: Sequence[str]) -> Iterator[OpCase]:
    """Returns the large cases with one of the texts in the module or name of the operation."""
    for op in tables():
        for case in table(op):
            if case.is_large and is_wanted(f"{op}: {case}", only):
                yield case


def is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def case_of(item: Item) -> OpCase:
    """The case of an item; it cannot be sent from process to process itself."""
    return next(case for case in cases_of([]) if f"{case.op}: {case}" == item.name)
