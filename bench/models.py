"""Random models of real sizes for the benchmarks, and the bytes that a step of them must read."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from shared.boundary.backend import Limits, Program, Work
from shared.models.checkpoint import parameters
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

QWEN3_5_0_8B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}

TINY_HYBRID = QWEN3_5_0_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}

SIZES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3.5-0.8b": QWEN3_5_0_8B, "tiny-hybrid": TINY_HYBRID}


def random_weights(
    config: ModelConfig, with_mtp: bool, dtype: str, seed: int
) -> dict[str, np.ndarray]:
    """Normal weights of deviation 1/sqrt(fan-in), by the names of `shared.models.checkpoint`.

    The unit deviation of the embedding keeps logits some units apart.
    """
    rng = np.random.default_rng(seed)
    out_dtype = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    weights = {}
    for parameter in parameters(config, with_mtp):
        array = _random_parameter(parameter.name, parameter.shape, config, rng)
        weights[parameter.name] = array.astype(np.float32 if parameter.float32 else out_dtype)
    return weights


def _random_parameter(
    name: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator
) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "a_log":
        return np.log(rng.uniform(0.05, 3.5, shape))
    if leaf == "dt_bias":
        return noise - 1.0
    if leaf.endswith("norm"):
        plain_norm = name == "gated_delta.norm" or not config.zero_centered_norms
        return 0.1 * noise + (1.0 if plain_norm else 0.0)
    if leaf == "embed":
        return noise / np.float32(np.sqrt(config.hidden) / 4)
    return noise / np.float32(np.sqrt(shape[-1]))


def limits_for(
    config: ModelConfig,
    batch: int,
    context: int,
    page_size: int,
    prefill_tokens: int,
    shapes: tuple[TreeShape, ...],
    overlap: int,
) -> Limits:
    """Limits with one batch bucket, one prefill bucket and one page-table size."""
    scratch = max(shape.scratch for shape in shapes)
    growth = max(shape.max_tokens for shape in shapes)
    positions = context + (overlap + 1) * growth + scratch
    pages = -(-positions // page_size)
    common = {"batch": batch, "pages": pages, "host_draft": False, "mask": False, "logprobs": False}
    plain = TreeShape.plain(batch)
    programs = [Program(work=Work.PREFILL, tokens=prefill_tokens, shape=plain, **common)]
    programs += [Program(work=Work.DECODE, tokens=0, shape=shape, **common) for shape in shapes]
    return Limits(
        page_size=page_size,
        num_pages=1 + batch * pages,
        num_slots=1 + batch,
        num_snapshots=1,
        programs=tuple(programs),
        overlap=overlap,
        context_length=context,
        vocab=config.vocab,
        max_stop_ids=4,
        max_bias=1,
        max_logprobs=1,
    )


def step_bytes(
    config: ModelConfig, weights: Mapping[str, np.ndarray], batch: int, context: int, depth: int
) -> int:
    """Bytes that one decode step must at least move.

    Weights once (the embedding only as LM head, when tied; the MTP layer once per use), the KV of
    every row once, and each recurrent state read and written once, and once more for the replay.
    """
    itemsize = weights["final_norm"].dtype.itemsize
    target = sum(w.nbytes for name, w in weights.items() if not name.startswith("mtp."))
    if not config.tied:
        target -= weights["embed"].nbytes
    head = weights.get("lm_head", weights["embed"]).nbytes
    mtp = sum(w.nbytes for name, w in weights.items() if name.startswith("mtp.")) + head
    kv_row = 2 * config.num_kv_heads * config.head_size * itemsize
    kv = batch * context * kv_row * config.num_attention_layers
    delta, state = config.gated_delta, 0
    if delta:
        per_slot = delta.num_value_heads * delta.key_size * delta.value_size * 4
        state = batch * per_slot * config.num_gated_delta_layers * (3 if depth else 2)
    drafts = depth * (mtp + batch * context * kv_row)
    return target + kv + state + drafts
