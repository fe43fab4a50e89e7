"""How drafts are made; all drafters rank their candidates in the same way."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jax_impl.device_state import DraftState, Held
from jax_impl.model import Forward
from jax_impl.ops import sampling
from jax_impl.ops.attention import Rows
from jax_impl.ops.sampling import Sampling
from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.sampling import DRAFT_TAU

Carry = TypeVar("Carry")

Trees = tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]


class Ranking(NamedTuple):
    """How a batch's candidates are ranked: as the target will choose, with its noise.

    Attributes:
      sampling: Parameters of the B rows.
      seen: What each row's text holds, the newest token included.
      lengths: Committed tokens of each row; its newest token stands there.
      kept: Gets the processed logits of each level as the step is traced, where drafts are sampled
        to be judged by the rejection rule; their noise is then their own. Else None.
    """

    sampling: Sampling
    seen: Int[jax.Array, "B vocab"]
    lengths: Int[jax.Array, " B"]
    kept: list[Float[jax.Array, "B vocab"]] | None

    def rank(
        self,
        logits: Float[jax.Array, "B k vocab"],
        paths: Int[jax.Array, "B k path"],
        depth: Int[jax.Array, ""] | int,
        noise: Float[jax.Array, "B vocab"],
        width: int,
    ) -> tuple[Int[jax.Array, "B k width"], Float[jax.Array, "B k width"]]:
        """The best children of nodes at one depth, and the log weights of the edges to them.

        Args:
          paths: Drafts from below the root to each node; the first `depth` of them are real.
          noise: The target's, for the token after those nodes.
        """
        B, k, vocab = logits.shape
        flat, how = logits.reshape(B * k, vocab), self.sampling
        if k > 1:
            how = how.rows(jnp.repeat(jnp.arange(B), k))

        def seen() -> Int[jax.Array, "R vocab"]:
            is_real = jnp.broadcast_to(jnp.arange(paths.shape[2]) < depth, paths.shape)
            before = jnp.repeat(self.seen, k, axis=0)
            flat_paths = (part.reshape(B * k, -1) for part in (paths, is_real))
            return sampling.seen_along(before, *flat_paths)

        positions = jnp.repeat(self.lengths, k) + depth + 1
        scores = sampling.processed_after(flat, seen, positions, how, None)
        if self.kept is not None:
            self.kept.append(scores)
        scores = sampling.perturbed(scores, jnp.repeat(noise, k, axis=0), how.temperature)
        ids = sampling.top_candidates(scores, width)
        weights = sampling.draft_weights(scores, how.temperature, DRAFT_TAU)
        weights = jnp.take_along_axis(weights, ids, axis=1)
        return ids.reshape(B, k, width), weights.reshape(B, k, width)

    def along(
        self, body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, levels: Any
    ) -> tuple[Carry, Any]:
        """`lax.scan` over levels; written out where each keeps what cannot leave a scan's body."""
        if self.kept is None:
            return lax.scan(body, carry, levels)
        found = []
        for level in range(len(jax.tree.leaves(levels)[0])):
            carry, out = body(carry, jax.tree.map(lambda x, level=level: x[level], levels))
            found.append(out)
        return carry, jax.tree.map(lambda *outs: jnp.stack(outs), *found)


class Fed(NamedTuple):
    """Committed rows that a drafter is extended over.

    Attributes:
      rows: Where they stand; they see draft KV from `draft_from` on.
      tokens: Each row's own token.
      following: The token after each row's.
      passed: The target's pass over the rows.
      last: The flat row that is each request's last.
    """

    rows: Rows
    tokens: Int[jax.Array, " R"]
    following: Int[jax.Array, " R"]
    passed: Forward
    last: Int[jax.Array, " B"]


class Drafter(Protocol):
    """What a step asks of a drafter; it writes its memory but for `start`."""

    @property
    def sizes(self) -> DraftSizes:
        """What it keeps between steps; only with a relay is it ranked while it is extended."""
        ...

    def prefill(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        held: Held,
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """Extends the drafter over prompt chunks.

        Args:
          ranking, noise: Of the token after each row's newest, which the relay holds.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        before: Int[jax.Array, " B"],
        counts: Int[jax.Array, " B"],
        fed: Fed,
        ranking: Ranking,
        noise: Float[jax.Array, "B vocab"],
    ) -> DraftState:
        """Extends the drafter over accepted paths, of W rows a request.

        Args:
          before: Lengths before the path.
          counts: How many of a request's rows are real.
        """
        ...

    def draft(
        self,
        memory: DraftState,
        plan: SimpleNamespace,
        newest: Int[jax.Array, " B"],
        shape: TreeShape,
        ranking: Ranking,
        noise: Float[jax.Array, "B levels vocab"],
    ) -> tuple[Trees, DraftState]:
        """Drafts a tree for each request; one whose `draft_from` is its length gets its root.

        Args:
          noise: The target's at the position after the newest token and those that follow.

        Returns:
          Tokens, parents and node counts as `draft_tree.keep_best`, and the memory, whose committed
          rows are as they were.
        """
        ...
