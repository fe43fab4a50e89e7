"""Records of gpt-oss."""

from shared.models.activation import SWIGLU_OAI
from shared.models.config_classes import gpt_oss as config_classes
from shared.models.experts import Routing
from shared.models.family import BIASES, Family, SlidingWindowRule
from shared.models.mlp import ExpertTensors

_OAI_EXPERTS = ExpertTensors(
    router="mlp.router",
    is_transposed=True,
    is_interleaved=True,
    width_field="intermediate_size",
)
GPT_OSS = Family(
    "gpt_oss",
    config_classes.GPT_OSS,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_TYPES,
    full_attention_interval=2,
    has_sinks=True,
    routing=Routing(
        count_field="num_local_experts",
        is_renormalised=True,
        reads_renormalised=False,
        has_bias=True,
        activation=SWIGLU_OAI,
        tensors=_OAI_EXPERTS,
    ),
)

FAMILIES = {
    "GptOssForCausalLM": GPT_OSS,
}

ARCHITECTURES = {
    "gpt_oss": "GptOssForCausalLM",
}
