"""Writes the small random model: `python -m models.make_random [FOLDER]`.

The model is a Qwen3.5 hybrid with an MTP layer and a byte-level tokenizer. Its output has no
meaning. Every run writes the same bytes.

The LM head scores each printable byte by the component of another byte's embedding in the hidden
state. Each next token therefore depends partly on the latest token alone and partly on the context.
The MTP layer reads the same component, so it agrees with the model often enough for a realistic
acceptance rate.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint

SEED = 20
# With these scales about half of the greedy tokens depend on the latest token alone.
EMBEDDING_SCALE = 0.4
HEAD_SCALE = 2.5
DRAFT_CONTEXT_SHARE = 0.3  # share of the target's hidden state in the MTP layer's input
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PRINTABLE = np.arange(ord(" "), ord("~") + 1)
ROOT = Path(__file__).resolve().parent

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}

_PARTS = (
    "{% macro text(content) %}"
    "{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    "{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{% endmacro %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}SYSTEM{{ '\n\n' }}{% endif %}"
    "# Tools\n\nFunctions that you may call:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\n\nWrite each call as JSON in tags:\n"
    '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n{% endif %}'
)
_RESULT = (
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}CONTENT{{ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": {{ call['function']['name'] | tojson }}, "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}"
)


def chat_template(has_images: bool) -> str:
    """Returns a chat template in Qwen's format, including tools, tool calls and results.

    Args:
      has_images: Whether message contents may include images.
    """
    form = "{{ text(%s) }}" if has_images else "{{ %s or '' }}"
    template = (
        f"{_PARTS if has_images else ''}{_TOOLS}"
        "{% for message in messages %}"
        f"{{% if message['role'] == 'tool' %}}{_RESULT}"
        "{% elif not (tools and loop.first and message['role'] == 'system') %}"
        f"<|im_start|>{{{{ message['role'] }}}}\nCONTENT{_CALLS}<|im_end|>\n"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = template.replace("SYSTEM", form % "messages[0]['content']")
    return template.replace("CONTENT", form % "message['content']")


def write(folder: Path) -> None:
    """Writes the checkpoint and its tokenizer into `folder`."""
    save_checkpoint(folder, CONFIG, make_weights(config_from_dict(CONFIG)))
    _write_json(folder / "generation_config.json", {"eos_token_id": [256, 258]})
    _write_json(folder / "tokenizer.json", tokenizer())
    _write_json(folder / "tokenizer_config.json", tokenizer_config())


def make_weights(config: ModelConfig) -> Weights:
    """Returns random bfloat16 weights under the project's parameter names."""
    rng = np.random.default_rng(SEED)
    weights = {p.name: _random(p, rng) for p in parameters(config, with_mtp=True)}
    order = rng.permutation(PRINTABLE)
    embed = weights["embed"]
    weights["lm_head"] = np.zeros_like(embed)
    norms = np.sqrt((embed[order] ** 2).sum(axis=1, keepdims=True))
    weights["lm_head"][np.roll(order, -1)] = HEAD_SCALE * embed[order] / norms
    weights["mtp.fc"][:, : config.hidden] = np.eye(config.hidden)
    weights["mtp.fc"][:, config.hidden :] *= DRAFT_CONTEXT_SHARE
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in weights.items()}


def _random(parameter: Parameter, rng: np.random.Generator) -> np.ndarray:
    """Samples weights with deviation 1 / sqrt(fan-in), and norms near their neutral value."""
    name, shape = parameter.name, parameter.shape
    if name.endswith("a_log"):
        return rng.uniform(-3.0, 1.2, shape)
    noise = noise_of(parameter, rng)
    if name == "embed":
        return EMBEDDING_SCALE * noise
    if name.endswith("dt_bias"):
        return noise - 1
    if name.endswith("norm"):
        return 0.2 * noise + (name == "gated_delta.norm")
    if name.endswith("conv"):
        return 0.5 * noise
    return noise / np.sqrt(shape[-1])


def noise_of(parameter: Parameter, rng: np.random.Generator) -> np.ndarray:
    """Samples normal numbers; qkv, z and the gates of a GDN layer are sampled separately.

    The output of the model depends on the order of the samples.
    """
    if parameter.name != "gated_delta.inputs":
        return rng.standard_normal(parameter.shape)
    layers, _, hidden = parameter.shape
    q, k, v, z, b, a = (section.size for section in parameter.sections)
    parts = [rng.standard_normal((layers, rows, hidden)) for rows in (q + k + v, z, b + a)]
    return np.concatenate(parts, axis=1)


def tokenizer() -> dict[str, Any]:
    """Returns the content of tokenizer.json: one token per byte and the special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    added = [
        {
            "id": 256 + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, content in enumerate(SPECIAL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Returns the character of each byte in byte-level tokenizers: itself, or one from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def tokenizer_config() -> dict[str, Any]:
    """Returns the content of tokenizer_config.json: Qwen's special tokens and chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": chat_template(has_images=False),
    }


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "random")
