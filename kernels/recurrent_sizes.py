"""Sizes of a recurrent layer, GDN or Mamba2, and the layout of its projected rows."""

from collections.abc import Sequence
from typing import NamedTuple


class RecurrentSizes(NamedTuple):
    """Sizes of a layer, and first columns of the parts of its projected rows.

    Attributes:
      H, K, V: Value heads, and elements of a key and of a value.
      C: Channels of the convolution.
      key_heads: Key heads (Mamba2: groups).
      width: Elements of a projected row.
      q, k, v: First channels of queries, keys and values (Mamba2: C, B, x).
      channels, z, gates: First columns of the convolution's channels, of z and of the gates.
      has_delta: False for Mamba2, which has no delta rule, no unit length of queries and keys, and
        no norm of each head; see `shared.spec.mamba2`.
      has_bias: True if the convolution has a bias.
    """

    H: int
    K: int
    V: int
    C: int
    key_heads: int
    width: int
    q: int
    k: int
    v: int
    channels: int
    z: int
    gates: int
    has_delta: bool
    has_bias: bool


def sizes_of(
    recurrent: Sequence[int], window: Sequence[int], *, has_delta: bool, has_bias: bool
) -> RecurrentSizes:
    """Returns the sizes of layers with states of shapes [..., H, K, V] and [..., 3, C]."""
    (H, K, V), C = recurrent[-3:], window[-1]
    values = H * V
    keys = (C - values) // 2  # of all key heads
    return RecurrentSizes(
        H=H,
        K=K,
        V=V,
        C=C,
        key_heads=keys // K,
        width=C + values + (2 if has_delta else 1) * H,
        q=0 if has_delta else values + keys,
        k=keys if has_delta else values,
        v=2 * keys if has_delta else 0,
        channels=0 if has_delta else values,
        z=C if has_delta else 0,
        gates=C + values,
        has_delta=has_delta,
        has_bias=has_bias,
    )


def columns_of(columns: int, sizes: RecurrentSizes) -> int:
    """Returns the state columns of a program: half for keys of 256, which take more registers."""
    return min(columns if sizes.K <= 128 else columns // 2, sizes.V)


def size_of_list(nodes: int) -> int:
    """Returns the size of a list of visits of a tree: their number, the visits, two of padding.

    A leaf off the trunk takes a visit of each inner node off the trunk at most: half of the nodes
    for each of the others.
    """
    return nodes + nodes * nodes // 4 + 3
