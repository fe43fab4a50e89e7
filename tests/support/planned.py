"""Memory plans of Qwen3-8B on absent devices."""

from jax_impl import platform as jax_platform
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.families import config_from_dict
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.memory_plan import MemoryPlan, plan
from torch_impl import platform as torch_platform

GB = 10**9
PLATFORMS = {"torch": torch_platform.PLATFORM, "jax": jax_platform.PLATFORM}
QWEN3_8B = config_from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
    }
)


def planned(framework: str, free_bytes: int, flags: str = "", kind: str = "gpu") -> MemoryPlan:
    """The plan of a start with these flags on a device with so much free memory."""
    device, costs = Device(kind, "one", free_bytes), PLATFORMS[framework].costs
    options = parse(flags.split())
    on_device = options.speculative.drafts_from_table
    drafts = DrafterSpec.of_text() if on_device else DrafterSpec.none()
    return plan(options, QWEN3_8B, drafts, device, costs)
