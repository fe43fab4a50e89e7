"""Rank code of all-gather tests on GPUs: a process in torch, a device in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kernels.peer_buffers import BufferLayout, PeerTimeout
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SQUARES
from tests.support.gather_cases import CASES, PRODUCT_CASES, Case, ProductCase
from tests.support.gpu_ranks import LOOKS, Rank

BLOCK_BYTES = 1 << 25


def on_torch(rank: Rank) -> Any:
    """The symmetric buffer of a process, connected with all others."""
    from kernels.triton_gpu.collectives.symmetric_memory import SymmetricBuffer

    device = torch.device("cuda", rank.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    symmetric_buffer = SymmetricBuffer(BufferLayout(rank.count, BLOCK_BYTES), rank.rank, device)
    symmetric_buffer.connect(rank.meet(symmetric_buffer.handle))
    return symmetric_buffer


def _placed(case: Case, rank: Rank, step: int, device: torch.device) -> list[torch.Tensor | None]:
    values, sums = case.share(rank.rank, rank.count, step)
    kind = torch.int16 if case.dtype == "bfloat16" else torch.int32
    signed = torch.from_numpy(values.view(np.int16 if kind == torch.int16 else np.int32))
    placed = signed.to(device).view(getattr(torch, case.dtype))
    if sums is None:
        return [placed, None]
    return [placed, torch.from_numpy(sums.view(np.int32)).to(device).view(torch.float32)]


def _bits(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    kind, found = (torch.int16, np.uint16) if x.element_size() == 2 else (torch.int32, np.uint32)
    return x.view(kind).cpu().numpy().view(found)


def gathers_of_torch(rank: Rank, steps: int, is_captured: bool) -> list[str]:
    """Gathers all cases in each step; returns a sentence for each fault."""
    from kernels.triton_gpu.collectives.all_gather import advance_sequence, all_gather

    symmetric_buffer = on_torch(rank)
    device = symmetric_buffer.mail.place.device
    given = [_placed(case, rank, 0, device) for case in CASES]

    def step() -> list[Any]:
        found = [
            all_gather(
                *given[call],
                symmetric_buffer.mail,
                call,
                boxes=symmetric_buffer.boxes,
                largest_words_bytes=case.largest_words_bytes,
            )
            for call, case in enumerate(CASES)
        ]
        advance_sequence(symmetric_buffer.mail, len(CASES))
        return found

    step()  # no rank waits for one that still compiles
    torch.cuda.synchronize(device)
    run: Callable[[], list[Any]] = step
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = step()

        def run() -> list[Any]:
            graph.replay()
            return captured

    rank.meet()
    symmetric_buffer.wait(LOOKS)
    torch.cuda.synchronize(device)
    rank.meet()
    wrong = []
    for number in range(steps):
        for own, case in zip(given, CASES, strict=True):
            for to, new in zip(own, _placed(case, rank, number, device), strict=True):
                if to is not None and new is not None:
                    to.copy_(new)
        torch.cuda.synchronize(device)
        found = [[_bits(x) for x in one] for one in run()]
        for case, got in zip(CASES, found, strict=True):
            for one, want in zip(got, case.whole(rank.count, number), strict=True):
                if want is not None and not np.array_equal(one, want):
                    places = np.argwhere(one != want)
                    wrong.append(
                        f"{case}, step {number}, rank {rank.rank}: {len(places)} of {want.size} "
                        f"differ, first {places[0]}: {one[tuple(places[0])]:x}"
                    )
        if late := PeerTimeout.read(int(symmetric_buffer.mail.error)):
            wrong.append(f"rank {rank.rank} missed {late} in step {number}")
            break
    rank.meet()
    symmetric_buffer.close()
    return wrong


def products_of_torch(rank: Rank, steps: int) -> list[str]:
    """Compares gathered products with one of all weights; returns a sentence for each fault."""
    from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, advance_sequence
    from kernels.triton_gpu.gemm.linear import product

    symmetric_buffer = on_torch(rank)
    device, wrong = symmetric_buffer.mail.place.device, []

    def multiply(case: ProductCase, step: int, own: int | None, call: int) -> Any:
        def placed(x: np.ndarray | None) -> Any:
            return None if x is None else torch.from_numpy(x).to(device).bfloat16()

        arrays = case.arrays(step, own, rank.count)
        return product(
            placed(arrays.x),
            placed(arrays.weight),
            None,
            out_type=torch.bfloat16,
            squares=None if arrays.squares is None else torch.from_numpy(arrays.squares).to(device),
            eps=1e-6,
            is_gated=case.is_gated,
            bias=None,
            factor=1.0,
            added=placed(arrays.added),
            norm=None if arrays.norm is None else torch.from_numpy(arrays.norm).to(device),
            order=SQUARES,
            segments=case.segments,
            format=PLAIN,
            tiles=case.tiles,
            gather=None
            if own is None
            else AllGatherArgs(symmetric_buffer.mail, call, symmetric_buffer.boxes),
        )

    for number in range(-1, steps):
        found = [multiply(case, number, rank.rank, call) for call, case in enumerate(PRODUCT_CASES)]
        advance_sequence(symmetric_buffer.mail, len(PRODUCT_CASES))
        if number < 0:  # no rank waits for one that still compiles
            rank.meet()
            symmetric_buffer.wait(LOOKS)
            torch.cuda.synchronize(device)
            rank.meet()
            continue
        for case, got in zip(PRODUCT_CASES, found, strict=True):
            want = multiply(case, number, None, 0)
            wrong += [
                f"{case}, step {number}, rank {rank.rank}: {name} differs"
                for name in case.differing([_bits(x) for x in got], [_bits(x) for x in want])
            ]
        if late := PeerTimeout.read(int(symmetric_buffer.mail.error)):
            wrong.append(f"rank {rank.rank} missed {late} in step {number}")
            break
    rank.meet()
    symmetric_buffer.close()
    return wrong


def missing_of_torch(rank: Rank, looks: int) -> tuple[PeerTimeout | None, bool]:
    """The last rank skips the second call of the second step; returns the view of each rank."""
    from kernels.triton_gpu.collectives.all_gather import advance_sequence, all_gather

    symmetric_buffer = on_torch(rank)
    values, _ = _placed(CASES[0], rank, 0, symmetric_buffer.mail.place.device)

    def gather(call: int) -> torch.Tensor:
        return all_gather(values, None, symmetric_buffer.mail, call, boxes=symmetric_buffer.boxes)[
            0
        ]

    gather(0)
    torch.cuda.synchronize()
    early = symmetric_buffer.missing()
    rank.meet()
    symmetric_buffer.wait(looks)
    rank.meet()
    gather(0)
    advance_sequence(symmetric_buffer.mail, 1)
    gather(0)
    out = values
    if rank.rank < rank.count - 1:
        out = gather(1)
    torch.cuda.synchronize()
    found = symmetric_buffer.missing()
    rank.meet()
    symmetric_buffer.close()
    assert early is None, "who does not wait misses nobody"
    return found, bool(out[:, -1].isnan().all())


def buffers_of_jax(ranks: int) -> tuple[Any, Any]:
    """A mesh of `ranks` devices of this process, and their symmetric buffers."""
    import jax
    from jax.sharding import Mesh

    from kernels.pallas_gpu.collectives.symmetric_memory import SymmetricBuffer

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("ranks",))
    return mesh, SymmetricBuffer(BufferLayout(ranks, BLOCK_BYTES), list(mesh.devices.flat))


def gathers_of_jax(ranks: int, steps: int) -> list[str]:
    """Same as `gathers_of_torch`, on devices of this process, in one program per step."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, all_gather, missed

    mesh, symmetric_buffer = buffers_of_jax(ranks)
    columns = PartitionSpec(None, "ranks")

    def run(given: list[Any], place: Any) -> Any:
        gather, found = AllGatherArgs(place, symmetric_buffer.boxes), []
        for case, (values, sums) in zip(CASES, given, strict=True):
            values = values.view(case.dtype)
            sums = sums if sums is None else sums.view(jnp.float32)
            got = all_gather(values, sums, gather, largest_words_bytes=case.largest_words_bytes)
            found.append([x if x is None else x.view(_unsigned(x.dtype.itemsize)) for x in got])
        return found, missed(gather, jnp.stack([each[0][0, 0] for each in found]))

    specs = [[columns, columns if case.chunks else None] for case in CASES]
    out_specs = [[columns, columns if case.chunks else None] for case in CASES]
    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, PartitionSpec("ranks")),
            out_specs=(out_specs, PartitionSpec("ranks")),
            check_vma=False,
        )
    )

    def placed(number: int) -> list[list[Any]]:
        shares = [[case.share(rank, ranks, number) for rank in range(ranks)] for case in CASES]
        return [
            [None if each[0] is None else joined(mesh, each, 1) for each in zip(*one, strict=True)]
            for one in shares
        ]

    idle, waiting = (joined(mesh, symmetric_buffer.places(looks), 0) for looks in (0, LOOKS))
    # No rank waits for one that still loads its kernels.
    jax.block_until_ready(program(placed(0), idle))
    wrong = []
    for number in range(steps):
        found, errors = program(placed(number), waiting)
        for case, got in zip(CASES, found, strict=True):
            for one, want in zip(got, case.whole(ranks, number), strict=True):
                if want is None:
                    continue
                for part in one.addressable_shards:
                    if not np.array_equal(np.asarray(part.data), want):
                        count = int((np.asarray(part.data) != want).sum())
                        wrong.append(f"{case}, step {number}: {count} of {want.size} differ")
        wrong += [f"{PeerTimeout.read(int(x))} in step {number}" for x in np.asarray(errors) if x]
    return wrong


def products_of_jax(ranks: int, steps: int) -> list[str]:
    """Same as `products_of_torch`, in one program for all devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, missed
    from kernels.pallas_gpu.collectives.symmetric_memory import SymmetricBuffer
    from kernels.pallas_gpu.gemm.linear import product

    devices = jax.devices()[:ranks]
    mesh = Mesh(np.array(devices), ("ranks",))
    symmetric_buffer = SymmetricBuffer(BufferLayout(ranks, BLOCK_BYTES), devices)

    def multiply(case: ProductCase, arrays: Any, gather: AllGatherArgs | None) -> Any:
        x, weight, squares, added, norm = arrays
        return product(
            x.astype(jnp.bfloat16),
            weight.astype(jnp.bfloat16)[None],
            None,
            jnp.int32(0),
            first=0,
            out_type=jnp.bfloat16,
            squares=squares,
            eps=1e-6,
            is_gated=case.is_gated,
            bias=None,
            factor=1.0,
            added=None if added is None else added.astype(jnp.bfloat16),
            norm=None if norm is None else norm[None],
            norm_layer=jnp.int32(0),
            order=SQUARES,
            format=PLAIN,
            tiles=case.tiles,
            gather=gather,
        )

    def run(given: list[Any], place: Any) -> Any:
        gather, found = AllGatherArgs(place, symmetric_buffer.boxes), []
        for case, arrays in zip(PRODUCT_CASES, given, strict=True):
            got = [x for x in multiply(case, arrays, gather) if x is not None]
            found.append([x.astype(jnp.float32) for x in got])
        return found, missed(gather, jnp.stack([each[-1][0, 0] for each in found]))

    rows, columns, whole = PartitionSpec("ranks"), PartitionSpec(None, "ranks"), PartitionSpec()
    specs = [
        (
            whole,
            rows,
            whole if case.kind != "added" else None,
            columns if case.kind == "added" else None,
            rows if case.kind == "added" else None,
        )
        for case in PRODUCT_CASES
    ]
    outs = [[columns] * (3 if case.kind == "added" else 1) for case in PRODUCT_CASES]
    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, rows),
            out_specs=(outs, rows),
            check_vma=False,
        )
    )
    alone = jax.jit(
        lambda given: [multiply(c, a, None) for c, a in zip(PRODUCT_CASES, given, strict=True)]
    )

    def placed(number: int) -> list[Any]:
        made = []
        for case in PRODUCT_CASES:
            each = [case.arrays(number, rank, ranks) for rank in range(ranks)]
            axes = {"x": None, "weight": 0, "squares": None, "added": 1, "norm": 0}
            made.append(
                tuple(
                    None
                    if getattr(each[0], name) is None
                    else joined(mesh, [getattr(one, name) for one in each], axis)
                    for name, axis in axes.items()
                )
            )
        return made

    idle, waiting = (joined(mesh, symmetric_buffer.places(looks), 0) for looks in (0, LOOKS))
    jax.block_until_ready(program(placed(0), idle))
    wrong = []
    for number in range(steps):
        found, errors = program(placed(number), waiting)
        wanted = alone([tuple(case.arrays(number, None, ranks)) for case in PRODUCT_CASES])
        for case, got, want in zip(PRODUCT_CASES, found, wanted, strict=True):
            numbers = [None if x is None else np.asarray(x.astype(jnp.float32)) for x in want]
            for rank in range(ranks):
                own: list[Any] = [np.asarray(x.addressable_shards[rank].data) for x in got]
                own += [None] * (3 - len(own))
                wrong += [
                    f"{case}, step {number}, rank {rank}: {name} differs"
                    for name in case.differing(own, numbers)
                ]
        wrong += [f"{PeerTimeout.read(int(x))} in step {number}" for x in np.asarray(errors) if x]
    return wrong


def missing_of_jax(ranks: int, looks: int) -> list[PeerTimeout | None]:
    """Rank 0 alone gathers, as device of a program that the others do not run, and again."""
    import jax
    import jax.numpy as jnp

    from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, all_gather, missed
    from kernels.pallas_gpu.collectives.symmetric_memory import SymmetricBuffer

    symmetric_buffer = SymmetricBuffer(BufferLayout(ranks, BLOCK_BYTES), jax.devices()[:ranks])
    values, _ = CASES[0].share(0, ranks, 0)

    def run(x: Any, place: Any) -> Any:
        gather = AllGatherArgs(place, symmetric_buffer.boxes)
        out, _ = all_gather(x, None, gather)
        return out, missed(gather, out)

    program, given = jax.jit(run), jnp.asarray(values).view("bfloat16")
    for wait in (0, 0, looks, 1 << 30):  # the last ends as soon: something is missing already
        out, error = program(given, jnp.asarray(symmetric_buffer.places(wait)[0]))
        assert bool(jnp.isnan(out[:, -1]).all())
        assert bool(error[0]) == bool(wait), "who does not wait misses nobody"
    return symmetric_buffer.missing()


def _unsigned(size: int) -> str:
    return f"uint{8 * size}"


def joined(mesh: Any, pieces: Sequence[np.ndarray], axis: int | None) -> Any:
    """An array from its part on each device, concatenated along an axis; None: replicated."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    devices = list(mesh.devices.flat)
    shape = list(pieces[0].shape)
    names: list[str | None] = [None] * len(shape)
    if axis is not None:
        shape[axis] *= len(devices)
        names[axis] = "ranks"
    parts = [jax.device_put(x, device) for x, device in zip(pieces, devices, strict=True)]
    sharding = NamedSharding(mesh, PartitionSpec(*names))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)
