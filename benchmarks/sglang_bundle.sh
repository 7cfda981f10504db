#!/bin/bash
# Bundle SGLang 0.5.17 and all it needs for GPU machines without a network: Python 3.12, torch 2.11 (CUDA 13.0), triton 3.6, sm90.
#
#   PYTHON=python3.12 [CUDA_HOME=CUDA-13.0] benchmarks/sglang_bundle.sh FOLDER      where pip works, PYTHON having torch 2.11
#
# Writes FOLDER/part0 and part1, 20 MB each: put together they are the sg.txz of benchmarks/sglang_gpu.sh.
# Lean: of sglang-kernel (383 MB) only its Python and the operators for sm90, of flashinfer only its Python, which SGLang imports
# whatever its backends; xgrammar, which it imports too, without symbols. With nvcc in CUDA_HOME, what SGLang would compile at start.
set -euo pipefail
PYTHON=${PYTHON:-python3}
SITE=$(mktemp -d)
WANTED=(transformers==5.12.1 tokenizers==0.22.2 apache-tvm-ffi==0.1.11 compressed-tensors==0.17.0 xgrammar==0.2.1 dill distro
  interegular ipython ipython-pygments-lexers decorator matplotlib-inline pexpect ptyprocess prompt-toolkit wcwidth stack-data
  executing asttokens pure-eval traitlets loguru msgspec openai==2.6.1 jiter sniffio openai-harmony==0.0.4 orjson
  partial-json-parser pybase64 python-multipart pyzmq setproctitle soundfile==0.13.1 cffi pycparser watchfiles zstandard
  fastapi==0.128.0 starlette==0.50.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection uvicorn
  llguidance gguf jsonschema jsonschema-specifications referencing rpds-py flashinfer_python==0.6.15.post1)

flags=(--quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for n in 39 34 31 28 27 24 17; do flags+=(--platform "manylinux_2_${n}_x86_64"); done
flags+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
wheels=$(mktemp -d); mkdir -p "$1" "$SITE"
"$PYTHON" -m pip download "${flags[@]}" -d "$wheels" "${WANTED[@]}"
"$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$wheels"/*.whl
"$PYTHON" -m pip download "${flags[@]}" -d "$wheels/sglang" sglang==0.5.17 sglang-kernel==0.4.5
unzip -q -o "$wheels"/sglang/sglang-0*.whl 'sglang/*' 'sglang-0*' -x 'sglang/test/*' 'sglang/multimodal_gen/*' '*/_core.*.so' -d "$SITE"
unzip -q -o "$wheels"/sglang/sglang_kernel*.whl 'sgl_kernel/*.py' 'sgl_kernel/sm90/*' 'sgl_kernel/spatial_ops*' 'sglang_kernel*' \
  'triton_kernels/*' -d "$SITE"
rm -rf "$wheels" "$SITE"/{bin,flashinfer/data,xgrammar/lib,xgrammar/include}
find "$SITE" -name '*.so' -size +200k ! -path '*sm90*' ! -name 'libsndfile*' -exec strip --strip-unneeded {} + || true
# The entry point by which SGLang finds the plugin, without an install of ddtree.
mkdir -p "$SITE/ddtree-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: ddtree\nVersion: 0.1.0\n' >"$SITE/ddtree-0.1.0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nddtree = ddtree.sglang.plugin:register\n' >"$SITE/ddtree-0.1.0.dist-info/entry_points.txt"
if [ -x "${CUDA_HOME:-}/bin/nvcc" ]; then
  TVM_FFI_CACHE_DIR="$SITE/.jit" PYTHONPATH="$SITE:$PWD" "$PYTHON" -m benchmarks.sglang_kernels && rm -f "$SITE"/.jit/*/*.o
fi
find "$SITE" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$SITE" -c . | xz -T2 -6 >"$1/sg.txz"
split -n 2 -d -a 1 "$1/sg.txz" "$1/part" && rm "$1/sg.txz" && ls -l "$1"
