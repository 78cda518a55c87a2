# SPDX-License-Identifier: Apache-2.0
"""Processes of a job, and restarts of it, make the same program of a step."""

import os
import subprocess
import sys

import pytest
from helpers.sources import REPOSITORY

SIZES = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 32, "NUM_HEADS": 2, "DIMS_PER_HEAD": 16}
SIZES |= {"VOCAB_SIZE": 64, "MAX_SEQ_LEN": 16, "PERCORE_BATCH_SIZE": 4}
EXPERTS = {"NUM_KV_HEADS": 2, "EXPERT_DIMS": "none", "NUM_EXPERTS": 4, "WINDOW": 8}
CODE = """
import sys, jax
from paxlike import root_graph, run_mode
from paxlike.cli import command_line, startup

options = command_line.parse(sys.argv)
startup.set_up_jax(options)
trainer = run_mode.build_trainer(root_graph.of(options, root_graph.experiment_of(options)))
with jax.set_mesh(trainer.devices):
  print(trainer.lower(*trainer.abstract()).as_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("experiment", "knobs"),
  [
    ("Synthetic126M", {"ICI_MESH_SHAPE": "{'pipeline':2,'data':2,'context':2}"}),
    ("GptOss20B", EXPERTS | {"ICI_MESH_SHAPE": "{'data':2,'expert':2,'context':2}"}),
  ],
)
def test_the_order_of_sets_is_not_in_it(experiment, knobs):
  """Each process has its own hashes of names, unless PYTHONHASHSEED is set."""
  flags = [f"--fdl.{name}={value}" for name, value in (SIZES | knobs).items()]
  command = [sys.executable, "-c", CODE, f"--fdl_config={experiment}", "--mode=compile", *flags]
  environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_NUM_CPU_DEVICES": "8"}
  texts = [
    subprocess.check_output(command, env=environ | {"PYTHONHASHSEED": seed}, text=True)
    for seed in ("1", "2")
  ]
  assert "all_reduce" in texts[0]
  assert texts[0] == texts[1]
