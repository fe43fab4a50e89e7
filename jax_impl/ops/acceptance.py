"""Which drafts of a tree become text; as `shared.spec.acceptance`."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int


def force(
    tokens: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    forced: Bool[jax.Array, " B"],
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Puts a forced row's own tokens in the place of the target's choices."""
    following = jnp.concatenate([tokens[:, 1:], choices[:, -1:]], axis=1)
    forces = forced & (num_nodes > 1)
    return jnp.where(forces[:, None], following, choices), num_nodes - forces.astype(jnp.int32)


def walk(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    depth: int,
) -> tuple[Int[jax.Array, "B W"], Int[jax.Array, " B"]]:
    """Follows the target's choices from each root: the nodes on the way, and how many."""
    B, N = tokens.shape
    numbers = jnp.arange(N)
    is_draft = (numbers > 0) & (numbers < num_nodes[:, None])
    node, counts = jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.int32)
    path = [node]
    for _ in range(depth):
        wanted = jnp.take_along_axis(choices, node[:, None], axis=1)
        is_next = is_draft & (parents == node[:, None]) & (tokens == wanted)
        found = is_next.any(axis=1)
        node = jnp.where(found, jnp.argmax(is_next, axis=1).astype(jnp.int32), node)
        path.append(node)
        counts = counts + found.astype(jnp.int32)
    return jnp.stack(path, axis=1), counts


def emitted(
    choices: Int[jax.Array, "B N"], path: Int[jax.Array, "B W"], counts: Int[jax.Array, " B"]
) -> Int[jax.Array, "B W"]:
    """The step's tokens, the bonus token last; 0 past a row's count."""
    chosen = jnp.take_along_axis(choices, path, axis=1)
    return jnp.where(jnp.arange(path.shape[1]) < counts[:, None], chosen, 0)


def failed(is_nan: Bool[jax.Array, "B N"], path: Int[jax.Array, "B W"]) -> Bool[jax.Array, " B"]:
    """Whether a logit on the way was NaN; a NaN elsewhere in the tree cannot reach the text."""
    return jnp.take_along_axis(is_nan, path, axis=1).any(axis=1)
