"""Gemma 4 assistants: drafters that read the keys and values of their target and write none.

A row combines the embedding of a token with a hidden state: the target's at the last committed
token, and below the first level the assistant's own. Its layers are decoder layers of the target's
family with queries only. All rows of a request have the position of its last committed token, at
all levels of a tree, and attend to the committed tokens that are visible to it. Nodes of a tree
are not visible to each other, so nothing has to be written, moved or extended.

The position follows vLLM and SGLang, which measure acceptance with it. transformers uses the next
position.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from shared.drafts.assistant import TOKEN_CLUSTERS
from shared.drafts.config import DraftHead
from shared.models.config import ModelConfig
from shared.models.groups import LayerPlace, places_in_target
from shared.spec import layers, lm_head, model
from shared.spec.attention import AttentionRows, WindowPageTables
from shared.spec.cache_pools import Pools
from shared.spec.draft_tree import TreeShape
from shared.spec.eagle import DraftInput, relay_of
from shared.spec.linear import Matrix
from shared.spec.lm_head import Projection
from shared.spec.model import Hidden, Weights
from shared.spec.token_clusters import TokenClusters
from shared.spec.tree_growth import DraftRequests, Logits, Rank, Tokens, Tree, grow

TargetHidden = Float[np.ndarray, "R target_hidden"]
"""Hidden states of the target's width."""


@dataclass(frozen=True, eq=False)
class Assistant:
    """An assistant bound to its weights and its target's.

    Attributes:
      head: Its config and weights.
      target, target_weights: Config and weights of the target, for the embedding.
    """

    head: DraftHead
    target: ModelConfig
    target_weights: Weights

    @cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """Place of each layer in its own groups, and in the pools of the target."""
        config = self.head.config
        return places_in_target(config.layer.places, self.target.places, config.kv_layers)

    def forward(
        self, rows: AttentionRows, tokens: Tokens, hidden: TargetHidden, kv: Pools
    ) -> Hidden:
        """Runs the assistant over rows; returns its hidden states after the final norm.

        Args:
          rows: Rows of `reading_rows`.
          tokens: Token of each row.
          hidden: Hidden state of each row, of the target's width.
          kv: Pools of the target.
        """
        config, target = self.head.config.layer, self.target
        embed = self.target_weights["embed"]
        embedded = layers.embed_tokens(embed, tokens, None, target.embedding_factor)
        x = layers.linear(np.concatenate([embedded, hidden], axis=1), self.head.weights["fc"])
        passed = model.run_layers(
            config, self.head.weights, self.places, kv, rows, x, None, _no_recurrent_layer
        )
        return passed.hidden

    def carried(self, hidden: Hidden) -> TargetHidden:
        """Returns the hidden states for the next level from the outputs of `forward`."""
        return layers.linear(hidden, self.head.weights["post"])

    def logits(self, hidden: Hidden) -> Logits:
        """Returns the logits from the outputs of `forward`."""
        weights, clusters = self.head.weights, self.head.config.clusters
        own = None
        if clusters is not None:
            centroids = Matrix.plain(weights["centroids"])
            own = TokenClusters(centroids, weights[TOKEN_CLUSTERS], clusters.top_k)
        return lm_head.scores(Projection(hidden, Matrix.plain(weights["lm_head"]), clusters=own))


def _no_recurrent_layer(layer: int, inputs: np.ndarray) -> np.ndarray:
    raise AssertionError("an assistant has attention layers only")


def reading_rows(
    until: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    window_page_tables: WindowPageTables,
    width: int,
) -> AttentionRows:
    """Returns `width` rows for each request, all at its last committed position.

    Args:
      until: Number of committed tokens of each request; 0 for padding.
      page_table, window_page_tables: Pages of the requests in the pools of the target.
      width: Rows of a request.
    """
    request = np.repeat(np.arange(len(until)), width)
    until = until[request]
    position = np.maximum(until - 1, 0)
    return AttentionRows(
        request=request,
        positions=position,
        places=position,
        first=np.zeros_like(until),
        until=until,
        window=np.zeros((len(until), 0), bool),
        is_real=until > 0,
        page_table=page_table,
        window_page_tables=window_page_tables,
    )


def extend(
    assistant: Assistant,
    kv: Pools,
    rows: AttentionRows,
    newest: Tokens,
    hidden: TargetHidden,
    rank: Rank,
) -> tuple[DraftInput, Logits]:
    """Computes the draft input of each request; see `relay_of`.

    Args:
      assistant: The assistant.
      kv: Pools of the target, with the committed tokens.
      rows: One row for each request.
      newest: Newest token of each request.
      hidden: Hidden state of the target at each request's last committed token.
      rank: Selects the candidates.

    Returns:
      The draft input with the assistant's own hidden state, and the logits of its candidates.
    """
    own = assistant.forward(rows, newest, hidden, kv)
    logits = assistant.logits(own)
    return relay_of(own, logits, np.arange(len(own)), rank), logits


def draft(
    assistant: Assistant,
    kv: Pools,
    relay: DraftInput,
    requests: DraftRequests,
    window_page_tables: WindowPageTables,
    shape: TreeShape,
    rank: Rank,
) -> Tree:
    """Grows one draft tree per request; see `eagle.draft`.

    Args:
      assistant: The assistant.
      kv: Pools of the target.
      relay: Result of `extend`.
      requests, shape, rank: See `eagle.draft`.
      window_page_tables: See `AttentionRows`.
    """
    hidden = relay.hidden
    until = np.where(requests.can_draft, requests.lengths, 0)
    rows = reading_rows(until, requests.page_table, window_page_tables, shape.width)

    def expand(
        _: AttentionRows, tokens: Tokens, parent: Int[np.ndarray, " R"], kv: Pools
    ) -> tuple[Logits, Pools]:
        nonlocal hidden
        hidden = assistant.forward(rows, tokens, assistant.carried(hidden[parent]), kv)
        return assistant.logits(hidden), kv

    first = (relay.tokens[:, : shape.width], relay.weights[:, : shape.width])
    return grow(expand, kv, first, requests, shape, rank, root_rows=0)[0]
