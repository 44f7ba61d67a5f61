#!/bin/bash
# Decodes a file of prompts with Qwen3-4B and its DFlash drafter, then serves them, on one v5p-8 slice
# (one host of four chips). Weights, prompts, results and compiled programs are in a bucket.
#
#   bash deploy/v5p8.sh BUCKET
#
# Run it in a clone on the slice's host (docs/tpu.md, steps 1 to 3). Needs: the bucket, that the
# slice's service account may write to, with prompts.jsonl in it:
#   gcloud storage buckets create gs://BUCKET --location=REGION
#   gcloud storage cp prompts.jsonl gs://BUCKET/
set -euo pipefail
BUCKET=gs://${1:?usage: v5p8.sh BUCKET}
export PATH=$HOME/venv/bin:$PATH
# Once: copy the weights from the Hugging Face Hub into the bucket.
if ! gcloud storage ls "$BUCKET/qwen3_4b_dflash/config.json"; then
  dflash convert hf:Qwen/Qwen3-4B "$BUCKET/qwen3_4b" --to=hf
  dflash convert hf:z-lab/Qwen3-4B-DFlash-b16 "$BUCKET/qwen3_4b_dflash" --to=hf
fi
dflash decode configs/qwen3_4b_dflash.yml mesh.tensor=4 decode.batch_size=32 decode.max_length=8192 \
  target.checkpoint="$BUCKET/qwen3_4b" drafter.checkpoint="$BUCKET/qwen3_4b_dflash" \
  prompts.text=[] prompts.file="$BUCKET/prompts.jsonl" prompts.chat=true \
  --workdir="$BUCKET/runs/answers" --compilation_cache="$BUCKET/programs" --nostream
exec dflash serve configs/qwen3_4b_dflash.yml mesh.tensor=4 decode.batch_size=32 decode.max_length=8192 \
  target.checkpoint="$BUCKET/qwen3_4b" drafter.checkpoint="$BUCKET/qwen3_4b_dflash" \
  --compilation_cache="$BUCKET/programs"
