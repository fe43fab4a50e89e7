"""Every implementation gives the numbers of the reference implementations, see golden/README.md."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shared.checkpoint import eagle_parameters, load_all, open_checkpoint
from shared.model_config import ModelConfig
from shared.spec import attention, draft_tree, eagle, model, sampling
from tests.golden_jax import JaxModel
from tests.golden_models import GoldenModel, SpecModel
from tests.golden_torch import TorchModel

GOLDEN = Path(__file__).parent / "golden"
IMPLEMENTATIONS: dict[str, type[GoldenModel]] = {
    "spec": SpecModel,
    "torch": TorchModel,
    "jax": JaxModel,
}

# Float32 on both sides, logits of magnitude 4 to 10: the orders of the sums differ, by up to 6e-5
# between the reference implementation's own chunked and recurrent forms.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def vectors(folder):
    return dict(np.load(GOLDEN / folder / "vectors.npz"))


def chain(length):
    return np.maximum(np.arange(length) - 1, 0)


MODELS = ("llama", "qwen3", "qwen3_5_dense")


@pytest.mark.parametrize("folder", MODELS)
def test_prefill_gives_logits_hidden_and_residual_streams(folder, implementation):
    want = vectors(folder)
    got = implementation(GOLDEN / folder).prefill(want["short_ids"], None)
    close(got.logits, want["short_logits"])
    close(got.hidden, want["short_hidden"])
    close(got.streams, want["short_layers"])


@pytest.mark.parametrize("folder", MODELS)
def test_prefill_writes_the_kv_of_the_first_attention_layer(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    golden.prefill(want["short_ids"], None)
    layer = 3 if folder == "qwen3_5_dense" else 0
    k, v = golden.kv(0)
    close(k, want[f"short_K_{layer}"])
    close(v, want[f"short_V_{layer}"])


@pytest.mark.parametrize("folder", MODELS)
@pytest.mark.parametrize("step", [1, 3, 8])
def test_decoding_gives_the_logits_in_any_number_of_steps(folder, step, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    golden.prefill(want["short_ids"], None)
    for start in range(0, 8, step):
        tokens = want["decode_ids"][start : start + step]
        got = golden.verify(tokens, chain(len(tokens)))
        close(got.logits, want["decode_logits"][start : start + step])
        golden.commit(np.arange(len(tokens)))


@pytest.mark.parametrize("folder", MODELS)
def test_rejected_branches_of_a_tree_leave_no_trace(folder, implementation):
    want = vectors(folder)
    golden = implementation(GOLDEN / folder)
    golden.prefill(want["short_ids"], None)
    a, b, c, *rest = want["decode_ids"]
    wrong = (b + 1) % 256
    # Root a; children: a wrong token, b; below the wrong one again b; below b: c.
    got = golden.verify(np.array([a, wrong, b, b, c]), np.array([0, 0, 0, 1, 2]))
    close(got.logits[[0, 2, 4]], want["decode_logits"][:3])
    golden.commit(np.array([0, 2, 4]))
    got = golden.verify(np.array(rest), chain(5))
    close(got.logits, want["decode_logits"][3:])


@pytest.mark.parametrize("folder", ["llama", "qwen3"])
def test_far_positions_keep_the_rotation_exact(folder, implementation):
    want = vectors(folder)
    got = implementation(GOLDEN / folder).prefill(want["short_ids"], want["far_pos"])
    close(got.logits, want["far_logits"])


def test_states_after_the_prefill_and_after_three_and_eight_tokens(implementation):
    want = vectors("qwen3_5_dense")
    for committed in (0, 3, 8):
        golden = implementation(GOLDEN / "qwen3_5_dense")
        golden.prefill(want["short_ids"], None)
        golden.verify(want["decode_ids"], chain(8))
        golden.commit(np.arange(committed))
        name = f"decode{committed}" if committed else "short"
        for layer in range(3):
            recurrent, window = golden.delta_state(layer)
            close(recurrent, want[f"{name}_S_{layer}"])
            close(window.T, want[f"{name}_conv_{layer}"])


@pytest.mark.parametrize("cuts", [(150,), (64, 64, 22), (100, 1, 49), (1, 149)], ids=str)
def test_a_long_prompt_gives_the_same_however_it_is_cut(cuts, implementation):
    want = vectors("qwen3_5_dense")
    golden = implementation(GOLDEN / "qwen3_5_dense")
    chunks = np.split(want["long_ids"], np.cumsum(cuts)[:-1])
    logits = np.concatenate([golden.prefill(chunk, None).logits for chunk in chunks])
    close(logits[-32:], want["long_logits_last32"])
    recurrent, window = golden.delta_state(0)
    close(recurrent, want["long_S_0"])
    close(window.T, want["long_conv_0"])


def test_the_mtp_layer_reads_the_models_hidden_states_and_then_its_own(implementation):
    want = vectors("qwen3_5_dense")
    golden = implementation(GOLDEN / "qwen3_5_dense")
    hidden, logits = golden.mtp(want["mtp_next_ids"], want["short_hidden"], 0)
    close(hidden, want["mtp_hidden"])
    close(logits, want["mtp_logits"])
    last = hidden[-1:]
    for i, token in enumerate(want["mtp_chain_ids"]):
        assert token == logits[-1].argmax()
        last, logits = golden.mtp(np.array([token]), last, 24 + i)
        close(last, want["mtp_chain_hidden"][i : i + 1])
        close(logits, want["mtp_chain_logits"][i : i + 1])


class Eagle:
    """An EAGLE head on the `llama` target, with the KV of one request."""

    def __init__(self, name):
        folder = GOLDEN / name
        kind = "eagle3" if name == "eagle3" else "eagle"
        llama = ModelConfig.from_folder(GOLDEN / "llama")
        self.target = load_all(GOLDEN / "llama", llama, False)
        llama_layer = {"architectures": ["LlamaForCausalLM"]}
        self.config = ModelConfig.from_dict({**_read_config(folder), **llama_layer})
        checkpoint = open_checkpoint(folder)
        found = eagle_parameters(self.config, kind, checkpoint.has("fc.bias"), 64)
        checkpoint.check_parameters(found)
        weights = {p.name: checkpoint.load(p, np.float32) for p in found}
        fixed = (self.config, weights, self.target)
        self.head = partial(eagle.eagle, *fixed)
        self.project = lambda hidden: hidden
        if kind == "eagle3":
            self.draft_ids = np.arange(64) + checkpoint.tensor("d2t")
            self.head = partial(eagle.eagle3, *fixed, self.draft_ids)
            self.project = partial(eagle.eagle3_project, weights)
        self.table = np.arange(1, 8)[None]
        self.kv = model.new_kv(self.config, 1, 8, 16)

    def rows(self, tokens, hidden, first_position):
        starts, first = np.array([0, len(tokens)]), np.array([first_position])
        rows = attention.causal_rows(starts, first, np.zeros(1, int), self.table, len(tokens))
        out, logits, self.kv = self.head(rows, tokens, hidden, self.kv)
        return out, logits


def _read_config(folder):
    return json.loads((folder / "config.json").read_text())


def eagle_inputs(name):
    want = vectors(name)
    return want, want["aux"] if name == "eagle3" else want["hidden_in"]


def logits_of(head, logits, name):
    return logits[:, head.draft_ids] if name == "eagle3" else logits


@pytest.mark.parametrize("name", ["eagle1", "eagle1_nobias", "eagle3"])
def test_an_eagle_head_reads_target_hidden_states_and_then_its_own(name):
    want, inputs = eagle_inputs(name)
    head = Eagle(name)
    hidden, logits = head.rows(want["next_ids"], head.project(inputs), 0)
    close(hidden, want["hidden_out"])
    close(logits_of(head, logits, name), want["logits"])
    last = hidden[-1:]
    for i, token in enumerate(want["chain_ids"]):
        assert token == logits[-1].argmax()
        last, logits = head.rows(np.array([token]), last, 24 + i)
        close(last, want["chain_hidden"][i : i + 1])
        close(logits_of(head, logits, name), want["chain_logits"][i : i + 1])


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_an_eagle_head_grows_the_dynamic_tree(name):
    want, inputs = eagle_inputs(name)
    head = Eagle(name)
    hidden, logits = head.rows(want["next_ids"], head.project(inputs), 0)
    rank = partial(most_likely, 4)
    shape = draft_tree.TreeShape(nodes=12, depth=4, width=4, rows=12)
    tokens, parents, num_nodes, _ = eagle.draft(
        head.head,
        head.kv,
        eagle.relay_of(hidden, logits, np.array([23]), rank),
        want["next_ids"][-1:],
        np.array([24]),
        np.array([0]),
        np.array([11]),
        head.table,
        shape,
        rank,
    )
    assert num_nodes == 12
    np.testing.assert_array_equal(tokens[0], want["tree_tokens"])
    np.testing.assert_array_equal(draft_tree.ancestors(parents)[0], want["tree_mask"])
    np.testing.assert_array_equal(draft_tree.depths(parents)[0], want["tree_depth"])


def most_likely(width, logits, paths):
    """Ranks greedily: the `width` most likely children of each node."""
    B, k, vocab = logits.shape
    log_probability = sampling.log_softmax(logits.reshape(B * k, vocab))
    ids = sampling.top_candidates(log_probability, width)
    edges = np.take_along_axis(log_probability, ids, axis=1)
    return ids.reshape(B, k, width), edges.reshape(B, k, width)
