"""Layout rules: parallel names, a test for each specification, imports, sizes and documents."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from docs.make import import_table
from shared.spec import draft_tree
from tests.support.private_names import defined_in, reached_by

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shared", "jax_impl", "torch_impl", "kernels")
# Writing Orbax, training, programs that are kept, ranks that are devices of one process and results
# in pinned memory are JAX's alone, compiling kernels on their own and capturing are torch's.
_ALONE = """
    compilation_cache convert cuda_graphs mesh pinned_results symmetric_memory train
    triton_precompile
    """
ONE_SIDED = {Path(f"{name}.py") for name in _ALONE.split()}
ONE_SIDED_FOLDER = "training"
# What kernels share, and what an op has beside the kernel of its name.
_PARTS = """
    activation all_gather attention_layer_mainloop attention_layer_sm90 attention_layer_trees
    attention_sm90 block_loaders dequantize encoder_attention encoder_attention_sm90
    encoder_qkv_layout expert_lora expert_sums experts_packed_sm90 experts_packed_sm90_mainloop
    flag_protocol flatten_tree fp8_activations fp8_w8a16 fp8_w8a8 gdn_chunk gdn_commit gdn_layer
    gdn_prefill gdn_rows gdn_tree gumbel_noise head_dim_padding head_product int4_w4a16
    kv_compaction latent_attention_mainloop latent_attention_sm90 latent_attention_sm90_mainloop
    latent_combine latent_rows linear_epilogue linear_launch linear_mainloop linear_swap_ab
    linear_packed_sm90_mainloop linear_sm90 linear_sm90_mainloop lora_shrink lm_head_epilogue
    logits_processing mamba2_output mamba2_prefill moe_align moe_gemm_tiles mxfp4_w4a16
    prefill_requests qk_norm_rope_kv_write rejection rope router row_bounds sampling_kernels
    split_kv sum_of_squares symmetric_memory threshold_bracket online_softmax topk topk_topp
    verify_sm90_loads verify_sm90_mainloop vocab_parallel
    """
PARTS = set(_PARTS.split())
# Triton writes down in one kernel what JAX writes in Pallas for Triton and again for Mosaic GPU.
PALLAS_ALONE = {
    "ptx",
    "linear_packed_sm90",
    "linear_tile",
}
TEST_OF_SPEC = {
    "model": "golden",
    "layer_weights": "golden",
    "parallel_experts": "golden",
    "per_layer": "golden",
    "matrix": "linear",
    "convolution": "dflash2",
    "tree_growth": "eagle",
}
"""Specifications that are tested under another name."""

MAX_LINES = 450
MOST_ARGUMENTS = 12  # of a call, by place

SKIPPED = {"build", "dist", "__pycache__"}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ""}
MACHINE_PATHS = re.compile("|".join(f"/{top}/" for top in ("work", "root", "home", "opt", "tmp")))
REGISTRIES = re.compile(
    "|".join(map(re.escape, ("pypi" + ".org", "python" + "hosted", "pytorch" + ".org/whl")))
    + "|"
    + re.escape("npmjs" + ".")
    + "|"
    + re.escape("../" + "shared")
)


def modules(folder: str) -> set[Path]:
    return {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}


def names(folder: str) -> set[str]:
    return {path.stem for path in modules(folder)} - {"__init__"}


def text_files() -> list[Path]:
    """Every text file of the project; hidden folders hold tools, but for the CI's."""
    tops = [path for path in ROOT.iterdir() if path.name[0] != "." or path.name == ".ci"]
    paths = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    return [
        path
        for path in paths
        if path.suffix in TEXT and not SKIPPED & set(path.parts) and path.is_file()
    ]


def test_both_backends_have_same_files():
    alone = {path for path in modules("jax_impl") if path.parts[0] == ONE_SIDED_FOLDER}
    assert modules("jax_impl") - ONE_SIDED - alone == modules("torch_impl") - ONE_SIDED


def test_ops_have_specification_kernels_and_cases():
    ops, kernels = names("jax_impl/ops"), names("kernels/triton_gpu")
    assert ops <= names("shared/spec")
    assert names("kernels/pallas_gpu") - PALLAS_ALONE == kernels
    assert kernels - PARTS <= ops & names("tests/support/cases")


def test_every_specification_has_test():
    proofs = {TEST_OF_SPEC.get(name, name) for name in names("shared/spec")}
    assert {f"test_{name}" for name in proofs} <= names("tests")


def test_package_names_are_not_shadowed():
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        assert Path(spec.origin).parents[1] == ROOT, f"{name} is {spec.origin}: run from the root"


@pytest.mark.parametrize("forbidden", [MACHINE_PATHS, REGISTRIES], ids=["paths", "registries"])
def test_files_contain_no_machine_path_or_registry_host(forbidden):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if forbidden.search(line)
    ]
    assert not found, "\n".join(found)


LATE_IMPORTS = {
    Path("torch_impl/triton_precompile.py"): "it is imported where Triton is not installed",
    Path("bench/quality/drafter_matrix.py"): "a side that is not asked for need not be installed",
    Path("torch_impl/serve.py"): "flags are answered, and other ranks begun, without the framework",
    Path("jax_impl/serve.py"): "flags are answered without the framework",
}


def test_imports_are_at_module_top():
    """A circle is resolved by moving what both sides need, not by importing late."""
    found = set()
    for folder in (*PACKAGES, "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            kinds = (ast.Import, ast.ImportFrom)
            inner = {
                each
                for node in ast.parse(text).body
                if not isinstance(node, kinds)
                for each in ast.walk(node)
                if isinstance(each, kinds)
            }
            if inner or "TYPE_CHECKING" in text:
                found.add(path.relative_to(ROOT))
    assert found == LATE_IMPORTS.keys()


KERNEL_IMPORTS = {
    *("shared.models.formats.fp8", "shared.models.formats.fp8_w8a16"),
    *("shared.models.formats.four_bit", "shared.models.formats.int4_encoding"),
    *("shared.models.formats.weight_format", "shared.models.mlp", "shared.models.activation"),
    *("shared.spec.attention_layer", "shared.spec.reduction_order"),
}
"""Modules of `shared` that kernels import: plain data and the layouts of quantised weights."""


def test_kernels_import_plain_data_of_shared():
    named = set().union(*(import_table.imported(path) for path in (ROOT / "kernels").rglob("*.py")))
    assert {name.rpartition(".")[0] for name in named if name[:7] == "shared."} == KERNEL_IMPORTS


@pytest.mark.parametrize("table", import_table.TABLES, ids=lambda table: table.page)
def test_import_tables_of_pages_are_current(table):
    page = (ROOT / table.page).read_text(encoding="utf-8")
    assert page == table.written_into(page), "run python -m docs.make.import_table"


@pytest.mark.parametrize("name", ["llguidance", "numba"])
def test_start_without_use_does_not_import(name):
    code = f"import sys, shared.process.serving; sys.exit({name!r} in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode


def test_support_does_not_import_bench():
    """Benchmarks have tests of their own, and use `tests/support` like all tests."""
    found = {
        str(path)
        for path in modules("tests")
        if path.parts[0] != "bench"
        and any(
            name.split(".")[0] == "bench" for name in import_table.imported(ROOT / "tests" / path)
        )
    }
    assert not found


def test_bench_readme_lists_every_program():
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    programs = {
        ".".join(path.with_suffix("").parts).removesuffix(".__main__")
        for path in (Path("bench") / path for path in modules("bench"))
        if '__name__ == "__main__"' in (ROOT / path).read_text(encoding="utf-8")
    }
    assert set(re.findall(r"^\| `([\w.]+)` \|", page, re.M)) == programs - {"bench.performance"}


def test_python_files_have_at_most_450_lines():
    long = {
        str(path.relative_to(ROOT)): count
        for path in text_files()
        if path.suffix == ".py" and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_readme_has_at_most_160_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_jaxtyping_shapes_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        draft_tree.depths(np.zeros((1, 2, 3), np.int32))


def named_in_documents() -> list[tuple[Path, str, str]]:
    """Each file, and test within it, that a document names; NAME stands for any name."""
    pattern = re.compile(r"`((?:tests|shared|models|docs|bench)/[\w./]+\w)(?:::(\w+))?`")
    return [
        (path.relative_to(ROOT), file, test)
        for path in text_files()
        if path.suffix == ".md"
        for file, test in pattern.findall(path.read_text(encoding="utf-8"))
        if "NAME" not in file
    ]


def test_files_and_tests_named_in_documents_exist():
    missing = [
        f"{document} names {file}::{test}"
        for document, file, test in named_in_documents()
        if not (ROOT / file).exists()
        or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert not missing, "\n".join(missing)


def imported_tests(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = file.relative_to(ROOT).parent.parts
            package = above[: len(above) + 1 - node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in found if re.fullmatch(r"tests\.(\w+\.)*test_\w+", name)}


def test_imports_name_no_test_file():
    """Code that several test files use is in `tests/support`."""
    files = (ROOT / "tests").rglob("*.py")
    found = {file.relative_to(ROOT): names for file in files if (names := imported_tests(file))}
    assert not found


def test_planted_fault_tables_are_proven_in_their_files():
    table = (ROOT / "tests" / "support" / "mutations.py").read_text(encoding="utf-8")
    files = re.findall(r'^    "(\w+/test_\w+)": \{', table, re.MULTILINE)
    assert len(files) >= 10
    for file in files:
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert f'\ntest_planted_fault_is_detected = prover("{file}", globals())\n' in text


REACHED_NAMES = {
    "boundary/test_block_faults.py": {"_kv"},
    "device/test_grammar_adaptive.py": {"_asleep", "_planned"},
    "engine/test_ngram_index.py": {"_text"},
    "engine/test_prefix_cache.py": {"_fail"},
    "engine/test_prompt_logprobs.py": {"_scores"},
    "offline/test_llm.py": {"_engine"},
    "reference/test_reference_backend.py": {"_weights"},
    "server/test_http_connection_limit.py": {"_seen"},
    "server/test_http_slow_readers.py": {"_queue", "_submissions"},
    "spec/test_standalone.py": {"_expansion_rows", "_state", "_step"},
    "support/planted_faults.py": {"_start"},
    "training/test_training_heads.py": {"_steps_scored"},
}
"""Private names that tests reach for, by file of `tests`. This list may only shrink."""


def test_tests_use_public_names():
    private = defined_in(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    files = (ROOT / "tests").rglob("*.py")
    reached = {
        file.relative_to(ROOT / "tests").as_posix(): names
        for file in files
        if (names := reached_by(file, private))
    }
    assert reached == REACHED_NAMES


def test_failure_modes_have_tests():
    page = (ROOT / "docs" / "failure_modes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    assert all("`tests/" in tests or tests == "not yet" for _, tests in rows)


def launchers(folder: str) -> dict[str, list[str]]:
    """By `FILE::NAME`, what a kernel's launch function leaves without a type.

    Launch functions are those that Triton's side has as plain Python, by their name, on both sides.
    """
    return {
        f"{path.relative_to(ROOT)}::{node.name}": [
            arg.arg for arg in (*node.args.args, *node.args.kwonlyargs) if arg.annotation is None
        ]
        + ([] if node.returns else ["return"])
        for path in sorted((ROOT / "kernels" / folder).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if not node.decorator_list
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_calls_have_few_positional_arguments(package: str) -> None:
    """At most twelve arguments by place, and none of many by its number."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST_ARGUMENTS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.FunctionDef) and node.args.vararg is not None:
                found += numbered(node, node.args.vararg.arg, path)
    assert not found


def numbered(function: ast.FunctionDef, many: str, path: Path) -> list[str]:
    """Returns the places where a function reads one of its many arguments by a literal index."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == many
        and isinstance(node.slice, ast.Constant)
    ]


def test_kernel_launch_functions_are_typed():
    """Kernels have pointers and references; `pyright` reads the functions that launch them."""
    triton = launchers("triton_gpu")
    pallas = launchers("pallas_gpu")
    twins_of = {key.replace("triton_gpu", "pallas_gpu") for key in triton} & pallas.keys()
    assert len(twins_of) > 20
    untyped = {k: v for k, v in (triton | {k: pallas[k] for k in twins_of}).items() if v}
    assert not untyped
