"""Recurrent state of a slot, and its replay over accepted paths.

Same as `shared.spec.recurrent_state`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.gated_delta import CHUNK
from shared.spec.recurrent_state import WINDOW
from torch_impl.ops import any_row_set, clamp_rows
from torch_impl.ops.gemm import layers
from torch_impl.ops.recurrent import gated_delta


@dataclass(frozen=True)
class RecurrentState:
    """States of rows (or slots) in all recurrent layers."""

    recurrent: Float[Tensor, "L B H K V"]
    window: Float[Tensor, "L B 3 C"]


@dataclass(frozen=True)
class ReplayInputs:
    """Replay inputs: the inputs of a verify's nodes in all layers, exactly as it used them."""

    k: Float[Tensor, "L B N H K"]
    v: Float[Tensor, "L B N H V"]
    log_decay: Float[Tensor, "L B N H"]
    beta: Float[Tensor, "L B N H"] | None
    inputs: Float[Tensor, "L B N C"]


def conv(
    windows: Float[Tensor, "*rows 3 C"],
    inputs: Float[Tensor, "*rows C"],
    weight: Float[Tensor, "C 4"],
    bias: Float[Tensor, " C"] | None,
) -> Float[Tensor, "*rows C"]:
    """Computes the depthwise causal convolution of width 4 and silu, in float32."""
    total, *products = (
        x.float() * weight[:, i].float() for i, x in enumerate((*windows.unbind(dim=-2), inputs))
    )
    for product in products:
        total += product
    return layers.silu(total if bias is None else total + bias.float())


def chain_windows(
    window: Float[Tensor, "B 3 C"],
    inputs: Float[Tensor, "T C"],
    request: Int[Tensor, " T"],
    places: Int[Tensor, " T"],
) -> Float[Tensor, "T 3 C"]:
    """Returns the convolution window before each token of many requests.

    Args:
      window: Each request's last inputs before its tokens.
      inputs: Inputs of the tokens of all requests, concatenated.
      request: Request of each token.
      places: Index of each token among its request's tokens.
    """
    T = len(inputs)
    back = torch.arange(WINDOW, 0, -1, dtype=torch.int32, device=inputs.device)
    number = torch.arange(T, dtype=torch.int32, device=inputs.device)
    from_inputs = inputs[(number[:, None] - back).clamp(min=0)]
    place = places[:, None] - back  # below 0: in the old window
    from_window = window[request[:, None], (place + WINDOW).clamp(0, WINDOW - 1)]
    return torch.where((place >= 0)[:, :, None], from_inputs, from_window)


def chain_end(
    window: Float[Tensor, "B 3 C"],
    inputs: Float[Tensor, "T C"],
    row_starts: Int[Tensor, " B1"],
    taken: Int[Tensor, " B"],
) -> Float[Tensor, "B 3 C"]:
    """Returns the convolution window after the first `taken` tokens of each request."""
    place = taken[:, None] + torch.arange(-WINDOW, 0, dtype=torch.int32, device=taken.device)
    from_inputs = inputs[(row_starts[:-1, None] + place).clamp(0, len(inputs) - 1)]
    request = torch.arange(len(window), device=window.device)[:, None]
    from_window = window[request, (place + WINDOW).clamp(0, WINDOW - 1)]
    return torch.where((place >= 0)[:, :, None], from_inputs, from_window)


def tree_windows(
    window: Float[Tensor, "B 3 C"],
    inputs: Float[Tensor, "B N C"],
    parents: Int[Tensor, "B N"] | None,
) -> Float[Tensor, "B N 3 C"]:
    """Same as the specification; `parents` is None for chains."""
    if parents is None:
        return torch.cat([window, inputs[:, :-1]], dim=1).unfold(1, WINDOW, 1).mT
    # Indices into window + inputs: node i is WINDOW + i, the root's parent is WINDOW - 1.
    root = torch.full_like(parents[:, :1], WINDOW - 1)
    above = torch.cat([root, parents[:, 1:] + WINDOW], dim=1).long()
    place, taps = above, [above]
    for _ in range(WINDOW - 1):
        node = (place - WINDOW).clamp(min=0)
        place = torch.where(place >= WINDOW, above.gather(1, node), place - 1)
        taps.append(place)
    rows = torch.arange(len(window), device=window.device)[:, None, None]
    return torch.cat([window, inputs], dim=1)[rows, torch.stack(taps[::-1], dim=2)]


def path_window(
    window: Float[Tensor, "L B 3 C"], inputs: Float[Tensor, "L B W C"], taken: Int[Tensor, " B"]
) -> Float[Tensor, "L B 3 C"]:
    rows = torch.cat([window, inputs], dim=2)
    index = taken[:, None] + torch.arange(WINDOW, dtype=torch.int32, device=taken.device)
    return rows[:, torch.arange(len(taken), device=taken.device)[:, None], index]


def replay(
    state: RecurrentState,
    kept: ReplayInputs,
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    save_after: Int[Tensor, " B"],
) -> tuple[RecurrentState, RecurrentState, Bool[Tensor, " B"]]:
    path = path[:, : clamp_rows(counts.max(), path.shape[1], 1)]
    rows = torch.arange(len(path), device=path.device)[:, None]
    k, v, log_decay, inputs = (
        x[:, rows, path] for x in (kept.k, kept.v, kept.log_decay, kept.inputs)
    )
    beta = None if kept.beta is None else kept.beta[:, rows, path]
    recurrent = saved = state.recurrent
    for i in range(path.shape[1]):
        # A row's tokens past its count have no effect: no decay, and key, beta and value 0.
        is_real = i < counts[:, None]
        recurrent = gated_delta.update(
            recurrent,
            _masked(k[:, :, i], is_real),
            _masked(v[:, :, i], is_real),
            _masked(log_decay[:, :, i], is_real),
            None if beta is None else _masked(beta[:, :, i], is_real),
        )
        if any_row_set(is_saved := save_after == i + 1):
            saved = torch.where(is_saved[None, :, None, None, None], recurrent, saved)
    passed = (save_after >= 1) & (save_after <= counts)
    save_window = path_window(state.window, inputs, torch.where(passed, save_after, 0))
    new_window = path_window(state.window, inputs, counts)
    return RecurrentState(recurrent, new_window), RecurrentState(saved, save_window), passed


def _masked(
    x: Float[Tensor, "L B *rest"], is_real: Bool[Tensor, "B 1"]
) -> Float[Tensor, "L B *rest"]:
    return torch.where(is_real.view(-1, *[1] * (x.ndim - 2)), x, 0)


def ends_chunk(save_after: Int[Tensor, " B"], num_tokens: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Returns True if a prefill has a chunk that ends after `save_after` tokens."""
    is_border = (save_after % CHUNK == 0) | (save_after == num_tokens)
    return (save_after > 0) & (save_after <= num_tokens) & is_border
