# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder, which source it.

PYTHON="${PYTHON:-python3}"
# Prepended to the user's XLA_FLAGS. Empty by default: paxlike sets its own options (xla_flags.py).
# Flags that this version of XLA does not take are left out, with a line that names them.
BASE_XLA_FLAGS="${BASE_XLA_FLAGS:-}"
export XLA_FLAGS="${BASE_XLA_FLAGS:+${BASE_XLA_FLAGS} }${XLA_FLAGS:-}"

# The flags for the variables of Pax's scripts; flags of the user come later and prevail.
VARIABLE_FLAGS=()
if [ "${ENABLE_TE:-0}" != 0 ]; then VARIABLE_FLAGS+=(--fdl.ENABLE_TE=true); fi
if [ "${ENABLE_FP8:-0}" != 0 ]; then VARIABLE_FLAGS+=(--fdl.USE_FP8=true); fi
case "${NVTE_FUSED_ATTN:-}" in
  "") ;;
  0) VARIABLE_FLAGS+=(--fdl.ATTENTION_KERNEL=xla) ;;
  *) VARIABLE_FLAGS+=(--fdl.ATTENTION_KERNEL=cudnn) ;;
esac

# Prints the flags with which a process of a Slurm job finds the others.
slurm_arguments() {
  echo "--multiprocess_gpu --server_addr=${SLURM_LAUNCH_NODE_IPADDR}:${PORT:-12345}" \
    "--num_hosts=${SLURM_NTASKS} --host_idx=${SLURM_PROCID}"
}

# Parses the arguments of the Pile scripts, in Pax's order, and sets FLAGS and LOG_DIR:
#   TFDS_DATA_DIR VOCAB_PATH [PREC] [NUM_GPUS] [PERCORE_BS] [LOGDIR] [FLAG...]
read_arguments() {
  local tfds_data_dir="${1:?TFDS_DATA_DIR is the first argument}"
  export VOCAB_PATH="${2:?VOCAB_PATH is the second argument}"
  LOG_DIR="${6:-test_logdir}"
  FLAGS=(
    --job_log_dir="${LOG_DIR}"
    --tfds_data_dir="${tfds_data_dir}"
    --fdl.FPROP_DTYPE="${3:-bfloat16}"
    --fdl.ICI_MESH_SHAPE="[${4:-8},1,1]"
    --fdl.PERCORE_BATCH_SIZE="${5:-4}"
    "${VARIABLE_FLAGS[@]}"
    "${@:7}"
  )
}
