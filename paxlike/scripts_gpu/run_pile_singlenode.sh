#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains GPT 126M on the Pile, on the GPUs of one node. paxlike gets the arguments after LOGDIR.
#   run_pile_singlenode.sh TFDS_DATA_DIR VOCAB_PATH [PREC] [NUM_GPUS] [PERCORE_BS] [LOGDIR] [FLAG...]
set -euo pipefail
source "$(dirname "$0")/common.sh"

read_arguments "$@"

mkdir -p "${LOG_DIR}"
"${PYTHON}" -m paxlike.main \
  --fdl_config=Pile126M \
  --fdl.DCN_MESH_SHAPE="[1,1,1]" \
  "${FLAGS[@]}" 2>&1 | tee "${LOG_DIR}/pile_output.log"
