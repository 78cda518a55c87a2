# SPDX-License-Identifier: Apache-2.0
"""The step of a run, compiled for a GPU that is not there."""

import math
import os
import re
import subprocess
import sys
from typing import Any

import fiddle as fdl
import pytest
from program import TINY, run

from paxlike import aot, fiddlers, kernels, registry
from paxlike.scripts_gpu import xla_flags

GPU = ("--mode=compile", "--topology=h200-1")


@pytest.mark.slow
def test_the_page_tells_of_memory_and_kernels(capsys):
  bf16 = [flag for flag in TINY if "DTYPE" not in flag]
  assert run(*bf16, *GPU, "--kernels", "--fdl.DIMS_PER_HEAD=8") == 0
  out = capsys.readouterr().out
  assert re.search(r"devices +1 x NVIDIA H200", out)
  assert re.search(r"memory per device: all +[\d.]+ [kM]B of 151\.4 GB: fits", out)
  assert re.search(r"attention: __cudnn\$fmhaSoftmaxBackward\n", out)
  groups = out.partition("roofline of each device\n")[2].partition("\n\n")[0].splitlines()
  every, *parts = [float(line.split()[0]) for line in groups]
  assert every == pytest.approx(sum(parts), abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Synthetic126M", "SyntheticLLaMA7B"])
def test_every_product_of_a_block_is_in_8_bits_and_no_other(h200, name):
  knobs = {"USE_REPEATED_LAYER": False, "CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
  graph = registry.find(name)(USE_FP8=True, **knobs).trainer()
  fiddlers.shrink(graph)
  trainer: Any = fdl.build(graph)
  trainer.compiler_options, _ = xla_flags.options()
  program = aot.compile_step(trainer)
  flops = {group: one.flops for group, one in kernels.grouped(program.kernels(), "group")}
  sizes = {key: math.prod(spec.shape) for key, spec in trainer.definition.weights.items()}
  blocks = sum(size for key, size in sizes.items() if key.endswith(".w") and "stack" in key)
  head = sizes["head.w"] if "head.w" in sizes else sizes["embedding.table"]
  # Once forward and twice backward, a multiplication and an addition each.
  assert flops["matmul fp8"] == 6 * program.tokens * blocks
  assert flops["matmul"] == 6 * program.tokens * head
  assert "attention" in flops


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (("--mode=compile", "--topology=h201-1"), "Did you mean h"),
    (("--mode=train", "--topology=h200-1", "--job_log_dir=x"), "--topology goes with"),
    (("--mode=train", "--kernels", "--job_log_dir=x"), "--kernels goes with --mode=compile"),
    ((*GPU, "--fdl.ICI_MESH_SHAPE=[2,1,1]"), "needs 2 devices"),
    ((*GPU, "--fdl.GRADIENT_ACCUMULATION_STEPS=3"), "GRADIENT_ACCUMULATION_STEPS"),
  ],
)
def test_mistakes_are_said(flags, says, capsys):
  assert run(*TINY, *flags) == 2
  assert says in capsys.readouterr().err


def test_options_that_this_jax_does_not_know_are_left_out(h200, monkeypatch):
  monkeypatch.setattr(xla_flags, "SINGLE", xla_flags.SINGLE | {"xla_gpu_graph_level": 2})
  known, dropped = xla_flags.options()
  assert dropped == ["xla_gpu_graph_level"]
  assert known == {"xla_gpu_enable_triton_gemm": False}


def test_where_there_is_no_gpu_that_is_no_error():
  environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  command = [sys.executable, "-m", "paxlike.main", "--fdl_config=Gpt3_52k", "--mode=show"]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  assert done.stderr == ""


def test_cpus_have_no_options():
  assert xla_flags.options() == ({}, [])


# Milliseconds of a step on an H200 by the roofline, of whole models or of two layers; JAX 0.10.2.
RECORDED = {
  ("Synthetic126M", "PERCORE_BATCH_SIZE=32"): 117.4,
  ("Synthetic5B", "PERCORE_BATCH_SIZE=8 NUM_LAYERS=2"): 100.8,
  ("Synthetic5B", "PERCORE_BATCH_SIZE=8 NUM_LAYERS=2 USE_FP8=true"): 81.1,
  ("SyntheticLLaMA7B", "PERCORE_BATCH_SIZE=2 NUM_LAYERS=2"): 49.7,
  ("SyntheticLLaMA7B", "PERCORE_BATCH_SIZE=2 NUM_LAYERS=2 USE_LORA=true LORA_RANK=32"): 32.8,
}
# Such as gradients of biases, and of embedded tokens.
SUM_IN_BFLOAT16 = re.compile(r" = bf16\[.* (reduce|scatter)\(.*op_name=.*(reduce_sum|scatter-add)")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "knobs"), RECORDED)
def test_no_step_takes_longer_than_it_did(h200, name, knobs):
  experiment = registry.find(name)()
  for setting in f"{knobs} CHECKPOINT_POLICY=SAVE_EVERYTHING USE_REPEATED_LAYER=false".split():
    knob, _, text = setting.partition("=")
    experiment.set(knob, text, source="test")
  trainer: Any = fdl.build(experiment.trainer())
  trainer.compiler_options, _ = xla_flags.options()
  program = aot.compile_step(trainer)
  assert not SUM_IN_BFLOAT16.search(program.step.as_text() or "")
  found = program.kernels()
  sums = {group: one.seconds for group, one in kernels.grouped(found, "group")}
  assert kernels.total(found).seconds < 1.02e-3 * RECORDED[name, knobs]
  assert "matmul tf32" not in sums
  if "FP8" not in knobs:  # There operands are also laid out anew, for the gradients.
    assert sums["transpose"] < 0.01 * sum(sums.values())
