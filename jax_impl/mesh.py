"""Device mesh for tensor parallelism: runs a step under `shard_map`, one rank per device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_impl.ops.collectives.all_gather import AXIS
from shared.boundary.tp_group import TPGroup

Tree = TypeVar("Tree")
State = TypeVar("State")

Leaf = jax.Array | list[jax.Array]


@dataclass(frozen=True)
class RankMesh:
    """Mesh of the devices of one process, one rank per device.

    Arrays of all ranks are one JAX array, concatenated along the first axis; the program of a rank
    has its own shard. With one rank arrays are unchanged.

    Attributes:
      devices: Devices of the ranks, in order.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, first: jax.Device, group: TPGroup) -> Self:
        """Returns the mesh of the first devices, one per rank.

        Raises:
          ValueError: There are fewer devices than ranks.
        """
        if group.is_single:
            return cls((first,))
        found = first.client.devices()
        devices = tuple(found[found.index(first) :][: group.count])
        if len(devices) < group.count:
            raise ValueError(
                f"tp_size {group.count} requires {group.count} {first.platform} devices, found "
                f"{len(devices)}; lower --tp-size, or on a CPU set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={group.count}"
            )
        return cls(devices)

    @property
    def ranks(self) -> list[TPGroup]:
        """Returns the `TPGroup` of each device."""
        count = len(self.devices)
        return [TPGroup(rank, count, None) for rank in range(count)]

    @property
    def all(self) -> Sharding:
        """Returns the sharding of replicated arrays."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec())

    def joined(self, shares: Sequence[Tree]) -> Tree:
        """Joins the ranks' arrays (or shapes) into global ones, without copying."""
        if len(shares) == 1:
            return shares[0]
        return jax.tree.map(lambda *arrays: self._joined(arrays), *shares)

    def run(
        self,
        step: Callable[[Tree, State, jax.Array], tuple[State, jax.Array]],
        arrays: Tree,
        state: State,
        words: jax.Array,
    ) -> tuple[State, jax.Array]:
        """Runs a step on every rank.

        Args:
          step: Program of a rank: maps its arrays, its state and the plan to its state and a
            result that is equal on all ranks.
          arrays, state: Global arrays of all ranks.
          words: The plan, replicated.
        """
        if len(self.devices) == 1:
            return step(arrays, state, words)
        own, same = PartitionSpec(AXIS), PartitionSpec()
        # Tests check that results are equal on all ranks; JAX cannot infer it from all-gathers.
        spread = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(own, own, same),
            out_specs=(own, same),
            check_vma=False,
        )
        return spread(arrays, state, words)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    def _joined(self, arrays: Sequence[jax.Array]) -> jax.Array | jax.ShapeDtypeStruct:
        where = NamedSharding(self._mesh, PartitionSpec(AXIS))
        first, *rest = arrays[0].shape
        shape = (len(arrays) * first, *rest)
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, arrays[0].dtype, sharding=where)
        return jax.make_array_from_single_device_arrays(shape, where, list(arrays))


def reserve_host_devices(count: int) -> None:
    """Configures `count` CPU devices in JAX, one per rank, if JAX runs on the CPU.

    Importing the ops has initialised the JAX backends, so they are cleared. If the process already
    has arrays, nothing changes, and `RankMesh.of` raises an error.
    """
    has_few = count > 1 and jax.default_backend() == "cpu" and len(jax.devices()) < count
    if has_few and not jax.live_arrays():
        clear_backends()
        jax.config.update("jax_num_cpu_devices", count)


def free_on_each(count: int) -> list[int]:
    """Returns the free bytes of the first `count` GPUs that report them; a CPU does not."""
    stats = [device.memory_stats() for device in jax.devices()[:count]]
    return [each["bytes_limit"] - each["bytes_in_use"] for each in stats if each]


def leaves_of(device: jax.Device, loaded: Sequence[Any]) -> list[Leaf]:
    """Returns the arrays of a rank as program arguments."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(loaded)
    return [_leaf(path, array, device) for path, array in leaves]


def _leaf(path: tuple, array: jax.Array, device: jax.Device) -> Leaf:
    """Returns a parameter as a program argument; on a CPU stacks of layers are split.

    On a CPU the static slice of a stack is copied in every step before its GEMM; a slice of a stack
    built in the program is not. A GPU reads slices in place and has a cost per argument, so it gets
    the stacks.
    """
    is_stack = any(getattr(key, "name", None) == "stacks" for key in path)
    if not is_stack or device.platform != "cpu":
        return array
    return [jax.device_put(layer, device) for layer in np.asarray(array)]
