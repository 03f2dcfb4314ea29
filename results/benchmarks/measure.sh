#!/usr/bin/env bash
# The benchmarks of a GPU behind docs/benchmarks.md, each into a file of its own. Start it in the
# repository's folder, with nothing else on the GPU.
#   measure.sh OUT PART...
#   optimizer   what GeometricOptimizer costs; profile: in which kernels its step spends that
#   training    ResNet-50 without BatchNorm, and with the geometry; compiled: the same, compiled
#   tracker     what a record costs
#   tests       tests/test_gpu.py
# OPTIONS are added to every benchmark, after its own.
set -euo pipefail
out=$1
shift
mkdir -p "$out"

measure() { # NAME BENCHMARK OPTIONS...
  local name=$1 benchmark=$2
  shift 2
  python3 -m "benchmarks.$benchmark" "$@" ${OPTIONS:-} 2>&1 | tee "$out/$name.md"
}

for part in "$@"; do
  case $part in
    optimizer) measure optimizer optimizer --modes eager ;;
    profile) measure profile optimizer --profile ;;
    training)
      measure training training --networks resnet50 --modes eager --batches 2,8,32,128,256 \
        --methods bn,none,bn+geometric,imn,imn+geometric ;;
    compiled)
      measure compiled training --networks resnet50 --modes compiled --batches 256 \
        --methods bn,bn+geometric,imn ;;
    tracker) measure tracker tracker ;;
    tests) python3 -m pytest -q tests/test_gpu.py 2>&1 | tee "$out/tests.txt" ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
