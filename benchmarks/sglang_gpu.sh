#!/bin/bash
# SGLang 0.5.17 on the card, plain and with DDTREE, beside our own engine: speed, tokens, acceptance, sampling, a hybrid, two ranks.
#
#   R=RESULTS BUNDLE=sg.txz GGUF=SmolLM2.gguf [MORE=kernels.txz] [PROMPTS=FOLDER] [WORK=FOLDER] [LIMIT=200] benchmarks/sglang_gpu.sh   in the tree's root
#
# In bf16 it is timed; in fp32, where near ties are rare, tokens and rounds are compared with plain SGLang's, our engine's and transformers',
# and stages wait for the device, so that their times say where it works.
# BUNDLE: of benchmarks/sglang_bundle.sh; MORE: a further archive to unpack over it. LIMIT: seconds altogether; the steps come by value, and one that fails stops no other.
SITE=${SITE:-/tmp/sg}; WORK=${WORK:-/tmp/sglang}
R=${R:?where the results go}; LIMIT=${LIMIT:-200}; T0=$(date +%s); mkdir -p "$R" "$WORK"
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
[ -n "${MORE:-}" ] && { timeout 30 tar -xJf "$MORE" -C $SITE 2>>"$R/unpack.txt" || timeout 30 python3 -m tarfile -e "$MORE" $SITE 2>>"$R/unpack.txt" || say "unpacking $MORE FAILED"; }
# sgl_kernel hands norms to flashinfer wherever that imports, and flashinfer compiles them; its own, for sm90, are in its library.
sed -i 's/_has_flashinfer = True/_has_flashinfer = False/' $SITE/sgl_kernel/{elementwise,sampling}.py
grep -q norms_in_torch $SITE/sgl_kernel/elementwise.py || cat benchmarks/sglang_norms.py >>$SITE/sgl_kernel/elementwise.py
say "unpacked $(du -sm $SITE | cut -f1) MB"
export PYTHONPATH=$SITE:$PWD
timeout 60 python3 -m compileall -q -j 8 $SITE/sglang/srt $SITE/sglang/kernels $SITE/transformers/utils $SITE/transformers/*.py >/dev/null 2>&1 &
COMPILE=$!
timeout 60 python3 -W ignore -m tests.sglang.checkpoints $WORK/hf "$GGUF" >"$R/checkpoints.txt" 2>&1 &
WRITE=$!
products() { [ "$1" = float32 ] && echo ieee || echo tf32; }  # what Triton multiplies fp32 in; tf32 is its own default
kind_of() { case $1 in f32*) echo float32;; *) echo bfloat16;; esac; }
# Every kernel by itself, so that one run names all that are at fault; the servers find what Triton compiled for it in its cache.
check() {
  CUDA_VISIBLE_DEVICES=0 TRITON_F32_DEFAULT=$(products "$2") timeout 120 python3 -W ignore -X faulthandler -m benchmarks.sglang_kernels check "$1" "$2" >"$R/kernels_$3.txt" 2>&1 &
}
check dense bfloat16 dense; check hybrid bfloat16 hybrid; check dense float32 f32dense
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
  local name=$1 port=$2 gpu=$3 level=$4 model=$5 kind; shift 5; kind=$(kind_of $name)
  CUDA_VISIBLE_DEVICES=$gpu TRITON_F32_DEFAULT=$(products $kind) SGLANG_DDTREE_TRACE="$R/$name.rounds.jsonl" SGLANG_DDTREE_TRACE_SYNC=$([ $name = f32dd16 ] && echo 1) timeout -k 5 "$LIMIT" nice -n "$level" python3 -W ignore -m sglang.launch_server \
    --model-path "$model" --port "$port" --nccl-port $((port + 1000)) --dtype $kind --attention-backend triton --sampling-backend pytorch --grammar-backend none \
    --mem-fraction-static 0.5 --max-total-tokens 40000 --max-running-requests 8 --context-length 2048 --cuda-graph-max-bs-decode 8 \
    --disable-prefill-cuda-graph --skip-server-warmup --sleep-on-idle --disable-flashinfer-autotune --watchdog-timeout 120 --mm-feature-transport cpu "$@" >"$R/$name.log" 2>&1 &
  eval "PID_$name=$!"
}
# Memory of one card for all seven: each wants 40000 tokens' rows (0.9 GB), scratch and a context, about 3 GB, and looks only whether
# half of what was free at its start is left.
G1=0; [ "$GPUS" -gt 1 ] && G1=1
wait $COMPILE; say "compiled to bytecode"
serve hplain 31005 0 5 $H $FEW
serve hdd16 31006 0 5 $H $HD $FEW
wait_for() { while [ "$(left)" -gt "$2" ] && ! grep -q "$1" "$3" 2>/dev/null; do sleep 0.3; kill -0 "$4" 2>/dev/null || break; done; grep -q "$1" "$3"; }
wait_for whole $((LIMIT - 60)) "$R/checkpoints.txt" $WRITE || say "checkpoints FAILED: $(tail -1 "$R/checkpoints.txt")"
say "SmolLM2's folder is written"
P=$(echo $PROMPTS/{gsm8k,humaneval,mt-bench,alpaca}.jsonl | tr ' ' ','); [ -f $PROMPTS/gsm8k.jsonl ] || P=humaneval,gsm8k,mt-bench
HP=humaneval,gsm8k,mt-bench
render() { timeout 90 nice python3 -W ignore -m benchmarks.sglang_budgets render --model "$1" --prompts "$2" --limit 20 --out "$3" >"$R/render.txt" 2>&1 & }
render $S "$P" $WORK/prompts.json; render $H "$HP" $WORK/hprompts.json
serve plain 31001 0 0 $S
serve dd16 31002 $G1 0 $S $DD $D --speculative-num-draft-tokens 17
serve dd64 31004 $G1 0 $S $DD $D --speculative-num-draft-tokens 65
serve f32plain 31008 0 3 $S
serve f32dd16 31009 $G1 3 $S $DD $D --speculative-num-draft-tokens 17
# The norms come first in the check, long before a server gets to one. Should they be off, torch's arithmetic stands in.
wait_for '^norms' $((LIMIT - 75)) "$R/kernels_dense.txt" $$; NORMS=$(grep -a '^norms' "$R/kernels_dense.txt" | cut -c1-300)
say "kernels: ${NORMS:-no norms yet}"
case $NORMS in *FAILED*) touch $SITE/sgl_kernel/norms_in_torch; say "norms: torch's arithmetic from here on";; esac
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
ask() {
  local name=$1 port=$2 out=$3 seconds=$4 pid; shift 4; pid=PID_$name
  kill -0 "${!pid}" 2>/dev/null || { say "no server for $out"; return 1; }
  [ "$(left)" -lt 8 ] && { say "no time for $out"; return 1; }
  [ "$seconds" -gt "$(left)" ] && seconds=$(left)
  timeout "$seconds" python3 -W ignore -m benchmarks.sglang_budgets ask "http://127.0.0.1:$port" --limit 20 --max-tokens 64 --rendered $WORK/prompts.json \
    --trace "$R/$name.rounds.jsonl" --out "$R/$out.json" "$@" >"$R/$out.txt" 2>&1 || say "$out FAILED or was cut: $(tail -1 "$R/$out.txt" | cut -c1-300)"
  say "$out: $(grep -a '^{' "$R/$out.txt" | tr '\n' ' ' | cut -c1-900)"; [ -s "$R/$out.json" ]
}
stop() { local pid=PID_$1; [ -n "${!pid}" ] && kill "${!pid}" 2>/dev/null; }
# First all that start, so that none measures beside another's start; until 2/3 of the time. Whose graphs fail is tried again without.
until_() { local rest=$(( $(left) - LIMIT * ${1:-34} / 100 )); echo $(( rest > 2 ? rest : 2 )); }
UPS=
again() { local name=$1 port=$2; shift 2; [ "$(left)" -gt 100 ] && { say "$name again, without graphs"; serve $name $port "$@" --disable-cuda-graph; AGAIN="$AGAIN $name:$port"; }; }
up dd16 31002 "$(until_)" && UPS="$UPS dd16 " || again dd16 31012 $G1 0 $S $DD $D --speculative-num-draft-tokens 17
up plain 31001 "$(until_)" && UPS="$UPS plain "
up dd64 31004 "$(until_)" && UPS="$UPS dd64 "
up hplain 31005 "$(until_)" && UPS="$UPS hplain "
up hdd16 31006 "$(until_)" && UPS="$UPS hdd16 " || again hdd16 31016 0 5 $H $HD $FEW
up f32plain 31008 "$(until_)" && UPS="$UPS f32plain "
up f32dd16 31009 "$(until_)" && UPS="$UPS f32dd16 "
DD16=31002 HDD16=31006
case $AGAIN in *dd16:31012*) up dd16 31012 "$(until_ 30)" && UPS="$UPS dd16 " DD16=31012;; esac
case $AGAIN in *hdd16:31016*) up hdd16 31016 "$(until_ 30)" && UPS="$UPS hdd16 " HDD16=31016;; esac
say "all that start are up: kernels_dense $(grep -ac FAILED "$R/kernels_dense.txt") failed, _hybrid $(grep -ac FAILED "$R/kernels_hybrid.txt"), _f32dense $(grep -ac FAILED "$R/kernels_f32dense.txt")"
wait_for '.' 20 $WORK/hprompts.json $$; wait_for '.' 20 $WORK/prompts.json $$ || say "no prompts: $(tail -1 "$R/render.txt")"
# Then by value.
is_up() { case $UPS in *" $1 "*) return 0;; *) return 1;; esac; }
try() { is_up "$1" && ask "$@"; }
try plain 31001 plain 20 --model $S
try dd16 $DD16 dd16 30 --model $S --against "$R/plain.json"
try f32plain 31008 f32plain 20 --model $S
try f32dd16 31009 f32dd16 30 --model $S --against "$R/f32plain.json"
try dd64 31004 dd64 25 --model $S --against "$R/plain.json"
HA="--model $H --rendered $WORK/hprompts.json"
try hplain 31005 hplain 20 $HA
try hdd16 $HDD16 hdd16 30 $HA --against "$R/hplain.json"
# Who is not needed any more leaves the card to our own engine and to transformers, which start now.
own() {
  local out=$1 kind; shift; kind=$(kind_of $out)
  timeout 60 python3 -W ignore -X faulthandler -m benchmarks.sglang_budgets ours --device cuda --dtype $kind --max-tokens 64 "$@" --out "$R/$out.json" >"$R/$out.txt" 2>&1 &
  eval "PID_$out=$!"
}
for each in plain f32plain dd64 dd16 hplain hdd16; do stop $each; done
TRITON_F32_DEFAULT=ieee own f32ours --model $S --drafter $D --rendered $WORK/prompts.json --budgets 16 --against "$R/f32plain.json,$R/f32dd16.json"
timeout 60 python3 -W ignore -m benchmarks.sglang_budgets hf --model $S --device cuda --rendered $WORK/prompts.json --answers "$R/f32plain.json,$R/f32dd16.json,$R/plain.json,$R/dd16.json" \
  --out "$R/hf.json" >"$R/hf.txt" 2>&1 & PID_hf=$!
# Sampling with a seed: the tokens at budget 16 are those at budget 0, alone (1) and in a batch (8). A verify in fp32 takes 50 ms here.
SEEDED="--model $S --temperature 0.8 --seed 7 --limit 8 --max-tokens 24"
try f32dd16 31009 f32seeded0 20 $SEEDED --budget 0 --concurrency 8
try f32dd16 31009 f32seeded16 15 $SEEDED --against "$R/f32seeded0.json"
try f32dd16 31009 f32filtered0 20 $SEEDED --budget 0 --concurrency 8 --top-p 0.9
try f32dd16 31009 f32filtered16 15 $SEEDED --top-p 0.9 --against "$R/f32filtered0.json"
stop f32dd16
[ "$(left)" -gt 20 ] && own hours --model $H --drafter $WORK/hybrid-dflash --rendered $WORK/hprompts.json --budgets 16 --against "$R/hplain.json,$R/hdd16.json"
if [ "$GPUS" -gt 1 ] && [ "$(left)" -gt 50 ]; then
  serve tp2 31007 0,1 0 $WORK/hf/padded $DD $D --speculative-num-draft-tokens 17 --tp-size 2 --disable-custom-all-reduce
  up tp2 31007 60 && ask tp2 31007 tp2 30 --model $WORK/hf/padded --against "$R/plain.json" --concurrency 1
  stop tp2
fi
for out in hf f32ours hours; do
  pid=PID_$out; [ -n "${!pid}" ] && { while kill -0 "${!pid}" 2>/dev/null && [ "$(left)" -gt 3 ]; do sleep 0.5; done; say "$out: $(grep -a '^{' "$R/$out.txt" | tr '\n' ' ' | cut -c1-900) $(grep -aE '^[A-Za-z_.]*Error' "$R/$out.txt" | tail -1 | cut -c1-300)"; }
done
nvidia-smi --query-gpu=memory.used --format=csv >"$R/memory.txt"
# Traces can be large; what counts of them is in the JSON. Logs: their ends.
for log in "$R"/*.log; do tail -c 60000 "$log" >"$log.end"; rm "$log"; done; for trace in "$R"/*.rounds.jsonl; do [ -f "$trace" ] && tail -n 200 "$trace" >"$trace.end" && rm "$trace"; done
say "done"
