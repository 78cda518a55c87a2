# SPDX-License-Identifier: Apache-2.0
"""Manifests of `paxlike-launch k8s` are JobSets by the schema that its authors publish."""

from typing import Any

import jsonschema
import pytest
import yaml
from helpers.job_set_schema import published
from helpers.pods import expanded

from paxlike.launchers import main
from paxlike.processes import cluster

RUN = ("--fdl_config=Pile126M", "--job_log_dir=gs://bucket/run", "--fdl.PERCORE_BATCH_SIZE=4")
GPUS = ("--image=registry/paxlike", "--gpus_per_node=8")
SLICES = ("--image=registry/paxlike", "--tpu=tpu-v5-lite-podslice", "--tpu_topology=16x16")


def manifest(capsys: pytest.CaptureFixture, *flags: str) -> Any:
  assert main.run(["k8s", *flags, *RUN]) == 0
  return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
  "flags",
  [
    GPUS,
    (*GPUS, "--nodes=16", "--queue=team", "--namespace=ml", "--claim=data", "--setup=a\nb"),
    (*GPUS, "--service_account=writer", "--env=NCCL_DEBUG=INFO", "--max_restarts=0"),
    (*SLICES, "--nodes=2", "--queue=team"),
  ],
)
def test_manifests_are_job_sets(flags, capsys):
  made = manifest(capsys, *flags)
  jsonschema.validate(made, published())
  made["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
  with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
    jsonschema.validate(made, published())


def test_pods_find_each_other(capsys):
  """By the names that JobSet gives pods: JOBSET-JOB-REPLICA-INDEX.JOBSET."""
  made = manifest(capsys, *GPUS, "--nodes=16")
  jobs = made["spec"]["replicatedJobs"]
  pod = jobs[0]["template"]["spec"]["template"]["spec"]
  environ = {pair["name"]: pair["value"] for pair in pod["containers"][0]["env"]}
  group = cluster.detect(environ | {"JOB_COMPLETION_INDEX": "7"}, lambda: 8)
  name = made["metadata"]["name"]
  assert group == cluster.ProcessGroup(f"{name}-{jobs[0]['name']}-0-0.{name}:8476", 16, 7)
  assert len(f"{name}-{jobs[0]['name']}-0-15") <= 63


def test_a_slice_is_a_job_with_a_pod_for_each_machine(capsys):
  made = manifest(capsys, *SLICES, "--nodes=2")
  (job,) = made["spec"]["replicatedJobs"]
  workers = job["template"]["spec"]
  assert (job["replicas"], workers["completions"], workers["parallelism"]) == (2, 64, 64)
  (container,) = workers["template"]["spec"]["containers"]
  assert container["resources"]["limits"] == {"google.com/tpu": 4}
  assert container["env"] == []


def test_the_shell_gets_the_script_as_it_is(capsys):
  setup = "echo $$ $$$ $(HOME) $$(HOME) $(echo $$) ${HOME} $"
  made = manifest(capsys, *GPUS, f"--setup={setup}")
  (workers,) = made["spec"]["replicatedJobs"]
  (container,) = workers["template"]["spec"]["template"]["spec"]["containers"]
  assert expanded(container["command"][2], {"HOME": "/root"}).splitlines()[0] == setup


def test_a_job_that_saves_nothing_is_not_restarted(capsys):
  def limit(*flags: str) -> int:
    return manifest(capsys, *GPUS, *flags)["spec"]["failurePolicy"]["maxRestarts"]

  assert (limit(), limit("--max_restarts=3")) == (100, 3)
  assert limit("--enable_checkpoint_saving=${SAVE:-false}") == 0
  assert limit("--enable_checkpoint_saving=false", "--max_restarts=3") == 3


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ((), "k8s needs --image=IMAGE"),
    (("--image=a b",), "--image=a b: it has a blank"),
    ((*GPUS, "--tpu=tpu-v5p-slice"), "--tpu and --tpu_topology: set both"),
    ((*GPUS, *SLICES), "--gpus_per_node and --tpu: set one"),
    ((*SLICES, "--tpu_topology=16"), "expected sizes such as 16x16"),
    ((*SLICES, "--tpu_topology=3x3"), "has 9 chips, not a multiple of --chips_per_node=4"),
    ((*GPUS, "--job_log_dir=runs/x"), "is relative, and lost with the container of --image"),
    ((*GPUS, "--env=A"), "--env=A: expected NAME=VALUE"),
    ((*GPUS, "--nodes=0"), "--nodes=0: expected at least 1"),
    ((*GPUS, "--node=2"), "unknown flag --node. Did you mean --nodes?"),
    ((*GPUS, "--nodes=two"), "invalid int value: 'two'"),
    ((*GPUS, "--fdl.MAX_STEP=${STEPS}"), "no knob MAX_STEP in Pile126M. Did you mean MAX_STEPS?"),
  ],
)
def test_mistakes_are_named(flags, message, capsys):
  assert main.run(["k8s", *RUN, *flags]) == 2
  captured = capsys.readouterr()
  assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
