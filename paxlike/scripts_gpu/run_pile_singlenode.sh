#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains GPT 126M on the Pile, on the GPUs of one node. What follows LOGDIR is given to paxlike.
#   run_pile_singlenode.sh TFDS_DATA_DIR VOCAB_PATH [PREC] [NUM_GPUS] [PERCORE_BS] [LOGDIR] [FLAG...]
set -euo pipefail
source "$(dirname "$0")/common.sh"

TFDS_DATA_DIR="${1:?TFDS_DATA_DIR is the first argument}"
export VOCAB_PATH="${2:?VOCAB_PATH is the second argument}"
PREC="${3:-bfloat16}"
NUM_GPUS="${4:-8}"
PERCORE_BATCH_SIZE="${5:-4}"
LOG_DIR="${6:-test_logdir}"
shift "$(($# < 6 ? $# : 6))"

export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
mkdir -p "${LOG_DIR}"
"${PYTHON}" -m paxlike.main \
  --job_log_dir="${LOG_DIR}" \
  --fdl_config=Pile126M \
  --tfds_data_dir="${TFDS_DATA_DIR}" \
  --fdl.FPROP_DTYPE="${PREC}" \
  --fdl.ICI_MESH_SHAPE="[${NUM_GPUS},1,1]" \
  --fdl.DCN_MESH_SHAPE="[1,1,1]" \
  --fdl.PERCORE_BATCH_SIZE="${PERCORE_BATCH_SIZE}" \
  "$@" 2>&1 | tee "${LOG_DIR}/pile_output.log"
