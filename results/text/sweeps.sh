#!/usr/bin/env bash
# The sweeps behind docs/transformers.md: every run of one part, which goes on where it was cut off.
#   sweeps.sh DATA OUT PART...
#   transfer      one turn at all widths, depths, lengths and batch sizes
#   transfer-8000 the same for 8,000 steps
#   rivals-64 rivals-256 rivals-1024    grids of five optimizers at one width
#   tuned-384 tuned-768    five optimizers with 12 tries each: a grid of 8, then 4 around the best,
#                          then three seeds of the best (10 and 42 million parameters)
#   recipe        schedules, momentum, rate of r and decay of the output layer under a turn, or
#   shakespeare   nanoGPT's shakespeare-char
# DATA holds python-train.txt.xz, python-val.txt.xz and tinyshakespeare.txt. JOBS=8 trains eight
# networks side by side, best under CUDA's MPS (nvidia-cuda-mps-control -d).
set -euo pipefail
data=$1 out=$2
shift 2
cd "$(dirname "$0")/../.."

train() { # EXPERIMENT TEXT NAME OPTIONS...
  local experiment=$1 text=$2 name=$3
  shift 3
  python3 -m geoparam run "$experiment" --data "$data/$text" --out "$out/$name" --resume \
    --jobs "${JOBS:-1}" "$@"
}

run() { # NAME OPTIONS...
  local name=$1
  shift
  train text python-train.txt.xz "$name" --validation "$data/python-val.txt.xz" \
    --batch-sizes 64 "$@"
}

grid=( # eight tries each
  --method turn:turn=1.2,1.7,2.4,3.4:momentum=0.95,0.9
  --method muon:lr=0.005,0.01,0.02,0.04:decay=0.1,0.3
  --method angularmuown:lr=0.01,0.02,0.04,0.08:momentum=0.95,0.9
  --method muonh:lr=0.009,0.018,0.036,0.072:momentum=0.95,0.9
  --method adamw:lr=1e-3,2e-3,4e-3,8e-3:decay=0.1,0.5
)

choose() { # NAME: set `best` to the best setting of every method, `near` to four around each
  mapfile -t best < <(python3 results/text/best.py "$out/$1" best)
  mapfile -t near < <(python3 results/text/best.py "$out/$1" near)
  best=("${best[@]/#/--method=}")
  near=("${near[@]/#/--method=}")
}

for part in "$@"; do
  case $part in
    transfer)
      run text-transfer --one-factor --widths 256,64,1024 --depths 6,3,12,24 --steps 500,2000 \
        --batch-sizes 64,32,256 --methods turn --turns 0.6,1.2,1.7,2.4,3.4,4.8 ;;
    transfer-8000)
      run text-transfer-8000 --widths 256 --depths 6 --steps 8000 --methods turn \
        --turns 0.6,1.2,1.7,2.4,3.4 ;;
    rivals-*)
      run "text-$part" --widths "${part#rivals-}" --depths 6 --steps 500 --seeds 1 "${grid[@]}" ;;
    tuned-*)
      size=(--widths "${part#tuned-}" --depths 6 --steps 2000)
      run "text-$part" "${size[@]}" --seeds 1 "${grid[@]}"
      choose "text-$part"
      run "text-$part" "${size[@]}" --seeds 1 "${near[@]}"
      choose "text-$part"
      run "text-$part" "${size[@]}" --seeds 3 "${best[@]}" ;;
    recipe)
      run text-recipe --widths 384 --depths 6 --steps 2000 --seeds 1 \
        --method turn:turn=1.7,2.4,3.4:schedule=linear,cosine,power,hold \
        --method turn:turn=2.4:rest_lr=1e-3,1e-2 --method turn:turn=2.4:scale_lr=1e-3,1e-2,3e-2 \
        --method turn:turn=2.4:rest_decay=0.1,1,5 --method turn:turn=2.4,3.4:momentum=0.8 ;;
    shakespeare)
      train shakespeare tinyshakespeare.txt text-shakespeare --seeds 1 --method adamw:lr=1e-3 \
        --method turn:turn=0.6,1.2,2.4:momentum=0.95,0.9:rest_lr=1e-3,3e-3 ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
