"""Kernels that spill registers on an H200, with the reason for each.

Other spills are faults of `bench.kernels.aot` and `bench.kernels.aot_torch --whole`, and so are
unused lines here. Bytes are those of ptxas 13.5 in Pallas, and of Triton 3.6.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Excuse:
    """A spill that is known.

    Attributes:
      kernel: As its source names it.
      cases: Cases, or steps.
      max_bytes: It may grow no further.
      reason: Why it stays.
    """

    kernel: str
    cases: tuple[str, ...]
    max_bytes: int
    reason: str


TIMED = "of the tiles that were timed, the fastest"
LOTS = "qwen3-8b, EAGLE3 S=3 L=2.5, batch 8"
BLOCKS = "qwen3-8b, DFLASH rule=rejection, batch 1"
MARKED, PAIRED = "qwen3-8b, DSPARK, batch 8", "qwen3-8b, DFLASH2, batch 8"
COPIED, COPIED_FED = "qwen3-8b, NGRAM N=8, batch 8", "qwen3-8b, NGRAM N=8, prompt of 2048"
TREES = "qwen3.5-9b, NEXTN S=5 k=4 N=16, batch 8"
EXPERTS = "qwen3.5-35b-a3b-fp8, NEXTN S=3 k=1 N=4, batch 8"
CHAINS_OF_RANKS = "qwen3-8b, EAGLE3 S=3 k=1 N=4, batch 8, 2 ranks"
EXPERTS_OF_RANKS = (
    f"{EXPERTS}, 2 ranks",
    "qwen3.5-122b-a10b-fp8, NEXTN S=3 k=1 N=4, batch 8, 4 ranks",
)
LATENT_CHAINS = "glm-4.7-flash, NEXTN S=3 k=1 N=4, batch 8"
MAMBA2_CHAINS = "nemotron-3-nano, NEXTN S=3 k=1 N=4, batch 8"
ASSISTANT_CHAINS = "gemma-4-31b, ASSISTANT S=3 k=1 N=4, batch 8"
MAMBA2_OF_RANKS = f"{MAMBA2_CHAINS}, 2 ranks"
CHAINS_OF_MORE = (LATENT_CHAINS, MAMBA2_CHAINS, ASSISTANT_CHAINS)
LATENT_CODES = "deepseek-v3-8-layers-fp8, none, batch 8"
EXPERTS_FED = "qwen3.5-35b-a3b-fp8, none, prompt of 2048"
CODES, CODES_FED = "qwen3-8b-fp8, none, batch 8", "qwen3-8b-fp8, none, prompt of 2048"
CODES_OF_MANY = tuple(f"FP8 {what}, 256 rows" for what in ("out", "down", "27B gate and up"))
MIXES = ("8 x 8 rows after 512", "32 x 8 rows after 512")
WIDE = (
    "hybrid, 1 x 64 rows after 4096",
    "hybrid, 4 of 64 rows after 4096",
    "hybrid, 1 x 64 nodes after 512",
    "hybrid, prompt of 64",
)
DESCRIBED = (
    "8 x 16 rows after 512",
    "32 x 16 rows after 512",
    "described, 8 x 16 rows after 4096",
    "described, 8 x 64 rows after 512",
    "described, hybrid, 32 x 16 rows after 512",
    "described, hybrid, one group, 32 x 16 rows",
)
HEADS = tuple(f"head, {rows} rows, greedy" for rows in (128, 256))
WIDE_HEADS = ("head, 512 rows, greedy", "head, 512 rows, at a temperature")
LATENT_ALONE = (
    *(f"{heads} heads, 32 x 4 rows after 512" for heads in (20, 128)),
    "20 heads, 8 x 16 nodes after 4096",
)
LATENT_PROMPTS = (
    "20 heads, prompt of 2048",
    "20 heads, chunk of 2048 after 6144",
    "128 heads, prompt of 512",
)
GATED_CODES = "it holds sums of gate and up beside those of a block, by tiles of proven bits"
FEW = "ptxas stores one number rather than take more than 56 registers"
MANY_WARPS = "its 16 warps can have no more than 128 registers"
OF_SPANS = "what is summed over spans, which waits outside of the loops"
PADDED = "what is summed over spans, of 256 columns"
DEEP = "it keeps the best of 3,856 candidates; no known model requires it"
TWO_SUMS = "sums of 512 latent columns, of a split and of all splits"
HOISTED = "addresses and descriptors of shared memory, computed before the loops"
JOINED = "a head joined with its choice"
SOME = "ptxas stores some numbers rather than take more registers"

SCORED = "qwen3-8b, none, prompt of 2048 with scores"
FED = "qwen3.5-9b, NEXTN S=3 k=1 N=4, prompt of 2048"
PROMPTS = tuple(f"heads of {D}, prompt of 512" for D in (80, 96))
WIDE_PROMPTS = tuple(f"heads of {D}, prompt of 512" for D in (192, 512))
SM90_PROMPTS = (
    *(f"{model}prompt of {n}" for model in ("", "hybrid, ") for n in (512, 2048)),
    *(f"described, {which}prompt of 2048" for which in ("", "hybrid, ", "hybrid, one group, ")),
    "shared KV, prompt of 512",
)
DESCRIBED_PROMPTS = (
    *SM90_PROMPTS,
    *("qwen3-8b, none, prompt of 2048", FED, SCORED, EXPERTS_FED, CODES_FED, COPIED_FED),
)

PALLAS = (
    Excuse("prefill_attention", WIDE_PROMPTS[:1], 1916, PADDED),
    Excuse("prefill_attention", PROMPTS, 1600, OF_SPANS),
    Excuse("prefill_attention", WIDE_PROMPTS[1:], 496, OF_SPANS),
    Excuse("latent_attention", LATENT_ALONE, 152, TWO_SUMS),
    Excuse("latent_attention_sm90", LATENT_PROMPTS, 400, HOISTED),
    Excuse("attention_sm90", DESCRIBED_PROMPTS, 900, OF_SPANS),
    Excuse("sample_rows", (SCORED, CODES, LATENT_CODES), 8, FEW),
    Excuse("sample_rows", ("head, 1 rows, greedy",), 8, FEW),
    Excuse("sample_rows", (FED, MAMBA2_CHAINS), 24, SOME),
    Excuse("sample_tiles", (BLOCKS,), 8, FEW),
    Excuse("gdn_decode", ("8 x chain of 4", EXPERTS, *EXPERTS_OF_RANKS), 64, TIMED),
    Excuse("gdn_decode", ("1 x tree of 16", "1 x block tree of 16"), 8, SOME),
    Excuse("linear_sm90", (CODES_FED,), 144, GATED_CODES),
    Excuse(
        "linear_sm90",
        WIDE_HEADS,
        332,
        "what groups hold of rows with a temperature, after the sums",
    ),
    Excuse(
        "attention_layer_sm90",
        (*DESCRIBED, MAMBA2_CHAINS),
        200,
        "numbers that stay the same while tiles are added",
    ),
    Excuse("tree_next_level", ("B 8, k 16, s 14, depth 16, root_rows 0",), 3924, DEEP),
    Excuse(
        "find_threshold",
        (TREES, LOTS, EXPERTS, *EXPERTS_OF_RANKS, CHAINS_OF_RANKS, *CHAINS_OF_MORE),
        52,
        MANY_WARPS,
    ),
    Excuse("find_threshold", (MARKED, PAIRED, COPIED, MAMBA2_OF_RANKS), 248, MANY_WARPS),
    Excuse("attention_layer", MIXES, 240, TIMED),
    Excuse("linear", CODES_OF_MANY, 320, TIMED),
    Excuse("linear", HEADS, 1128, f"{JOINED}, which no table takes"),
    Excuse("attention_layer", (*WIDE, MARKED, PAIRED, ASSISTANT_CHAINS), 96, SOME),
    Excuse("attention_layer", (TREES,), 84, "heads of 256 by 8 warps; by 4 it was 1,448 bytes"),
)

FEW_ROWS = (
    *(f"1 x {rows} rows after 512" for rows in (1, 4)),
    *(f"{sinks}1 x 1 rows after 4096" for sinks in ("", "sinks, ")),
    "heads of 64, 8 x 4 rows after 512",
    *(f"hybrid, {requests} x 16 rows after 512" for requests in (8, 32)),
    "8 x 64 rows after 512",
    "hybrid, 1 x 64 nodes after 512",
)
TREE_NODES = (
    *(f"1 x {nodes} nodes after {context}" for nodes in (32, 64) for context in (512, 840)),
    "separate, 1 x 64 nodes after 840",
)
MANY_ROWS = tuple(
    f"{encoding}{what}, 2048 rows" for encoding in ("", "FP8 ", "INT4 ") for what in ("out", "down")
)
RANKED = tuple(f"{B} requests, {k} of each of {k} nodes" for B in (1, 8) for k in (4, 16))
LEVELS = "sums of a tile, of a split and of a span at once"

TRITON = (
    Excuse("_attend_kernel", (*PROMPTS, *WIDE_PROMPTS), 1152, LEVELS),
    Excuse("_attention_sm90_kernel", SM90_PROMPTS, 1344, LEVELS),
    Excuse("_latent_attention_sm90_kernel", LATENT_PROMPTS, 432, LEVELS),
    Excuse("_attend_latent_kernel", ("20 heads, 8 x 16 nodes after 4096",), 8, SOME),
    Excuse("_attention_layer_kernel", FEW_ROWS, 116, SOME),
    Excuse("_attention_layer_trees_kernel", TREE_NODES, 188, SOME),
    Excuse("_carry_kernel", ("a prompt of 512, keys of 256",), 52, SOME),
    Excuse(
        "_head_product_kernel",
        tuple(f"GLM-4.7-Flash, 8 x rank 64, {rows} rows" for rows in (1, 32)),
        8,
        SOME,
    ),
    Excuse("_product_kernel", MANY_ROWS, 8, SOME),
    Excuse("_product_kernel", ("head, 256 rows, greedy", *WIDE_HEADS), 472, JOINED),
    Excuse("_verify_kernel", tuple(f"{B} x chain of 4" for B in (8, 32)), 32, SOME),
    Excuse("rows_kernel", ("1 requests, 16 of each of 16 nodes",), 4, SOME),
    Excuse(
        "rows_kernel",
        ("head, 1 rows, greedy", "head, 8 rows, greedy", "head, 8 rows, at a temperature"),
        4,
        SOME,
    ),
    Excuse("threshold_kernel", RANKED, 4, SOME),
)
