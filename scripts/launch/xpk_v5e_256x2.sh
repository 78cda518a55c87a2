#!/usr/bin/env bash
# Made by this command; --to=FILE saves another:
#   paxlike-launch xpk \
#     --name=scaled-16b \
#     --nodes=2 \
#     --tpu_type=v5litepod-256 \
#     --cluster=mine \
#     --zone=us-east5-a \
#     --create_cluster \
#     --image=registry.example/paxlike:tpu \
#     --fdl_config=Scaled16BV5e256 \
#     '--fdl.DCN_MESH_SHAPE=[2,1,1]' \
#     --job_log_dir=gs://bucket/scaled-16b

set -eu
if ! gcloud compute networks describe mine-network > /dev/null 2>&1; then
  gcloud compute networks create mine-network --mtu=8896 --subnet-mode=auto --bgp-routing-mode=regional
  gcloud compute firewall-rules create mine-network-internal --network=mine-network --allow=tcp,udp,icmp \
    --source-ranges=10.128.0.0/9
fi
xpk cluster create --cluster=mine --zone=us-east5-a --tpu-type=v5litepod-256 --num-slices=2 --on-demand --custom-cluster-arguments='--network=mine-network --subnetwork=mine-network'
xpk workload create --cluster=mine --zone=us-east5-a --workload=scaled-16b --tpu-type=v5litepod-256 --num-slices=2 --docker-image=registry.example/paxlike:tpu --max-restarts=100 --restart-on-exit-codes=75,134,137,142,143 --termination-grace-period-seconds=120 \
  --command='sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_no_metrics_save=1 net.core.optmem_max=131072 net.core.somaxconn=4096 net.ipv4.tcp_max_syn_backlog=4096; route="$$(ip route show default | sed '"'"'s/ rto_min.*//;1q'"'"')"; ip route change ${route} rto_min 5ms; exec paxlike --fdl_config=Scaled16BV5e256 '"'"'--fdl.DCN_MESH_SHAPE=[2,1,1]'"'"' --job_log_dir=gs://bucket/scaled-16b'
