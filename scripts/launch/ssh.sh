#!/usr/bin/env bash
# Made by this command; --to=FILE saves another:
#   paxlike-launch ssh \
#     --name=synthetic-126m \
#     --hosts=a.example,b.example \
#     --directory=work \
#     --copy=. \
#     '--setup=source .venv/bin/activate' \
#     --fdl_config=Synthetic126M \
#     '--fdl.ICI_MESH_SHAPE=[-1,1,1]' \
#     '--fdl.DCN_MESH_SHAPE=[2,1,1]' \
#     --job_log_dir=/shared/synthetic-126m

# Runs a process on each of HOSTS, and restarts all if one is lost. Ctrl-C or SIGTERM stops them all
# with a checkpoint.
set -u
HOSTS=(a.example b.example)
SSH=(ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=6)
COMMAND='paxlike \
  --fdl_config=Synthetic126M \
  '"'"'--fdl.ICI_MESH_SHAPE=[-1,1,1]'"'"' \
  '"'"'--fdl.DCN_MESH_SHAPE=[2,1,1]'"'"' \
  --job_log_dir=/shared/synthetic-126m \
  --server_addr=a.example:8476 \
  --num_hosts=2'
PREPARATION='cd work || exit 1
source .venv/bin/activate'
PID=/tmp/paxlike-synthetic-126m

start() {  # INDEX HOST
  {
    echo "echo \$\$ > ${PID}-$1.pid"
    echo "${PREPARATION}"
    echo "exec ${COMMAND} --host_idx=$1 < /dev/null"
  } | "${SSH[@]}" "$2" bash -s 2>&1 | sed -u "s/^/$2: /"
}

signal() {  # NAME
  for index in "${!HOSTS[@]}"; do
    "${SSH[@]}" "${HOSTS[index]}" "kill -$1 \$(cat ${PID}-${index}.pid)" 2> /dev/null &
  done
}

stopped=
trap 'stopped=1; signal TERM' INT TERM HUP
for host in "${HOSTS[@]}"; do
  tar -C . -cz . | "${SSH[@]}" "${host}" 'mkdir -p work && tar -C work -xz' || exit 1
done
for ((attempt = 0; ; attempt++)); do
  pids=() status=0
  for index in "${!HOSTS[@]}"; do
    (trap '' INT TERM HUP; set -o pipefail; start "${index}" "${HOSTS[index]}") &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${pid}"; one=$?; kill -0 "${pid}" 2> /dev/null; do :; done
    ((one > status)) && status=${one}
  done
  case "${status}" in 75|134|137|142|143|255) ;; *) exit "${status}" ;; esac
  [ -z "${stopped}" ] && ((attempt < 100)) || exit "${status}"
  echo "a process ended with status ${status}: all are started again, and resume."
  signal KILL
  sleep 10
done
