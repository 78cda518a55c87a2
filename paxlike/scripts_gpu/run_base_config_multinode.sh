#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs any experiment, as one process of a Slurm job (srun starts it once per process).
#   run_base_config_multinode.sh CONFIG [PREC] [NUM_GPUS] [LOGDIR] [TFDS_DATA_DIR|None] [VOCAB_PATH] [EXTRA_ARGS]
# NUM_GPUS is accepted because Pax has it, and ignored: the experiment sets the mesh.
set -euo pipefail
source "$(dirname "$0")/common.sh"

CONFIG="${1:?CONFIG is the first argument}"
PREC="${2:-bfloat16}"
LOG_DIR="${4:-test_logdir}"
TFDS_DATA_DIR="${5:-None}"
export VOCAB_PATH="${6:-${VOCAB_PATH:-}}"
EXTRA_ARGS="${7:-}"

if [ "${TFDS_DATA_DIR}" != None ]; then
  EXTRA_ARGS="--tfds_data_dir=${TFDS_DATA_DIR} ${EXTRA_ARGS}"
fi
# shellcheck disable=SC2046,SC2086 # Word splitting is intended.
exec "${PYTHON}" -m paxlike.main \
  --job_log_dir="${LOG_DIR}" \
  --fdl_config="${CONFIG}" \
  --fdl.FPROP_DTYPE="${PREC}" \
  $(slurm_arguments) \
  "${VARIABLE_FLAGS[@]}" \
  ${EXTRA_ARGS}
