#!/usr/bin/env bash
# The sweeps behind docs/transformers.md: every run of some parts, which goes on where it was cut
# off. Start it in the repository's folder.
#   sweeps.sh DATA OUT PART...
#   transfer      one turn at all widths, depths, lengths and batch sizes
#   edges         smaller turns where the smallest was the best
#   grid-WIDTH    five optimizers, eight tries each, 2,000 steps (384: 11 million parameters, 768: 42)
#   near-WIDTH    four more tries for each, around its best of the eight
#   best-WIDTH    three seeds of each one's best
#   fixed-WIDTH   three seeds of the turn that width 384 chose
#   width-768     a smaller one, as a factor for width would have it, and a larger one
#   rivals-WIDTH  the same eight tries each in 500 steps
#   ...-METHOD    grid, near, best or rivals for one method alone
#   decay-384     six more tries for Muon, of its decay, and for the turn
#   start-384     from nanoGPT's start, in which rows are short
#   recipe        schedules, momentum, rate of r and decay of the output layer under a turn
#   shakespeare   nanoGPT's shakespeare-char
# DATA holds python-train.txt.xz, python-val.txt.xz and tinyshakespeare.txt. JOBS=8 trains eight
# networks side by side, best under CUDA's MPS (nvidia-cuda-mps-control -d). OPTIONS are added to
# every command, after its own.
set -euo pipefail
data=$1 out=$2
shift 2
# Compilers of several jobs would wait for the same cores.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-2}

train() { # TEXT NAME OPTIONS...
  local text=$1 name=$2
  shift 2
  python3 -m geoparam run text --data "$data/$text" --out "$out/$name" --resume \
    --jobs "${JOBS:-1}" --compile "$@" ${OPTIONS:-}
}

run() { # NAME OPTIONS...
  local name=$1
  shift
  train python-train.txt.xz "$name" --validation "$data/python-val.txt.xz" \
    --batch-sizes 64 "$@"
}

tries=( # eight of each method; best.py counts on that number
  turn:turn=1.2,1.7,2.4,3.4:momentum=0.95,0.9
  muon:lr=0.0025,0.005,0.01,0.02:decay=0.1,0.03:momentum=0.95 # at 384 0.3 with 0.9 for 0.03
  angularmuown:lr=0.01,0.02,0.04,0.08:momentum=0.95,0.9
  muonh:lr=0.009,0.018,0.036,0.072:momentum=0.95,0.9
  adamw:lr=1e-3,2e-3,4e-3,8e-3:decay=0.1,0.5
)

list_grid() { # METHOD: set `grid` to the tries of a method, or without one to all
  grid=()
  for each in "${tries[@]}"; do
    if [[ -z $1 || $each = "$1":* ]]; then grid+=("--method=$each"); fi
  done
  [ ${#grid[@]} -gt 0 ] || { echo "no method $1" >&2; exit 2; }
}

choose() { # NAME WHICH: set `chosen` to the best setting of $method or of each, or to four near it
  mapfile -t chosen < <(python3 "$(dirname "$0")/best.py" "$out/$1" "$2" ${method:+"$method"})
  [ ${#chosen[@]} -gt 0 ] || { echo "$out/$1 has nothing to choose from" >&2; exit 1; }
  chosen=("${chosen[@]/#/--method=}")
}

tuned() { # WIDTH OPTIONS...
  local width=$1
  shift
  run "text-$width" --widths "$width" --depths 6 --steps 2000 "$@"
}

for part in "$@"; do
  IFS=- read -r _ width method <<<"$part"
  case $part in
    transfer)
      run text-transfer --one-factor --widths 256,64,1024 --depths 6,3,12,24 --steps 500,2000 \
        --batch-sizes 64,32,256 --methods turn --turns 1.2,1.7,2.4,3.4,4.8
      run text-transfer --widths 256 --depths 6 --steps 2000,8000 --methods turn \
        --turns 0.6,1.2,1.7,2.4 ;;
    edges)
      run text-transfer --widths 1024 --depths 6 --steps 500 --methods turn --turns 0.6,0.85
      run text-transfer --widths 256 --depths 6 --steps 8000 --methods turn --turns 0.3,0.42 ;;
    grid-*)
      list_grid "$method"
      tuned "$width" --seeds 1 "${grid[@]}" ;;
    near-*)
      choose "text-$width" near
      tuned "$width" --seeds 1 "${chosen[@]}" ;;
    best-*)
      choose "text-$width" best
      tuned "$width" --seeds 3 "${chosen[@]}" ;;
    fixed-*)
      tuned "$width" --seeds 3 --method=turn:turn=1.2:momentum=0.9:rest_lr=0.003 ;;
    width-768)
      tuned 768 --seeds 3 --method=turn:turn=0.9:momentum=0.9:rest_lr=0.003
      tuned 768 --seeds 1 --method=turn:turn=0.6,1.7:momentum=0.9:rest_lr=0.003 ;;
    decay-384)
      tuned 384 --seeds 1 --method muon:lr=0.01,0.02:decay=0,0.03,0.3:momentum=0.95 \
        --method turn:turn=0.85,1,1.4:momentum=0.9,0.85 ;;
    start-384)
      run text-384-start --std 0.02 --widths 384 --depths 6 --steps 2000 --seeds 1 \
        --method muon:lr=0.01,0.02,0.04:decay=0.1:momentum=0.95 \
        --method turn:turn=0.85,1.2,1.7,2.4:momentum=0.9 \
        --method turn:turn=1.2,1.7:momentum=0.9:scale_lr=1e-2 ;;
    rivals-*)
      list_grid "$method"
      run text-rivals --widths "$width" --depths 6 --steps 500 --seeds 1 "${grid[@]}" ;;
    recipe)
      run text-recipe --widths 384 --depths 6 --steps 2000 --seeds 1 \
        --method turn:turn=0.85,1.2,1.7:momentum=0.9:schedule=linear,cosine,power,hold \
        --method turn:turn=1.2:momentum=0.9:scale_lr=1e-3,1e-2,3e-2 \
        --method turn:turn=1.2:momentum=0.9:rest_decay=0.1,1,5 \
        --method turn:turn=1.7,2.4:momentum=0.8 ;;
    shakespeare)
      nanogpt=(--widths 384 --heads 6 --steps 5000 --batch-sizes 64 --warmup 0.02 --beta2 0.99
        --mlp gelu --dropout 0.2 --tied --std 0.02 --marks 20 --seeds 1 --method adamw:lr=1e-3)
      train tinyshakespeare.txt text-shakespeare "${nanogpt[@]}" --schedules cosine --final 0.1 \
        --method turn:turn=0.6,1.2,2.4,3.4,4.8:momentum=0.9:rest_lr=1e-3,3e-3 \
        --method muon:lr=0.01,0.02,0.04:decay=0.1:momentum=0.9,0.95:rest_lr=1e-3
      train tinyshakespeare.txt text-shakespeare-to-0 "${nanogpt[@]}" --schedules linear --final 0 \
        --method turn:turn=2.4,3.4,4.8:momentum=0.9:rest_lr=1e-3 ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
