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
SIGNAL='for ((; wait >= 0; wait--)); do
  read -r pid start < /tmp/paxlike-$(id -u)-scaled-16b-a138a8d3.pid && [ "$(sed '"'"'s/.*) //'"'"' /proc/$pid/stat | cut -d'"'"' '"'"' -f20)" = "$start" ] &&
    kill -${name} $pid && break
  ((wait == 0)) || sleep 1
done'

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
    # A process may be about to start.
    everywhere "name=TERM wait=60; ${SIGNAL}" > /dev/null 2>&1 &
  fi
}

say_what_is_left() {
  local state
  if state="$(queued describe --format='value(state.state)' 2> /dev/null)"; then
    case "${state}" in
      FAILED | SUSPENDED | SUSPENDING)
        echo "the request scaled-16b is ${state}. Delete it, then run this script again to resume:" ;;
      *) echo "the TPUs of scaled-16b are kept (${state}); this script resumes. To delete them:" ;;
    esac
    echo "  gcloud compute tpus queued-resources delete scaled-16b ${WHERE[*]} --force"
  fi >&2
}

pause() {
  sleep 30 &> /dev/null & wait $! || true
}

wait_for_tpus() {
  local state
  until state="$(queued describe --format='value(state.state)')" && [ "${state}" = ACTIVE ]; do
    case "${state}" in FAILED | SUSPENDED) exit 1 ;; esac
    [ -z "${stopped}" ] || exit "${stopped}"
    pause
  done
  [ -z "${stopped}" ] || exit "${stopped}"
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
wait_for_tpus
everywhere 'sudo sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_no_metrics_save=1 net.core.optmem_max=131072 net.core.somaxconn=4096 net.ipv4.tcp_max_syn_backlog=4096
route="$(ip route show default | sed '"'"'s/ rto_min.*//;1q'"'"')"
sudo ip route change ${route} rto_min 5ms
pip install "paxlike[tpu,gcs]"'
for ((attempt = 0; ; attempt++)); do
  running=1
  [ -z "${stopped}" ] || exit "${stopped}"
  everywhere 'echo $$ $(sed '"'"'s/.*) //'"'"' /proc/$$/stat | cut -d'"'"' '"'"' -f20) > /tmp/paxlike-$(id -u)-scaled-16b-a138a8d3.pid || exit 1
exec paxlike \
  --fdl_config=Scaled16BV5e256 \
  '"'"'--fdl.DCN_MESH_SHAPE=[2,1,1]'"'"' \
  --job_log_dir=gs://bucket/scaled-16b' && exit 0 || status=$?
  case "${status}" in 75|134|137|142|143|255) ;; *) break ;; esac
  [ -z "${stopped}" ] && ((attempt < 100)) || break
  running=
  echo "a process ended with status ${status}: all are started again, and resume."
  pause
  wait_for_tpus
  everywhere "name=KILL wait=0; ${SIGNAL}" &> /dev/null || true
done
exit "${status}"
