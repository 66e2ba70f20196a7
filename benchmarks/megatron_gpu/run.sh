#!/bin/sh
# Measure Megatron on a machine with one GPU, which four processes share under MPS. Arguments are handed to the program.
# megatron-core, psutil and einops are taken from build/megatron-gpu (`make megatron-gpu`).
set -u
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="src:build/megatron-gpu${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY="$folder" CUDA_MPS_LOG_DIRECTORY="$folder"
trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$folder"' EXIT
if ! nvidia-cuda-mps-control -d; then
  echo "MPS does not start: processes take turns on the GPU"
  unset CUDA_MPS_PIPE_DIRECTORY
fi
"$PYTHON" -m benchmarks.megatron_gpu "$@" # each process claims a quarter of the GPU and another host (tests/distributed/ranks.py)
