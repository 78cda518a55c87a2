# SPDX-License-Identifier: Apache-2.0
# What the scripts here share; sourced by them.

PYTHON="${PYTHON:-python3}"
# Put before what the user's XLA_FLAGS say.
BASE_XLA_FLAGS="${BASE_XLA_FLAGS:---xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false}"
export XLA_FLAGS="${BASE_XLA_FLAGS} ${XLA_FLAGS:-}"

for name in ENABLE_TE ENABLE_FP8 NVTE_FUSED_ATTN; do
  if [ "${!name:-0}" != 0 ]; then
    echo "$0: ${name} has no effect: there is no Transformer Engine here." >&2
  fi
done

# Arguments by which a process of a Slurm job finds the others.
slurm_arguments() {
  echo "--multiprocess_gpu --server_addr=${SLURM_LAUNCH_NODE_IPADDR}:${PORT:-12345}" \
    "--num_hosts=${SLURM_NTASKS} --host_idx=${SLURM_PROCID}"
}
