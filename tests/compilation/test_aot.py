# SPDX-License-Identifier: Apache-2.0
"""The step of a run, compiled for a GPU that is not there."""

import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from helpers.program import TINY, run, start

from paxlike import fiddlers, registry, run_mode
from paxlike.compilation import aot, hlo_kernels
from paxlike.devices import chips, xla_flags
from paxlike.devices.kernel_rates import KernelRates

GPU = ("--mode=compile", "--topology=h200-1")


@pytest.mark.slow
def test_the_page_tells_of_memory_and_kernels(capsys):
  bf16 = [flag for flag in TINY if "DTYPE" not in flag]
  assert run(*bf16, *GPU, "--kernels", "--fdl.DIMS_PER_HEAD=8") == 0
  out = capsys.readouterr().out
  assert re.search(r"devices +1 x NVIDIA H200", out)
  assert re.search(r"attention +cudnn\n", out)
  assert re.search(r"memory per device: peak +[\d.]+ [kM]B of 139\.3 GB: fits", out)
  assert re.search(r"attention: __cudnn\$fmhaSoftmaxBackward\n", out)
  groups = out.partition("roofline per device\n")[2].partition("\n\n")[0].splitlines()
  every, *parts = [float(line.split()[0]) for line in groups]
  assert every == pytest.approx(sum(parts), abs=0.003)


@pytest.mark.slow
def test_the_page_of_a_step_for_tpus(capsys):
  """Of two compilers at once, as each holds Google's library for itself by default."""
  flags = (*TINY, "--mode=compile", "--topology=v5e-4", "--fdl.ICI_MESH_SHAPE=[1,2,2]")
  other = start(*flags, "--json")
  assert run(*flags) == 0
  page = capsys.readouterr().out
  facts = json.loads(other.communicate()[0])
  assert other.returncode == 0
  assert "4 x TPU v5 lite: fsdp 2, tensor 2" in page
  assert re.search(r"peak +[\d.]+ MB of 16\.91 GB: fits", page)
  assert re.search(r"all-gather over fsdp\n", page)
  assert facts["fits"] and facts["mesh"]["tensor"] == 2
  assert facts["attention"] == ["splash"]
  assert facts["tokens_per_step"] == 4 * 16
  # A dense model's FLOPs are at least six a parameter and token.
  assert facts["flops_per_step"] > 6 * facts["parameters"] * facts["tokens_per_step"] * 0.9
  assert {row["kind"] for row in facts["collectives"]} >= {"all-gather", "all-reduce"}


@pytest.mark.slow
def test_what_does_not_fit_is_a_verdict_with_what_helps(capsys):
  bf16 = [flag for flag in TINY if "DTYPE" not in flag]
  wide = ("--fdl.NUM_LAYERS=2", "--fdl.MODEL_DIMS=512", "--fdl.HIDDEN_DIMS=2048")
  flags = (*bf16, *wide, "--fdl.MAX_SEQ_LEN=512", "--mode=compile", "--topology=v5e-4")
  assert run(*flags, "--fdl.PERCORE_BATCH_SIZE=4096", "--fdl.ICI_MESH_SHAPE=[1,4,1]") == 3
  captured = capsys.readouterr()
  assert captured.err == ""
  assert re.search(r"peak +[\d.]+ GB of 16\.91 GB: does not fit", captured.out)
  assert "CHECKPOINT_POLICY=SAVE_NOTHING (now SAVE_EVERYTHING)" in captured.out
  assert "GRADIENT_ACCUMULATION_STEPS=2 (now 1)" in captured.out
  assert re.search(r"PERCORE_BATCH_SIZE=\d+ \(now 4096\)", captured.out)
  wide = ("--fdl.MODEL_DIMS=16384", "--fdl.HIDDEN_DIMS=65536")
  assert run(*flags, *wide, "--fdl.ICI_MESH_SHAPE=[4,1,1]") == 3
  out = capsys.readouterr().out
  assert "shard weights and optimizer over more devices" in out
  assert "SHARD_OPTIMIZER_OVER_DATA=True" in out


@pytest.mark.slow
def test_what_helps_in_a_pipeline_is_what_it_says(capsys):
  wide = ("--fdl.NUM_LAYERS=8", "--fdl.MODEL_DIMS=2048", "--fdl.HIDDEN_DIMS=8192")
  mesh = ("--fdl.ICI_MESH_SHAPE=[4,1,1,1]", "--fdl.PERCORE_BATCH_SIZE=64")
  flags = (*TINY, *wide, *mesh, "--fdl.MAX_SEQ_LEN=2048", "--mode=compile", "--topology=v5e-4")
  assert run(*flags, "--fdl.PIPELINE_RECOMPUTE=false") == 3
  out = capsys.readouterr().out
  assert "PIPELINE_RECOMPUTE=True" in out
  assert "NUM_MICROBATCHES=8 (now 4)" in out
  assert "GRADIENT_ACCUMULATION_STEPS" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
  ("topology", "mesh"),
  [("v5e-8", "[2,1,2,2]"), ("h100-2", "[2,1,1,1]")],
)
def test_kernels_of_attention_are_taken_in_the_stages_of_a_pipeline(topology, mesh, capsys):
  bf16 = [flag for flag in TINY if "DTYPE" not in flag]
  sizes = (f"--fdl.ICI_MESH_SHAPE={mesh}", "--fdl.NUM_LAYERS=2", "--fdl.DIMS_PER_HEAD=128")
  assert run(*bf16, *sizes, "--mode=compile", f"--topology={topology}") == 0
  out = capsys.readouterr().out
  assert "collective-permute over pipeline" in out
  assert "count the embedding and the loss in every tick" in out


@pytest.mark.slow
def test_experts_are_chosen_in_stages_on_devices_that_are_not_in_order():
  flags = ("--fdl_config=GptOss20B", "--fiddler=shrink", "--fdl.ICI_MESH_SHAPE=[2,2,1,2]")
  assert run(*flags, "--mode=compile", "--topology=v5e-8") == 0


def test_what_a_compiler_asks_for_is_all_that_it_needs():
  message = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries"
    " (48.00G) exceeds available HBM (15.75G)."
  )
  assert aot._asked_for(message, 2**30) == (2**30, 47 * 2**30, 48 * 2**30)
  assert aot._asked_for("INTERNAL: something else", 2**30) is None


@pytest.mark.parametrize(("share", "fits"), [("", False), ("0.9", False), ("0.95", True)])
def test_what_fits_a_gpu_is_what_fits_the_share_that_programs_have(monkeypatch, share, fits):
  chip = chips.CHIPS["H200"]
  nothing: Any = object()
  memory = aot.ProgramMemory(0, 0, int(0.94 * chip.memory))
  for name in chips.SHARE_NAMES:
    monkeypatch.setenv(name, share)
  program = aot.Program(
    step=nothing, memory=memory, seconds=0, chip=chip, devices=nothing, tokens=0, flops=0
  )
  assert program.fits is fits


@pytest.mark.slow
def test_every_product_of_a_block_is_in_8_bits_and_no_other(h200):
  knobs = {"USE_REPEATED_LAYER": True, "CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
  graph = registry.find("SyntheticLLaMA7B")(QUANTIZATION="fp8_delayed", **knobs).trainer()
  fiddlers.shrink(graph)
  trainer = run_mode.build_trainer(graph)
  program = aot.compile_step(trainer)
  flops = {group: one.flops for group, one in hlo_kernels.grouped(program.kernels(), "group")}
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
    (("--mode=compile", "--kernels"), "has none of cpu: give a --topology such as h200-1"),
    (("--mode=compile", "--slices=2"), "--slices=2 goes with --topology"),
    (("--mode=compile", "--slices=2", "--topology=h200-8"), "TPUs come in slices"),
    ((*GPU, "--fdl.ICI_MESH_SHAPE=[2,1,1]"), "needs 2 devices"),
    ((*GPU, "--fdl.GRADIENT_ACCUMULATION_STEPS=3"), "GRADIENT_ACCUMULATION_STEPS"),
  ],
)
def test_mistakes_are_said(flags, says, capsys):
  assert run(*TINY, *flags) == 2
  assert says in capsys.readouterr().err


def test_options_that_this_jax_does_not_know_are_left_out(h200, monkeypatch):
  monkeypatch.setattr(xla_flags, "ONE_GPU", xla_flags.ONE_GPU | {"xla_gpu_graph_level": 2})
  known, dropped = xla_flags.options()
  assert dropped == ["xla_gpu_graph_level"]
  assert known == {"xla_gpu_enable_triton_gemm": False}


def test_where_there_is_no_gpu_that_is_no_error():
  environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
  command = [sys.executable, "-m", "paxlike.main", "--fdl_config=Gpt3_52k", "--mode=show"]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
  assert done.stderr == ""


# Milliseconds of a step on an H200 at these rates, and GB that it needs besides what it is given;
# of a few layers; JAX 0.10.2.
RATES = KernelRates(
  matmul=0.71,
  matmul_8_bits=0.63,
  matmul_f32=0.8,
  attention=0.6,
  attention_backward=0.48,
  narrow=0.75,
  bandwidth=0.9,
  launch=2e-6,
)
RECORDED = {
  ("Synthetic5B", "PERCORE_BATCH_SIZE=8 NUM_LAYERS=2 USE_FP8=true"): (79.4, 7.5),
  (
    "SyntheticLLaMA7B",
    "PERCORE_BATCH_SIZE=4 NUM_LAYERS=2 USE_FP8=true WEIGHT_DTYPE=bfloat16 "
    "ADAM_MOMENT_DTYPE=bfloat16",
  ): (69.1, 5.9),
  ("SyntheticLLaMA7B", "PERCORE_BATCH_SIZE=2 NUM_LAYERS=2 USE_LORA=true LORA_RANK=32"): (32.6, 2.6),
  ("Synthetic126M", "PERCORE_BATCH_SIZE=32 NUM_LAYERS=2"): (41.6, 7.3),
}
# Such as gradients of biases, and of embedded tokens.
SUM_IN_BFLOAT16 = re.compile(r" = bf16\[.* (reduce|scatter)\(.*op_name=.*(reduce_sum|scatter-add)")
# cuBLAS writes a gradient in an order that optimizers would have to transpose.
TRANSPOSED_GRADIENT = re.compile(r"cublas-gemm[.\d]* = \(\w+\[[\d,]+\]\{0,1\}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "knobs"), RECORDED)
def test_no_step_takes_longer_than_it_did(h200, name, knobs):
  experiment = registry.find(name)()
  for setting in f"{knobs} CHECKPOINT_POLICY=SAVE_EVERYTHING USE_REPEATED_LAYER=false".split():
    knob, _, text = setting.partition("=")
    experiment.set(knob, text, source="test")
  trainer = run_mode.build_trainer(experiment.trainer())
  program = aot.compile_step(trainer)
  assert not SUM_IN_BFLOAT16.search(program.text)
  assert not TRANSPOSED_GRADIENT.search(program.text)
  assert program.chip is not None
  found = hlo_kernels.kernels(program.text, program.chip, RATES)
  sums = {group: one.seconds for group, one in hlo_kernels.grouped(found, "group")}
  milliseconds, temporaries = RECORDED[name, knobs]
  assert hlo_kernels.total(found).seconds < 1.02e-3 * milliseconds
  assert program.memory.temporaries < 1.02e9 * temporaries
  assert "attention" in sums and "matmul tf32" not in sums
  if "FP8" not in knobs:  # There operands are also laid out anew, for the gradients.
    assert sums.get("transpose", 0.0) < 0.01 * sum(sums.values())
