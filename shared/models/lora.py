"""LoRA adapters in peft's files; see `shared.models.lora_shapes`.

Source: peft 0.21.2, `tuners/lora`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from shared.models.file_kind import ADAPTER_FILE
from shared.models.lora_config import LoraConfig
from shared.models.lora_shapes import (
    WEIGHT,
    AdapterArrays,
    AdapterShapes,
    BaseWeight,
    Module,
    adaptable,
    modules,
    put_adapter,
)
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameter_arrays import slice_tensor
from shared.models.safetensors_file import open_file
from shared.models.stored_tensor import DTYPE_BYTES, UNNEEDED, without_prefix
from shared.models.weight_files import CheckpointError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
"""Prefix that peft adds to the tensor names of the base model."""

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
KV_B = "kv_b"
"""Last name of the weights of heads in latent attention, for which DoRA is not supported."""
BASE_LAYER = ".base_layer"
"""Suffix of the inner one of two adapted parameters of a module."""


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

    def __repr__(self) -> str:
        """Returns the version, which is the same in all processes."""
        return f"Adapter({self.version})"

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
            if len(module.index) == len(shapes.stack) - 2:
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
        is_kv_b = parameter.name.rpartition(".")[2] == KV_B
        for module in modules(parameter):
            if (stored := self._modules.get(module.name)) is not None:
                if is_kv_b and self.config.use_dora:
                    raise CheckpointError(
                        f"adapter {self.folder} adapts {stored}, which is not supported with "
                        "DoRA; train it without kv_b_proj, or merge the adapter"
                    )
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
        put_adapter(arrays, shapes, module.index, module.first, a, b, scale)
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
            put_adapter(arrays, shapes, index, 0, a[expert], b[expert], self.config.scale_of(name))


def _unwrapped(stored: str) -> str:
    return stored.removesuffix(BASE_LAYER)
