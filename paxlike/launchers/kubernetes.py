# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: JobSets of GPU or TPU machines (https://jobset.sigs.k8s.io)."""

import dataclasses
import math
import re
from typing import Any

from paxlike.errors import UserError
from paxlike.launchers.job import Job, option
from paxlike.launchers.manifest import to_yaml, without_references
from paxlike.launchers.target import Devices, Target

_PORT = 8476
# Statuses after which a restart does not help: a failure, a mistake of the user, too little memory,
# a program that cannot be run or found.
_FINAL = [1, 2, 3, 126, 127]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubernetes(Target):
  """A JobSet, which restarts all processes if one is lost, and fails on an error of the job.

  On GPUs, each of `nodes` machines is a pod with one process. On TPUs, each of `nodes` slices is an
  indexed job of its own, with a pod for each machine of the slice; GKE sets the variables by which
  they find each other.
  """

  suffix = ".yaml"

  image: str = option("", "container image with paxlike")
  gpus_per_node: int = option(0, "NVIDIA GPUs of each machine")
  tpu: str = option("", "GKE's name of the TPU, such as tpu-v5-lite-podslice")
  tpu_topology: str = option("", "topology of a slice, such as 16x16")
  chips_per_node: int = option(4, "TPU chips of each machine", least=1)
  queue: str = option("", "Kueue's local queue")
  namespace: str = option("", "namespace")
  service_account: str = option("", "service account of the pods, for buckets")
  claim: str = option("", "PersistentVolumeClaim that is mounted at /data")
  grace: int = option(120, "seconds between SIGTERM and SIGKILL")

  def text(self, job: Job) -> str:
    if not self.image:
      raise UserError("k8s needs --image=IMAGE, a container image with paxlike.")
    job.check_log_dir("--image")
    if bool(self.tpu) != bool(self.tpu_topology):
      raise UserError("--tpu and --tpu_topology: set both, or neither.")
    if self.tpu and self.gpus_per_node:
      raise UserError("--gpus_per_node and --tpu: set one of them.")
    for flag, value in (
      ("image", self.image),
      ("queue", self.queue),
      ("namespace", self.namespace),
    ):
      if re.search(r"\s", value):
        raise UserError(f"--{flag}={value}: it has a blank.")
    return to_yaml(self._job_set(job))

  def _job_set(self, job: Job) -> dict[str, Any]:
    slices, pods = (job.nodes, self._pods_per_slice()) if self.tpu else (1, job.nodes)
    metadata: dict[str, Any] = {"name": job.title}
    if self.namespace:
      metadata["namespace"] = self.namespace
    if self.queue:
      metadata["labels"] = {"kueue.x-k8s.io/queue-name": self.queue}
    if self.tpu:
      # A slice is a node pool; none may be shared by two jobs.
      placement = "alpha.jobset.sigs.k8s.io/exclusive-topology"
      metadata["annotations"] = {placement: "cloud.google.com/gke-nodepool"}
    on_exit = {"containerName": "paxlike", "operator": "In", "values": _FINAL}
    workers = {
      "completionMode": "Indexed",
      "completions": pods,
      "parallelism": pods,
      "backoffLimit": 0,
      "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_exit}]},
      "template": {"spec": self._pod(job)},
    }
    rule = {
      "name": "failed",
      "action": "FailJobSet",
      "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
      "apiVersion": "jobset.x-k8s.io/v1alpha2",
      "kind": "JobSet",
      "metadata": metadata,
      "spec": {
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [rule]},
        "replicatedJobs": [{"name": "w", "replicas": slices, "template": {"spec": workers}}],
      },
    }

  def devices(self) -> Devices | None:
    if self.tpu and self.tpu_topology:
      chips = self._chips_per_slice()
      return Devices(chips, f"--tpu_topology={self.tpu_topology}", are_slice=True)
    if self.gpus_per_node:
      return Devices(self.gpus_per_node, f"--gpus_per_node={self.gpus_per_node}")
    return None

  def _chips_per_slice(self) -> int:
    if not re.fullmatch(r"\d+(x\d+){1,2}", self.tpu_topology):
      raise UserError(f"--tpu_topology={self.tpu_topology}: expected sizes such as 16x16 or 2x2x4.")
    return math.prod(map(int, self.tpu_topology.split("x")))

  def _pods_per_slice(self) -> int:
    chips = self._chips_per_slice()
    if chips % min(chips, self.chips_per_node):
      raise UserError(
        f"--tpu_topology={self.tpu_topology} has {chips} chips, not a multiple of"
        f" --chips_per_node={self.chips_per_node}."
      )
    return max(1, chips // self.chips_per_node)

  def _pod(self, job: Job) -> dict[str, Any]:
    variables = {}
    if not self.tpu and job.nodes > 1:
      # JobSet gives pod 0 of replica 0 of job "w" this host name.
      variables["JAX_COORDINATOR_ADDRESS"] = f"{job.title}-w-0-0.{job.title}:{_PORT}"
      variables["JAX_NUM_PROCESSES"] = str(job.nodes)
    devices = {"google.com/tpu": self.chips_per_node} if self.tpu else {}
    if self.gpus_per_node:
      devices["nvidia.com/gpu"] = self.gpus_per_node
    mounts, volumes = {"shm": "/dev/shm"}, [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if self.claim:
      mounts["data"] = "/data"
      volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": self.claim}})
    script = "\n".join([*job.preparation(), f"exec {job.command()}", ""])
    container: dict[str, Any] = {
      "name": "paxlike",
      "image": self.image,
      "command": ["bash", "-c", without_references(script)],
      "env": [{"name": name, "value": value} for name, value in variables.items()],
      "ports": [{"containerPort": _PORT}],
      "resources": {"limits": devices},
      "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    pod: dict[str, Any] = {
      "restartPolicy": "Never",
      "terminationGracePeriodSeconds": self.grace,
      "containers": [container],
      "volumes": volumes,
    }
    if self.service_account:
      pod["serviceAccountName"] = self.service_account
    if self.tpu:
      labels = {"accelerator": self.tpu, "topology": self.tpu_topology}
      pod["nodeSelector"] = {f"cloud.google.com/gke-tpu-{k}": v for k, v in labels.items()}
    return pod

  def submission(self, file: str) -> list[str]:
    return ["kubectl", "create", "-f", file]
