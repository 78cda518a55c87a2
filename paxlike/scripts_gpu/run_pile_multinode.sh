#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains GPT 126M on the Pile, as one process of a Slurm job (srun starts it once per process).
#   run_pile_multinode.sh TFDS_DATA_DIR VOCAB_PATH [PREC] [NUM_GPUS] [PERCORE_BS] [LOGDIR] [FLAG...]
# NUM_GPUS is the number per node.
set -euo pipefail
source "$(dirname "$0")/common.sh"

read_arguments "$@"

# shellcheck disable=SC2046 # Word splitting is intended.
exec "${PYTHON}" -m paxlike.main \
  --fdl_config=Pile126M \
  --fdl.DCN_MESH_SHAPE="[${SLURM_JOB_NUM_NODES},1,1]" \
  $(slurm_arguments) \
  "${FLAGS[@]}"
