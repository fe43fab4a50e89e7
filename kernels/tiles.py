"""Tile configurations of kernels: block sizes, warps and pipeline stages, tuned for each GPU.

Tiles are measured, one file of `kernels/gpus` per GPU, and affect speed only: bits are fixed by the
orders of `shared.spec.reduction_order`. The sizes of a call alone select the line of a table.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from kernels.tile_tables import Line, Table, check_at_least, check_one_of, check_powers_of_two
from shared.models.fp8_packing import FP8_BLOCK

FOLDER = Path(__file__).parent / "gpus"
MEASURED = "nvidia_h200"
"""A GPU without a file has the tiles of this one, until it is measured itself."""
_THREE_HALVES = (96, 192)
"""Columns of tiles that are a power of two and half of one, so that they fill more of a GPU."""
_WIDE = 64
"""Of the sides of a tile of codes one is as wide, or a compiler takes no unit that multiplies
codes."""


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionTiles:
    """Tiles of `encoder_attention`, whose rows are a picture's patches.

    Attributes:
      lanes: Rows of a product.
      warps, stages: Of the kernel.
      described: Stages of `attend_all_described`, which attends where it can; 0: it does not.
      groups: Its warpgroups that multiply.
    """

    sizes: ClassVar = ("item_bytes", "rows", "head_size")
    """Bytes of an element of q, the rows, and D."""

    lanes: int
    warps: int
    stages: int
    described: int
    groups: int

    def __post_init__(self) -> None:
        # Fewer than 16 rows or columns a matrix unit does not take.
        check_powers_of_two(self, {"lanes": 16, "warps": 1})
        check_at_least(self, stages=1)
        check_one_of(self, described=(0, *range(2, 9)), groups=(2, 3))


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Tiles of `attention.attend`.

    Attributes:
      lanes: Rows of a product, one for each pair of a query row and a query head of the key head.
      ones: Weights are summed by a matrix product with so many columns of 1. Where there are no
        more of them than lanes, Triton splits the rows over its warps, otherwise the columns.
      unroll: Tiles of a split that a step of the loop adds; all where a split has fewer.
      warps, stages: Of the kernel.
      described: Stages of `attend_described`, which attends where it can; 0: it does not.
    """

    sizes: ClassVar = ("item_bytes", "rows", "head_size")
    """Bytes of an element of q, the most pairs that a request can have, and D."""

    lanes: int
    ones: int
    unroll: int
    warps: int
    stages: int
    described: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, {"lanes": 16, "ones": 16, "unroll": 1, "warps": 1})
        check_at_least(self, stages=1, described=0)


BLOCKS = 16
"""Most blocks that `mix.attention_layer` cuts the pairs of a request and key head into, of 16 or
more.
"""
MOST_LANES = 16 * BLOCKS
"""Most pairs of a row and a query head of a key head that a request can have there."""


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionTiles:
    """Tiles of `mix.attention_layer`.

    Attributes:
      lanes: Pairs of a program; fewer where a request cannot have so many.
      programs: Most programs that share the positions of a request and key head.
      splits: Fewest splits of a program, unless there are fewer. Above 1, a program that has all
        positions of a request keeps its sums, where they are within a span.
      ones: As of `AttentionTiles`.
      placed: Whether `place` makes the queries first and writes keys and values.
      described: Whether `mix_described` attends behind `place`, where it can.
      warps, stages: Of the kernel.
      registers: Most of a thread; 0 for no bound, which is all that Pallas knows.
    """

    sizes: ClassVar = ("item_bytes", "rows", "requests", "head_size")
    """Bytes of an element of q, most pairs of a request, requests, and the size of a head."""

    lanes: int
    programs: int
    splits: int
    ones: int
    placed: bool
    described: bool
    warps: int
    stages: int
    registers: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, {"lanes": 16, "ones": 16, "warps": 1})
        check_at_least(self, programs=1, splits=1, stages=1)


@dataclass(frozen=True, kw_only=True)
class GDNLayerTiles:
    """Tiles of `gdn_layer`.

    Attributes:
      columns: Of a state, in a program; all where a state has fewer.
      warps: Of the kernel.
      prepare_warps: Of a launch of its own that prepares rows for the recurrence; 0: there is none.
      commit_columns, commit_warps: As columns and warps, of `commit`.
    """

    sizes: ClassVar = ("nodes", "requests")
    """The most nodes that a request can have, and the requests."""

    columns: int
    warps: int
    prepare_warps: int
    commit_columns: int
    commit_warps: int

    def __post_init__(self) -> None:
        least = {"columns": 8, "warps": 1}
        least |= {f"commit_{name}": x for name, x in least.items()}
        check_powers_of_two(self, least | {"prepare_warps": 0})


@dataclass(frozen=True, kw_only=True)
class GDNPrefillTiles:
    """Tiles of `gdn_prefill`.

    Attributes:
      columns: Of the state, of a program that carries it; fewer where a head has fewer.
      warps, stages: Of that kernel.
      prepare_warps: Of the kernel that prepares chunks.
      rows, row_warps: Rows of a program before and after that, up to 64, and its warps.
    """

    sizes: ClassVar = ("requests",)
    """Requests of a call."""

    columns: int
    warps: int
    stages: int
    prepare_warps: int
    rows: int
    row_warps: int

    def __post_init__(self) -> None:
        # Fewer than 16 columns a matrix unit does not take.
        least = {"columns": 16, "warps": 1, "prepare_warps": 1, "rows": 1, "row_warps": 1}
        check_powers_of_two(self, least)
        if self.stages < 2:  # by Triton 3.6 the kernel reads and writes what it must not
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.rows > 64:
            raise ValueError(f"rows must be at most 64, got {self.rows}")


@dataclass(frozen=True, kw_only=True)
class ExpertsTiles:
    """Tiles of a block of experts: of `router.route`, and of `experts`.

    Attributes:
      grouped: Whether rows of one expert share a tile; otherwise each slot of a row is a tile, and
        the last product adds a row's slots too.
      slots: Slots of a tile.
      columns, depth: Outputs of a program of the first product, and inputs of a step of its chain.
      warps, stages: Of its kernel.
      down_columns, down_depth, down_warps, down_stages: The same of the second product.
      sum_columns, sum_warps: Outputs of a program that adds a row's slots, and its warps.
      router_rows, router_depth: Rows of a program that finds logits, of which one chooses for all,
        and inputs of a step.
      router_warps, router_stages: Of its kernel.
      group_rows: Rows that are looked at at once for those of an expert.
    """

    sizes: ClassVar = ("item_bytes", "rows", "inner")
    """Bytes of a number of the weights, rows of a call, and values between an expert's products."""

    grouped: bool
    slots: int
    columns: int
    depth: int
    warps: int
    stages: int
    down_columns: int
    down_depth: int
    down_warps: int
    down_stages: int
    sum_columns: int
    sum_warps: int
    router_rows: int
    router_depth: int
    router_warps: int
    router_stages: int
    group_rows: int

    def __post_init__(self) -> None:
        # Fewer than 16 of each a matrix unit does not take, and squares are summed by 64.
        least = {"slots": 16, "columns": 16, "depth": 16, "warps": 1}
        least |= {"down_columns": 64, "down_depth": 16, "down_warps": 1}
        least |= {"sum_columns": 64, "sum_warps": 1}
        least |= {"router_rows": 1, "router_depth": 16, "router_warps": 1, "group_rows": 16}
        check_powers_of_two(self, least)
        check_at_least(self, stages=1, down_stages=1, router_stages=1)


@dataclass(frozen=True, kw_only=True)
class LinearTiles:
    """Tiles of a product of `linear`.

    Attributes:
      rows, columns: Rows and outputs of a program; fewer rows where a call has fewer. Blocks that
        descriptors copy can also have 96 or 192 columns, or 8 rows where they are swapped.
      depth: Inputs of a step along the chain; of codes some blocks, which are added one by one.
      swapped: Whether the outputs, not the rows, are the wide side of the matrix unit.
      described: Whether blocks are copied by tensor descriptors (TMA); in Pallas by a kernel of its
        own, which is persistent and has as many warps more as copy, where that takes the product.
      persistent: Whether a multiprocessor has one program, which takes blocks in turn.
      widens: Whether a weight in FP8 is widened in memory first, by a kernel of its own. Otherwise
        it is in registers, which takes a depth of a block of FP8 and tiles that are swapped and
        neither described nor persistent.
      warps, stages: Of the kernel.
    """

    sizes: ClassVar = ("item_bytes", "rows", "outputs", "gated")
    """Bytes of a number of the weight, rows and outputs of a call; 1 with a gate, else 0."""

    rows: int
    columns: int
    depth: int
    swapped: bool
    described: bool
    persistent: bool
    widens: bool
    warps: int
    stages: int

    @property
    def takes_fp8(self) -> bool:
        """Whether a weight in FP8 can be widened in registers."""
        has_blocks = self.depth == FP8_BLOCK and self.swapped
        return has_blocks and not (self.described or self.persistent)

    def __post_init__(self) -> None:
        is_narrow = self.swapped and self.described
        least = {"rows": 8 if is_narrow else 16, "columns": 16, "depth": 16, "warps": 1}
        if self.columns in _THREE_HALVES:
            del least["columns"]
            is_tall = self.rows >= 16 * max(4, self.warps)
            if not (self.described and is_tall) or self.swapped:
                raise ValueError(
                    f"tiles of {self.columns} columns must be described, not swapped, and have 64 "
                    "rows or more for 4 warps"
                )
        check_powers_of_two(self, least)
        if not (self.widens or self.takes_fp8):
            raise ValueError(
                f"tiles that widen no weight must be swapped, {FP8_BLOCK} deep, and neither "
                "described nor persistent"
            )
        check_at_least(self, stages=1)

    @property
    def are_powers_of_two(self) -> bool:
        """Whether every kernel can have blocks of these columns."""
        return self.columns not in _THREE_HALVES

    @property
    def narrowed(self) -> "LinearTiles":
        """With a power of two of columns, for a kernel that can have no others."""
        return self if self.are_powers_of_two else replace(self, columns=self.columns * 2 // 3)

    def rows_of_codes(self, rows: int) -> int:
        """The rows of a tile of codes; all of them where they are the wide side of the matrix unit.

        Args:
          rows: As many as there are to multiply, and at most those of the tiles.

        Raises:
          ValueError: The wide side is not wide enough, so that the bits would be others.
        """
        wide = self.columns if self.swapped else self.rows
        is_wide = wide >= _WIDE and self.are_powers_of_two
        if not is_wide or self.columns > FP8_BLOCK or self.depth < FP8_BLOCK:
            raise ValueError(
                f"tiles of codes must be {FP8_BLOCK} deep or more, {_WIDE} wide or more, and have "
                f"{FP8_BLOCK} columns at most, a power of two, got {self}"
            )
        return rows if self.swapped else self.rows

    def depth_of_codes(self, inputs: int) -> int:
        """Inputs of a step of a chain along so many, whole blocks of FP8."""
        return self.depth if inputs % self.depth == 0 else FP8_BLOCK

    def depth_of(self, inputs: int) -> int:
        """Inputs of a step of a chain along so many; fewer than all, where there are more than 16.

        A compiler begins a chain of one step with what is added to its end, and rounds otherwise.
        """
        depth = self.depth
        while depth >= inputs and depth > 16:
            depth //= 2
        return depth


@dataclass(frozen=True, kw_only=True)
class LmHeadEpilogueTiles:
    """How tokens are chosen behind a head, see `lm_head_epilogue`.

    Attributes:
      joined: Whether the head's product leaves what the choice needs, and scores where asked for.
      ranked: The same of a drafter's head and the best children of nodes.
    """

    sizes: ClassVar = ("rows",)
    """Rows of the product."""

    joined: bool
    ranked: bool


@dataclass(frozen=True, kw_only=True)
class SamplingTiles:
    """Tiles of `sampling.choose`, `sampling.score` and `sampling.rank`.

    Attributes:
      groups, warps: Groups of tokens of a tile, and of the kernels that look at one.
      programs: Most programs that share the tiles of a row with a filter.
      row_programs, at_once, row_warps: Most programs that share the search of its support, groups
        that one reads at once, and of the kernel.
      sampled, listed: Tokens of the sample by which it guesses, and those that it can list.
    """

    sizes: ClassVar = ("rows",)
    """Rows of the logits."""

    groups: int
    warps: int
    programs: int
    row_programs: int
    at_once: int
    row_warps: int
    sampled: int
    listed: int

    def __post_init__(self) -> None:
        least = {"groups": 1, "warps": 1, "at_once": 1, "row_warps": 1, "sampled": 8, "listed": 1}
        check_powers_of_two(self, least)
        check_at_least(self, programs=1, row_programs=1)


@dataclass(frozen=True)
class Tiles:
    """The tables of all kernels of one language, a field for each module that has some."""

    encoder_attention: Table[EncoderAttentionTiles]
    attention: Table[AttentionTiles]
    gdn_prefill: Table[GDNPrefillTiles]
    gdn_layer: Table[GDNLayerTiles]
    experts: Table[ExpertsTiles]
    fp8_activations: Table[LinearTiles]
    lm_head_epilogue: Table[LmHeadEpilogueTiles]
    linear: Table[LinearTiles]
    attention_layer: Table[DecodeAttentionTiles]
    sampling: Table[SamplingTiles]

    @classmethod
    def load(cls, language: str, gpu: str, folder: Path = FOLDER) -> "Tiles":
        """Reads the tables of a GPU.

        Args:
          language: `pallas_gpu` or `triton_gpu`; they are compiled differently, hence two tables.
          gpu: The name that the driver gives the GPU; a file's name must begin it.
          folder: Of the files.

        Raises:
          ValueError: A table is missing, is of no kernel, or has a wrong line; says which.
        """
        path = _file_of(gpu, folder)
        tables = json.loads(path.read_text(encoding="utf-8"))[language]
        if tables.keys() != CLASSES.keys():
            have, want = sorted(tables), sorted(CLASSES)
            raise ValueError(f"{path.name}, {language}: tables must be {want}, got {have}")
        return cls(**{op: _table(f"{path.name}, {language}", op, tables[op]) for op in CLASSES})


CLASSES: dict[str, Any] = {
    "encoder_attention": EncoderAttentionTiles,
    "attention": AttentionTiles,
    "gdn_prefill": GDNPrefillTiles,
    "gdn_layer": GDNLayerTiles,
    "experts": ExpertsTiles,
    "fp8_activations": LinearTiles,
    "lm_head_epilogue": LmHeadEpilogueTiles,
    "linear": LinearTiles,
    "attention_layer": DecodeAttentionTiles,
    "sampling": SamplingTiles,
}
"""The class of the tiles of each module of kernels that has some."""


def _file_of(gpu: str, folder: Path) -> Path:
    """The file with the longest name that begins the GPU's."""
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + "_"
    stems = [path.stem for path in folder.glob("*.json") if name.startswith(path.stem + "_")]
    return folder / f"{max(stems, key=len, default=MEASURED)}.json"


def _table(where: str, op: str, lines: list[dict[str, Any]]) -> Table[Any]:
    made = []
    for number, line in enumerate(lines, start=1):
        try:
            made.append(_line(CLASSES[op], **line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, {op}, line {number}: {error}") from error
    try:
        return Table(tuple(made))
    except ValueError as error:
        raise ValueError(f"{where}, {op}: {error}") from error


def _line(kind: Any, *, at_most: dict[str, int], **tiles: int) -> Line[Any]:
    names = {field.name for field in fields(kind)}
    if tiles.keys() != names:
        raise ValueError(f"tiles must be {sorted(names)}, got {sorted(tiles)}")
    if unknown := at_most.keys() - set(kind.sizes):
        raise ValueError(f"at_most takes {list(kind.sizes)}, got {sorted(unknown)}")
    return Line(at_most, kind(**tiles))
