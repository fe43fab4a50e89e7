"""`python -m jax_impl.train` end to end: its output can be served and loaded elsewhere."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from jax_impl.train import BALANCE_WEIGHT, balance_weight, main
from jax_impl.training import export, init, target_outputs, tasks
from jax_impl.training.forward import check_drafted_for, check_trained, forward, logits
from models import quantize_fp8
from models.make_random import ROOT
from shared.boundary.program import StepKind
from shared.drafts.checkpoint import kind_of, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.families import config_from_dict, config_from_folder
from shared.models.saving import save_checkpoint
from shared.spec.draft_tree import TreeShape
from tests.support.backends import JAX_BACKENDS, make_backend
from tests.support.contract_host import contract_capacity
from tests.support.run_engine import drive
from tests.support.tiny_models import tiny_config

TOKENIZER = ROOT / "random"
DEMO = ROOT / "demo"
VOCAB, ENDS = 259, [256, 258]
CHAIN = TreeShape.chain(3, 4)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": ENDS,
}
HYBRID = COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "mtp_num_hidden_layers": 1,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
}
MIXTURE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
RUN = ["--batch-tokens", "256", "--warmup", "2", "--max-tokens", "64", "--output-tokens", "16"]
HEAD_RUN = [*RUN, "--steps", "4", "--depth", "2", "--prompts", "7", "--output-slots", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    turns = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "answer": f"{i}."} for i in "abcd"
    ]
    texts = [{"prompt": "to and fro"}, {"prompt": "1, 2,", "answer": " 3"}]
    lines = [{"prompt": "too long " * 9}, *turns, *texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory, data) -> Path:
    """A model that the command trained from scratch."""
    folder = tmp_path_factory.mktemp("target")
    config = folder / "given.json"
    config.write_text(json.dumps(HYBRID), encoding="utf-8")
    words = ["--model", str(config), "--tokenizer", str(TOKENIZER), "--data", str(data)]
    assert main([*words, "--out", str(folder / "out"), *RUN, "--steps", "60"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def answers(tmp_path_factory, data, target) -> Path:
    """The target's own answers, made when the first head is trained."""
    return tmp_path_factory.mktemp("answers") / "outputs.jsonl"


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Backends that the command makes count like those of other tests."""
    made = target_outputs.JaxBackend

    def make(*args, **named):
        JAX_BACKENDS.append(made(*args, **named))
        return JAX_BACKENDS[-1]

    monkeypatch.setattr(target_outputs, "JaxBackend", make)


def log_of(folder: Path) -> list[dict]:
    text = (folder / "training/log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def trained_head(target: Path, data: Path, answers: Path, kind: str, out: Path) -> int:
    draft = "dflash" if kind == "jetspec" else kind
    words = ["--target", str(target), "--draft", draft, "--data", str(data), "--out", str(out)]
    size = "3" if kind == "dspark" else "4"  # of three drafts, as `CHAIN` has
    blocks = {each: ["--block", size, "--layers", "2"] for each in ("dflash", "dspark", "dflash2")}
    shape = {"eagle3": ["--draft-vocab", "200"], **blocks}
    shape["jetspec"] = [*blocks["dflash"], "--causal-head", "--loss", "kl"]
    return main([*words, "--outputs", str(answers), *shape.get(kind, []), *HEAD_RUN])


def text_of(folder: Path, drafter, prompt: list[int]) -> list[int]:
    """Returns the output of the engine on the reference backend."""
    config = config_from_folder(folder)
    weights = load_all(folder, config, drafter == "NEXTN")
    capacity = contract_capacity(config)
    shape = TreeShape.plain(4) if drafter == "none" else CHAIN
    programs = [p for p in capacity.programs if p.work is StepKind.PREFILL or p.shape == shape]
    capacity = replace(capacity, programs=tuple(programs))  # a block drafts no trees
    backend = make_backend("reference", config, weights, capacity, drafter)
    controller = StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    most = capacity.token_sizes[-1]
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=most, cache=NO_CACHE)
    ends = {"temperature": 0.0, "stop_token_ids": tuple(ENDS)}
    sampling = SamplingParams(max_tokens=12, **ends)
    request = Request(request_id=1, prompt=tuple(prompt), sampling=sampling)
    return drive(engine, [request])[1].tokens


def test_train_from_scratch_lowers_loss_and_serves(target):
    first, *_, last = log_of(target)
    assert last["loss"] < 0.8 * first["loss"]
    assert last["mtp_cross_entropy"] < first["mtp_cross_entropy"]
    config = config_from_folder(target)
    assert config.eos_ids == tuple(ENDS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (TOKENIZER / name).read_bytes()
    assert (target / "training/curves.png").is_file()
    prompt = [65, 66, 67]
    assert text_of(target, "NEXTN", prompt) == text_of(target, "none", prompt)


def test_train_resumes_and_rejects_other_settings(target, data, capsys):
    given = target.parent / "given.json"
    words = ["--model", str(given), "--tokenizer", str(TOKENIZER), "--data", str(data)]
    words += ["--out", str(target), *RUN]
    before = load_file(target / "model.safetensors")
    assert main([*words, "--steps", "60"]) == 0
    after = load_file(target / "model.safetensors")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    others = {"seed": "1", "depth": "3", "start": str(target.parent)}
    for name, value in others.items():
        assert main([*words, "--steps", "60", f"--{name}", value]) == 2
        assert f"another {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        *("mtp", "eagle", "eagle3", "dflash", "jetspec", "dspark"),
        pytest.param("dflash2", marks=pytest.mark.matrix),
    ],
)
def test_trained_head_serves_with_plain_output(target, data, answers, kind, tmp_path, capsys):
    out = tmp_path / kind
    assert trained_head(target, data, answers, kind, out) == 0
    assert "acceptance_length" in log_of(out)[-1]
    shapes = ["chain", "tree 16", "tree 32", "tree 64"] if kind in ("dflash", "jetspec") else []
    printed = re.findall(r"(chain|tree \d+) ([\d.]+)", capsys.readouterr().out)
    assert [shape for shape, _ in printed] == shapes
    trees = [float(length) for _, length in printed[1:]]
    assert trees == sorted(trees)  # a smaller tree is the beginning of a larger one
    config, prompt = config_from_folder(target), [65, 66, 67]
    plain = text_of(target, "none", prompt)
    if kind == "mtp":
        assert text_of(out, "NEXTN", prompt) == plain
        old, new = (load_file(f / "model.safetensors") for f in (target, out))
        kept = [name for name in old if not name.startswith("mtp.")]
        assert all(np.array_equal(old[name], new[name]) for name in kept)
        assert not np.array_equal(old["mtp.fc.weight"], new["mtp.fc.weight"])
        return
    opened = open_head(out)
    assert kind_of(opened.names) == ("DFLASH" if kind == "jetspec" else kind.upper())
    head = load_head(opened, DraftConfig.from_folder(out, config), np.float32)
    assert head.config.block is None or all(head.config.block.causal) == (kind == "jetspec")
    assert text_of(target, head, prompt) == plain


def test_target_outputs_generated_once(target, data, answers, tmp_path, capsys):
    assert trained_head(target, data, answers, "eagle", tmp_path / "a") == 0
    assert "Dropped 1 of 7 prompts" in capsys.readouterr().out
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert len({tuple(line["prompt_ids"]) for line in lines[1:]}) == len(lines[1:]) == 6
    for line in lines[1:3]:
        whole = text_of(target, "none", line["prompt_ids"])
        assert line["output_ids"][: len(whole)] == whole  # which has at most 12 tokens of 16
    written = answers.stat().st_mtime_ns
    answers.write_bytes(answers.read_bytes() + b'{"prompt_ids": [9')  # a write that was cut off
    assert trained_head(target, data, answers, "eagle", tmp_path / "b") == 0
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 7
    assert answers.stat().st_mtime_ns > written


def test_target_outputs_missing_and_read_limits(tmp_path):
    path = tmp_path / "outputs.jsonl"
    said = {(1, 2): [7, 8, 9, 7], (3,): [9, 258], (4,): [5, 6]}
    lines = [{"prompt_ids": list(p), "output_ids": output} for p, output in said.items()]
    path.write_text("\n".join(map(json.dumps, [{"target": "a"}, *lines])) + "\n", "utf-8")
    asked, most = [[4], [8, 8], [3], [8, 8], [1, 2]], SamplingParams(stop_token_ids=(258,))
    # Of four tokens the last answer is cut short, and a prompt has none.
    four, two = (replace(most, max_tokens=count) for count in (4, 2))
    assert target_outputs.missing(path, "a", asked, four) == [0, 3]
    assert target_outputs.missing(path, "a", asked, two) == [3]
    rows = target_outputs.read_outputs(path, "a", [[4], [3], [1, 2]], two, 9)
    assert rows.tokens.tolist() == [4, 5, 6, 3, 9, 258, 1, 2, 7, 8]
    assert rows.is_answer.tolist() == [False, True, True] * 2 + [False, False, True, True]


def test_target_outputs_of_other_model_rejected(target, data, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"target": "0123"}\n', encoding="utf-8")
    assert trained_head(target, data, other, "eagle", tmp_path / "out") == 2
    assert "another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("no JSON", "byte 0 is not valid JSON"),
        ('{"prompt": "' + "long " * 99 + '"}', "no prompt leaves room"),
    ],
)
def test_invalid_data_leaves_no_output_folder(line, fault, tmp_path, capsys):
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_text(f"{line}\n", encoding="utf-8")
    for kind in ("mtp", "eagle"):
        assert trained_head(DEMO / "target", bad, tmp_path / "answers.jsonl", kind, out) == 2
        assert fault in capsys.readouterr().err
        assert not out.exists()


def test_frequent_tokens_of_outputs_form_draft_vocabulary():
    row = target_outputs.Row([9, 9, 9, 7, 3, 3, 8], [False, False, False, True, True, True, True])
    rows = target_outputs.RaggedRows.of([row], max_tokens=9)
    assert target_outputs.frequent_tokens(rows, 10, 1).tolist() == [3]
    assert target_outputs.frequent_tokens(rows, 10, 4).tolist() == [0, 3, 7, 8]


@pytest.mark.parametrize("config", [HYBRID, QWEN3, MIXTURE], ids=["hybrid", "qwen3", "mixture"])
def test_exported_model_loads_equal_to_bfloat16(config, tmp_path):
    sizes = config_from_dict(config)
    model = init.fresh_model(sizes, 3, sizes.has_mtp)
    export.save_model(tmp_path, config, model, TOKENIZER, 1)
    loaded = tasks.load_model(tmp_path, sizes, sizes.has_mtp, np.float32)
    trained, read = export.arrays_of(model), export.arrays_of(loaded)
    assert trained.keys() == read.keys()
    for name, array in trained.items():
        # bfloat16 keeps 8 bits; a zero-centred norm is 1 here, and stored as an exact 0.
        np.testing.assert_allclose(read[name], array, rtol=2**-8, atol=0)


@pytest.mark.parametrize("config", [HYBRID, QWEN3, MIXTURE], ids=["hybrid", "qwen3", "mixture"])
def test_exported_model_matches_transformers(config, tmp_path):
    sizes = config_from_dict(config)
    export.save_model(tmp_path, config, init.fresh_model(sizes, 3, sizes.has_mtp), TOKENIZER, 1)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 64))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    model = tasks.load_model(tmp_path, sizes, sizes.has_mtp, np.float32)
    passed = jax.jit(lambda m, t: forward(sizes, m, t, jnp.float32, False))(model, tokens)
    # Float32 on both sides: only the orders of the sums differ.
    np.testing.assert_allclose(logits(model, passed.hidden, jnp.float32), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bfloat16", "fp8"])
def test_mtp_export_copies_sharded_target(is_fp8, tmp_path):
    """The target's index names files in another folder, which stay unchanged."""
    source, files, out = tmp_path / "source", tmp_path / "files", tmp_path / "out"
    without = {**HYBRID, "mtp_num_hidden_layers": 0}
    sizes, bare = config_from_dict(HYBRID), config_from_dict(without)
    model = init.fresh_model(bare, 3, with_mtp=False)
    save_checkpoint(source, without, export.arrays_of(model), num_shards=2)
    if is_fp8:
        quantize_fp8.write(source, tmp_path / "twin")
        source = tmp_path / "twin"
    weights = load_all(source, bare, with_mtp=False)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace('"model-', '"../files/model-'), "utf-8")
    files.mkdir()
    for shard in [*source.glob("*.safetensors")]:
        shard.rename(files / shard.name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("a", encoding="utf-8")
    before = {path: path.read_bytes() for path in files.iterdir()}
    layer = init.fresh_mtp(sizes, model, 4)
    export.save_mtp(out, source, sizes, layer)
    assert {path: path.read_bytes() for path in files.iterdir()} == before
    config, opened = config_from_folder(out), open_checkpoint(out)
    opened.check(config, with_mtp=True)
    read = load_all(out, config, with_mtp=True)
    assert all(np.array_equal(read[name], array) for name, array in weights.items())
    fc = export.arrays_of(layer)["fc"]
    assert np.array_equal(read["mtp.fc"], fc.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert (out / "additional_chat_templates/tool_use.jinja").read_text(encoding="utf-8") == "a"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--target", "t"], "--target and --draft require each other"),
        (["--model", "m"], "--model and --tokenizer require each other"),
        (["--target", "t", "--model", "m"], "either --target and --draft"),
        (
            ["--target", "t", "--draft", "mtp", "--tokenizer", "x"],
            "--tokenizer is not supported with --target",
        ),
        (["--target", "t", "--draft", "mtp"], "set --steps or --minutes"),
        (["--target", "t", "--draft", "mtp", "--steps", "0"], "--steps must be positive"),
        (
            ["--target", "t", "--draft", "mtp", "--steps", "1", "--warmup", "-3"],
            "--warmup must be 0 or more, got -3",
        ),
        (["--target", "t", "--draft", "mtp", "--steps", "1"], "the model folder t does not exist"),
        (["--model", "m", "--tokenizer", "x", "--steps", "1"], "m cannot be read: No such file"),
    ],
)
def test_train_rejects_invalid_flags_in_one_line(data, tmp_path, words, fault, capsys):
    assert main([*words, "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    written = capsys.readouterr().err
    assert fault in written
    assert written.count("\n") == 1


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("bamba", "Mamba2 layers"),
        ("granite", "scaling factors"),
        ("llama_bias", "biases"),
        ("ministral3", "query scaling by position"),
        ("mistral", "sliding windows"),
        ("olmo3", "norms after mixers and MLPs"),
        ("qwen2", "biases"),
        ("smollm3", "layers with different rotary settings"),
        ("phi3", None),
        ("glm4_moe", "shared experts"),
        ("glm4_moe_lite", "latent attention"),
        ("nemotron_h", "Mamba2 layers"),
        ("qwen3_5_moe", "shared experts"),
        ("qwen3_moe", None),
    ],
)
def test_check_trained_rejects_unsupported_model(family, named):
    config = config_from_dict(tiny_config(family, nested=False, with_mtp=False, tied=False))
    with nullcontext() if named is None else pytest.raises(ValueError, match=named):
        check_trained(config)


def test_check_trained_rejects_sigmoid_router():
    fields = tiny_config("glm4_moe", nested=False, with_mtp=False, tied=False)
    fields |= {"n_shared_experts": 0, "attention_bias": False}
    with pytest.raises(ValueError, match="experts with sigmoid scores"):
        check_trained(config_from_dict(fields))


def test_check_drafted_for_rejects_moe():
    config = config_from_dict(MIXTURE)
    with pytest.raises(ValueError, match="training a head for it is not supported"):
        check_drafted_for(config)


@pytest.mark.parametrize("weight", [-0.1, "0.01", True])
def test_balance_weight_rejects_invalid_value(weight):
    assert balance_weight({}) == BALANCE_WEIGHT
    assert balance_weight({"router_aux_loss_coef": 0}) == 0
    with pytest.raises(ValueError, match="router_aux_loss_coef in config.json must be a number"):
        balance_weight({"router_aux_loss_coef": weight})


def test_demo_models_have_expected_sizes():
    sizes = {}
    for name in ("target", "standalone", "mixture"):
        config_json = json.loads((DEMO / f"{name}_config.json").read_text(encoding="utf-8"))
        config = config_from_dict(config_json)
        model = init.fresh_model(config, 0, config.has_mtp)
        sizes[name] = sum(array.size for array in export.arrays_of(model).values())
    assert 6e6 < sizes["target"] < 10e6
    assert 1e6 < sizes["standalone"] < 2e6
    assert 18e6 < sizes["mixture"] < 22e6
