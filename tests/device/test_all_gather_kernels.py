"""All-gather of tensor-parallel ranks on the GPUs of one host, and its timeouts.

More ranks than GPUs share the GPUs, in torch as processes.
"""

import jax
import pytest
import torch

from kernels.peer_buffers import BufferLayout, PeerTimeout
from tests.support.gpu_ranks import in_processes
from tests.support.rank_steps_on_gpus import BACKENDS, MODELS, run_part
from tests.support.ranks_on_gpus import (
    gathers_of_jax,
    gathers_of_torch,
    missing_of_jax,
    missing_of_torch,
    products_of_jax,
    products_of_torch,
)
from tests.support.rows_on_gpus import rows_of_jax, rows_of_torch

GPUS = torch.cuda.device_count()
on_two_gpus = pytest.mark.skipif(GPUS < 2, reason="ranks exchange between two GPUs or more")
DEVICES = len(jax.devices()) if jax.default_backend() == "gpu" else 1


@on_two_gpus
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_torch_all_gather_returns_columns_of_all_ranks(ranks: int, is_captured: bool) -> None:
    found = in_processes(ranks, gathers_of_torch, 3 if ranks > GPUS else 12, is_captured)
    assert not [wrong for each in found for wrong in each]


@on_two_gpus
@pytest.mark.parametrize("ranks", [n for n in (2, 4, 8) if n <= max(DEVICES, 2)])
def test_jax_all_gather_returns_columns_of_all_ranks(ranks: int) -> None:
    assert not gathers_of_jax(ranks, 12)


@on_two_gpus
@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_all_gather_returns_listed_rows(ranks: int) -> None:
    found = in_processes(ranks, rows_of_torch, 3 if ranks > GPUS else 8)
    assert not [wrong for each in found for wrong in each]


@on_two_gpus
def test_jax_all_gather_returns_listed_rows() -> None:
    assert not rows_of_jax(2, 8)


@on_two_gpus
@pytest.mark.parametrize("ranks", [2, 8])
def test_torch_tp_linear_bitwise_equal(ranks: int) -> None:
    found = in_processes(ranks, products_of_torch, 3 if ranks > GPUS else 8)
    assert not [wrong for each in found for wrong in each]


@on_two_gpus
def test_jax_tp_linear_bitwise_equal() -> None:
    assert not products_of_jax(2, 8)


@on_two_gpus
def test_torch_missing_rank_sets_peer_timeout() -> None:
    (first, is_no_number), (last, _) = in_processes(2, missing_of_torch, 1 << 16)
    assert first == PeerTimeout(rank=1, call=1)
    assert is_no_number
    assert last is None


@on_two_gpus
def test_jax_missing_rank_sets_peer_timeout() -> None:
    assert missing_of_jax(2, 1 << 16) == [PeerTimeout(rank=1, call=3), None]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((3, 256), "ranks on GPUs must be 2, 4 or 8, got 3"),
        ((2, 100), "block_bytes must be a multiple of 256, got 100"),
        ((8, 1 << 27), "a symmetric buffer must be smaller than 2 GiB, got"),
    ],
)
def test_buffer_layout_rejects_invalid_sizes(sizes: tuple[int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BufferLayout(*sizes)


def test_peer_timeout_read_decodes_rank_and_call() -> None:
    assert PeerTimeout.read(0) is None
    assert PeerTimeout.read(145 * 16 + 7 + 1) == PeerTimeout(rank=7, call=145)


@on_two_gpus
@pytest.mark.parametrize(("name", "is_joined"), [*((n, False) for n in MODELS), ("dense", True)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tp_steps_bitwise_equal(backend: str, name: str, is_joined: bool) -> None:
    said = run_part(backend, name, is_joined=is_joined)
    assert said[0].isdigit(), said
