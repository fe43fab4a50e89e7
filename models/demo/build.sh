#!/bin/sh
# Trains all models of models/demo: `sh models/demo/build.sh [FOLDER]`. The defaults are the commands
# of the shipped models, on one host with 4 NVIDIA H200: the target uses all GPUs, every other part
# one. With one H200, MINUTES=7 trains each part for 7 minutes.
# An interrupted part resumes from its last checkpoint. PARTS selects parts. A part that needs the
# target of another run reads it from $WORK/target. STEPS=2 with small TARGET_BATCH, PART_BATCH,
# SHARDS, COUNT and PROMPTS and an empty DEVICE tries all commands on a CPU.
# The parts `mixture` (an MoE model and its FP8 copy), `jetspec` (a block head with a causal block)
# and `dflash_kl` (DFLASH with the KL divergence) are trained only if PARTS contains them.
set -eu
cd "$(dirname "$0")/../.."

OUT=${1:-models/demo}
WORK=${WORK:-build/demo}
PYTHON=${PYTHON:-python3}
SHARDS=${SHARDS:-48}
COUNT=${COUNT:-25000}      # examples per shard; the shard number is the seed
PROMPTS=${PROMPTS:-21587}  # prompts that the target answers, to train the heads
TARGET_MINUTES=${TARGET_MINUTES:-${MINUTES:-2.9}}
PART_MINUTES=${PART_MINUTES:-${MINUTES:-2.02}}
HEAD_MINUTES=${HEAD_MINUTES:-${MINUTES:-4}}
MIXTURE_MINUTES=${MIXTURE_MINUTES:-${MINUTES:-3.5}}
TARGET_BATCH=${TARGET_BATCH:-131072}
PART_BATCH=${PART_BATCH:-32768}
PARTS=${PARTS:-data target standalone mtp eagle eagle3 dflash}
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$WORK/xla}"
# The shipped models were trained with cuBLAS GEMMs only.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_triton_gemm=false}"
mkdir -p "$WORK" "$OUT/curves"

wants() { case " $PARTS " in *" $1 "*) true ;; *) false ;; esac; }
train() {
    minutes=$1
    shift
    echo "== $*"
    if [ -n "${STEPS:-}" ]; then set -- "$@" --steps "$STEPS"; else set -- "$@" --minutes "$minutes"; fi
    "$PYTHON" -m jax_impl.train "$@"
}
train_on_one() { CUDA_VISIBLE_DEVICES="${DEVICE-0}" train "$PART_MINUTES" --batch-tokens "$PART_BATCH" "$@"; }
head_for() {
    part=$1 kind=$2
    shift 2
    if wants "$part"; then
        train_on_one --target "$WORK/target" --draft "$kind" --data "$WORK/train.jsonl" \
            --outputs "$WORK/outputs.jsonl" --prompts "$PROMPTS" --out "$WORK/$part" "$@"
    fi
}

if wants data; then
    shard=0
    while [ "$shard" -lt "$SHARDS" ]; do
        "$PYTHON" -m models.demo.data --split train --kind all --count "$COUNT" --seed "$shard" \
            --out "$WORK/train-$(printf %02d "$shard").jsonl" &
        shard=$((shard + 1))
    done
    wait
    cat "$WORK"/train-*.jsonl > "$WORK/train.jsonl"
    rm "$WORK"/train-*.jsonl
fi

if wants target; then
    train "$TARGET_MINUTES" --model models/demo/target_config.json --tokenizer models/demo \
        --data "$WORK/train.jsonl" --out "$WORK/target" \
        --batch-tokens "$TARGET_BATCH" --learning-rate 3e-3 --warmup 150 --seed 1
fi
if wants standalone; then
    train_on_one --model models/demo/standalone_config.json --tokenizer models/demo \
        --data "$WORK/train.jsonl" --out "$WORK/standalone" \
        --learning-rate 3e-3 --warmup 150 --seed 2
fi
if wants mixture; then
    PART_MINUTES=$MIXTURE_MINUTES train_on_one --model models/demo/mixture_config.json \
        --tokenizer models/demo --data "$WORK/train.jsonl" --out "$WORK/mixture" \
        --batch-tokens 65536 --learning-rate 2e-3 --warmup 150 --seed 7 --shards 4
    "$PYTHON" -m models.quantize_fp8 "$WORK/mixture" "$WORK/mixture_fp8"
fi

# All heads are trained on the same outputs of the target; the first one to run generates them.
head_for mtp mtp --start "$WORK/target" --seed 3 --depth 3
PART_MINUTES=$HEAD_MINUTES
head_for eagle eagle --seed 4 --depth 4 --learning-rate 2e-3
head_for eagle3 eagle3 --seed 5 --depth 5 --draft-vocab 2048 --learning-rate 2e-3
head_for dflash dflash --seed 6 --block 8 --layers 3 --learning-rate 2e-3
head_for dflash_kl dflash --seed 8 --block 8 --layers 3 --learning-rate 2e-3 --loss kl
head_for jetspec dflash --seed 9 --block 8 --layers 3 --learning-rate 2e-3 --loss kl --causal-head

# The shipped target is the one that contains the trained MTP layer.
install_model() {
    [ -f "$WORK/$1/config.json" ] || return 0
    mkdir -p "$OUT/$2"
    cp "$WORK/$1"/*.json "$WORK/$1"/*.safetensors "$OUT/$2/"
    chmod 644 "$OUT/$2"/*
}
install_model mtp target
for part in standalone eagle eagle3 dflash dflash_kl jetspec mixture mixture_fp8; do install_model "$part" "$part"; done
for part in target mtp standalone eagle eagle3 dflash dflash_kl jetspec mixture; do
    [ ! -f "$WORK/$part/training/curves.png" ] || cp "$WORK/$part/training/curves.png" "$OUT/curves/$part.png"
done
