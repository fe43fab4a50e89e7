"""Records of Qwen."""

from dataclasses import replace

from shared.models import mtp
from shared.models.config_classes import qwen as config_classes
from shared.models.experts import Routing
from shared.models.family import BIASES, Family, SlidingWindowRule

QWEN2 = Family(
    "qwen2", config_classes.QWEN2, input_bias=True, sliding_window=SlidingWindowRule.BY_FLAG
)
QWEN3 = Family(
    "qwen3",
    config_classes.QWEN3,
    qk_norm=True,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_FLAG,
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    of=config_classes.QWEN3_MOE,
    sliding_window=SlidingWindowRule.WHOLE_BY_FLAG,
    routing=Routing(steps=True),
)
QWEN3_5 = Family(
    "qwen3_5", config_classes.QWEN3_5, qk_norm=True, is_hybrid=True, mtp=mtp.QWEN, sees=True
)
_WITH_SHARED = Routing(
    is_renormalised=True,
    reads_renormalised=False,
    shared_field="shared_expert_intermediate_size",
    has_shared_gate=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5, name="qwen3_5_moe", of=config_classes.QWEN3_5_MOE, routing=_WITH_SHARED
)
QWEN3_NEXT = Family(
    "qwen3_next",
    config_classes.QWEN3_NEXT,
    qk_norm=True,
    is_hybrid=True,
    has_fused_delta=True,
    biases=BIASES[:1],
    routing=replace(_WITH_SHARED, is_renormalised=False, reads_renormalised=True, steps=True),
    mtp=mtp.QWEN,
)

FAMILIES = {
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
}

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
