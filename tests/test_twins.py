"""Twins: the two device backends define the same names and call the same operations."""

import re
from pathlib import Path

import pytest

from tests.support import backend_parity

ROOT = Path(__file__).resolve().parents[1]

_OF_BLOCKS = ("BlockDrafter", "fill", "write_context")
_MET = ("connect", "AllGather") + tuple(
    f"AllGather.{x}" for x in ("begin", "close", "end", "error", "meet", "rank")
)
ONE_SIDED_NAMES = {
    "backend.py::ReadyArray": "what JAX does not declare of its arrays",
    "backend.py::ReadyArray.is_ready": "the same",
    "backend.py::Backend.traced": "a program of JAX, to be read before it is compiled",
    "backend.py::Backend.captures": "graphs are torch's",
    "backend.py::Backend.replays": "the same",
    "backend.py::JaxFuture": "a result of torch is a step in flight, or a thread's",
    "backend.py::JaxFuture.result": "the same",
    "backend.py::compiler_options": "torch has no compiler options",
    "weights.py::Loaded": "a program of JAX takes arrays, and makes records of them in its trace",
    "weights.py::Loaded.named": "the same",
    "weights.py::Loaded.has_mtp": "the same",
    "weights.py::weights_of": "the same",
    "weights.py::head_of": "the same",
    "weights.py::vision_encoder_of": "the same",
    "weights.py::are_read_in_stacks": "kernels of JAX read a stack where it lies",
    "weights.py::from_arrays": "each names first what makes its own records",
    "weights.py::Loadable": "JAX types what weights are read from by what it can do",
    "weights.py::Loadable.load": "the same",
    "ops/gemm/matrix.py::Matrix": "JAX reads a stack of weights in place, torch has views",
    **{f"layer_weights.py::{x}": "as above" for x in ("layers_of", "matrix_of")},
    "ops/gemm/matrix.py::Matrix.alone": "as above",
    "ops/gemm/matrix.py::Matrix.plain": "as above",
    "ops/gemm/lora.py::RowAdapters": "as above",
    "ops/gemm/lora.py::RowAdapters.alone": "as above",
    **{
        f"ops/gemm/lora.py::{x}": "GEMMs of JAX also compute the shrink of one row"
        for x in ("PassAdapters", "PassAdapters.of", "kernel_shrink")
    },
    "ops/__init__.py::zeros_of": "XLA shares equal zeros",
    "ops/gemm/linear.py::kernel_products": "the same",
    **{f"ops/__init__.py::{x}": "the same of scales" for x in ("Scale", "alone", "stacked")},
    "ops/collectives/all_gather.py::number": "the program of JAX is that of all ranks",
    "ops/gemm/linear.py::beside_kernels": "what JAX runs on other platforms keeps one structure",
    "ops/recurrent/recurrent_mixer.py::RecurrentWeights.alone": "the same",
    "ops/recurrent/recurrent_mixer.py::RecurrentWeights.with_norm_of": "the same",
    "ops/attention/attention_layer.py::HeadNorms.alone": "the same",
    "ops/__init__.py::reads_stacks": "the shape of an array that JAX traces has no device",
    "platform.py::set_cpu_threads": "torch's threads",
    "platform.py::read_weights": "JAX compiles for a GPU that is not here, and reads their shapes",
    "device_state.py::select": "JAX's states are values",
    "step_context.py::drafter_state": "the drafter of torch shares the target's pools",
    "step_context.py::with_drafter_state": "the same",
    "adapters.py::new_adapters": "a JAX program declares the placement of its results",
    "cache_pools.py::new_kv": "a JAX program declares the placement of its results",
    "cache_pools.py::new_pools": "the same",
    "cache_pools.py::new_states": "the same",
    **{
        f"symmetric_memory.py::{x}": "ranks of JAX are one program, which needs no meeting"
        for x in _MET
    },
    "layers.py::RecurrentMixer": "a mixer of JAX gives back what it carries",
    "layers.py::rotary_frequencies": "torch keeps what JAX folds into the program",
    "layers.py::angles": "the same",
    "layers.py::AttentionContext.of": "the same",
    "model.py::Model": "the same",
    **{f"drafters/dflash.py::{name}": "the same" for name in _OF_BLOCKS},
    "drafters/eagle.py::Expand": "what an expansion carries is a value in JAX, a closure in torch",
    "ops/__init__.py::any_row_set": "work that few rows need is skipped by the host of torch",
    "ops/__init__.py::cond_any": "and by JAX's program",
    "ops/__init__.py::clamp_rows": "how far a CPU of torch works through an array",
    "ops/__init__.py::Kernels.of": "JAX compiles for a GPU that is not here",
    "ops/__init__.py::compiled_for": "the same",
    "ops/__init__.py::kernel_or_reference": "what JAX runs on other platforms keeps one structure",
    "ops/__init__.py::operand": "a layer's number, which kernels of JAX take as an array",
    "ops/__init__.py::scan": "a loop of torch is Python's",
    "ops/attention/attention.py::attend": "JAX reads one long pool, by offsets",
    "ops/attention/attention.py::read": "the same",
    "formats/registry.py::host_tensor": "torch does not support bfloat16 of NumPy",
    "workspace.py::blocked_attention": "JAX's plain attention reads block by block",
    "ops/trees/draft_tree.py::is_last": "torch's prompts",
    "ops/trees/draft_tree.py::request_of": "the same",
}
"""Definitions of one twin only, or with other parameters, and the reasons."""


_ASKING = ("first_of", "support")
OTHER_OPS = {
    **{
        f"ops/sampling/vocab_parallel.py::{x}": "its program asks which rank it is" for x in _ASKING
    },
    "ops/recurrent/mamba2.py::kernel_gated_output": "the same",
    "ops/attention/attention.py::causal_rows": "torch finds rows by starts, JAX by lengths",
    "adapters.py::load": "JAX reads its rank within the program",
    "prefill.py::count_tokens": "torch finds rows by starts, JAX by lengths",
    "prefill.py::prefill": "what a prompt leaves in its slot JAX writes by scatters, torch commits",
}
"""Public functions that call other ops than their twins, and why."""


OF_STEP = [
    file
    for file in backend_parity.files()
    if file.parts[0] == "drafters"
    or file.stem in ("decode", "draft", "encode_image", "layers", "prefill", "step", "step_context")
]
"""Modules with the phases of a step."""


def check_excused(found: dict[str, str], excuses: dict[str, str]) -> None:
    """Every difference has an excuse, and every excuse a difference."""
    unknown = [f"{key}: {found[key]}" for key in sorted(found.keys() - excuses.keys())]
    assert not unknown, "\n".join(unknown)
    assert not excuses.keys() - found.keys(), "an exception that nothing needs any more"


@pytest.mark.parametrize("package", ["torch_impl", "jax_impl"])
def test_weight_storage_known_to_ops_only(package: str) -> None:
    """So that another form of weights changes products and loading, and no layer."""
    read = re.compile(r"(?<!config)\.values\b(?!\()")
    above = (x for x in (ROOT / package).rglob("*.py") if not {"ops", "training"} & {*x.parts})
    assert not [path.name for path in above if read.search(path.read_text(encoding="utf-8"))]


def test_twin_modules_have_same_public_names():
    """Public names and parameters are equal, but for what functional code carries."""
    found = {
        key: difference
        for file in backend_parity.files()
        for key, difference in backend_parity.differences(file).items()
    }
    check_excused(found, ONE_SIDED_NAMES)


@pytest.mark.parametrize("file", OF_STEP, ids=str)
def test_twin_modules_of_step_order_definitions_equally(file: Path) -> None:
    assert not backend_parity.order_differences(file)


def test_twin_modules_call_same_ops():
    found = {
        key: difference
        for file in backend_parity.files()
        for key, difference in backend_parity.other_ops(file).items()
    }
    check_excused(found, OTHER_OPS)
