#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tunes LLaMA 2 on BoolQ, in full or by LoRA (USE_LORA=1), and evaluates it; EVAL_ONLY=1 only
# evaluates. Environment variables set all options; arguments are passed to paxlike.
set -euo pipefail
source "$(dirname "$0")/common.sh"

export VOCAB_PATH="${VOCAB_PATH:?set VOCAB_PATH to the tokenizer.model of LLaMA}"
TFDS_DATA_DIR="${TFDS_DATA_DIR:?set TFDS_DATA_DIR to the folder of TFDS}"
CONFIG="${CONFIG:-LLaMA7B}"
EVAL_ONLY="${EVAL_ONLY:-0}"
USE_LORA="${USE_LORA:-0}"
USE_MULTIPROCESS="${USE_MULTIPROCESS:-0}"
CHECKPOINT_RESTORE_PATH="${CHECKPOINT_RESTORE_PATH:?set it to the folder of a converted LLaMA}"
PERCORE_BATCH_SIZE="${PERCORE_BATCH_SIZE:-2}"
LOG_DIR="${LOG_DIR:-llama-${CONFIG}-mbs-${PERCORE_BATCH_SIZE}-te-0-lora-${USE_LORA}}"

if [ "${USE_LORA}" = 1 ]; then
  LEARNING_RATE="${LEARNING_RATE:-1e-4}"
  LR_SCHEDULE="${LR_SCHEDULE:-constant}"
  MAX_STEPS="${MAX_STEPS:-600}"
  TUNING=(
    --fdl.USE_LORA=True
    --fdl.LORA_RANK="${LORA_RANK:-32}"
    --fdl.LORA_TARGET_LAYERS="${LORA_TARGET_LAYERS:-all}"
  )
else
  LEARNING_RATE="${LEARNING_RATE:-1e-6}"
  LR_SCHEDULE="${LR_SCHEDULE:-linear_rampup_cosine_decay}"
  MAX_STEPS="${MAX_STEPS:-1000}"
  TUNING=()
fi
if [ "${LR_SCHEDULE}" = linear_rampup_cosine_decay ]; then
  LR_COS_WARMUP="${LR_COS_WARMUP:-500}"
  TUNING+=(
    --fdl.LR_COS_WARMUP="${LR_COS_WARMUP}"
    --fdl.LR_COS_DECAY_START="${LR_COS_DECAY_START:-$((LR_COS_WARMUP + 1))}"
    --fdl.LR_COS_DECAY_END="${LR_COS_DECAY_END:-300000}"
  )
fi
if [ "${USE_MULTIPROCESS}" = 1 ]; then
  # shellcheck disable=SC2207 # Word splitting is intended.
  TUNING+=($(slurm_arguments))
fi

export NCCL_IB_SL="${NCCL_IB_SL:-0}"
export NCCL_PROTO="${NCCL_PROTO:-LL128}"

run() {
  "${PYTHON}" -m paxlike.main \
    --job_log_dir="${LOG_DIR}" \
    --fdl_config="${CONFIG}" \
    --tfds_data_dir="${TFDS_DATA_DIR}" \
    --fdl.CHECKPOINT_RESTORE_PATH="${CHECKPOINT_RESTORE_PATH}" \
    --fdl.USE_REPEATED_LAYER="${USE_REPEATED_LAYER:-False}" \
    --fdl.MAX_SEQ_LEN="${MAX_SEQ_LEN:-4096}" \
    --fdl.PERCORE_BATCH_SIZE="${PERCORE_BATCH_SIZE}" \
    --fdl.ICI_MESH_SHAPE="${ICI_MESH_SHAPE:-[1,-1,1]}" \
    --fdl.DCN_MESH_SHAPE="${DCN_MESH_SHAPE:-[1,1,1]}" \
    --fdl.LEARNING_RATE="${LEARNING_RATE}" \
    --fdl.LR_SCHEDULE="${LR_SCHEDULE}" \
    --fdl.MAX_STEPS="${MAX_STEPS}" \
    "${TUNING[@]}" "${VARIABLE_FLAGS[@]}" "$@"
}

mkdir -p "${LOG_DIR}/logs"
if [ "${EVAL_ONLY}" != 1 ]; then
  run "$@" 2>&1 | tee "${LOG_DIR}/logs/train.log"
fi
run --mode=eval "$@" 2>&1 | tee "${LOG_DIR}/logs/eval.log"
