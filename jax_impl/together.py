"""Several devices of one process that run every step together, each as a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import jax
import numpy as np
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_impl.ops.ranks import AXIS
from shared.boundary.ranks import Ranks

Tree = TypeVar("Tree")
State = TypeVar("State")


@dataclass(frozen=True)
class Together:
    """The devices of one process that run every step together, each as a rank.

    Arrays of all ranks are one array of JAX with one axis more, the first, whose places lie on the
    devices; a rank's program sees its own place alone. One rank has its arrays as they are.

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
        found = jax.devices(first.platform)
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
        """Arrays of each rank, on its device, as arrays of all of them."""
        if len(shares) == 1:
            return shares[0]
        return jax.tree.map(lambda *arrays: self._joined(arrays), *shares)

    def run(
        self,
        step: Callable[[Tree, State, jax.Array], tuple[State, jax.Array]],
        leaves: Tree,
        state: State,
        words: jax.Array,
    ) -> tuple[State, jax.Array]:
        """A step on every rank.

        Args:
          step: A rank's program, of its weights, its state and the plan's words; gives its state
            and a result that is the same on all ranks.
          leaves, state: Arrays of all ranks.
        """
        if len(self.devices) == 1:
            return step(leaves, state, words)

        def of_rank(leaves: Tree, state: State, words: jax.Array) -> tuple[State, jax.Array]:
            leaves, state = jax.tree.map(lambda x: x[0], (leaves, state))
            state, result = step(leaves, state, words)
            return jax.tree.map(lambda x: x[None], state), result

        own, same = PartitionSpec(AXIS), PartitionSpec()
        # Whether ranks end with one result is for tests to say: gathers are no sums of XLA's.
        spread = jax.shard_map(
            of_rank,
            mesh=self._mesh,
            in_specs=(own, own, same),
            out_specs=(own, same),
            check_vma=False,
        )
        return spread(leaves, state, words)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    def _joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
        where = NamedSharding(self._mesh, PartitionSpec(AXIS))
        # By way of numpy, which on a CPU is the same memory; a reshape would be compiled.
        own = [
            jax.device_put(np.asarray(array)[None], device)
            for array, device in zip(arrays, self.devices, strict=True)
        ]
        shape = (len(own), *own[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, where, own)


def take_devices(count: int) -> None:
    """Has JAX make a device of the processor for each of so many ranks, where they run on it.

    Who imports the ops has asked for the devices already. That is undone, unless another part of
    the process has arrays on them; `Together.of` then says that there are too few.
    """
    has_few = count > 1 and jax.default_backend() == "cpu" and len(jax.devices()) < count
    if has_few and not jax.live_arrays():
        clear_backends()
        jax.config.update("jax_num_cpu_devices", count)
