"""Flags of SGLang and vLLM without an equivalent, with the reason or the flag to use.

Flags that request the behaviour of every server are accepted. So are values that request nothing.
"""

OTHER_WAYS = (
    "only tensor parallelism is supported; give --tp-size, and for several hosts "
    "--distributed-executor-backend ray"
)
AUTOMATIC = "the start decides it; leave the flag out"
STEPS = "the scheduler decides it in each step; leave the flag out"
KERNELS = "kernels are the project's own, chosen by the model and the GPU; leave the flag out"
QUANTISED = "weights are served as the checkpoint stores them; give a checkpoint in FP8"
KV_TYPE = "KV and the LM head have the type of the activations; give --dtype"
ADAPTERS = "adapters are served if they are named; give --lora-paths"
EXACT_RULES = (
    "output keeps the target's distribution; give --speculative-accept-rule exact or rejection"
)
GRAPHS = "graphs are captured for every batch up to --max-running-requests; leave the flag out"
TOKENIZER = "the tokenizer is tokenizer.json of the model folder; put it there"
SEED = "a seed belongs to a request; send the field seed"
ON_DEVICE = "weights and KV stay on the device; leave the flag out"
ONE_LEVEL = "one level is for both processes; give --log-level"
GRAMMARS = "give --grammar-backend"
OVERRIDES = "edit config.json in the model folder"

ALWAYS = frozenset(
    ("--enable-metrics", "--enable-prefix-caching", "--enable-chunked-prefill")
    + ("--enable-deterministic-inference", "--enable-multimodal", "--enable-auto-tool-choice")
    + ("--enable-cache-report", "--enable-prompt-tokens-details")
    + ("--disable-log-requests", "--no-enable-log-requests")
)
"""Switches that request the only supported behaviour."""

NEUTRAL = {
    **dict.fromkeys(
        (
            "--pp-size",
            "--pp",
            "--pipeline-parallel-size",
            "--ep-size",
            "--ep",
            "--nnodes",
            "--stream-interval",
        ),
        ("1",),
    ),
    **dict.fromkeys(("--node-rank", "--base-gpu-id"), ("0",)),
    **dict.fromkeys(("--kv-cache-dtype", "--tokenizer-mode"), ("auto",)),
    "--schedule-policy": ("fcfs",),
    "--scheduling-policy": ("fcfs", "priority"),
}
"""Values of unsupported flags that have no effect."""


def asks_for_nothing(name: str, value: str | None) -> bool:
    """Returns True if an unsupported flag requests the only supported behaviour.

    Args:
      name: Spelling of the flag.
      value: Value of the flag; None for a switch.
    """
    return value in NEUTRAL.get(name, ()) if value is not None else name in ALWAYS


UNSUPPORTED_FLAGS = {
    **dict.fromkeys(
        (
            "--pp-size",
            "--pp",
            "--pipeline-parallel-size",
            "--ep-size",
            "--ep",
            "--nnodes",
            "--enable-expert-parallel",
        )
        + ("--node-rank", "--dist-init-addr", "--enable-dp-attention"),
        OTHER_WAYS,
    ),
    "--base-gpu-id": "the environment names the GPUs; set CUDA_VISIBLE_DEVICES",
    **dict.fromkeys(
        ("--schedule-policy", "--scheduling-policy", "--schedule-conservativeness")
        + ("--enable-mixed-chunk", "--num-continuous-decode-steps"),
        STEPS,
    ),
    **dict.fromkeys(
        ("--max-prefill-tokens", "--max-num-batched-tokens"),
        "prompt tokens of a step are bounded; give --chunked-prefill-size",
    ),
    "--gpu-memory-utilization": "give --mem-fraction-static, a share of the memory that is free",
    **dict.fromkeys(("--swap-space", "--cpu-offload-gb"), ON_DEVICE),
    **dict.fromkeys(
        ("--cuda-graph-max-bs", "--cuda-graph-bs", "--disable-cuda-graph-padding"), GRAPHS
    ),
    **dict.fromkeys(
        ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
        + ("--sampling-backend", "--enable-torch-compile"),
        KERNELS,
    ),
    **dict.fromkeys(("--mamba-ssm-dtype", "--max-mamba-cache-size"), AUTOMATIC),
    "--device": "a GPU serves where there is one; set CUDA_VISIBLE_DEVICES to none for the CPU",
    "--stream-interval": "an answer is streamed step by step; leave the flag out",
    "--torchao-config": QUANTISED,
    **dict.fromkeys(
        ("--kv-cache-dtype", "--enable-fp32-lm-head", "--quantization-param-path"), KV_TYPE
    ),
    "--completion-template": "prompts of completions are read as they are; leave the flag out",
    "--is-embedding": "answers are texts, and no embeddings are made; leave the flag out",
    "--enable-lora": ADAPTERS,
    **dict.fromkeys(
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        EXACT_RULES,
    ),
    "--speculative-config": "give --speculative-algorithm and --speculative-draft-model-path",
    **dict.fromkeys(
        ("--speculative-draft-model-quantization", "--speculative-attention-mode")
        + ("--speculative-draft-attention-backend", "--speculative-draft-sink-size")
        + ("--speculative-ngram", "--speculative-dflash-block-size", "--enable-multi-layer-eagle")
        + ("--speculative-moe-runner-backend",),
        "the draft model and its tree are all that is chosen; leave the flag out",
    ),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile"),
        "the server speaks in clear text on every listener; put a proxy before it",
    ),
    "--root-path": "routes begin at /; put a proxy before it that rewrites paths",
    "--allow-credentials": "pages of other sites send a key of their own; leave the flag out",
    **dict.fromkeys(
        ("--allowed-methods", "--allowed-headers"),
        "a page may use every route with every header; give --allowed-origins",
    ),
    **dict.fromkeys(("--log-level-http", "--uvicorn-log-level"), ONE_LEVEL),
    **dict.fromkeys(
        ("--decode-log-interval", "--log-requests-level", "--enable-log-requests"),
        "a request has one line, when it ends, with its texts where --log-requests is given",
    ),
    "--enable-trace": "give --otlp-traces-endpoint",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave the flag out",
    **dict.fromkeys(("--tokenizer-path", "--tokenizer"), TOKENIZER),
    "--tokenizer-mode": "the tokenizer is the model folder's tokenizer.json; leave the flag out",
    "--skip-tokenizer-init": "send prompts as token ids and ask for return_token_ids instead",
    **dict.fromkeys(("--random-seed", "--seed"), SEED),
    "--structured-outputs-config": GRAMMARS,
    **dict.fromkeys(("--json-model-override-args", "--hf-overrides"), OVERRIDES),
    "--language-only": "encoders on other servers are not supported; give --language-model-only "
    "to serve the text model alone",
}

UNSUPPORTED_PREFIXES = (
    "--speculative-dspark-",
    "--disaggregation-",
)
