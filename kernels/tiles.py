"""Tile configurations of kernels: block sizes, warps and pipeline stages, tuned for each GPU.

Tiles are measured, one file of `kernels/gpus` per GPU, and affect speed only: bits are fixed by the
orders of `shared.spec.reduction_order`. The sizes of a call alone select the line of a table.
"""

import json
import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from kernels.experts_tiles import ExpertsTiles
from kernels.gdn_tiles import GDNLayerTiles, GDNPrefillTiles
from kernels.latent_tiles import HeadProductTiles, LatentAttentionTiles
from kernels.tile_tables import Line, Table, check_at_least, check_one_of, check_powers_of_two
from shared.models.formats.fp8_w8a16 import FP8_BLOCK

FOLDER = Path(__file__).parent / "gpus"
MEASURED = "nvidia_h200"
"""GPU with the tiles of all GPUs without a file."""
_THREE_HALVES = (96, 192)
"""Tile columns that are one and a half powers of two, to fill more of a GPU."""
_WIDE = 64
"""Minimum of one side of an FP8 tile; below, a compiler does not select FP8 tensor cores."""


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionTiles:
    """Tiles of `encoder_attention`; its rows are the patches of an image.

    Attributes:
      lanes: Rows of a product.
      warps, stages: Warps and pipeline stages of the kernel.
      described: Stages of `encoder_attention_sm90`, used if it supports the call; 0: never.
      groups: Consumer warpgroups of that kernel.
    """

    sizes: ClassVar = ("item_bytes", "rows", "head_size")
    """Bytes of an element of q, rows, and D."""

    lanes: int
    warps: int
    stages: int
    described: int
    groups: int

    def __post_init__(self) -> None:
        # Tensor cores require at least 16 rows and columns.
        check_powers_of_two(self, {"lanes": 16, "warps": 1})
        check_at_least(self, stages=1)
        check_one_of(self, described=(0, *range(2, 9)), groups=(2, 3))


@dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """Tiles of `attention.attend`.

    Attributes:
      lanes: Rows of a product: packed (query head, row) pairs of a KV head.
      ones: Columns of 1 in the product that sums the softmax weights. If they are at most the
        lanes, Triton splits the rows over its warps, otherwise the columns.
      unroll: Tiles of a split per loop step; all if a split has fewer.
      warps, stages: Warps and pipeline stages of the kernel.
      described: Stages of `attention_sm90`, used if it supports the call; 0: never.
    """

    sizes: ClassVar = ("item_bytes", "rows", "head_size")
    """Bytes of an element of q, maximum pairs of a request, and D."""

    lanes: int
    ones: int
    unroll: int
    warps: int
    stages: int
    described: int

    def __post_init__(self) -> None:
        check_powers_of_two(self, {"lanes": 16, "ones": 16, "unroll": 1, "warps": 1})
        check_at_least(self, stages=1, described=0)


BLOCKS = 64
"""Maximum blocks, of 16 or more pairs each, of a request and KV head in `attention_layer`."""
TREE_LANES = 16
"""Pairs of a program there, for trees."""
MOST_LANES, MOST_TREE_LANES = 256, TREE_LANES * BLOCKS
"""Maximum (query head, row) pairs of a request and KV head there, and for trees."""


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionTiles:
    """Tiles of `attention_layer.attention_layer`.

    Attributes:
      lanes: Pairs of a program; fewer if a request cannot have that many.
      programs: Maximum programs that share the positions of a request and KV head (split-KV).
      splits: Minimum splits of a program, if there are enough. Above 1, a program with all
        positions of a request keeps its softmax state in registers within a span.
      ones: Same as in `AttentionTiles`.
      placed: Whether `place` first computes queries and writes keys and values.
      described: Whether `attention_layer_sm90` attends after `place`, if it supports the call.
      warps, stages: Warps and pipeline stages of the kernel.
      registers: Maximum per thread; 0 for no maximum, the only value that Pallas supports.
      context_lanes: Pairs of a program of the context before a tree, after `place`; 0 if the
        programs of the tree also attend to the context.
      tree_rows: Nodes of a program of the tree then, of at most `TREE_LANES` pairs.
      path_rows, path_stages: Paths of a tree that a program reads at once, and pipeline stages of
        the loop over them.
    """

    sizes: ClassVar = ("item_bytes", "rows", "requests", "head_size", "nodes")
    """Bytes of an element of q, maximum pairs of a request, requests, the size of a head, and the
    width of the tree window."""

    lanes: int
    programs: int
    splits: int
    ones: int
    placed: bool
    described: bool
    warps: int
    stages: int
    registers: int
    context_lanes: int = 0
    tree_rows: int = 1
    path_rows: int = 1
    path_stages: int = 4

    def __post_init__(self) -> None:
        check_powers_of_two(self, {"lanes": 16, "ones": 16, "warps": 1, "path_rows": 1})
        check_at_least(self, programs=1, splits=1, stages=1, tree_rows=1, path_stages=1)
        check_one_of(self, context_lanes=(0, 16, 32, 64))
        if self.context_lanes and not self.placed:
            raise ValueError("tiles with context_lanes must be placed")


@dataclass(frozen=True, kw_only=True)
class LinearTiles:
    """Tiles of a GEMM of `linear`.

    Attributes:
      rows, columns: Rows and outputs of a program; fewer rows if a call has fewer. With TMA,
        columns can also be 96 or 192, and rows 8 with swap-AB.
      depth: Inputs per step; for quantised rows some FP8 blocks, added one by one. Packed weights
        have their own, unless TMA copies them.
      swapped: Swap-AB: outputs, not rows, are the wide side of the tensor core.
      described: Whether blocks are copied by TMA descriptors; in Pallas by `linear_sm90`, which is
        persistent and has additional producer warps, if it supports the call.
      persistent: Whether a multiprocessor has one program, which processes blocks in turn.
      widens: Whether a separate kernel dequantises a packed weight in memory first. Otherwise it is
        dequantised in registers, which requires tiles that are not persistent. Described ones are
        for swap-AB by `linear_swap_ab` in Triton, also of bfloat16, and by `linear_packed_sm90` in
        Pallas, if they support the call.
      warps, stages: Warps and pipeline stages of the kernel.
      separate: Whether each segment of the inputs, see `LinearOrder`, has programs of its own, of
        which one adds the segments. Otherwise one program computes all segments of a tile.
    """

    sizes: ClassVar = ("item_bytes", "rows", "outputs", "gated", "one_segment")
    """Bytes of a weight element, rows and outputs of a call; 1 with a gate, else 0; 1 if the inputs
    are one segment, else 0."""

    rows: int
    columns: int
    depth: int
    swapped: bool
    described: bool
    persistent: bool
    widens: bool
    warps: int
    stages: int
    separate: bool = False

    def __post_init__(self) -> None:
        is_narrow = self.swapped and self.described
        depth = 128 if self.copies_swapped else 16
        least = {"rows": 8 if is_narrow else 16, "columns": 16, "depth": depth, "warps": 1}
        if self.columns in _THREE_HALVES:
            del least["columns"]
            is_tall = self.rows >= 16 * max(4, self.warps)
            if not (self.described and is_tall) or self.swapped:
                raise ValueError(
                    f"tiles of {self.columns} columns must be described, not swapped, and have 64 "
                    "rows or more for 4 warps"
                )
        check_powers_of_two(self, least)
        if not self.widens and (self.persistent or self.described and not self.swapped):
            raise ValueError("tiles without widens must be swapped if described, never persistent")
        if self.separate and (self.persistent or self.described and self.widens):
            raise ValueError("separate tiles must be without widens if described, never persistent")
        check_at_least(self, stages=2 if self.copies_swapped else 1)

    @property
    def copies_swapped(self) -> bool:
        """Returns whether TMA copies blocks of the weight for swap-AB."""
        return self.described and not self.widens

    def loaded(self, *, swapped: bool, most_stages: int = 4) -> "LinearTiles":
        """Returns the tiles of a kernel that loads blocks of a weight without TMA.

        Args:
          swapped: Whether these are, too, as all tiles that TMA copies.
          most_stages: Maximum stages; dequantised parts take registers.
        """
        if not self.copies_swapped:
            return self
        rows, stages = max(self.rows, 16), min(self.stages, most_stages)
        return replace(self, described=False, swapped=swapped, rows=rows, depth=128, stages=stages)

    def dividing(self, inputs: int) -> "LinearTiles":
        """Returns the tiles with half as deep steps, but as much memory, if that is fewer inputs.

        TMA copies whole steps.

        Args:
          inputs: Inputs of a segment.
        """
        half = self.depth // 2
        if not self.copies_swapped or -(-inputs // half) % 2 == 0:
            return self
        return self if half < 2 * FP8_BLOCK else replace(self, depth=half, stages=2 * self.stages)

    @property
    def are_powers_of_two(self) -> bool:
        """Returns whether every kernel supports these columns."""
        return self.columns not in _THREE_HALVES

    @property
    def narrowed(self) -> "LinearTiles":
        """Returns the tiles with a power of two of columns, for kernels that require it."""
        return self if self.are_powers_of_two else replace(self, columns=self.columns * 2 // 3)

    def adapted(self, rows: int, *, is_gated: bool) -> "LinearTiles":
        """Returns the tiles of a GEMM of rows with LoRA adapters.

        Adapters continue the accumulators beside their copies, so each has at most 64 registers of
        a thread.

        Args:
          rows: Rows of a tile.
          is_gated: Whether a tile has the outputs of gate and up.
        """
        warps = max(self.warps, 8) if rows >= 2 * _WIDE else self.warps
        most = 64 * 32 * warps // rows // (2 if is_gated else 1)
        return replace(self, columns=min(self.columns, most), warps=warps)

    def rows_of_codes(self, rows: int) -> int:
        """Returns the rows of an FP8 tile; all rows with swap-AB.

        Args:
          rows: Rows to multiply, at most those of the tiles.

        Raises:
          ValueError: The wide side is too narrow, so the bits would differ.
        """
        wide = self.columns if self.swapped else self.rows
        is_wide = wide >= _WIDE and self.are_powers_of_two
        if not is_wide or self.columns > FP8_BLOCK or self.depth < FP8_BLOCK:
            raise ValueError(
                f"tiles of FP8 rows must be {FP8_BLOCK} deep or more, {_WIDE} wide or more, and "
                f"have {FP8_BLOCK} columns at most, a power of two, got {self}"
            )
        return rows if self.swapped else self.rows

    def depth_of_codes(self, inputs: int) -> int:
        """Returns the inputs per step of a chain of `inputs`, in whole FP8 blocks."""
        return self.depth if inputs % self.depth == 0 else FP8_BLOCK

    def depth_of(self, inputs: int) -> int:
        """Returns the inputs per step of a chain; less than all of them, if there are more than 16.

        A compiler starts a chain of one step with the value added at its end, which rounds
        differently.
        """
        depth = self.depth
        while depth >= inputs and depth > 16:
            depth //= 2
        return depth


@dataclass(frozen=True, kw_only=True)
class LmHeadEpilogueTiles:
    """Choice of the LM-head epilogue, see `lm_head_epilogue`.

    Attributes:
      joined: Whether the LM head stores block partials, and logits only on request.
      ranked: The same for a drafter's LM head and the top-k children of nodes.
    """

    sizes: ClassVar = ("rows",)
    """Rows of the GEMM."""

    joined: bool
    ranked: bool


@dataclass(frozen=True, kw_only=True)
class SamplingTiles:
    """Tiles of `sampling.choose`, `sampling.score` and `sampling.rank`.

    Attributes:
      groups, warps: Groups of tokens of a tile, and warps of the kernels that process one.
      programs: Maximum programs that share the tiles of a row with a filter.
      row_programs, at_once, row_warps: Maximum programs that share the threshold search of a row,
        groups per step of one, and warps of the kernel.
      sampled, listed: Sampled tokens for the threshold bracket, and capacity of the list of tokens.
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
    """Tables of all kernels of one language, one field per module that has tiles."""

    encoder_attention: Table[EncoderAttentionTiles]
    attention: Table[AttentionTiles]
    gdn_prefill: Table[GDNPrefillTiles]
    gdn_layer: Table[GDNLayerTiles]
    experts: Table[ExpertsTiles]
    fp8_activations: Table[LinearTiles]
    lm_head_epilogue: Table[LmHeadEpilogueTiles]
    linear: Table[LinearTiles]
    head_product: Table[HeadProductTiles]
    attention_layer: Table[DecodeAttentionTiles]
    latent_attention: Table[LatentAttentionTiles]
    sampling: Table[SamplingTiles]

    @classmethod
    def load(cls, language: str, gpu: str, folder: Path = FOLDER) -> "Tiles":
        """Reads the tables of a GPU.

        Args:
          language: `pallas_gpu` or `triton_gpu`; compiled differently, hence two tables.
          gpu: Name of the GPU from its driver; it must begin with a file's name.
          folder: Folder of the files.

        Raises:
          ValueError: A table is missing, belongs to no kernel, or has an invalid line; names it.
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
    "head_product": HeadProductTiles,
    "attention_layer": DecodeAttentionTiles,
    "latent_attention": LatentAttentionTiles,
    "sampling": SamplingTiles,
}
"""Tile class of each kernel module that has tiles."""


def _file_of(gpu: str, folder: Path) -> Path:
    """Returns the file with the longest name that begins the GPU's name."""
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
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if not required <= tiles.keys() <= names:
        raise ValueError(f"tiles must be {sorted(names)}, got {sorted(tiles)}")
    if unknown := at_most.keys() - set(kind.sizes):
        raise ValueError(f"at_most supports {list(kind.sizes)}, got {sorted(unknown)}")
    return Line(at_most, kind(**tiles))
