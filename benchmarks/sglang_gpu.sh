#!/bin/bash
# SGLang 0.5.16 with the plugin on a GPU machine without a network: Python 3.12, torch 2.11, triton 3.6. NOT RUN YET.
#
#   benchmarks/sglang_gpu.sh fetch FOLDER     where pip works: FOLDER/a, /b and /c, 15 to 31 MB each, to be carried one after another
#   benchmarks/sglang_gpu.sh install FOLDER   on the machine, once for each part: into SITE
#   benchmarks/sglang_gpu.sh run MODELS       on the machine: a server over MODELS/whole (tests/sglang/checkpoints.py), then budgets
#
# Lean: of sglang-kernel (383 MB) only its Python and the operators for sm90; no flashinfer, no xgrammar, so no grammars.
set -euo pipefail
SITE=${SITE:-/tmp/sglang-site}
WANTED=(transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 compressed-tensors==0.17.0 dill distro interegular ipython
  ipython-pygments-lexers jedi parso decorator matplotlib-inline pexpect ptyprocess prompt-toolkit wcwidth stack-data executing
  asttokens pure-eval traitlets loguru msgspec openai==2.8.0 jiter sniffio openai-harmony==0.0.4 orjson partial-json-parser pybase64
  python-multipart pyzmq setproctitle soundfile cffi pycparser watchfiles zstandard fastapi pydantic pydantic-core annotated-types
  typing-inspection starlette uvicorn llguidance gguf)

fetch() {
  local flags=(--quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
  for n in 39 34 31 28 27 24 17; do flags+=(--platform "manylinux_2_${n}_x86_64"); done
  flags+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  mkdir -p "$1"/{a,b,c}
  python3 -m pip download "${flags[@]}" -d "$1/a" sglang==0.5.16
  python3 -m pip download "${flags[@]}" -d "$1/b" "${WANTED[@]}"
  mv "$1"/b/{transformers,jedi,zstandard}-* "$1/a/"
  local whole; whole=$(mktemp -d)
  python3 -m pip download "${flags[@]}" -d "$whole" sglang-kernel==0.4.5
  unzip -q "$whole"/*.whl 'sgl_kernel/*.py' 'sgl_kernel/sm90/*' 'sgl_kernel/spatial_ops*' 'sglang_kernel*' 'triton_kernels/*' -d "$whole/kernel"
  tar -czf "$1/c/kernel.tgz" -C "$whole/kernel" .
  rm -r "$whole"
  du -sh "$1"/*
}

install() {
  for part in "$1"/a "$1"/b; do
    if compgen -G "$part/*.whl" >/dev/null; then
      python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$part"/*.whl
    fi
  done
  if [ -f "$1/c/kernel.tgz" ]; then mkdir -p "$SITE" && tar -xzf "$1/c/kernel.tgz" -C "$SITE"; fi
  # The entry point by which SGLang finds the plugin, without an install of ddtree.
  mkdir -p "$SITE/ddtree-0.1.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: ddtree\nVersion: 0.1.0\n' >"$SITE/ddtree-0.1.0.dist-info/METADATA"
  printf '[sglang.srt.plugins]\nddtree = ddtree.sglang.plugin:register\n' >"$SITE/ddtree-0.1.0.dist-info/entry_points.txt"
}

run() {
  export PYTHONPATH="$SITE:$PWD"
  local common=(--model-path "$1/whole" --dtype float32 --attention-backend triton --sampling-backend pytorch --grammar-backend none
    --mem-fraction-static 0.5 --context-length 4096 --port 30000 --skip-server-warmup)
  local drafter=(--speculative-algorithm DDTREE --speculative-draft-model-path ddtree/embedded/smollm2-dflash
    --speculative-num-draft-tokens 65)
  # Plain SGLang, the plugin without CUDA graphs, the plugin with them.
  serve_and_ask plain "${common[@]}"
  serve_and_ask 0,16,64 "${common[@]}" "${drafter[@]}" --disable-cuda-graph
  serve_and_ask 0,16,64 "${common[@]}" "${drafter[@]}"
}

serve_and_ask() {
  local budgets=$1 log; shift
  log=$(mktemp)
  python3 -m sglang.launch_server "$@" >"$log" 2>&1 &
  local server=$!
  for _ in $(seq 120); do
    sleep 2
    if curl -fs http://127.0.0.1:30000/health >/dev/null; then break; fi
    if ! kill -0 $server 2>/dev/null; then break; fi
  done
  python3 -m benchmarks.sglang_budgets http://127.0.0.1:30000 --budgets "$budgets" || tail -40 "$log"
  kill $server && wait $server || true
}

"$@"
