"""Parsing and fault detection of `bench.kernels.aot`, without compiling."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from bench.common.draft_config import Draft, folders_of
from bench.kernels.aot import KERNELS, Report, line_of
from bench.kernels.compiled import (
    MOST_SHARED_BYTES,
    Kernel,
    Thunk,
    copied_by_xla,
    faults_of_copies,
    faults_of_kernel,
    faults_of_memory,
    faults_of_operations,
    faults_of_order,
    kernel_names,
    misaligned_access,
    read_mosaic,
    read_ptxas,
    read_thunks,
)
from bench.kernels.items import RANKS, STEPS, Found, Item, Step, case_of, cases_of, items_of
from bench.kernels.known_spills import PALLAS, TRITON
from bench.kernels.starts import SHAPES
from bench.kernels.workers import Done

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'product__1' for 'sm_90a'
ptxas info    : Function properties for product__1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
ptxas info    : Compiling entry function 'input_reduce_fusion' for 'sm_90a'
ptxas info    : Function properties for input_reduce_fusion
    592 bytes stack frame, 588 bytes spill stores, 640 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 592 bytes cumulative stack size, 128 bytes smem
"""
WAITS = """\
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to ill formed pipeline stage in the function 'product__1'
"""
THUNKS = """\
000: kCommandBuffer [source | sink] 
    001: kCustomKernel [source        | next=002 (1) ] input_reduce_fusion grid: [1, 1, 1] \
threads: [2, 1, 1]  shared_memory: 0 bytes
    002: kCopy         [prev=001 (1)  | next=003 (1) ] kCopy
    003: kCustomKernel [prev=002 (1)  | sink         ] product__1 grid: [96, 1, 1] threads: \
[128, 1, 1]  shared_memory: 122880 bytes
"""
POOL = "bf16[4,2,64,128,64]"
HLO = f"""\
%fused (p: {POOL}) -> {POOL} {{
  ROOT %inner = {POOL} copy(%p)
}}

ENTRY %main (words: s32[7], pool: {POOL}) -> ({POOL}, s32[3]) {{
  %words = s32[7]{{0}} parameter(0), sharding={{replicated}}
  %pool = {POOL}{{4,3,2,1,0}} parameter(1)
  %view = bf16[8,64,128,64]{{3,2,1,0}} bitcast(%pool)
  %slice_fusion = bf16[2,64]{{1,0}} fusion(%view, %words), kind=kLoop, calls=%fused
  %loop_fusion = (pred[3]{{0}}, /*index=1*/f32[999999]{{0}}) fusion(%words), kind=kLoop
  %update.1 = {POOL}{{4,3,2,1,0}} dynamic-update-slice(%pool, %words)
  %loop_dynamic_update_slice_fusion = {POOL}{{4,3,2,1,0}} fusion(%pool, %words), kind=kLoop
  %ours = (s32[9]{{0}}, {POOL}{{4,3,2,1,0}}) custom-call(%pool), target="__gpu$xla.gpu.triton"
  %small_fusion = s32[9]{{0}} fusion(%ours#0), kind=kLoop, calls=%fused
  %late_fusion = f32[3]{{0}} fusion(%small_fusion, %ours#1), kind=kLoop, calls=%fused
  %copy.3 = s32[9]{{0}} copy(%ours#0)
  ROOT %tuple = ({POOL}{{4,3,2,1,0}}, s32[3]{{0}}) tuple(%ours#1, %loop_fusion)
}}
"""


def test_read_ptxas_returns_registers_spills_and_shared_memory():
    assert read_ptxas(PTXAS, read_thunks(THUNKS)) == [
        Kernel("product__1", registers=48, spilled_bytes=0, shared_bytes=122880),
        Kernel("input_reduce_fusion", registers=255, spilled_bytes=640, shared_bytes=128),
    ]
    assert Kernel("product__1", 48, 0, 0).source == "product"


@pytest.mark.parametrize("where", ["in the function", "for the function"])
def test_read_ptxas_reports_serialised_wgmma(where: str) -> None:
    told = WAITS.replace("in the function", where)
    waits, other = read_ptxas(told + PTXAS, read_thunks(THUNKS))
    assert line_of(waits, "case", None).endswith("  serialised: ill formed pipeline stage")
    assert not other.serialised


@pytest.mark.parametrize("gone", ["spill", "registers"])
def test_read_ptxas_rejects_unknown_format(gone: str) -> None:
    with pytest.raises(ValueError, match="ptxas reports no registers or spills of product__1"):
        read_ptxas(PTXAS.replace(gone, "other"), read_thunks(THUNKS))
    with pytest.raises(ValueError, match="no thunk starts product__1"):
        read_ptxas(PTXAS, [])


def test_read_mosaic_returns_kernel_and_shared_memory():
    said = PTXAS.split("ptxas info    : Compiling entry function 'input")[0]
    said = said.replace("product__1", "linear_sm90_mosaic_gpu_kernel")
    passes = "gpu.launch blocks(%1) threads(%2) dynamic_shared_memory_size %c163840_i32 {"
    assert read_mosaic(said, passes) == Kernel("linear_sm90", 48, 0, 163840)
    for text, other in ((PTXAS, passes), (said, "gpu.launch")):
        with pytest.raises(
            ValueError, match="the dump of Mosaic GPU has no kernel or no shared memory size"
        ):
            read_mosaic(text, other)


@pytest.mark.parametrize(
    ("access", "want"),
    [
        ("ld.v2.b32 \t{%r1, %r2}, [%rd5+148]", "ld.v2.b32 [%rd5+148]"),
        ("st.shared.v4.b32 \t[%rd5+8], {%r1, %r2, %r3, %r4}", "st.shared.v4.b32 [%rd5+8]"),
        ("ld.global.v2.f32 \t{%f1, %f2}, [%rd5+-4]", "ld.global.v2.f32 [%rd5+-4]"),
        ("ld.v2.b32 \t{%r1, %r2}, [%rd5+152]", ""),
        ("ld.shared.v2.b16 \t{%rs1, %rs2}, [%rd5+148]", ""),
        ("ld.b32 \t%r1, [%rd5+148]", ""),
        ("ld.v2.b32 \t{%r1, %r2}, [%rd5];\n\tst.b32 \t[%rd5+148], %r1", ""),
    ],
)
def test_misaligned_access_finds_vectors_at_odd_offsets(access: str, want: str) -> None:
    found = misaligned_access(f"\tmov.b64 \t%rd5, 0;\n\t{access};\n")
    assert found == want
    faults = list(faults_of_kernel(Kernel("mix", 255, 0, 0, misaligned=found), "a case"))
    assert faults == [f"mix of a case has a misaligned vector access: {want}"] * bool(want)


def test_read_thunks_returns_kind_kernel_and_depth():
    assert read_thunks(THUNKS) == [
        Thunk("kCommandBuffer", "", 0, 0),
        Thunk("kCustomKernel", "input_reduce_fusion", 4, 0),
        Thunk("kCopy", "kCopy", 4, 0),
        Thunk("kCustomKernel", "product__1", 4, 122880),
    ]


def test_copied_by_xla_counts_copies_and_slices():
    """Also of a pool that a kernel has written; no update in place, no view, and no sum of rows."""
    assert copied_by_xla(HLO) == {"slice_fusion": 256, "late_fusion": 12, "copy.3": 36}


def test_faults_of_kernel_reports_spills_and_shared_memory():
    assert not list(faults_of_kernel(Kernel("mix", 255, 0, MOST_SHARED_BYTES), "a case"))
    wrong = Kernel("mix__2", 255, 8, MOST_SHARED_BYTES + 1)
    assert list(faults_of_kernel(wrong, "a case")) == [
        "mix__2 of a case spills 8 bytes",
        "mix__2 of a case requires 232449 bytes of shared memory, and a block has 232448",
    ]


def test_known_spill_limits_bytes_per_kernel_and_case():
    known = PALLAS[0]
    name, case, most = known.kernel, known.cases[0], known.max_bytes
    kernel = Kernel(f"{name}__1", 255, most, 0)
    assert not list(faults_of_kernel(kernel, case))
    assert line_of(kernel, case, 1.0).endswith(f"excused: {known.reason}")
    assert list(faults_of_kernel(kernel, "another"))
    assert list(faults_of_kernel(Kernel("other", 255, most, 0), case))
    (fault,) = faults_of_kernel(Kernel(name, 255, most + 4, 0), case)
    assert fault == f"{name} of {case} spills {most + 4} bytes, and {most} are excused"
    assert "excused" not in line_of(Kernel(name, 255, 0, 0), case, None)


def test_faults_of_order_accepts_single_command_buffer():
    assert not list(faults_of_order(read_thunks(THUNKS), "a step"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("000: kCopy [source] kCopy", "is not one command buffer: it has 1, and beside them kCopy"),
        (
            "004: kWhile [source] at",
            "is not one command buffer: it has 1, and beside them kWhile at",
        ),
        ("004: kCommandBuffer [source] ", "is not one command buffer: it has 2"),
        ("    004: kConditional [source] at", "has in its command buffer kConditional at"),
        ("    004: kCublasLtMatmul [source]", "has in its command buffer kCublasLtMatmul"),
    ],
)
def test_faults_of_order_reports_thunks_outside_command_buffer(line: str, told: str):
    (fault,) = faults_of_order(read_thunks(THUNKS + line), "a step")
    assert fault.startswith(f"a step {told}")


def test_faults_of_order_rejects_loose_thunks():
    loose = [Thunk("kCustomKernel", f"mix__{n}", 0, 0) for n in range(5)]
    (fault,) = faults_of_order(loose, "a step")
    assert "it has 0, and beside them kCustomKernel mix__0, " in fault
    assert fault.endswith("and 2 more")


@pytest.mark.parametrize("name", ["slice_fusion", "copy.3"])
def test_faults_of_copies_rejects_weights_not_rows(name: str) -> None:
    assert not list(faults_of_copies(HLO, 256, "a step"))
    large = re.sub(rf"%{name} = \w+\[[\d,]+\]", f"%{name} = bf16[129]", HLO)
    assert list(faults_of_copies(large, 256, "a step")) == [f"a step copies 258 bytes in {name}"]


def test_faults_of_memory_and_sort_operations():
    assert not list(faults_of_memory(100, 100, "a step"))
    assert list(faults_of_memory(101, 100, "a step"))
    line = '  %4 = "stablehlo.{}"(%3) <{{dimension = 1}}> ({{'
    assert not list(faults_of_operations(line.format("add"), "a step"))
    (fault,) = faults_of_operations(line.format("sort"), "a step")
    assert fault == "a step has operations that break a command buffer: sort"


def test_report_names_uncompiled_kernels_and_unused_excuses(monkeypatch) -> None:
    texts = [path.read_text() for path in KERNELS.rglob("*.py")]
    calls = sum(x.count("pl.pallas_call(") + x.count("plgpu.kernel(") for x in texts)
    names = kernel_names(KERNELS)
    assert {
        "attention_layer",
        "linear",
        "linear_sm90",
        "rms_norm",
        "rms_norm_partial",
        "gdn_decode",
    } <= names
    # Four of `layers` share a call, the seven of both recurrent prefills and the four of
    # `rejection`.
    assert len(names) == calls + 3 + 6 + 3
    report = Report()
    report.compiled = names - {"attention_layer"}
    report.needed = {(known, case) for known in PALLAS for case in known.cases}
    report.check_completeness()
    assert report.faults == ["the kernel attention_layer is compiled by no case and no step"]
    report.compiled, report.needed, report.faults = names, set(), []
    report.check_completeness()
    assert len(report.faults) == sum(len(known.cases) for known in PALLAS)
    assert report.faults[0].endswith("is excused and spills nothing")


def test_known_spills_name_existing_cases_and_steps() -> None:
    names = {case.name for case in cases_of([])} | set(map(str, STEPS)) | set(RANKS)
    assert {case for known in (*PALLAS, *TRITON) for case in known.cases} <= names
    assert not {known.kernel for known in PALLAS} & {known.kernel for known in TRITON}


def test_report_shows_xla_kernels_only_with_faults(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    fine, wrong = Kernel("loop_add_fusion", 20, 0, 0), Kernel("loop_mul_fusion", 255, 4, 0)
    report.add_kernels([Kernel("attention_layer", 200, 0, 0), fine, wrong], "a case", 1.0)
    printed = capsys.readouterr().out
    assert "attention_layer" in printed
    assert "loop_add_fusion" not in printed
    assert report.faults == ["loop_mul_fusion of a case spills 4 bytes"]
    assert report.summary.startswith("aot: 1 kernels, 1 fault, ")


def test_report_counts_unfinished_items_and_failed_starts() -> None:
    report, scratch = Report(), Path()
    step, start = Item("step", "a step", None, scratch), Item("start", "a start", None, scratch)
    report.add(Done(step, None, "it has not ended within 9 s", 9.0), "1/2")
    wrong = Found(faults=("a start, decode cannot be lowered",), programs=3, calls=7)
    report.add(Done(start, wrong, None, 1.0), "2/2")
    assert report.faults == [
        "a step cannot be compiled: it has not ended within 9 s",
        "a start, decode cannot be lowered",
    ]
    assert report.summary.startswith("aot: 0 kernels, 3 programs with 7 kernels in starts, 2 fault")


def test_items_of_covers_every_case() -> None:
    cases = [item for item in items_of([], Path()) if item.kind == "case"]
    assert len(cases) == len(list(cases_of([])))
    assert all(f"{case_of(item).op}: {case_of(item)}" == item.name for item in cases[::7])
    assert {case_of(item).function for item in cases if item.what == "recurrent_layer"} > {
        "prefill"
    }


def test_cases_of_filters_by_text() -> None:
    every = list(cases_of([]))
    assert all(case.is_large for case in every)
    assert {case.op for case in every} >= {
        "attention_layer",
        "linear",
        "recurrent_layer",
        "sampling",
        "slot_state",
    }
    assert {case.op for case in cases_of(["recurrent_layer"])} == {"recurrent_layer"}
    assert not list(cases_of(["no such name"]))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_aot_steps_name_existing_shapes_and_drafters(step: Step) -> None:
    folder = SHAPES / step.model
    assert (folder / "config.json").is_file()
    flags = Draft.parse(step.drafts).flags(folders_of(folder, {}))
    paths = [flag for name, flag in pairwise(flags) if name.endswith("-path")]
    assert all((Path(path) / "config.json").is_file() for path in paths)
