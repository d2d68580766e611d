#!/usr/bin/env bash
# A larger model of the demo's kind, all of whose layers are DSA: what benchmarks/fault_sensitivity.py compares the proxy with.
#
#   bash benchmarks/twin.sh OUTPUT
#
# A base of six layers, 1.5 times as wide as the demo's, learns the demo's tasks; two DSA layers are trained on top of it, then
# indexers for its own layers; the native layout makes every layer DSA. Half an hour on one core. It leaves OUTPUT/native.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ "${1:---help}" == -h || "${1:---help}" == --help ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
OUT="$1"
export PATH="$ROOT/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TOPK=64 SIZES=(--index-topk 64 --index-n-heads 4 --index-head-dim 32 --seq-length 256 --split "99,1" --micro-batch-size 8
  --global-batch-size 8)

mkdir -p "$OUT"
[[ -d "$OUT/base" ]] || python - "$OUT/base" << 'END'
import sys
from dataclasses import replace
from pathlib import Path

from megatron_patch.demo import demo_base

published = demo_base.published_config
larger = {"hidden_size": 192, "intermediate_size": 512, "moe_intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 6,
          "num_key_value_heads": 6}
demo_base.published_config = lambda *sizes: published(*sizes) | larger
demo_base.run(Path(sys.argv[1]), training=replace(demo_base.FULL, steps=700))
END
# Chats as text, one document each, without the BOS and EOS that prepare_pretrain.py adds.
python - "$OUT/base" "$OUT/chats.jsonl" << 'END'
import json
import sys

from transformers import AutoTokenizer

base, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
with open(output, "w") as out:
    for line in open(f"{base}/demo_data/sft.jsonl"):
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        out.write(json.dumps({"text": text.removeprefix(tokenizer.bos_token).removesuffix(tokenizer.eos_token)}) + "\n")
END
[[ -f "$OUT/text.json" ]] || python "$ROOT/data/prepare_pretrain.py" --input "$OUT/base/demo_data/pretrain.jsonl" --tokenizer "$OUT/base" \
  --output-prefix "$OUT/text"
[[ -f "$OUT/chats.json" ]] || python "$ROOT/data/prepare_pretrain.py" --input "$OUT/chats.jsonl" --tokenizer "$OUT/base" --output-prefix "$OUT/chats"
python "$ROOT/pretrain_upcycle.py" --base-model "$OUT/base" --data-path 0.5 "$OUT/text" 0.5 "$OUT/chats" --save "$OUT/pretrain" \
  "${SIZES[@]}" --train-iters 100 --optimizer muon --lr 2e-3 --min-lr 1e-4 --lr-warmup-iters 10 --indexer-warmup-iters 50 --eval-interval 100
python "$ROOT/pretrain_upcycle.py" --train base-indexers --base-model "$OUT/base" --data-path 0.5 "$OUT/text" 0.5 "$OUT/chats" \
  --save "$OUT/indexers" "${SIZES[@]}" --train-iters 400 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 20 --eval-interval 400
dsa-upcycle export --checkpoint "$OUT/pretrain" --base "$OUT/base" --output "$OUT/native" --layout native --base-indexers "$OUT/indexers"
echo "twin: $OUT/native (top-k $TOPK in every layer)"
