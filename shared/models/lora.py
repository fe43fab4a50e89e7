"""LoRA adapters in peft's files, and their arrays for the parameters of a model.

A parameter concatenates modules, such as q, k and v: its parts. The arrays of an adapter follow the
parameter's stack: `a [layers, parts * rank, in]` and `b [layers, out, rank]`, with an axis of
experts after the layers for experts. Modules without an adapter have zeros.

Source: peft 0.21.2, `tuners/lora`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32

from shared.models.file_kind import ADAPTER_FILE
from shared.models.lora_config import LoraConfig
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameter_arrays import slice_tensor
from shared.models.safetensors_file import open_file
from shared.models.stored_tensor import DTYPE_BYTES, UNNEEDED, without_prefix
from shared.models.weight_files import CheckpointError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
"""Prefix that peft adds to the tensor names of the base model."""

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
BASE_LAYER = ".base_layer"
"""Suffix of the inner one of two adapted parameters of a module."""

RANK_ALIGNMENT = 16
"""Ranks in device memory are multiples of this."""

WEIGHT = ".weight"
MATRICES = (
    *("inputs", "out", "queries", "gate_up", "down", "router", "shared_gate_up", "shared_down"),
    *("latent_in", "latent_out", "parallel_gate_up", "parallel_down"),
)
"""Last names of parameters that may have adapters."""

BaseWeight = Callable[[CheckpointTensor], Float32[np.ndarray, "..."]]
"""Reads a tensor of the base model, dequantised; its slice, if it has one."""


class WeightReader(Protocol):
    """An opened checkpoint of the base model."""

    def load(self, parameter: Parameter, dtype: Any) -> np.ndarray:
        """Reads a parameter; see `Checkpoint.load`."""
        ...


@dataclass(frozen=True)
class Module:
    """A module of a parameter.

    Attributes:
      name: Name without prefix.
      tensor: Its weight.
      index: Layer, and expert if the parameter has them.
      first: First of its outputs in the parameter.
    """

    name: str
    tensor: CheckpointTensor
    index: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class AdapterShapes:
    """Shapes of the adapter arrays of a parameter, or of a rank's shard of it.

    Attributes:
      parameter: The parameter.
      rank: Columns of `b`, a multiple of `RANK_ALIGNMENT` on devices.
    """

    parameter: Parameter
    rank: int

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Outputs of each part."""
        index = (0,) * (len(self.parameter.shape) - 2)
        modules = [each for each in _modules(self.parameter) if each.index == index]
        return tuple(each.tensor.taken_shape[0] for each in modules)

    @property
    def arrays(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array of `AdapterArrays`."""
        *lead, outputs, inputs = self.parameter.shape
        ranks = len(self.parts) * self.rank
        shapes = {"a": (ranks, inputs), "b": (outputs, self.rank), "scales": (ranks,)}
        return {name: (*lead, *x) for name, x in (shapes | {"factors": (outputs,)}).items()}

    def num_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of one adapter; scales and factors are float32."""
        items = {"a": item_bytes, "b": item_bytes}
        return sum(items.get(name, 4) * math.prod(shape) for name, shape in self.arrays.items())


@dataclass(frozen=True)
class AdapterArrays:
    """Arrays of one adapter for one parameter; see `shared.spec.lora.AdapterWeights`."""

    a: Float32[np.ndarray, "*layers ranks inputs"]
    b: Float32[np.ndarray, "*layers outputs rank"]
    scales: Float32[np.ndarray, "*layers ranks"]
    factors: Float32[np.ndarray, "*layers outputs"]


def adaptable(wanted: Sequence[Parameter]) -> list[Parameter]:
    """Returns the parameters of decoder layers that may have adapters."""
    return [x for x in wanted if x.name.rpartition(".")[2] in MATRICES and "mtp." not in x.name]


def padded_rank(rank: int) -> int:
    """Returns the rank in device memory."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT


class Adapter:
    """An adapter folder.

    Attributes:
      folder: The folder.
      config: Its settings.
      version: Digest of its files.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the files and reads their headers.

        Raises:
          CheckpointError: A file is missing or invalid, or a setting or tensor is not supported.
        """
        self.folder, self.config = folder, LoraConfig.from_folder(folder)
        path = folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise CheckpointError(
                f"adapter {folder} has no {ADAPTER_WEIGHTS}; save it with safe_serialization"
            )
        self._file = open_file(path)
        self._modules: dict[str, str] = {}
        self._tensors = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        for name in self._tensors:
            self._register(name)
        digest = hashlib.sha256()
        for each in (folder / ADAPTER_FILE, path):
            digest.update(hashlib.sha256(each.read_bytes()).digest())
        self.version = digest.hexdigest()

    @property
    def max_rank(self) -> int:
        """Largest rank of a module."""
        return max([self.config.rank, *self.config.rank_pattern.values()])

    def check(self, whole: Sequence[Parameter], model: str) -> None:
        """Checks that the adapter fits a model and that every tensor of it is used.

        Args:
          whole: Parameters of the model, not shards.
          model: Name of the model family, for messages.

        Raises:
          CheckpointError: The first fault.
        """
        used = set[str]()
        for parameter in adaptable(whole):
            used |= {stored for _, stored in self._found(parameter)}
        unused = sorted(set(self._modules.values()) - used)
        if unused:
            raise CheckpointError(
                f"adapter {self.folder} has {unused[0]}, which is not an adaptable module of this "
                f"{model} model; train an adapter of its linear layers"
            )

    def adapts(self, parameter: Parameter) -> bool:
        """Returns True if a module of a parameter has an adapter."""
        return any(True for _ in self._found(parameter))

    def arrays(self, shapes: AdapterShapes, base: BaseWeight) -> AdapterArrays:
        """Reads the arrays for a parameter, or for a rank's shard of it.

        Args:
          shapes: The parameter, and the rank to which ranks are zero-padded.
          base: Reads weights of the base model, for DoRA.

        Raises:
          CheckpointError: A value is not finite, or a tensor does not fit.
        """
        made = {name: np.zeros(shape, np.float32) for name, shape in shapes.arrays.items()}
        made["factors"][:] = 1
        arrays = AdapterArrays(**made)
        for module, stored in self._found(shapes.parameter):
            if len(module.index) == len(shapes.parameter.shape) - 2:
                self._fill(arrays, shapes, module, stored, base)
            else:
                self._fill_experts(arrays, shapes, module, stored)
        return arrays

    def _register(self, name: str) -> None:
        """Stores the module of a tensor; all tensors of an adapter are A, B or magnitudes."""
        stored = name.removeprefix(ROOT)
        for kind in (A, B, MAGNITUDE, f"{MAGNITUDE}{WEIGHT}"):
            if stored.endswith(f".{kind}"):
                module = stored.removesuffix(f".{kind}")
                break
        else:
            raise CheckpointError(
                f"adapter {self.folder} has tensor {name}, which is not supported; only {A}, {B} "
                f"and {MAGNITUDE} are"
            )
        if kind.startswith(MAGNITUDE) and not self.config.use_dora:
            raise CheckpointError(
                f"adapter {self.folder} has {name}, but use_dora in {ADAPTER_FILE} is not true; "
                "save the adapter again"
            )
        if any(part in stored for part in UNNEEDED):
            raise CheckpointError(
                f"adapter {self.folder} adapts {module}, and adapters of vision and audio encoders "
                "are not supported; train an adapter of the language model"
            )
        if module.endswith(("embed_tokens", "lm_head")):
            raise CheckpointError(
                f"adapter {self.folder} adapts {module}, and adapters of embeddings and LM heads "
                "are not supported; train without it, or merge the adapter"
            )
        if self._tensors[name].get_dtype() not in DTYPE_BYTES:
            raise CheckpointError(
                f"adapter {self.folder} stores {name} as {self._tensors[name].get_dtype()}; save "
                f"it in one of {', '.join(DTYPE_BYTES)}"
            )
        self._modules[without_prefix(module)] = module

    def _found(self, parameter: Parameter) -> Iterator[tuple[Module, str]]:
        """Yields the adapted modules of a parameter with their names in the file."""
        for module in _modules(parameter):
            if (stored := self._modules.get(module.name)) is not None:
                self._check(module.tensor, stored)
                yield module, stored
        if len(parameter.shape) == 4:
            for number, (whole, *_) in enumerate(parameter.pieces):
                if (stored := self._of_experts(whole)) is not None:
                    yield Module(whole.name, whole, (number,), 0), stored

    def _of_experts(self, whole: CheckpointTensor) -> str | None:
        """Returns the name of the adapter of all experts' matrices, which its shapes identify."""
        experts, outputs, inputs = whole.shape
        owner = whole.name.rpartition(".")[0]
        for name in (f"{owner}{BASE_LAYER}", owner):
            if (stored := self._modules.get(name)) is None:
                continue
            a, b = self._shape(stored, A), self._shape(stored, B)
            rank = self.config.rank_of(f"{_unwrapped(stored)}.{whole.name.rpartition('.')[2]}")
            if (a, b) == ((experts * rank, inputs), (outputs, experts * rank)):
                if whole.is_transposed or self.config.use_dora:
                    raise CheckpointError(
                        f"adapter {self.folder} adapts the experts {stored}, which is not "
                        "supported with DoRA or transposed experts; merge the adapter"
                    )
                return stored
        return None

    def _check(self, tensor: CheckpointTensor, stored: str) -> None:
        rank = self.config.rank_of(stored)
        expected: dict[str, tuple[int, ...]] = {
            A: (rank, tensor.shape[1]),
            B: (tensor.shape[0], rank),
        }
        if self.config.use_dora:
            expected[MAGNITUDE] = tensor.shape[:1]
        for kind, shape in expected.items():
            if (got := self._shape(stored, kind)) != shape:
                raise CheckpointError(
                    f"adapter {self.folder}: {stored}.{kind} must have shape {list(shape)}, got "
                    f"{'none' if got is None else list(got)}"
                )

    def _name(self, stored: str, kind: str) -> str:
        names = (f"{root}{stored}.{kind}{end}" for root in (ROOT, "") for end in ("", WEIGHT))
        return next((name for name in names if name in self._tensors), "")

    def _shape(self, stored: str, kind: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(self._name(stored, kind))
        return None if tensor is None else tuple(tensor.get_shape())

    def _read(self, stored: str, kind: str) -> Float32[np.ndarray, "..."]:
        values = self._file.get_tensor(self._name(stored, kind)).astype(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"adapter {self.folder}: {stored}.{kind} has values that are not finite; train it "
                "again"
            )
        return values

    def _fill(
        self,
        arrays: AdapterArrays,
        shapes: AdapterShapes,
        module: Module,
        stored: str,
        base: BaseWeight,
    ) -> None:
        a, whole = self._read(stored, A), self._read(stored, B)
        b, scale = slice_tensor(module.tensor, whole), self.config.scale_of(stored)
        _put(arrays, shapes, module.index, module.first, a, b, scale)
        if self.config.use_dora:
            magnitude = slice_tensor(module.tensor, self._read(stored, MAGNITUDE))
            sums = base(module.tensor) + np.float32(scale) * (b @ a)
            outputs = slice(module.first, module.first + len(b))
            norms = np.linalg.norm(sums, axis=1)
            arrays.factors[(*module.index, outputs)] = magnitude / norms

    def _fill_experts(
        self, arrays: AdapterArrays, shapes: AdapterShapes, module: Module, stored: str
    ) -> None:
        """Fills in the adapters of all experts: A has rows expert by expert, B columns rank by
        rank.
        """
        experts, outputs, inputs = module.tensor.shape
        a = self._read(stored, A).reshape(experts, -1, inputs)
        b = self._read(stored, B).reshape(outputs, -1, experts).transpose(2, 0, 1)
        b = slice_tensor(module.tensor, b)
        name = f"{_unwrapped(stored)}.{module.name.rpartition('.')[2]}"
        for expert in range(experts):
            index = (*module.index, expert)
            _put(arrays, shapes, index, 0, a[expert], b[expert], self.config.scale_of(name))


def _unwrapped(stored: str) -> str:
    return stored.removesuffix(BASE_LAYER)


def _put(
    arrays: AdapterArrays,
    shapes: AdapterShapes,
    index: tuple[int, ...],
    first: int,
    a: Float32[np.ndarray, "rank inputs"],
    b: Float32[np.ndarray, "outputs rank"],
    scale: float,
) -> None:
    """Stores an adapter of the outputs from `first` on in each part that has some of them."""
    end = first + len(b)
    for part, (start, stop) in enumerate(_ranges(shapes.parts)):
        low, high = max(start, first), min(stop, end)
        if low < high:
            rows = slice(part * shapes.rank, part * shapes.rank + len(a))
            arrays.a[(*index, rows)] = a
            arrays.scales[(*index, rows)] = scale
            arrays.b[(*index, slice(low, high), slice(0, len(a)))] = b[low - first : high - first]


def _ranges(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = [*accumulate(parts)]
    return zip([0, *ends[:-1]], ends, strict=True)


def _modules(parameter: Parameter) -> Iterator[Module]:
    """Yields the modules of a parameter that are stored as tensors of their own."""
    has_experts = len(parameter.shape) == 4
    for number, sources in enumerate(parameter.pieces):
        if not has_experts:
            yield from _in_order(sources, (number,))
            continue
        (whole, *shared), count = sources, sources[0].shape[0]
        each = len(whole.parts) // count
        for expert in range(count):
            own = whole.parts[expert * each : (expert + 1) * each]
            yield from _in_order(own, (number, expert))
        yield from _in_order(shared, (number, count))


def _in_order(tensors: Sequence[CheckpointTensor], index: tuple[int, ...]) -> Iterator[Module]:
    first = 0
    for each in tensors:
        yield Module(each.name.removesuffix(WEIGHT), each, index, first)
        first += each.taken_shape[0]


def adapter_bytes(shapes: Sequence[AdapterShapes], item_bytes: int) -> int:
    """Returns the bytes of one adapter in device memory."""
    return sum(each.num_bytes(item_bytes) for each in shapes)


def base_weights(checkpoint: WeightReader) -> BaseWeight:
    """Returns the function that reads tensors of an opened base checkpoint."""

    def read(tensor: CheckpointTensor) -> Float32[np.ndarray, "..."]:
        alone = Parameter(tensor.name, tensor.taken_shape, ((tensor,),), stacked=False)
        return checkpoint.load(alone, np.float32)

    return read
