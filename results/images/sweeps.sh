#!/usr/bin/env bash
# The sweeps behind results/images and docs/pretrained.md: every run of some parts, which goes on
# where it was cut off. Start it in the repository's folder.
#   sweeps.sh DATA OUT PART...
#   PART: vgg6-optimizers resnet18-optimizers vgg6-fair resnet18-fair
#   table2 table2-90 table3, bn-rate (the rate 0.3 under the papers' schedule),
#   schedules-BATCH   BN, GmP+IMN, WN+MBN over the papers' six rates under v2's steps and v1's
#                     plateau, each with and without warmup; batches of 1024 or 256
#   schedules-BATCH-SCHEDULE   one of the four: steps, steps-warmup, plateau, plateau-warmup
#   plateau-1024      the rates chosen there under v1's plateau, with epochs enough for it to fall
#   start-1024        GmP+IMN from the text's start and the released code's
#   resnet18-recipe vgg6-recipe   ours against Muon with decay, shifted images and smoothed
#                     labels: eight tries each in 18 epochs, three seeds of the best in 18 and 36
#   finetune-BATCH    a pretrained MobileNetV2 without its BatchNorm; batches of 1, 2, 8, 32
#   finetune-cost     the same for 200 steps, one network after the other, for time and memory, or,
#   each after its fair sweep,
#   vgg6-why resnet18-why           what could help input means, by one option each
#   vgg6-tracked resnet18-tracked   the boundaries of three methods in training
#   resnet18-optimizers-tracked     the same for SGD, Muon with decay and `turn`, or
#   best-NAME   two more seeds for the EACH (2) best settings of every method in the sweep NAME
#   long-NAME   for 18 epochs: the EACH (1) best settings of every method, the first BEST (4) of them
#   other-NAME  the four best of them on other images, in DATA: OUT still holds the sweep NAME
# Settings are chosen from what OUT holds: each folder's sessions.jsonl has what was run when.
# DATA holds train_data_batch_*.npz and val_data.npz (for finetune: of CIFAR-100), and WEIGHTS is
# torchvision's MobileNetV2 as a safetensors file. OPTIONS are added to every command, after its
# own. JOBS=6 trains six networks side by side: with
# CUDA's MPS (nvidia-cuda-mps-control -d) an H200 does 180,000 images a second of VGG-6 then, and
# 85,000 of ResNet-18.
set -euo pipefail
data=$1 out=$2
shift 2

train() { # EXPERIMENT NAME OPTIONS...
  local experiment=$1 name=$2
  shift 2
  python3 -m geoparam run "$experiment" --data "$data" --out "$out/$name" --resume \
    --jobs "${JOBS:-1}" "$@" ${OPTIONS:-}
}

run() { train imagenet32 "$@"; } # NAME OPTIONS...

finetune() { # NAME OPTIONS...
  train finetune "$1" --weights "${WEIGHTS:?names no file of weights}" "${@:2}"
}

# 10 % of the training images choose among a method's tries.
fair=(--batch-sizes 1024 --schedule linear --warmup 0.1 --nesterov
  --select 0.1 --recalibrate 80 --time-to 40,45)
optimizers=( # four tries each
  --method bn:optimizer=geometric:base=muon:rest=sgd:turn=1.8,2.6:lr=0.05,0.1
  --method bn:optimizer=geometric:base=sgd:lr=0.2,0.4,0.8,1.6
  --method bn:optimizer=adamw:decay=0.1,0.5:lr=1e-3,3e-3
  --method bn:optimizer=geometric:base=adamw:turn=1.2,2.4:lr=1e-3,3e-3
  --method bn:optimizer=rotational:decay=5e-4,2e-3:lr=0.4,0.8
  --method bn:optimizer=geometric:coordinates=angles:lr=0.2,0.4,0.8,1.6
)
finalists=( # SGD and the best four, whose best tries of four were at the edge: nine each
  --method bn:decay=1e-3,5e-4,2e-3:lr=0.8,0.4,1.6
  --method bn:optimizer=geometric:base=muon:turn=2.6,1.8,3.6:lr=1e-3,3e-3,1e-2
  --method bn:optimizer=muon:decay=0.2,0.1,0.4:lr=0.1,0.05,0.2
  --method bn:optimizer=airbench:lr=0.24,0.12,0.48:rest_lr=3e-3,1e-3,1e-2
  --method bn:optimizer=angularmuown:lr=0.05,0.02,0.1:rest_lr=1e-3,3e-3,1e-2
)
momenta=( # four tries more for each of these: Muon with decay gained by less momentum
  --method bn:decay=1e-3:momentum=0.8:lr=1.6,3.2 --method bn:decay=1e-3:momentum=0.95:lr=0.4,0.8
  --method bn:optimizer=geometric:base=muon:momentum=0.8,0.6:turn=5.4,9:lr=1e-3
  --method bn:optimizer=muon:momentum=0.8,0.6:decay=0.4:lr=0.05
  --method bn:optimizer=muon:momentum=0.8,0.6:decay=0.1:lr=0.2
  --method bn:optimizer=airbench:momentum=0.4,0.8:lr=0.24,0.36:rest_lr=1e-3
  --method bn:optimizer=angularmuown:momentum=0.8,0.6:lr=0.1,0.16:rest_lr=1e-3
)
output=( # and some with decay or another rate of the output layer, which the rest steps
  --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=5.4:decay=2,5,10:lr=1e-3
  --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=3.6:decay=5:lr=1e-3
  --method bn:optimizer=angularmuown:momentum=0.8:decay=2,5:lr=0.1:rest_lr=1e-3
)
output_vgg6=(
  --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=5.4:lr=3e-3,1e-2
  --method bn:optimizer=muon:momentum=0.8:decay=0.1:lr=0.2:rest_lr=3e-3,1e-2
  --method bn:optimizer=airbench:decay=1,5:lr=0.24:rest_lr=3e-3
)
output_resnet18=(
  --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=5.4:decay=1,20:lr=1e-3
  --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=9:decay=5:lr=1e-3
  --method bn:optimizer=muon:momentum=0.8:decay=0.4:lr=0.05:rest_lr=3e-3,1e-2
  --method bn:optimizer=airbench:decay=2,5:lr=0.24:rest_lr=1e-3
)
plain=( # six tries each
  --method bn:decay=5e-4,1e-3:lr=0.4,0.8,1.6 --method wn+mbn:decay=0,5e-4:lr=0.1,0.2,0.4
)
edges=( # two tries more for each method: most of the best rates were the largest
  --method bn:decay=5e-4,1e-3:lr=3.2 --method wn+mbn:decay=0,5e-4:lr=0.8
)

sweep() { # NAME OPTIONS...: a fair sweep; its network is the name's first word
  local name=$1 network=${1%%-*} compile=(--compile)
  shift
  [ "$name" = vgg6-optimizers ] && compile=() # its first runs were eager
  run "$name" --network "$network" "${compile[@]}" "${fair[@]}" --epochs 9 "$@"
}

# The papers' rates and schedule, scaled to 30 epochs; IMN in the papers' border form.
table=(--epochs 30 --compile)
table2=("${table[@]}" --methods "bn,gmp+imn,gmp,wn+mbn,wn+mbn:mbn=before,sp,wn,intrinsic+imn")

# The papers' rates under one schedule, chosen on a tenth of the training images; then three seeds.
# Of 12 epochs 5 and 10 of 90 would be below 1 and 2: the plateau has a patience of 2 and ends after 4.
schedules() { # BATCH SCHEDULE
  local name=table2-$1-$2 epochs=12 common
  [ "$1" = 256 ] && epochs=9
  common=(--batch-sizes "$1" --epochs "$epochs" --select 0.1 --recalibrate 80 --compile)
  case $2 in
    steps*) common+=(--schedule steps) ;;
    plateau*) common+=(--schedule plateau-top1 --patience 2) ;;
    *) echo "no schedule $2" >&2; exit 2 ;;
  esac
  [[ $2 = *-warmup ]] && common+=(--warmup 0.1)
  local rates=0.001,0.003,0.01,0.03,0.1,0.3
  local others=$rates
  [ "$1" = 256 ] && others=0.03,0.1,0.3 # at 1,024 the lower ones were 20 points behind, or more
  run "$name" "${common[@]}" --seeds 1 --method bn:lr=$rates --method gmp+imn:lr=$others \
    --method wn+mbn:lr=$others
  choose "$name" 99 1
  run "$name" "${common[@]}" --seeds 3 "${best[@]}"
}

everywhere=bn-eval,fold,frozen # networks of which nothing depends on the batch

choose() { # NAME COUNT EACH: set `best` to the COUNT best settings, at most EACH of a method
  mapfile -t best < <(python3 "$(dirname "$0")/best.py" "$out/$1" "$3")
  [ ${#best[@]} -gt 0 ] || { echo "$out/$1 has no records" >&2; exit 1; }
  best=("${best[@]:0:$2}")
  best=("${best[@]/#/--method=}")
}

for part in "$@"; do
  case $part in
    vgg6-optimizers | resnet18-optimizers)
      own="output_${part%-optimizers}[@]"
      sweep "$part" --seeds 1 "${finalists[@]}" "${momenta[@]}" "${output[@]}" "${!own}" \
        "${optimizers[@]}" ;;
    vgg6-fair) # IMN in the bias form
      sweep "$part" --seeds 1 "${plain[@]}" --method sp:decay=0,5e-4:lr=0.05,0.1,0.2 \
        --method wn:decay=0,5e-4:lr=0.05,0.1,0.2 --method gmp:decay=0,5e-4:lr=0.05,0.1,0.2 \
        --method gmp+imn:imn=input:decay=0,5e-4:lr=0.2,0.4,0.6 \
        --method intrinsic+imn:imn=input:decay=0,5e-4:lr=0.2,0.3,0.4
      sweep "$part" --seeds 3 "${edges[@]}" --method sp:decay=0,5e-4:lr=0.14 \
        --method wn:decay=0,5e-4:lr=0.14 --method gmp:decay=0,5e-4:lr=0.4 \
        --method gmp+imn:imn=input:decay=0,5e-4:lr=0.8 \
        --method intrinsic+imn:imn=input:decay=0,5e-4:lr=0.25 ;;
    resnet18-fair)
      sweep "$part" --seeds 1 "${plain[@]}" \
        --method gmp+imn:skip=plain:decay=0,5e-4:lr=0.1,0.2,0.4 \
        --method intrinsic+imn:skip=plain:decay=0,5e-4:lr=0.1,0.2,0.4
      sweep "$part" --seeds 3 "${edges[@]}" --method gmp+imn:skip=plain:decay=0,5e-4:lr=0.8 \
        --method intrinsic+imn:skip=plain:decay=0,5e-4:lr=0.3 ;;
    best-*)
      choose "${part#best-}" 99 "${EACH:-2}"
      sweep "${part#best-}" --seeds 3 "${best[@]}" ;;
    long-*)
      choose "${part#long-}" "${BEST:-4}" "${EACH:-1}"
      sweep "${part#long-}-18" --epochs 18 --seeds "${SEEDS:-3}" "${best[@]}" ;;
    other-*)
      choose "${part#other-}" 4 1
      sweep "${part#other-}-other" --seeds "${SEEDS:-3}" "${best[@]}" ;;
    vgg6-why | resnet18-why)
      choose "${part%-why}-fair" 99 1
      mapfile -t peer < <(printf '%s\n' "${best[@]}" | grep '=bn:')
      mapfile -t best < <(printf '%s\n' "${best[@]}" | grep intrinsic+imn)
      turn=9
      [ "$part" = resnet18-why ] && turn=5.4 # 9 diverges
      turned=:optimizer=geometric:base=muon:momentum=0.8:turn
      sweep "$part" --seeds 1 "${best[@]}" "${best[@]/%/:scale_decay=1e-4,1e-3}" \
        "${best[@]/%/:scales=relative}" "${best[@]/%/:label_smoothing=0.1}" \
        "${best[@]/%/:dropout=0.2,0.5}" "${best[@]/%/:accumulate=2}" "${best[@]/%/:crop=4}" \
        --method "sp+imn$turned=2.6,5.4,9,14:lr=1e-3" \
        --method "sp+imn$turned=5.4,9:decay=2,5:lr=1e-3" --method "bn$turned=5.4:crop=4:lr=1e-3" \
        "${peer[@]/%/:label_smoothing=0.1}" "${peer[@]/%/:crop=4}"
      sweep "$part" --seeds 3 --method "sp+imn$turned=$turn:decay=0,5:crop=4:lr=1e-3" \
        --method "sp+imn$turned=5.4,7:decay=0:crop=4:lr=1e-3" \
        --method "sp+imn$turned=$turn:decay=0:label_smoothing=0.1:crop=4:lr=1e-3" \
        --method "bn$turned=5.4,9:crop=4:lr=1e-3" --method "bn$turned=5.4:decay=5:crop=4:lr=1e-3" \
        --method "bn$turned=5.4,9:label_smoothing=0.1:crop=4:lr=1e-3" ;;
    resnet18-recipe | vgg6-recipe)
      ours=bn:optimizer=geometric:base=muon:momentum=0.8:lr=1e-3:crop=4:label_smoothing=0.1
      muon=bn:optimizer=muon:momentum=0.8:crop=4:label_smoothing=0.1
      sweep "$part" --epochs 18 --seeds 1 --method "$ours:turn=2.7,3.8,5.4,7.6:decay=0,5" \
        --method "$muon:decay=0.1,0.2:lr=0.05,0.1,0.2" --method "$muon:decay=0.4:lr=0.05,0.1"
      choose "$part" 99 1
      sweep "$part" --epochs 18 --seeds 3 "${best[@]}"
      sweep "$part-36" --epochs 36 --seeds 3 "${best[@]}" ;;
    resnet18-optimizers-tracked)
      sweep "$part" --seeds 1 --track 10 --method bn:decay=1e-3:lr=1.6 \
        --method bn:optimizer=muon:momentum=0.8:decay=0.4:lr=0.05 \
        --method bn:optimizer=geometric:base=muon:momentum=0.8:turn=5.4:lr=1e-3 ;;
    vgg6-tracked | resnet18-tracked)
      choose "${part%-tracked}-fair" 99 1
      mapfile -t best < <(printf '%s\n' "${best[@]}" | grep -E '=(bn|gmp\+imn|intrinsic\+imn):')
      sweep "$part" --seeds 1 --track 10 "${best[@]}" ;;
    table2)
      run "$part" "${table2[@]}" --batch-sizes 256,1024 --seeds "${SEEDS:-3}"
      run "$part" "${table2[@]}" --batch-sizes 512 --seeds 1 ;;
    schedules-*-*)
      IFS=- read -r _ batch schedule <<<"$part"
      schedules "$batch" "$schedule" ;;
    schedules-*)
      for schedule in steps plateau steps-warmup plateau-warmup; do
        schedules "${part#schedules-}" $schedule
      done ;;
    plateau-1024)
      for warmup in "" -warmup; do
        choose table2-1024-plateau$warmup 99 1
        run table2-1024-plateau-24$warmup --batch-sizes 1024 --epochs 24 --select 0.1 \
          --recalibrate 80 --compile --schedule plateau-top1 --patience 3 \
          ${warmup:+--warmup 0.1} --seeds 3 "${best[@]}"
      done ;;
    start-1024)
      start=(--batch-sizes 1024 --epochs 12 --schedule steps --select 0.1 --recalibrate 80 --compile)
      run table2-1024-start "${start[@]}" --seeds 1 \
        --method gmp+imn:init=sphere,released:lr=0.03,0.1,0.3
      choose table2-1024-start 99 1
      run table2-1024-start "${start[@]}" --seeds 3 "${best[@]}" ;;
    table2-90) run "$part" --epochs 90 --compile --batch-sizes 1024 --seeds 1 \
      --methods bn,gmp,gmp+imn ;;
    table3)
      run "$part" "${table[@]}" --network resnet18 --batch-sizes 256 --seeds "${SEEDS:-3}" \
        --methods bn,wn+mbn,gmp+imn,intrinsic+imn,gmp+imn:skip=plain,intrinsic+imn:skip=plain ;;
    finetune-cost)
      finetune "$part" --batch-sizes 1,2,8,32 --methods "$everywhere,bn,gn,fold+geometric,imn" \
        --lrs 1e-4 --seeds 1 --steps 200 --held-out 100 --test-images 100 --jobs 1 ;;
    finetune-1) # the best at batch 2
      finetune finetune --batch-sizes 1 --methods "$everywhere" --lrs 3e-5,1e-4,3e-4,1e-3 ;;
    finetune-2) finetune finetune --batch-sizes 2 --lrs 1e-4,3e-4,1e-3,3e-3 ;;
    finetune-8) finetune finetune --batch-sizes 8 --lrs 3e-4,1e-3,3e-3,1e-2 ;;
    finetune-32) finetune finetune --batch-sizes 32 --lrs 1e-3,3e-3,1e-2,3e-2 ;;
    bn-rate)
      run "$part" --epochs 18 --batch-sizes 1024 --seeds 2 --recalibrate 80 --track 10 \
        --method bn:lr=0.1,0.3 --method bn:warmup=0.1:lr=0.3 ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
