#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Evaluates on LAMBADA the newest checkpoint of a run of run_pile_*.sh; LOGDIR is that run's.
#   run_lambada_singlenode.sh TFDS_DATA_DIR VOCAB_PATH PREC NUM_GPUS PERCORE_BS LOGDIR [FLAG...]
set -euo pipefail
source "$(dirname "$0")/common.sh"

: "${6:?LOGDIR, the folder of the run, is the sixth argument}"
read_arguments "$@"

"${PYTHON}" -m paxlike.main \
  --fdl_config=Lambada126M \
  --mode=eval \
  "${FLAGS[@]}" 2>&1 | tee "${LOG_DIR}/lambada_output.log"
