#!/usr/bin/env bash
# Made by this command; --to=FILE saves another:
#   paxlike-launch gce \
#     --name=scaled-16b \
#     --nodes=2 \
#     --accelerator_type=v5litepod-256 \
#     --runtime_version=v2-alpha-tpuv5-lite \
#     --zone=us-east5-a \
#     --network=wide \
#     --create_network \
#     '--install=pip install "paxlike[tpu,gcs]"' \
#     --fdl_config=Scaled16BV5e256 \
#     '--fdl.DCN_MESH_SHAPE=[2,1,1]' \
#     --job_log_dir=gs://bucket/scaled-16b

# Requests TPUs unless it has, waits for them, and runs a process on each of their machines.
# Ctrl-C, SIGTERM or SIGHUP stops all processes with a checkpoint. The TPUs are kept.
set -eu
WHERE=(--zone=us-east5-a)
SLICES=(scaled-16b-0 scaled-16b-1)
PID=/tmp/paxlike-scaled-16b.pid

queued() {  # COMMAND FLAG...
  gcloud compute tpus queued-resources "$1" scaled-16b "${WHERE[@]}" "${@:2}"
}

everywhere() {  # COMMAND
  local pids=() status=0 one
  set -m  # In process groups of their own, which Ctrl-C does not reach.
  for slice in "${SLICES[@]}"; do
    gcloud compute tpus tpu-vm ssh "${slice}" "${WHERE[@]}" --worker=all --command="$1" \
      < /dev/null &
    pids+=($!)
  done
  set +m
  for pid in "${pids[@]}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${pid}" && one=0 || one=$?; kill -0 "${pid}" 2> /dev/null; do :; done
    if ((one > status)); then status=${one}; fi
  done
  return "${status}"
}

stopped='' running=''
stop() {  # STATUS
  stopped=$1
  echo "stopping${running:+: all processes save a checkpoint and end}." >&2
  if [ -n "${running}" ]; then
    # A process that is about to start has not written its number yet.
    everywhere "for ((i = 0; i < 60; i++)); do
      [ ! -s ${PID} ] || exec kill -TERM \$(cat ${PID}); sleep 1
    done" > /dev/null 2>&1 &
  fi
}

say_what_is_left() {
  local state
  if state="$(queued describe --format='value(state.state)' 2> /dev/null)"; then
    echo "the TPUs of scaled-16b are kept (${state}); this script resumes the run. To delete them:"
    echo "  gcloud compute tpus queued-resources delete scaled-16b ${WHERE[*]} --force"
  fi >&2
}

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
trap say_what_is_left EXIT
if ! gcloud compute networks describe wide > /dev/null 2>&1; then
  gcloud compute networks create wide --mtu=8896 --subnet-mode=auto --bgp-routing-mode=regional
  gcloud compute firewall-rules create wide-internal --network=wide --allow=tcp,udp,icmp \
    --source-ranges=10.128.0.0/9
fi
queued describe > /dev/null 2>&1 || queued create --accelerator-type=v5litepod-256 --runtime-version=v2-alpha-tpuv5-lite --node-count=2 --node-prefix=scaled-16b --network=wide
until state="$(queued describe --format='value(state.state)')" && [ "${state}" = ACTIVE ]; do
  case "${state}" in FAILED | SUSPENDED) echo "the request is ${state}" >&2; exit 1 ;; esac
  [ -z "${stopped}" ] || exit "${stopped}"
  sleep 30 &> /dev/null & wait $! || true
done
[ -z "${stopped}" ] || exit "${stopped}"
everywhere 'rm -f /tmp/paxlike-scaled-16b.pid
sudo sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_no_metrics_save=1 \
  net.core.optmem_max=131072 net.core.somaxconn=4096 net.ipv4.tcp_max_syn_backlog=4096
route="$(ip route show default | sed '"'"'s/ rto_min.*//;1q'"'"')"
sudo ip route change ${route} rto_min 5ms
pip install "paxlike[tpu,gcs]"'
for ((attempt = 0; attempt <= 100; attempt++)); do
  [ -z "${stopped}" ] || exit "${stopped}"
  running=1
  everywhere 'echo $$ > /tmp/paxlike-scaled-16b.pid
exec paxlike \
  --fdl_config=Scaled16BV5e256 \
  '"'"'--fdl.DCN_MESH_SHAPE=[2,1,1]'"'"' \
  --job_log_dir=gs://bucket/scaled-16b' && exit 0 || status=$?
  case "${status}" in 75|134|137|142|143|255) ;; *) break ;; esac
  [ -z "${stopped}" ] || break
  echo "a process ended with status ${status}: all are started again, and resume."
  everywhere "kill -KILL \$(cat ${PID}) 2> /dev/null; rm -f ${PID}" || true
done
exit "${status}"
