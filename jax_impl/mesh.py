"""Several devices of one process that run every step together, each as a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_impl.ops.collectives.all_gather import AXIS
from shared.boundary.tp_group import Ranks

Tree = TypeVar("Tree")
State = TypeVar("State")


@dataclass(frozen=True)
class Together:
    """The devices of one process that run every step together, each as a rank.

    Arrays of all ranks are one array of JAX, as if they stood one behind the other along the first
    axis; a rank's program sees its own alone. One rank has its arrays as they are.

    Attributes:
      devices: Of the ranks, in order.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, first: jax.Device, group: Ranks) -> Self:
        """As many devices as there are ranks, from the first on.

        Raises:
          ValueError: There are fewer.
        """
        if group.is_alone:
            return cls((first,))
        found = first.client.devices()
        devices = tuple(found[found.index(first) :][: group.count])
        if len(devices) < group.count:
            raise ValueError(
                f"{group.count} ranks need as many devices, of {first.platform} there are "
                f"{len(devices)}; on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{group.count}"
            )
        return cls(devices)

    @property
    def ranks(self) -> list[Ranks]:
        """Who each device is."""
        count = len(self.devices)
        return [Ranks(rank, count, None) for rank in range(count)]

    @property
    def all(self) -> Sharding:
        """Where what is the same on all ranks lies."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec())

    def joined(self, shares: Sequence[Tree]) -> Tree:
        """Arrays of each rank, on its device, or their shapes, as those of all; none is moved."""
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
        """A step on every rank.

        Args:
          step: A rank's program, of its arrays, its state and the plan's words; gives its state
            and a result that is the same on all ranks.
          arrays, state: Of all ranks.
        """
        if len(self.devices) == 1:
            return step(arrays, state, words)
        own, same = PartitionSpec(AXIS), PartitionSpec()
        # Whether ranks end with one result is for tests to say: gathers are no sums of XLA's.
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


def take_devices(count: int) -> None:
    """Has JAX make a device of the processor for each of so many ranks, where they run on it.

    Who imports the ops has asked for the devices already. That is undone, unless another part of
    the process has arrays on them; `Together.of` then says that there are too few.
    """
    has_few = count > 1 and jax.default_backend() == "cpu" and len(jax.devices()) < count
    if has_few and not jax.live_arrays():
        clear_backends()
        jax.config.update("jax_num_cpu_devices", count)


def free_on_each(count: int) -> list[int]:
    """Bytes that can be allocated on each of the first so many GPUs that tell; a CPU does not."""
    stats = [device.memory_stats() for device in jax.devices()[:count]]
    return [each["bytes_limit"] - each["bytes_in_use"] for each in stats if each]
