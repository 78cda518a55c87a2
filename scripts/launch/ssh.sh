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
NOTE='echo $$ $(sed '"'"'s/.*) //'"'"' /proc/$$/stat | cut -d'"'"' '"'"' -f20) > /tmp/paxlike-$(id -u)-synthetic-126m-f62eaf07-${index}.pid || exit 1'
SIGNAL='for ((; wait >= 0; wait--)); do
  read -r pid start < /tmp/paxlike-$(id -u)-synthetic-126m-f62eaf07-${index}.pid && [ "$(sed '"'"'s/.*) //'"'"' /proc/$pid/stat | cut -d'"'"' '"'"' -f20)" = "$start" ] &&
    kill -${name} $pid && break
  ((wait == 0)) || sleep 1
done'

start() {  # INDEX HOST
  {
    echo "index=$1"
    echo "${NOTE}"
    echo "${PREPARATION}"
    echo "exec ${COMMAND} --host_idx=$1 < /dev/null"
  } | "${SSH[@]}" "$2" bash -s 2>&1 | sed -u "s/^/$2: /"
}

signal() {  # NAME SECONDS
  for index in "${!HOSTS[@]}"; do
    "${SSH[@]}" "${HOSTS[index]}" bash -s &> /dev/null \
      <<< "index=${index} name=$1 wait=$2; ${SIGNAL}" &
  done
}

stopped='' running=''
stop() {  # STATUS
  stopped=$1
  # A process may be about to start.
  [ -z "${running}" ] || signal TERM 60
}

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
for host in "${HOSTS[@]}"; do
  tar -C . -cz . | "${SSH[@]}" "${host}" 'mkdir -p work && tar -C work -xz' || exit "${stopped:-1}"
  [ -z "${stopped}" ] || exit "${stopped}"
done
for ((attempt = 0; ; attempt++)); do
  pids=() status=0 running=1
  [ -z "${stopped}" ] || exit "${stopped}"
  for index in "${!HOSTS[@]}"; do
    (trap '' INT TERM HUP; set -o pipefail; start "${index}" "${HOSTS[index]}") &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${pid}"; one=$?; kill -0 "${pid}" 2> /dev/null; do :; done
    ((one > status)) && status=${one}
  done
  running=
  case "${status}" in 75|134|137|142|143|255) ;; *) exit "${status}" ;; esac
  [ -z "${stopped}" ] && ((attempt < 100)) || exit "${status}"
  echo "a process ended with status ${status}: all are started again, and resume."
  signal KILL 0
  wait
  [ -n "${stopped}" ] || { sleep 10 &> /dev/null & wait $!; }
done
