"""How drafts are made; all drafters rank their candidates in the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.drafts.config import DraftSizes
from shared.spec.draft_tree import TreeShape
from shared.spec.sampling import DRAFT_TAU, TARGET_STREAM
from torch_impl.device_state import DraftState, Plan
from torch_impl.model import Forward
from torch_impl.ops import any_row, sampling
from torch_impl.ops.attention import Rows
from torch_impl.ops.sampling import Sampling

Noise = Float[Tensor, "B places vocab"]
"""The noise of each request at positions that follow one another."""

Rank = Callable[
    [Float[Tensor, "B k vocab"], Int[Tensor, "B k path"]],
    tuple[Int[Tensor, "B k width"], Float[Tensor, "B k width"]],
]
"""As `shared.spec.eagle.Rank`."""


@dataclass(frozen=True)
class Prompts:
    """The prompt chunks of a prefill.

    Attributes:
      tokens: All chunks, then padding.
      row_starts: First token of each chunk, and the end.
      first: Position of each chunk's first token.
      lengths: Of the slots after the chunks.
      last: The flat row of each chunk's last token.
      rows: Where the tokens stand and what they see.
    """

    tokens: Int[Tensor, " T"]
    row_starts: Int[Tensor, " B1"]
    first: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, " B"]
    rows: Rows


@dataclass(frozen=True)
class Fed:
    """Committed rows that a drafter is extended over.

    Attributes:
      rows: Where they stand; they see draft KV from `draft_from` on.
      tokens: Each row's own token.
      following: The token after each row's.
      passed: The target's pass over the rows, with the streams that the drafter reads.
      last: The flat row that is each request's last.
    """

    rows: Rows
    tokens: Int[Tensor, " R"]
    following: Int[Tensor, " R"]
    passed: Forward
    last: Int[Tensor, " B"]


@dataclass(frozen=True)
class Drafted:
    """Drafted trees, as `draft_tree.keep_best` gives them."""

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    num_nodes: Int[Tensor, " B"]


class Drafter(Protocol):
    """What a step asks of a drafter; it writes its memory but for `draft_from`."""

    @property
    def streams(self) -> tuple[int, ...]:
        """The residual streams of the target that it reads, ascending."""
        ...

    @property
    def sizes(self) -> DraftSizes:
        """What it keeps between steps; only with a relay is `rank` used while it is extended."""
        ...

    def prefill(
        self, memory: DraftState, plan: Plan, prompts: Prompts, fed: Fed, rank: Rank
    ) -> None:
        """Extends the drafter over prompt chunks.

        Args:
          rank: Of the token after each row's newest, which the relay holds.
        """
        ...

    def extend(
        self,
        memory: DraftState,
        plan: Plan,
        before: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
        fed: Fed,
        rank: Rank,
    ) -> None:
        """Extends the drafter over accepted paths, of W rows a request.

        Args:
          before: Lengths before the path.
          counts: How many of a request's rows are real.
        """
        ...

    def draft(
        self,
        memory: DraftState,
        plan: Plan,
        newest: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
        shape: TreeShape,
        rank: "Ranking",
    ) -> Drafted:
        """Drafts a tree for each request; one whose `draft_from` is its length gets its root."""
        ...


@dataclass(frozen=True)
class Ranking:
    """Ranks the children of nodes as the target would: the same processing, the same noise.

    Attributes:
      sampling: Parameters of the requests.
      lengths: Committed positions of the requests.
      seen: Tokens of the requests with their newest, or None where no row has a penalty.
      noise: The noise at position `lengths + 1 + path`, or None where children are ranked without:
        no row has a temperature.
      width: Children of a node.
      kept: Gets the processed logits of each level where drafts are sampled, to be judged by the
        rejection rule; `noise` is then the drafts' own. Else None.
    """

    sampling: Sampling
    lengths: Int[Tensor, " B"]
    seen: Int[Tensor, "B vocab"] | None
    noise: Noise | None
    width: int
    kept: list[Float[Tensor, "B vocab"]] | None

    def __call__(
        self, logits: Float[Tensor, "B k vocab"], paths: Int[Tensor, "B k path"]
    ) -> tuple[Int[Tensor, "B k width"], Float[Tensor, "B k width"]]:
        """See `Rank`."""
        B, k, _ = logits.shape
        path = paths.shape[2]
        request = torch.arange(B, device=logits.device).repeat_interleave(k)
        rows = self.sampling if k == 1 else self.sampling.rows(request)
        positions = self.lengths[request] + 1 + path
        seen = self._seen_after(paths.flatten(0, 1), request)
        processed = sampling.processed(logits.flatten(0, 1), seen, positions, rows, None)
        if self.kept is not None:
            self.kept.append(processed)
        noise = None if self.noise is None else self.noise[request, path]
        perturbed = sampling.perturbed(processed, noise, rows.temperature)
        ids = sampling.top_candidates(perturbed, self.width)
        tau = 1.0 if noise is None else DRAFT_TAU
        weights = sampling.draft_weights(perturbed, rows.temperature, tau).gather(1, ids.long())
        return ids.unflatten(0, (B, k)), weights.unflatten(0, (B, k))

    def _seen_after(
        self, paths: Int[Tensor, "R path"], request: Int[Tensor, " R"]
    ) -> Int[Tensor, "R vocab"] | None:
        if self.seen is None:
            return None
        return self.seen[request].scatter_add(1, paths.long(), torch.full_like(paths, 2).int())


def noise_of(
    sampling_of: Sampling, lengths: Int[Tensor, " B"], places: int, vocab: int
) -> Noise | None:
    """The noise at positions `lengths + 1` and on, or None where no row has a temperature.

    The target and the drafter share it: all nodes of a depth, and the level that is drafted there.
    """
    if not any_row(sampling_of.temperature > 0):
        return None
    place = torch.arange(places, dtype=torch.int32, device=lengths.device)
    positions = (lengths[:, None] + 1 + place).flatten()
    seeds = sampling_of.seed.repeat_interleave(places)
    return sampling.gumbel(seeds, positions, vocab, TARGET_STREAM).view(-1, places, vocab)
