#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Evaluates on LAMBADA the newest checkpoint of a run of run_pile_*.sh; LOGDIR is that run's.
#   run_lambada_singlenode.sh TFDS_DATA_DIR VOCAB_PATH PREC NUM_GPUS PERCORE_BS LOGDIR [FLAG...]
set -euo pipefail
source "$(dirname "$0")/common.sh"

TFDS_DATA_DIR="${1:?TFDS_DATA_DIR is the first argument}"
export VOCAB_PATH="${2:?VOCAB_PATH is the second argument}"
PREC="${3:-bfloat16}"
NUM_GPUS="${4:-8}"
PERCORE_BATCH_SIZE="${5:-4}"
LOG_DIR="${6:?LOGDIR, the folder of the run, is the sixth argument}"
shift 6

export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
"${PYTHON}" -m paxlike.main \
  --job_log_dir="${LOG_DIR}" \
  --mode=eval \
  --fdl_config=Lambada126M \
  --tfds_data_dir="${TFDS_DATA_DIR}" \
  --fdl.FPROP_DTYPE="${PREC}" \
  --fdl.ICI_MESH_SHAPE="[${NUM_GPUS},1,1]" \
  --fdl.PERCORE_BATCH_SIZE="${PERCORE_BATCH_SIZE}" \
  "$@" 2>&1 | tee "${LOG_DIR}/lambada_output.log"
