#!/bin/sh
# Makes everything in models/demo again, on one NVIDIA H200: `sh models/demo/build.sh [FOLDER]`.
# A part that is cut off goes on from its last checkpoint when it is run again; PARTS names some.
set -eu
cd "$(dirname "$0")/../.."

OUT=${1:-models/demo}
WORK=${WORK:-build/demo}
PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-7}
SHARDS=${SHARDS:-16}
COUNT=${COUNT:-62500}   # examples of a shard
PROMPTS=${PROMPTS:-60000}
PARTS=${PARTS:-data target standalone mtp eagle eagle3 dflash}
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$WORK/xla}"
mkdir -p "$WORK" "$OUT"

wants() { case " $PARTS " in *" $1 "*) true ;; *) false ;; esac; }
train() { echo "== $*"; "$PYTHON" -m jax_impl.train "$@"; }
head_for() {
    kind=$1
    shift
    if wants "$kind"; then
        train --target "$WORK/target" --draft "$kind" --data "$WORK/train.jsonl" \
            --outputs "$WORK/outputs.jsonl" --prompts "$PROMPTS" --out "$WORK/$kind" \
            --minutes "$MINUTES" "$@"
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
    train --model models/demo/target_config.json --tokenizer models/demo \
        --data "$WORK/train.jsonl" --out "$WORK/target" --minutes "$MINUTES" \
        --batch-tokens 65536 --learning-rate 2e-3 --warmup 200 --seed 1
fi
if wants standalone; then
    train --model models/demo/standalone_config.json --tokenizer models/demo \
        --data "$WORK/train.jsonl" --out "$WORK/standalone" --minutes "$MINUTES" \
        --batch-tokens 65536 --learning-rate 3e-3 --warmup 200 --seed 2
fi

# Every head learns from the same answers of the target; the first one that runs makes them.
head_for mtp --start "$WORK/target" --seed 3 --depth 3
head_for eagle --seed 4 --depth 5
head_for eagle3 --seed 5 --depth 5 --draft-vocab 2048
head_for dflash --seed 6 --block 8 --layers 3

# The target that ships is the one with the trained MTP layer in it.
install_model() {
    [ -f "$WORK/$1/config.json" ] || return 0
    mkdir -p "$OUT/$2"
    cp "$WORK/$1"/*.json "$WORK/$1"/*.safetensors "$OUT/$2/"
    cp "$WORK/$1/training/curves.png" "$OUT/$2/" 2>/dev/null || true
}
install_model mtp target
for part in standalone eagle eagle3 dflash; do install_model "$part" "$part"; done
