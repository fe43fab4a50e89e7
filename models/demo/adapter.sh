#!/bin/sh
# Trains the LoRA adapter of the demo model and measures the drafters with it:
# `sh models/demo/adapter.sh [FOLDER]`.
# The adapter is trained for the kind `sql`, which the demo model does not know, along with the MTP
# layer. FOLDER (build/demo-adapter) receives data, adapter and result; $RESULT names the result
# file, and TABLE=docs/lora.md also renders the table of that page.
# MODEL names the folder of the target, with the draft heads beside it. MINUTES replaces STEPS: on a
# GPU `MINUTES=2 BATCH=16384 COUNT=100000 RATE=2e-3 WARMUP=50 DTYPE=bfloat16`.
set -eu
cd "$(dirname "$0")/../.."

OUT=${1:-build/demo-adapter}
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-models/demo/target}
COUNT=${COUNT:-8000}      # training examples
PROMPTS=${PROMPTS:-50}    # prompts of each line of the result
STEPS=${STEPS:-100}
MINUTES=${MINUTES:-}
BATCH=${BATCH:-1024}      # tokens of a step
RATE=${RATE:-4e-3}
WARMUP=${WARMUP:-5}
DTYPE=${DTYPE:-float32}   # of the result
BACKENDS=${BACKENDS:-torch jax}
RESULT=${RESULT:-$OUT/lora_acceptance.json}
TABLE=${TABLE:-}
mkdir -p "$OUT"

"$PYTHON" -m models.demo.data --split train --kind sql --count "$COUNT" --out "$OUT/train.jsonl"
if [ -n "$MINUTES" ]; then length="--minutes $MINUTES"; else length="--steps $STEPS"; fi
# shellcheck disable=SC2086
"$PYTHON" -m jax_impl.train --target "$MODEL" --lora-rank 16 --data "$OUT/train.jsonl" \
    --out "$OUT/adapter" $length --batch-tokens "$BATCH" --max-tokens 128 \
    --warmup "$WARMUP" --depth 3 --learning-rate "$RATE"
# shellcheck disable=SC2086
"$PYTHON" -m bench.speculation.lora_acceptance --model "$MODEL" --adapter "$OUT/adapter" \
    --backend $BACKENDS --dtype "$DTYPE" --count "$PROMPTS" --out "$RESULT"
[ -z "$TABLE" ] ||
    "$PYTHON" -m bench.speculation.lora_acceptance --table "$RESULT" --into "$TABLE"
