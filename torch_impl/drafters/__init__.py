"""How drafts are made; all drafters rank their candidates in the same way."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.spec.sampling import DRAFT_TAU, TARGET_STREAM
from torch_impl.ops import any_row, sampling
from torch_impl.ops.sampling import Sampling

Noise = Float[Tensor, "B places vocab"]
"""The noise of each request at positions that follow one another."""

Rank = Callable[
    [Float[Tensor, "B k vocab"], Int[Tensor, "B k path"]],
    tuple[Int[Tensor, "B k width"], Float[Tensor, "B k width"]],
]
"""As `shared.spec.eagle.Rank`."""


@dataclass(frozen=True)
class Ranking:
    """Ranks the children of nodes as the target would: the same processing, the same noise.

    Attributes:
      sampling: Parameters of the requests.
      lengths: Committed positions of the requests.
      seen: Tokens of the requests with their newest, or None where no row has a penalty.
      noise: The noise at position `lengths + 1 + path`, or None where no row has a temperature.
      width: Children of a node.
    """

    sampling: Sampling
    lengths: Int[Tensor, " B"]
    seen: Int[Tensor, "B vocab"] | None
    noise: Noise | None
    width: int

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
        noise = None if self.noise is None else self.noise[request, path]
        perturbed = sampling.perturbed(processed, noise, rows.temperature)
        ids = sampling.top_candidates(perturbed, self.width)
        weights = sampling.draft_weights(perturbed, rows.temperature, DRAFT_TAU).gather(
            1, ids.long()
        )
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
