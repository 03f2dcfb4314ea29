#!/usr/bin/env bash
# The sweeps behind results/images: every run of one part, which goes on where it was cut off.
#   sweeps.sh DATA OUT PART...   PART: vgg6-optimizers resnet18-optimizers table2 table3 fair
# DATA holds train_data_batch_*.npz and val_data.npz. Several parts may run side by side.
set -euo pipefail
data=$1 out=$2
shift 2

run() { # NAME OPTIONS...
  local name=$1
  shift
  python3 -m geoparam run imagenet32 --data "$data" --out "$out/$name" --resume "$@"
}

# Each method has four tries; 10 % of the training images choose; the best gets three seeds.
fair=(--batch-sizes 1024 --epochs "${EPOCHS:-9}" --seeds "${SEEDS:-1}" --schedule linear --warmup 0.1
  --nesterov --select 0.1 --recalibrate 80 --time-to 40,45)
optimizers=(
  --method bn:decay=5e-4,1e-3:lr=0.4,0.8
  --method bn:optimizer=adamw:decay=0.1,0.5:lr=1e-3,3e-3
  --method bn:optimizer=muon:decay=0.1,0.2:lr=0.05,0.1
  --method bn:optimizer=airbench:lr=0.12,0.24:rest_lr=1e-3,3e-3
  --method bn:optimizer=rotational:decay=5e-4,2e-3:lr=0.4,0.8
  --method bn:optimizer=angularmuown:lr=0.02,0.05:rest_lr=1e-3,3e-3
  --method bn:optimizer=geometric:base=sgd:lr=0.2,0.4,0.8,1.6
  --method bn:optimizer=geometric:base=adamw:turn=1.2,2.4:lr=1e-3,3e-3
  --method bn:optimizer=geometric:base=muon:turn=1.8,2.6:lr=1e-3,3e-3
  --method bn:optimizer=geometric:base=muon:rest=sgd:turn=1.8,2.6:lr=0.05,0.1
  --method bn:optimizer=geometric:coordinates=angles:lr=0.2,0.4,0.8,1.6
)

for part in "$@"; do
  case $part in
    vgg6-optimizers) run "$part" --network vgg6 "${fair[@]}" "${optimizers[@]}" ;;
    resnet18-optimizers) run "$part" --network resnet18 "${fair[@]}" "${optimizers[@]}" ;;
    table2) # the papers' rates and schedule, scaled to 30 epochs; IMN in the papers' border form
      for batch in 256 1024; do
        run "$part-$batch" --methods sp,wn,wn+mbn,bn --lrs 0.01 --batch-sizes "$batch" --epochs 30
        run "$part-$batch-gmp" --methods gmp,gmp+imn,intrinsic+imn --lrs 0.1 \
          --batch-sizes "$batch" --epochs 30
      done ;;
    table3)
      run "$part" --network resnet18 --methods wn+mbn,bn,gmp+imn,intrinsic+imn --lrs 0.1 \
        --batch-sizes 256 --epochs 30
      run "$part-plain" --network resnet18 --methods gmp+imn,intrinsic+imn --skip plain --lrs 0.1 \
        --batch-sizes 256 --epochs 30 ;;
    fair)
      for network in vgg6 resnet18; do
        run "$part-$network" --network "$network" "${fair[@]}" \
          --method sp:decay=0,5e-4:lr=0.05,0.2 --method wn:decay=0,5e-4:lr=0.05,0.2 \
          --method wn+mbn:decay=0,5e-4:lr=0.1,0.4 --method bn:decay=5e-4,1e-3:lr=0.4,0.8 \
          --method gmp+imn:decay=0,5e-4:lr=0.2,0.4 --method intrinsic+imn:decay=0,5e-4:lr=0.2,0.4
      done ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
