#!/bin/bash
# SGLang 0.5.17 on the card, plain and with DDTREE, beside our own engine: speed, tokens, acceptance, sampling, a hybrid, two ranks.
#
#   R=RESULTS BUNDLE=sg.txz GGUF=SmolLM2.gguf [PROMPTS=FOLDER] [WORK=FOLDER] [LIMIT=280] [DTYPE=float32] benchmarks/sglang_gpu.sh   in the tree's root
#
# DTYPE: SmolLM2's, bfloat16 if left out; in float32 near ties are rare, so tokens and rounds can be compared. hybrid-tiny's is bfloat16.
# BUNDLE: of benchmarks/sglang_bundle.sh. LIMIT: seconds altogether; the steps come by value, and one that fails stops no other.
SITE=${SITE:-/tmp/sg}; DTYPE=${DTYPE:-bfloat16}; WORK=${WORK:-/tmp/sglang}
R=${R:?where the results go}; LIMIT=${LIMIT:-280}; T0=$(date +%s); mkdir -p "$R" "$WORK"
GPUS=$(nvidia-smi -L | wc -l)
say() { echo "[$(( $(date +%s) - T0 ))s] $*" | tee -a "$R/steps.txt"; }
left() { echo $(( LIMIT - ( $(date +%s) - T0 ) )); }
export SGLANG_DISABLE_CUDNN_CHECK=1 SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR=$SITE/.jit HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export FLASHINFER_DISABLE_JIT=1  # the bundle has no sources of flashinfer's: what asks for them fails at once
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # the host's GPUs are others' too
export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")}

# 1. Install: unpack, compile in the background. The entry point of the plugin is in the bundle (ddtree-0.1.0.dist-info).
if [ ! -d $SITE/sglang ]; then
  mkdir -p $SITE
  timeout 60 tar -xJf $BUNDLE -C $SITE 2>"$R/unpack.txt" || timeout 60 python3 -m tarfile -e $BUNDLE $SITE 2>>"$R/unpack.txt" || say "unpack FAILED"
fi
# sgl_kernel hands norms to flashinfer wherever that imports, and flashinfer compiles them; its own, for sm90, are in its library.
sed -i 's/_has_flashinfer = True/_has_flashinfer = False/' $SITE/sgl_kernel/{elementwise,sampling}.py
say "unpacked $(du -sm $SITE | cut -f1) MB"
export PYTHONPATH=$SITE:$PWD
timeout 60 python3 -m compileall -q -j 8 $SITE/sglang/srt $SITE/sglang/kernels $SITE/transformers/utils $SITE/transformers/*.py >/dev/null 2>&1 &
COMPILE=$!
timeout 60 python3 -W ignore -m tests.sglang.checkpoints $WORK/hf "$GGUF" >"$R/checkpoints.txt" 2>&1 &
WRITE=$!
products() { [ "$1" = float32 ] && echo ieee || echo tf32; }  # what Triton multiplies fp32 in; tf32 is its own default
# Every kernel by itself, so that one run names all that are at fault; the servers find what Triton compiled for it in its cache.
for part in dense hybrid; do
  kind=$DTYPE; [ $part = hybrid ] && kind=bfloat16
  CUDA_VISIBLE_DEVICES=0 TRITON_F32_DEFAULT=$(products $kind) timeout 150 python3 -W ignore -X faulthandler -m benchmarks.sglang_kernels check $part $kind >"$R/kernels_$part.txt" 2>&1 &
done
# hybrid-tiny's drafter reads the last layer, 7, which SGLang does not hand out: the same weights told to read layer 6.
rm -rf $WORK/hybrid-dflash; cp -r ddtree/embedded/hybrid-tiny-dflash $WORK/hybrid-dflash
python3 - "$WORK/hybrid-dflash/config.json" <<'P'
import json, sys; p = sys.argv[1]; c = json.load(open(p))
c["dflash_config"]["target_layer_ids"] = [1, 3, 5, 6]; json.dump(c, open(p, "w"))
P

# 2. All servers at once: idle ones sleep. serve NAME PORT GPU NICE MODEL FLAGS...
S=$WORK/hf/whole; D=$PWD/ddtree/embedded/smollm2-dflash; H=$PWD/ddtree/embedded/hybrid-tiny; DD="--speculative-algorithm DDTREE --speculative-draft-model-path"
HD="$DD $WORK/hybrid-dflash --speculative-num-draft-tokens 17"; FEW="--disable-radix-cache --max-mamba-cache-size 64"
serve() {
  local name=$1 port=$2 gpu=$3 level=$4 model=$5 kind=$DTYPE; shift 5
  [ "$model" = "$H" ] && kind=bfloat16
  CUDA_VISIBLE_DEVICES=$gpu TRITON_F32_DEFAULT=$(products $kind) SGLANG_DDTREE_TRACE="$R/$name.rounds.jsonl" timeout -k 5 "$LIMIT" nice -n "$level" python3 -W ignore -m sglang.launch_server \
    --model-path "$model" --port "$port" --nccl-port $((port + 1000)) --dtype $kind --attention-backend triton --sampling-backend pytorch --grammar-backend none \
    --mem-fraction-static 0.5 --max-total-tokens 40000 --max-running-requests 8 --context-length 2048 --cuda-graph-max-bs-decode 8 \
    --disable-prefill-cuda-graph --skip-server-warmup --sleep-on-idle --disable-flashinfer-autotune --watchdog-timeout 120 --mm-feature-transport cpu "$@" >"$R/$name.log" 2>&1 &
  eval "PID_$name=$!"
}
# Memory of one card for all six: each wants 40000 tokens' rows (0.9 GB), scratch and a context, about 3 GB, and looks only whether
# half of what was free at its start is left.
G1=0; [ "$GPUS" -gt 1 ] && G1=1
wait $COMPILE; say "compiled to bytecode"
serve hplain 31005 0 5 $H $FEW
serve hdd16 31006 0 5 $H $HD $FEW
wait_for() { while [ "$(left)" -gt "$2" ] && ! grep -q "$1" "$3" 2>/dev/null; do sleep 0.3; kill -0 "$4" 2>/dev/null || break; done; grep -q "$1" "$3"; }
wait_for whole $((LIMIT - 60)) "$R/checkpoints.txt" $WRITE || say "checkpoints FAILED: $(tail -1 "$R/checkpoints.txt")"
say "SmolLM2's folder is written"
serve plain 31001 0 0 $S
serve dd16 31002 $G1 0 $S $DD $D --speculative-num-draft-tokens 17
serve dd64 31004 $G1 0 $S $DD $D --speculative-num-draft-tokens 65
serve eager16 31003 $G1 0 $S $DD $D --speculative-num-draft-tokens 17 --disable-cuda-graph
# The norms come first in the check, long before a server gets to one. Should they be off, torch's arithmetic stands in.
wait_for '^norms' $((LIMIT - 75)) "$R/kernels_dense.txt" $$; NORMS=$(grep -a '^norms' "$R/kernels_dense.txt" | cut -c1-300)
say "kernels: ${NORMS:-no norms yet}"
case $NORMS in *FAILED*) cat benchmarks/sglang_norms.py >>$SITE/sgl_kernel/elementwise.py; say "norms: torch's arithmetic from here on";; esac
timeout 40 python3 -W ignore -c "
import torch, triton, transformers, tokenizers, sgl_kernel, sglang
from ddtree.sglang.hooks import REGISTRY, WORKER, missing
print(torch.__version__, triton.__version__, transformers.__version__, tokenizers.__version__, sglang.__version__, sgl_kernel.__version__)
print('missing hooks:', missing(REGISTRY), missing(WORKER))" >"$R/versions.txt" 2>&1 &

# 3. Measure. up NAME PORT SECONDS: answers, or is gone. ask NAME PORT OUT SECONDS FLAGS...
answers() {
  ( exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET /health HTTP/1.0\r\nHost: a\r\n\r\n' >&3 && timeout 3 head -1 <&3 | grep -q ' 200' ) 2>/dev/null
}
up() {
  local name=$1 port=$2 end=$(( $(date +%s) + $3 )) pid; pid=PID_$name
  while [ "$(date +%s)" -lt $end ]; do
    answers "$port" && { say "$name is up"; return 0; }
    kill -0 "${!pid}" 2>/dev/null || { say "$name DIED: $(grep -aE '^[A-Za-z_.]*(Error|Exception)\b|error:' "$R/$name.log" | tail -2 | tr '\n' ' ' | cut -c1-500)"; return 1; }
    sleep 0.5
  done
  say "$name did not come up in $3 s"; return 1
}
P=$(echo $PROMPTS/{gsm8k,humaneval,mt-bench,alpaca}.jsonl | tr ' ' ','); [ -f $PROMPTS/gsm8k.jsonl ] || P=humaneval,gsm8k,mt-bench
ask() {
  local name=$1 port=$2 out=$3 seconds=$4 pid; shift 4; pid=PID_$name
  kill -0 "${!pid}" 2>/dev/null || { say "no server for $out"; return 1; }
  [ "$(left)" -lt 8 ] && { say "no time for $out"; return 1; }
  [ "$seconds" -gt "$(left)" ] && seconds=$(left)
  timeout "$seconds" python3 -W ignore -m benchmarks.sglang_budgets ask "http://127.0.0.1:$port" --limit 20 --max-tokens 64 --prompts "$P" \
    --trace "$R/$name.rounds.jsonl" --out "$R/$out.json" "$@" >"$R/$out.txt" 2>&1 || say "$out FAILED or was cut: $(tail -1 "$R/$out.txt" | cut -c1-300)"
  say "$out: $(grep -a '^{' "$R/$out.txt" | tr '\n' ' ' | cut -c1-900)"; [ -s "$R/$out.json" ]
}
stop() { local pid=PID_$1; [ -n "${!pid}" ] && kill "${!pid}" 2>/dev/null; }
# First all that start, so that none measures beside another's start; until 2/3 of the time. Whose graphs fail is tried again without.
until_() { local rest=$(( $(left) - LIMIT * ${1:-34} / 100 )); echo $(( rest > 2 ? rest : 2 )); }
up dd16 31002 "$(until_)" && UP_dd16=1
up plain 31001 "$(until_)" && UP_plain=31001 || { [ "$(left)" -gt 110 ] && serve plaine 31011 0 0 $S --disable-cuda-graph; }
up dd64 31004 "$(until_)" && UP_dd64=1
up hplain 31005 "$(until_)" && UP_hplain=31005 || { [ "$(left)" -gt 110 ] && serve hplaine 31015 0 5 $H $FEW --disable-cuda-graph; }
up hdd16 31006 "$(until_)" && UP_hdd16=31006 || { [ "$(left)" -gt 110 ] && serve hdd16e 31016 0 5 $H $HD $FEW --disable-cuda-graph; }
up eager16 31003 "$(until_)" && UP_eager16=1
PLAIN=plain HPLAIN=hplain HDD16=hdd16
[ -n "$PID_plaine" ] && up plaine 31011 "$(until_ 25)" && UP_plain=31011 PLAIN=plaine
[ -n "$PID_hplaine" ] && up hplaine 31015 "$(until_ 25)" && UP_hplain=31015 HPLAIN=hplaine
[ -n "$PID_hdd16e" ] && up hdd16e 31016 "$(until_ 25)" && UP_hdd16=31016 HDD16=hdd16e
say "all that start are up: kernels_dense $(grep -ac FAILED "$R/kernels_dense.txt") failed, kernels_hybrid $(grep -ac FAILED "$R/kernels_hybrid.txt") failed"
# Then by value. Of a start that DDTREE did not survive with graphs, the eager one takes the place.
[ -n "$UP_plain" ] && ask $PLAIN $UP_plain plain 30 --model $S
[ -n "$UP_dd16" ] && { ask dd16 31002 dd16 40 --model $S --against "$R/plain.json" && N="dd16 31002"; }
[ -z "$N" ] && [ -n "$UP_eager16" ] && { N="eager16 31003"; ask $N eager16 45 --model $S --against "$R/plain.json"; }
HP=humaneval,gsm8k,mt-bench
[ -n "$UP_hplain" ] && ask $HPLAIN $UP_hplain hplain 25 --model $H --prompts $HP --concurrency 1,8
[ -n "$UP_hdd16" ] && ask $HDD16 $UP_hdd16 hdd16 45 --model $H --prompts $HP --concurrency 1,8 --against "$R/hplain.json"
[ -n "$UP_dd64" ] && ask dd64 31004 dd64 35 --model $S --against "$R/plain.json"
# Sampling with a seed: the tokens at budget 16 are those at budget 0, alone (1) and in a batch (8).
[ -n "$N" ] && ask $N seeded0 20 --model $S --temperature 0.8 --seed 7 --budget 0 --concurrency 1 --limit 8 --max-tokens 48
[ -n "$N" ] && ask $N seeded16 20 --model $S --temperature 0.8 --seed 7 --concurrency 1,8 --limit 8 --max-tokens 48 --against "$R/seeded0.json"
[ "$N" = "dd16 31002" ] && [ -n "$UP_eager16" ] && ask eager16 31003 eager16 35 --model $S --against "$R/plain.json" --limit 8 --concurrency 1
for each in plain dd16 eager16 dd64 hplain hdd16 plaine hplaine hdd16e; do stop $each; done
# 4. Our own engine on the same prompts, for acceptance; then two ranks, if there are two cards.
[ "$(left)" -gt 12 ] && { timeout 40 python3 -W ignore -X faulthandler -m benchmarks.sglang_budgets ours --model $S --drafter $D --device cuda --dtype $DTYPE --prompts "$P" --max-tokens 64 \
  --against "$R/plain.json,$R/dd16.json,$R/dd64.json" --out "$R/ours.json" >"$R/ours.txt" 2>&1 || say "ours: exit $?, $(tail -1 "$R/ours.txt" | cut -c1-300)"; say "ours: $(grep -a '^{' "$R/ours.txt" | tr '\n' ' ' | cut -c1-700)"; }
if [ "$GPUS" -gt 1 ] && [ "$(left)" -gt 35 ]; then
  serve tp2 31007 0,1 0 $WORK/hf/padded $DD $D --speculative-num-draft-tokens 17 --tp-size 2 --disable-custom-all-reduce
  up tp2 31007 60 && ask tp2 31007 tp2 30 --model $WORK/hf/padded --against "$R/plain.json" --concurrency 1
  stop tp2
fi
[ "$(left)" -gt 15 ] && { timeout 60 python3 -W ignore -X faulthandler -m benchmarks.sglang_budgets ours --model $H --drafter $WORK/hybrid-dflash --device cuda --prompts $HP \
  --budgets 16 --max-tokens 64 --against "$R/hplain.json,$R/hdd16.json" --out "$R/hours.json" >"$R/hours.txt" 2>&1 || say "hours: exit $?, $(tail -1 "$R/hours.txt" | cut -c1-300)"; say "hours: $(grep -a '^{' "$R/hours.txt" | cut -c1-500)"; }
nvidia-smi --query-gpu=memory.used --format=csv >"$R/memory.txt"
# Traces can be large; what counts of them is in the JSON. Logs: their ends.
for log in "$R"/*.log; do tail -c 60000 "$log" >"$log.end"; rm "$log"; done; rm -f "$R"/*.rounds.jsonl
say "done"
