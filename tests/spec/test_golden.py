"""Golden numbers of the reference implementations on every implementation, see golden/README.md."""

import json
import shutil
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.spec import draft_tree, reduction_order
from shared.spec.reduction_order import LinearOrder
from tests.support.golden_implementations import HEADS, IMPLEMENTATIONS

GOLDEN = Path(__file__).parents[1] / "golden"

# Float32 on both sides, logits of magnitude 4 to 10: the orders of the sums differ, by up to 6e-5
# between the reference implementation's own chunked and recurrent forms.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


SMALL_LOGITS = ("granitemoehybrid", "granitemoehybrid_dense")


def close_logits(folder, got, want):
    """Logits of some folders are at most 0.5, and wrong ones differ by 0.005."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if folder in SMALL_LOGITS else 1e-4)


IN_JAX = (
    *("deepseek_v3", "falcon_h1", "falcon_h1_norm", "gemma2", "gemma3", "gemma4", "gemma4_moe"),
    *("glm4_moe_lite", "gpt_oss_bf16", "granitemoehybrid", "llama", "llama_bias", "ministral3"),
    *("nemotron_h_mtp", "olmo3", "phi3_longrope", "qwen3_5_moe", "qwen3_moe_fp8"),
    *("eagle1", "eagle3", "eagle3_sliding", "eagle3_speculators", "eagle3_two_layers"),
)
"""Folders that JAX reads by default, since it compiles three programs of some seconds for a model.

Together they have every switch of a config; the other folders are in the matrix.
"""
BY_NAME = ("name", "tensor_names", "tensors", "format", "has_fused_inputs", "eos_ids")
"""Fields that only loading reads, which is the same for all implementations."""


def each_of(folders, fixture="implementation"):
    """Each model or head on each implementation, which a fixture makes."""
    cases = [
        pytest.param(
            name,
            folder,
            marks=pytest.mark.matrix if name == "jax" and folder not in IN_JAX else (),
        )
        for name in IMPLEMENTATIONS
        for folder in folders
    ]
    return pytest.mark.parametrize((fixture, "folder"), cases, indirect=[fixture])


def vectors(folder):
    return dict(np.load(GOLDEN / folder / "vectors.npz"))


def chain(length):
    return np.maximum(np.arange(length) - 1, 0)


LATENT = ("deepseek_v3", "glm4_moe_lite")
TURNED = (
    *LATENT,
    "bamba",
    "falcon_h1",
    "falcon_h1_norm",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "glm4_moe",
    "gpt_oss_bf16",
    "granite",
    "granitemoehybrid_dense",
    "llama",
    "llama_bias",
    "minimax_m2",
    "ministral3",
    "mistral",
    "mistral_sliding",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
HYBRID = ("qwen3_5_dense", "qwen3_5_moe", "qwen3_next")
MAMBA2 = (
    *("bamba", "falcon_h1", "falcon_h1_norm", "granitemoehybrid", "granitemoehybrid_dense"),
    *("nemotron_h", "nemotron_h_mtp"),
)
MODELS = (*(*TURNED, *HYBRID, "granitemoehybrid", "nemotron_h", "nemotron_h_mtp", "qwen3_moe_fp8"),)
MULTIPLIED = ("falcon_h1", "falcon_h1_norm")
"""Models with multipliers of keys and values, which scale scores and outputs instead."""
CONTEXTS = {"phi3_longrope": 4096}
"""Context lengths beyond which the RoPE of a model differs; the golden short prompts use the
shorter.
"""


@each_of(MODELS)
def test_prefill_logits_hidden_and_residuals_match_golden(folder, implementation):
    want = vectors(folder)
    got = implementation(GOLDEN / folder, CONTEXTS.get(folder)).prefill(want["short_ids"], None)
    close_logits(folder, got.logits, want["short_logits"])
    close(got.hidden, want["short_hidden"])
    close(got.streams, want["short_layers"])


@pytest.mark.parametrize("folder", ["granite", "nemotron_h", "qwen3_5_dense", "gemma4", "olmo2"])
@pytest.mark.parametrize("name", ["spec", "torch"])
def test_logits_in_segments_match_golden(name, folder, monkeypatch):
    """Other orders of the sums move logits, by no more than an implementation does."""
    want, found = vectors(folder), []
    for segments in (1, 2):
        order = LinearOrder(segments=segments, least=16, unit=8)
        monkeypatch.setattr(reduction_order, "LINEAR", order)
        golden = IMPLEMENTATIONS[name](GOLDEN / folder, CONTEXTS.get(folder))
        found.append(golden.prefill(want["short_ids"], None).logits)
    once, got = found
    assert (got != once).any()
    close_logits(folder, got, want["short_logits"])


def test_w8a8_logits_match_golden(implementation):
    """Only the first rows are compared: the last bit of a norm can change an FP8 value.

    In JAX it moves one of the sixth row, and with it what later rows attend to.
    """
    want = vectors("qwen3_moe_fp8")
    golden = implementation(GOLDEN / "qwen3_moe_fp8", quantises=True)
    got = golden.prefill(want["short_ids"], None).logits
    close(got[:5], want["w8a8_logits"][:5])
    # Without quantised rows each of them is far from it.
    assert (np.abs(want["short_logits"] - want["w8a8_logits"]).max(axis=1) > 0.05).all()


@each_of([folder for folder in MODELS if folder not in (*LATENT, *MULTIPLIED)])
def test_prefill_kv_matches_golden(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder, CONTEXTS.get(folder))
    golden.prefill(want["short_ids"], None)
    windowed = {"gemma2": 1, "gemma3": 2, "gemma4": 2, "gemma4_moe": 2}
    windowed |= {"gpt_oss_bf16": 1, "olmo3": 3}
    first = windowed | dict.fromkeys(("granitemoehybrid", "granitemoehybrid_dense"), 2)
    first |= {"nemotron_h": 2, "nemotron_h_mtp": 3}
    first |= {"bamba": 1, "qwen3_5_dense": 3, "qwen3_5_moe": 1, "qwen3_next": 1}
    layer = first.get(folder, 0)  # the first with full attention
    k, v = golden.kv(windowed.get(folder, 0))
    kept = len(want[f"short_K_{layer}"])  # a cache of a window holds its newest rows
    close(k[-kept:], want[f"short_K_{layer}"])
    close(v[-kept:], want[f"short_V_{layer}"])


@each_of(["deepseek_v3"])
def test_prefill_latents_match_golden(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    golden.prefill(want["short_ids"], None)
    for layer in range(2):
        (rows,) = golden.kv(layer)
        latent, rope = np.split(rows[:, 0], [16], axis=1)
        halves = [latent, rope[:, ::2], rope[:, 1::2]]  # the golden order of rotated pairs
        close(np.concatenate(halves, axis=1), want[f"short_latent_{layer}"])


@each_of(MODELS)
@pytest.mark.parametrize("step", [1, 3, 8])
def test_decode_logits_any_step_size_match_golden(folder, step, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder, CONTEXTS.get(folder))
    golden.prefill(want["short_ids"], None)
    for start in range(0, 8, step):
        tokens = want["decode_ids"][start : start + step]
        got = golden.verify(tokens, chain(len(tokens)))
        close_logits(folder, got.logits, want["decode_logits"][start : start + step])
        golden.commit(np.arange(len(tokens)))


GREEDY = [folder for folder in MODELS if "greedy_ids" in vectors(folder)]


@each_of(GREEDY)
def test_greedy_tokens_match_golden(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder, CONTEXTS.get(folder))
    token = golden.prefill(want["short_ids"], None).logits[-1].argmax()
    text = []
    while len(text) < len(want["greedy_ids"]):
        text.append(token)
        token = golden.verify(np.array([token]), chain(1)).logits[0].argmax()
        golden.commit(np.arange(1))
    assert text == want["greedy_ids"].tolist()


@each_of(MODELS)
def test_rejected_tree_branches_do_not_change_logits(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder, CONTEXTS.get(folder))
    golden.prefill(want["short_ids"], None)
    a, b, c, *rest = want["decode_ids"]
    wrong = (b + 1) % want["decode_logits"].shape[1]
    # Root a; children: a wrong token, b; below the wrong one again b; below b: c.
    got = golden.verify(np.array([a, wrong, b, b, c]), np.array([0, 0, 0, 1, 2]))
    close_logits(folder, got.logits[[0, 2, 4]], want["decode_logits"][:3])
    golden.commit(np.array([0, 2, 4]))
    got = golden.verify(np.array(rest), chain(5))
    close_logits(folder, got.logits, want["decode_logits"][3:])


@each_of((*TURNED, "qwen3_next"))
def test_rope_at_far_positions_matches_golden(folder, implementation):
    want = vectors(folder)
    got = implementation(GOLDEN / folder).prefill(want["short_ids"], want["far_pos"])
    # An ulp of a frequency, in which numpy and torch may differ, is 5e-4 radians at 9,000 and 1e-3
    # at 20,000.
    coarser = {"ministral3": 1e-3, "phi3": 5e-4, "phi3_longrope": 1e-3}
    atol = coarser.get(folder, 1e-4)
    np.testing.assert_allclose(got.logits, want["far_logits"], rtol=0, atol=atol)


def state_of(want, name, folder):
    """A golden state; those of Mamba2 are stored with values first."""
    return want[name].swapaxes(1, 2) if folder in MAMBA2 else want[name]


@each_of([*HYBRID, *MAMBA2])
def test_recurrent_states_match_golden(folder, implementation):
    want = vectors(folder)
    (group,) = (
        each
        for each in config_from_folder(GOLDEN / folder).groups
        if each.config.kind in ("gated_delta", "mamba2")
    )
    numbers = group.layers
    assert len(numbers) >= 2
    for committed in (0, 3, 8):
        golden = implementation(GOLDEN / folder)
        golden.prefill(want["short_ids"], None)
        golden.verify(want["decode_ids"], chain(8))
        golden.commit(np.arange(committed))
        name = f"decode{committed}" if committed else "short"
        for place, layer in enumerate(numbers):
            recurrent, window = golden.delta_state(place)
            close(recurrent, state_of(want, f"{name}_S_{layer}", folder))
            close(window.T, want[f"{name}_conv_{layer}"])


@each_of([*HYBRID, *MAMBA2])
@pytest.mark.parametrize("cuts", [(150,), (64, 64, 22), (100, 1, 49), (1, 149)], ids=str)
def test_chunked_prefill_any_split_matches_golden(cuts, folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    chunks = np.split(want["long_ids"], np.cumsum(cuts)[:-1])
    logits = np.concatenate([golden.prefill(chunk, None).logits for chunk in chunks])
    close_logits(folder, logits[-32:], want["long_logits_last32"])
    recurrent, window = golden.delta_state(0)
    close(recurrent, state_of(want, "long_S_0", folder))
    close(window.T, want["long_conv_0"])


@each_of(["deepseek_v3", "glm4_moe", "nemotron_h_mtp", *HYBRID])
def test_mtp_hidden_states_and_logits_match_golden(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    hidden, logits = golden.mtp(want["mtp_next_ids"], want["short_hidden"], 0)
    close(hidden, want["mtp_hidden"])
    close(logits, want["mtp_logits"])
    last = hidden[-1:]
    for i, token in enumerate(want["mtp_chain_ids"]):
        assert token == logits[-1].argmax()
        last, logits = golden.mtp(np.array([token]), last, 24 + i)
        close(last, want["mtp_chain_hidden"][i : i + 1])
        close(logits, want["mtp_chain_logits"][i : i + 1])


def test_moe_without_renormalisation_matches_golden(implementation, tmp_path):
    folder = shutil.copytree(GOLDEN / "qwen3_moe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    want = vectors("qwen3_moe")
    assert np.abs(want["no_renorm_logits"] - want["short_logits"]).max() > 0.1
    close(implementation(folder).prefill(want["short_ids"], None).logits, want["no_renorm_logits"])


EAGLES = {
    "eagle1": "llama",
    "eagle1_nobias": "llama",
    "eagle3": "llama",
    "eagle3_speculators": "llama",
    "eagle3_fc_norm": "llama",
    "eagle3_qwen3_layer": "qwen3",
    "eagle3_two_layers": "llama",
    "eagle3_sliding": "qwen3",
}
"""Folders of heads, and of the target of each."""


@pytest.fixture
def head_of(request):
    """Makes an implementation's head of a folder."""
    return lambda name: HEADS[request.param](GOLDEN / name, target=GOLDEN / EAGLES[name])


def head_inputs(name):
    """The golden numbers of a head, and its inputs from the target."""
    want = vectors(name)
    return want, want["aux"] if "aux" in want else want["hidden_in"]


def assert_logits(name, got, want):
    """A draft vocabulary is scored, the rest of the target's is out of the question."""
    if want.shape[1] < got.shape[1]:
        offsets = open_checkpoint(GOLDEN / name).tensor("d2t")
        draft_ids = np.arange(len(offsets)) + offsets
        assert np.isneginf(np.delete(got, draft_ids, axis=1)).all()
        got = got[:, draft_ids]
    close(got, want)


@each_of(EAGLES, "head_of")
def test_eagle_head_hidden_states_and_logits_match_golden(folder, head_of):
    want, inputs = head_inputs(folder)
    head = head_of(folder)
    hidden, logits = head.extend(want["next_ids"], inputs)
    close(hidden, want["hidden_out"])
    assert_logits(folder, logits, want["logits"])
    last = hidden[-1:]
    for i, token in enumerate(want["chain_ids"]):
        assert token == logits[-1].argmax()
        last, logits = head.go_on(token, last, 24 + i)
        close(last, want["chain_hidden"][i : i + 1])
        assert_logits(folder, logits, want["chain_logits"][i : i + 1])


@each_of(["eagle1", "eagle3"], "head_of")
def test_eagle_dynamic_tree_matches_golden(folder, head_of):
    want, inputs = head_inputs(folder)
    shape = draft_tree.TreeShape(nodes=12, depth=4, width=4, rows=12)
    tokens, parents, num_nodes = head_of(folder).draft(want["next_ids"], inputs, shape)
    assert num_nodes == 12
    np.testing.assert_array_equal(tokens[0], want["tree_tokens"])
    np.testing.assert_array_equal(draft_tree.ancestors(parents)[0], want["tree_mask"])
    np.testing.assert_array_equal(draft_tree.depths(parents)[0], want["tree_depth"])


def switches(config):
    """Fields of a config and their values; numbers other than 0 and 1 are equal."""
    if is_dataclass(config):
        return {
            (field.name, *each)
            for field in fields(config)
            if field.name not in BY_NAME
            for each in switches(getattr(config, field.name))
        }
    if isinstance(config, tuple):
        return set().union({(bool(config),)}, *map(switches, config))
    is_number = isinstance(config, int | float) and config not in (0, 1)
    return {("a number",) if is_number else (config,)}


def test_jax_folders_have_every_switch():
    by_folder = {folder: switches(config_from_folder(GOLDEN / folder)) for folder in MODELS}
    covered = set().union(*(by_folder[folder] for folder in IN_JAX if folder in by_folder))
    assert set().union(*by_folder.values()) <= covered
