"""Faults of compiled programs, read from the output of XLA and ptxas.

This module needs neither of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from bench.kernels.known_spills import PALLAS, TRITON, Excuse
from tests.support.lowered import BROKEN_BY, operations

MOST_SHARED_BYTES = 227 * 1024
"""Shared memory that a block of an H200 can have."""
LEAST_HELD_BYTES = 2**20
"""Bytes of an array argument; a smaller one is no weight, pool or state of note."""

KERNELS_IN_BUFFER = {"kCustomKernel", "kCustomCall"}
"""Call targets of Triton and Mosaic GPU; other calls break a command buffer, see `BROKEN_BY`."""
IN_BUFFER = KERNELS_IN_BUFFER | {"kKernel", "kCopy", "kMemset32BitValue", "kMemzero"}
"""Thunks that a command buffer of a step has; a small copy may be one of them."""

_SHARED = re.compile(r"shared_memory: (\d+) bytes")
_THUNK = re.compile(r"^(\s*)\d+: (k\w+)\s+\[[^]]*\] ?(\S*)")
_SERIALISED = re.compile(
    r"wgmma\.\S+ instructions are serialized due to (.+?) (?:in|for) the function '(\w+)'"
)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<what>[\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NAMED = re.compile(r"\b(?:kernel_)?name=\"(\w+)\"")
_VECTOR = re.compile(r"\b((?:ld|st)\.\S*v(\d)\.[bfsu](\d+))\s+[^;\[]*(\[[^\]+]+\+(-?\d+)\])")
_MOSAIC = "_mosaic_gpu_kernel"
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_NO_WORK = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
_COPIES = {"copy", "copy-start"}
_IN_PLACE = ("dynamic_update_slice", "dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Thunk:
    """Thunk: a host action of a program.

    Attributes:
      kind: XLA's name of the kind.
      name: Name of the kernel that it starts, if any.
      depth: Nesting depth; 0 at the top.
      shared_bytes: Shared memory of a block of the kernel.
    """

    kind: str
    name: str
    depth: int
    shared_bytes: int


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: Name; XLA numbers kernels of one name.
      registers: Registers per thread.
      spilled_bytes: Bytes of spill stores or loads per thread.
      shared_bytes: Shared memory per block.
      serialised: Reason why WGMMA instructions are serialised; empty if they are not.
      misaligned: Misaligned vector access, see `misaligned_access`; empty if there is none.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    serialised: str = ""
    misaligned: str = ""

    @property
    def source(self) -> str:
        """Name in the source."""
        return re.sub(r"__\d+$", "", self.name)


def read_ptxas(text: str, thunks: Sequence[Thunk]) -> list[Kernel]:
    """Parses the kernels in the output of `ptxas -v`.

    Args:
      text: Output of ptxas.
      thunks: Thunks of the program, with the dynamic shared memory, which ptxas does not report.

    Raises:
      ValueError: A kernel has no figures, or no thunk starts it, so a format has changed.
    """
    shared = {thunk.name: thunk.shared_bytes for thunk in thunks}
    serialised = {name: why for why, name in _SERIALISED.findall(text)}
    found = []
    for part in text.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if registers is None or spills is None:
            raise ValueError(f"ptxas reports no registers or spills of {name}")
        if name not in shared:
            raise ValueError(f"no thunk starts {name}")
        static = re.search(r"(\d+) bytes smem", part)
        held = shared[name] + (int(static[1]) if static else 0)
        spilled = max(map(int, spills.groups()))
        found.append(Kernel(name, int(registers[1]), spilled, held, serialised.get(name, "")))
    return found


def read_mosaic(text: str, passes: str) -> Kernel:
    """Parses the kernel in the dump of Mosaic GPU; XLA's call of it has no figures.

    Args:
      text: Output of ptxas.
      passes: Dump of the kernel after each pass of Mosaic.

    Raises:
      ValueError: A figure is missing, so a format has changed.
    """
    name = re.search(rf"Compiling entry function '(\w+){_MOSAIC}'", text)
    shared = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    if name is None or shared is None:
        raise ValueError("the dump of Mosaic GPU has no kernel or no shared memory size")
    (kernel,) = read_ptxas(text, [Thunk("", f"{name[1]}{_MOSAIC}", 0, int(shared[1]))])
    return replace(kernel, name=name[1])


def misaligned_access(ptx: str) -> str:
    """Returns a vector load or store at a constant offset that is no multiple of its size, or "".

    Base registers are assumed to be aligned: a compiler puts constants into the offset. Mosaic GPU
    vectorises by layout, whatever the strides of an array are.
    """
    for found in _VECTOR.finditer(ptx):
        instruction, count, bits, address, offset = found.groups()
        if int(offset) % (int(count) * int(bits) // 8):
            return f"{instruction} {address}"
    return ""


def read_thunks(text: str) -> list[Thunk]:
    """The thunks of a dump, in order; those within another are indented."""
    found = []
    for line in text.splitlines():
        if thunk := _THUNK.match(line):
            shared = _SHARED.search(line)
            depth, kind, name = len(thunk[1]), thunk[2], thunk[3]
            found.append(Thunk(kind, name, depth, int(shared[1]) if shared else 0))
    return found


def copied_by_xla(text: str) -> dict[str, int]:
    """Bytes of XLA's own operations that copy, by name, of a step as optimized HLO.

    Those are the copies, and whatever reads an array of the form of a weight, a pool or a state and
    writes others. Kernels are none of XLA's, and an update in place writes nothing else: had it to
    copy first, a copy would precede it.
    """
    held, forms, found = set[str](), dict[str, list[str]](), dict[str, int]()
    for line in text[text.index("ENTRY") :].splitlines():
        one = _INSTRUCTION.match(line)
        if one is None:
            continue
        name, what, arrays = one["name"], one["what"], list(_ARRAY.finditer(one["type"]))
        forms[name] = [array[0] for array in arrays]
        read = held.intersection(_operands(line[one.end() :], forms))
        if what == "parameter" or (what == "bitcast" and read):
            held |= {array[0] for array in arrays if _bytes_of(array) > LEAST_HELD_BYTES}
        is_ours = what in _NO_WORK or "xla.gpu.triton" in line or "mosaic_gpu" in line
        is_in_place = any(each in name or each == what for each in _IN_PLACE)
        if (read or what in _COPIES) and not is_ours and not is_in_place:
            found[name] = sum(map(_bytes_of, arrays))
    return found


def _operands(rest: str, forms: Mapping[str, list[str]]) -> Iterator[str]:
    """The forms of what an operation reads, from the end of its opening parenthesis on."""
    for name, index in _OPERAND.findall(rest.split(")")[0]):
        known = forms.get(name, [])
        yield from known[int(index) : int(index) + 1] if index else known


def _bytes_of(array: re.Match[str]) -> int:
    _, bits, shape = array.groups()
    return max(1, int(bits or 8) // 8) * prod(int(size) for size in shape.split(",") if size)


def kernel_names(folder: Path) -> set[str]:
    """The names that the sources of a folder give their kernels."""
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return {name for text in texts for name in _NAMED.findall(text)}


def faults_of_kernel(kernel: Kernel, case: str) -> Iterator[str]:
    """Yields the faults of a kernel in a case, one sentence each."""
    known = excuse(kernel, case)
    most = known.max_bytes if known else 0
    if kernel.spilled_bytes > most:
        beyond = f", and {most} are excused" if known else ""
        yield f"{kernel.name} of {case} spills {kernel.spilled_bytes} bytes{beyond}"
    if kernel.misaligned:
        yield f"{kernel.name} of {case} has a misaligned vector access: {kernel.misaligned}"
    if kernel.shared_bytes > MOST_SHARED_BYTES:
        held, most = kernel.shared_bytes, MOST_SHARED_BYTES
        yield (
            f"{kernel.name} of {case} requires {held} bytes of shared memory, "
            f"and a block has {most}"
        )


def excuse(kernel: Kernel, case: str) -> Excuse | None:
    """Returns the known spill of a kernel, if any."""
    if not kernel.spilled_bytes:
        return None
    known = (*PALLAS, *TRITON)
    return next((x for x in known if x.kernel == kernel.source and case in x.cases), None)


def faults_of_excuses(
    known: Sequence[Excuse], needed: Collection[tuple[Excuse, str]]
) -> Iterator[str]:
    """Yields the cases of known spills in which nothing spilled.

    Args:
      known: Known spills.
      needed: Those that occurred, each with its case.
    """
    for each in known:
        for case in each.cases:
            if (each, case) not in needed:
                yield f"{each.kernel} of {case} is excused and spills nothing"


def faults_of_operations(text: str, step: str) -> Iterator[str]:
    """Yields operations that a step must not have before it is compiled, by its StableHLO."""
    if broken := operations(text) & BROKEN_BY:
        yield f"{step} has operations that break a command buffer: {', '.join(sorted(broken))}"


def faults_of_order(thunks: Sequence[Thunk], step: str) -> Iterator[str]:
    """Yields reasons why a step is not one command buffer, one sentence each."""
    tops = [thunk for thunk in thunks if not thunk.depth]
    if [thunk.kind for thunk in tops] != ["kCommandBuffer"]:
        beside = _format_thunks([thunk for thunk in tops if thunk.kind != "kCommandBuffer"])
        buffers = len(tops) - sum(thunk.kind != "kCommandBuffer" for thunk in tops)
        yield f"{step} is not one command buffer: it has {buffers}, and beside them {beside}"
    other = [thunk for thunk in thunks if thunk.depth and thunk.kind not in IN_BUFFER]
    if other:
        yield f"{step} has in its command buffer {_format_thunks(other)}"


def _format_thunks(thunks: Sequence[Thunk]) -> str:
    return _listed([" ".join(filter(None, (thunk.kind, thunk.name))) for thunk in thunks])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more


def faults_of_copies(text: str, max_bytes: int, step: str) -> Iterator[str]:
    """Yields the copies of weights, pools or states in a step, as a sentence."""
    large = {name: size for name, size in copied_by_xla(text).items() if size > max_bytes}
    if large:
        yield f"{step} copies {sum(large.values())} bytes in {_listed(list(large))}"


def faults_of_memory(temp_bytes: int, planned_bytes: int, step: str) -> Iterator[str]:
    """Yields a sentence if a step takes more memory than its plan."""
    if temp_bytes > planned_bytes:
        yield f"{step} works on {temp_bytes} bytes, and the memory plan has {planned_bytes}"
