#!/bin/sh
# Run tests/gpu on a machine with one GPU, which four processes share. Arguments are handed to pytest.
# Under MPS the processes really run side by side. Tests that kill processes run without it: a client that is killed may
# take the server with it.
#   ONLY=failures | others   run one of the two parts
set -u
cd "$(dirname "$0")/../.." || exit 1
export PYTHONPATH="${PYTHONPATH:-src}"
PYTHON="${PYTHON:-python3}"
failures=0 others=0
"$PYTHON" -c "from equilibra.execute.steps.planning import warm; warm(2)" || exit 1 # compile the planner once, not once per rank
if [ "${ONLY:-failures}" = failures ]; then
  "$PYTHON" -m pytest tests/gpu/test_gpu_failures.py "$@"
  failures=$?
fi
if [ "${ONLY:-others}" = others ]; then
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY="$folder" CUDA_MPS_LOG_DIRECTORY="$folder"
  nvidia-cuda-mps-control -d || echo "MPS does not start: processes take turns on the GPU"
  trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$folder"' EXIT
  "$PYTHON" -m pytest tests/gpu --ignore=tests/gpu/test_gpu_failures.py "$@"
  others=$?
fi
exit $((failures > others ? failures : others))
