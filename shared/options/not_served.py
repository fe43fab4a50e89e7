"""Flags of SGLang and vLLM that are not here, each with the reason or the way out."""

OTHER_WAYS = "several GPUs serve a model by --tp-size alone; leave the flag out"
AUTOMATIC = "the start decides it; leave the flag out"
FLOAT_ONLY = "weights and KV are float32 or bfloat16; give --dtype"
ADAPTERS = "adapters are not served; merge one into the weights of the checkpoint"
EXACT_RULES = "text keeps the target's law; give --accept-rule match or rejection"

NOT_SUPPORTED = {
    **dict.fromkeys(
        ("--dp-size", "--dp", "--pp-size", "--pipeline-parallel-size")
        + ("--data-parallel-size", "--ep-size", "--ep", "--nnodes")
        + ("--node-rank", "--dist-init-addr", "--enable-dp-attention", "--base-gpu-id"),
        OTHER_WAYS,
    ),
    **dict.fromkeys(
        ("--max-prefill-tokens", "--schedule-policy")
        + ("--schedule-conservativeness", "--cuda-graph-max-bs", "--cuda-graph-bs")
        + ("--disable-cuda-graph-padding", "--attention-backend")
        + ("--prefill-attention-backend", "--decode-attention-backend", "--sampling-backend")
        + ("--mamba-ssm-dtype", "--max-mamba-cache-size")
        + ("--enable-torch-compile", "--enable-mixed-chunk", "--num-continuous-decode-steps")
        + ("--device", "--stream-interval"),
        AUTOMATIC,
    ),
    **dict.fromkeys(
        ("--quantization", "--kv-cache-dtype", "--torchao-config", "--enable-fp32-lm-head")
        + ("--quantization-param-path",),
        FLOAT_ONLY,
    ),
    "--chat-template": "chats are written by the model folder's; put chat_template.jinja there",
    "--completion-template": "prompts of completions are read as they are; leave the flag out",
    "--enable-multimodal": "a model that sees is served so; --language-only leaves that out",
    "--is-embedding": "answers are texts, and no embeddings are made; leave the flag out",
    **dict.fromkeys(("--lora-paths", "--enable-lora"), ADAPTERS),
    **dict.fromkeys(
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        EXACT_RULES,
    ),
    "--speculative-use-rejection-sampling": "give --accept-rule rejection",
    "--speculative-use-block-verification": "give --accept-rule rejection --block-verification",
    **dict.fromkeys(
        ("--speculative-draft-model-revision",)
        + ("--speculative-draft-model-quantization", "--speculative-attention-mode")
        + ("--speculative-draft-attention-backend", "--speculative-draft-sink-size")
        + ("--speculative-ngram", "--speculative-dflash-block-size", "--enable-multi-layer-eagle")
        + ("--speculative-moe-runner-backend",),
        "the draft model and its tree are all that is chosen; leave the flag out",
    ),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile"),
        "the server speaks in clear text on every listener; put a proxy before it",
    ),
    "--allow-credentials": "pages of other sites send a key of their own; leave the flag out",
    **dict.fromkeys(
        ("--allowed-methods", "--allowed-headers"),
        "a page may use every route with every header; give --allowed-origins",
    ),
    "--cors-allowed-origins": "give --allowed-origins",
    "--log-level-http": "one level is for both processes; give --log-level",
    **dict.fromkeys(
        ("--decode-log-interval", "--log-requests-level"),
        "a request has one line, when it ends, and /metrics counts steps; leave the flag out",
    ),
    "--enable-metrics": "metrics are always there, at /metrics; leave the flag out",
    "--enable-trace": "give --otlp-traces-endpoint",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave the flag out",
    "--tokenizer-path": "the tokenizer lies in the model folder; put tokenizer.json there",
    "--tokenizer-mode": "the tokenizer is the model folder's tokenizer.json; leave the flag out",
    "--skip-tokenizer-init": "send prompts as token ids and ask for return_token_ids instead",
    "--revision": "a model is a folder; give the folder of that revision as --model-path",
    "--download-dir": "nothing is downloaded; give a folder as --model-path",
    "--random-seed": "a seed belongs to a request; send the field seed",
    "--enable-deterministic-inference": "float32 is deterministic already; give --dtype float32",
    "--json-model-override-args": "edit config.json in the model folder",
}

NOT_SUPPORTED_PREFIXES = (
    "--speculative-dspark-",
    "--disaggregation-",
)
