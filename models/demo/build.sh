#!/bin/sh
# Trains all models of models/demo: `sh models/demo/build.sh [FOLDER]`.
# The target and STANDALONE train side by side, then the draft heads and the vision encoder. Each
# part is a process with a share of a GPU's memory, and writes $WORK/PART.log.
# START=models/demo continues the models of that folder, which takes fewer minutes. EAGLE-3 always
# starts anew, because its draft vocabulary follows the outputs of the new target.
# PARTS selects parts. The parts `mixture` (an MoE model and its FP8 copy), `jetspec` (a block head
# with a causal block) and `dflash_kl` (DFLASH with the KL divergence) are trained only if PARTS
# contains them. A part that needs the target of another run reads it from $WORK/target.
# MINUTES sets the minutes of every part, MINUTES_PART (for example MINUTES_eagle3) those of one.
# DEVICES lists the GPUs, which the parts take in turn; the target uses all GPUs of the host.
# An interrupted part resumes from its last checkpoint. STEPS=2 with small TARGET_BATCH, PART_BATCH,
# SHARDS, COUNT and PROMPTS and empty DEVICES tries all commands on a CPU.
set -eu
cd "$(dirname "$0")/../.."

OUT=${1:-models/demo}
WORK=${WORK:-build/demo}
PYTHON=${PYTHON:-python3}
START=${START:-}
SHARDS=${SHARDS:-48}
COUNT=${COUNT:-25000}      # examples per shard; the shard number is the seed
PROMPTS=${PROMPTS:-21587}  # prompts that the target answers, to train the heads
OUTPUT_SLOTS=${OUTPUT_SLOTS:-256}
TARGET_BATCH=${TARGET_BATCH:-131072}
PART_BATCH=${PART_BATCH:-32768}
VLM_BATCH=${VLM_BATCH:-256}
VLM_WORKERS=${VLM_WORKERS:-8}  # processes that generate images
PARTS=${PARTS:-data target standalone mtp eagle eagle3 dflash vlm}
DEVICES=${DEVICES-0}
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$WORK/xla}"
# The shipped models were trained with cuBLAS GEMMs only.
export XLA_FLAGS="${XLA_FLAGS:---xla_gpu_enable_triton_gemm=false}"
mkdir -p "$WORK" "$OUT/curves"

if [ -n "$START" ]; then RATE=1.5e-3 HEAD_RATE=1e-3; else RATE=3e-3 HEAD_RATE=2e-3; fi
jobs='' failed='' memory=''
trap 'kill $(echo "$jobs" | sed "s/[^ ]*://g") 2>/dev/null; exit 130' INT TERM

wants() { case " $PARTS " in *" $1 "*) true ;; *) false ;; esac; }
log() { echo "[$(date +%T)] $*"; }
minutes_of() { eval "echo \"\${MINUTES_$1:-\${MINUTES:-$2}}\""; }
# Prints --start for a part if the models of another run are continued.
start_of() { [ -z "$START" ] || echo "--start $START/$1"; }
next_device() {
    device=${DEVICES%% *}
    [ "$device" = "$DEVICES" ] || DEVICES="${DEVICES#* } $device"
}

# Starts a part in the background: PART MINUTES COMMAND...
start() {
    part=$1 minutes=$(minutes_of "$1" "$2")
    shift 2
    if [ "$part" = vlm ]; then
        [ -z "${STEPS:-}" ] || minutes=0.05
        set -- "$@" --minutes "$minutes"
    elif [ -n "${STEPS:-}" ]; then
        set -- "$@" --steps "$STEPS"
    else
        set -- "$@" --minutes "$minutes"
    fi
    log "$part: $*"
    XLA_PYTHON_CLIENT_MEM_FRACTION=$memory "$PYTHON" -m "$@" > "$WORK/$part.log" 2>&1 &
    jobs="$jobs $part:$!"
}
start_on_one() {
    next_device
    CUDA_VISIBLE_DEVICES=$device start "$@"
}
# Waits for all parts in the background; a failed one does not stop the others.
finish() {
    for job in $jobs; do
        part=${job%%:*}
        if wait "${job##*:}"; then
            log "$part: $(tail -n 1 "$WORK/$part.log")"
        else
            failed="$failed $part"
            tail -n 20 "$WORK/$part.log"
        fi
    done
    jobs=''
}
head_for() {
    part=$1 minutes=$2 kind=$3
    shift 3
    if wants "$part"; then
        start_on_one "$part" "$minutes" jax_impl.train --target "$WORK/target" --draft "$kind" \
            --data "$WORK/train.jsonl" --outputs "$WORK/outputs.jsonl" --prompts "$PROMPTS" \
            --output-slots "$OUTPUT_SLOTS" --out "$WORK/$part" --batch-tokens "$PART_BATCH" "$@"
    fi
}

if wants data; then
    log data
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

# The first of the two tokenizes the data for both.
if wants target; then
    memory=.60
    # shellcheck disable=SC2046
    start target 2.9 jax_impl.train --model models/demo/target_config.json \
        --tokenizer models/demo --data "$WORK/train.jsonl" --out "$WORK/target" \
        --batch-tokens "$TARGET_BATCH" --learning-rate "$RATE" --warmup 150 --seed 1 \
        $(start_of target)
fi
if wants standalone; then
    memory=.25
    # shellcheck disable=SC2046
    start_on_one standalone 2.02 jax_impl.train --model models/demo/standalone_config.json \
        --tokenizer models/demo --data "$WORK/train.jsonl" --out "$WORK/standalone" \
        --batch-tokens "$PART_BATCH" --learning-rate "$RATE" --warmup 150 --seed 2 \
        $(start_of standalone)
fi
finish
if wants mixture; then
    memory=.85
    start_on_one mixture 3.5 jax_impl.train --model models/demo/mixture_config.json \
        --tokenizer models/demo --data "$WORK/train.jsonl" --out "$WORK/mixture" \
        --batch-tokens "${MIXTURE_BATCH:-65536}" --learning-rate 2e-3 --warmup 150 --seed 7 \
        --shards 4
    finish
    "$PYTHON" -m models.quantize_fp8 "$WORK/mixture" "$WORK/mixture_fp8"
fi

heads=0
for part in mtp eagle eagle3 dflash dflash_kl jetspec; do
    if wants "$part"; then heads=$((heads + 1)); fi
done
if wants vlm; then
    memory=.05
    start_on_one vlm 1.4 models.demo.train_vlm --target "$WORK/target" --batch "$VLM_BATCH" \
        --workers "$VLM_WORKERS" --out "$WORK/vlm"
fi
# All heads are trained on the same outputs of the target; the first one to run generates them.
devices=$(echo "${DEVICES:-0}" | wc -w)
[ "$heads" = 0 ] || memory=$(printf .%02d $((84 / ((heads + devices - 1) / devices))))
fresh_block='--block 8 --layers 3'
dflash=${START:+--start $START/dflash}
# shellcheck disable=SC2046,SC2086
{
    head_for eagle3 4 eagle3 --seed 5 --depth 5 --draft-vocab 2048 --learning-rate 2e-3
    head_for dflash 4 dflash --seed 6 --learning-rate "$HEAD_RATE" ${dflash:-$fresh_block}
    head_for eagle 4 eagle --seed 4 --depth 4 --learning-rate "$HEAD_RATE" $(start_of eagle)
    head_for mtp 2.02 mtp --start "$WORK/target" --seed 3 --depth 3
    head_for dflash_kl 4 dflash --seed 8 --learning-rate "$HEAD_RATE" ${dflash:-$fresh_block} \
        --loss kl
    head_for jetspec 4 dflash --seed 9 --learning-rate 2e-3 $fresh_block --loss kl --causal-head
}
finish

# The shipped target is the one that contains the trained MTP layer.
install_model() {
    [ -f "$WORK/$1/config.json" ] || return 0
    mkdir -p "$OUT/$2"
    cp "$WORK/$1"/*.json "$WORK/$1"/*.safetensors "$OUT/$2/"
    chmod 644 "$OUT/$2"/*
}
install_model mtp target
for part in standalone eagle eagle3 dflash dflash_kl jetspec mixture mixture_fp8; do
    install_model "$part" "$part"
done
if [ -f "$WORK/vlm/tower.safetensors" ]; then
    mkdir -p "$OUT/vlm"
    [ -f "$OUT/vlm/config.json" ] || cp models/demo/vlm/*.json "$OUT/vlm/"
    cp "$WORK/vlm/tower.safetensors" "$OUT/vlm/"
fi
for part in target mtp standalone eagle eagle3 dflash dflash_kl jetspec mixture; do
    curves=$WORK/$part/training/curves.png
    [ ! -f "$curves" ] || cp "$curves" "$OUT/curves/$part.png"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
