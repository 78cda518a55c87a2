# SPDX-License-Identifier: Apache-2.0
"""Kernels are placed in the model, and measured times stand beside the roofline's and add up."""

import json
import re

import jax
import pytest
from helpers.program import TINY, run
from helpers.steps import ONE
from helpers.tiny_model import adamw, batch, tiny

from paxlike.compilation import hlo_kernels
from paxlike.compilation.hlo_text import computations
from paxlike.devices import kernel_rates
from paxlike.devices.chips import CHIPS, Chip
from paxlike.devices.kernel_rates import KernelRates
from paxlike.profiling import step_profile
from paxlike.profiling.measurement import Measurement
from paxlike.profiling.trace import Interval
from paxlike.training import train_state
from paxlike.training.train_step import make_train_step


@pytest.mark.parametrize(
  ("source", "scope"),
  [
    ("jit(train_step)/jvp(layer_3)/attention/query/dot_general", "layer_3/attention/query"),
    ("jit(f)/transpose(jvp(layer_3))/mlp/up/cond/branch_0_fun/transpose", "layer_3/mlp/up"),
    (
      "jit(train_step)/jvp(layers)/while/body/closed_call/layers/attention/dot_product_attention"
      "/BKGTS,BSKH->BTKGH/dot_general",
      "layers/attention/dot_product_attention",
    ),
    (
      "jit(train_step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/"
      "rematted_computation/layers/mlp/norm/mul",
      "layers/mlp/norm",
    ),
    ("jit(train_step)/optimizer/jit(_where)/select_n", "optimizer"),
    (
      "jit(f)/jvp(layers)/layers/(attention/key/dot:attention/norm/sum:attention/add)",
      "layers/attention",
    ),
    ("jit(f)/(optimizer/reduce_sum:transpose(jvp(norm))/reduce_sum)", "several"),
    ("jit(train_step)/jvp()/div", ""),
    ("", ""),
  ],
)
def test_scopes_are_found_in_the_names_of_operations(source, scope):
  assert "/".join(step_profile.scope_of(source)) == scope


def program(*, scan: bool) -> str:
  """Returns the compiled text of a step of a tiny model."""
  definition, optimizer = tiny(scan=scan), adamw()
  mesh = ONE.build(jax.devices()[:1])
  with jax.set_mesh(mesh):
    state = train_state.abstract(definition, optimizer, mesh)
    arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in batch().items()}
    step = jax.jit(make_train_step(definition, optimizer, seed=1), donate_argnums=0)
    return step.lower(state, arrays).compile().as_text() or ""


@pytest.mark.parametrize("scan", [False, True])
def test_every_matmul_of_a_model_has_its_place(scan):
  text = program(scan=scan)
  names = [
    re.search(r'op_name="([^"]*)"', one.attributes)
    for lines in computations(text).values()
    for one in lines
    if one.operation == "dot"
  ]
  scopes = {"/".join(step_profile.scope_of(match[1] if match else "")) for match in names}
  layers = ["layers"] if scan else ["layer_0", "layer_1"]
  linears = ("attention/query", "attention/key", "attention/value", "attention/output")
  inside = (*linears, "mlp/up", "mlp/down", "attention/dot_product_attention")
  assert scopes == {"head", *(f"{layer}/{name}" for layer in layers for name in inside)}


PROGRAM = """HloModule jit_train_step, is_scheduled=true

%body (p: (f32[64,64])) -> (f32[64,64]) {
  %p = (f32[64,64]{1,0}) parameter(0)
  %x = f32[64,64]{1,0} get-tuple-element(%p), index=0
  %dot.1 = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(train_step)/jvp(layers)/while/body/closed_call/layers/mlp/up/dot_general"}
  ROOT %t = (f32[64,64]{1,0}) tuple(%dot.1)
}

%cond (p: (f32[64,64])) -> pred[] {
  %p = (f32[64,64]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %t = (f32[64,64]{1,0}) tuple(%x)
  %while.1 = (f32[64,64]{1,0}) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[64,64]{1,0} get-tuple-element(%while.1), index=0
  ROOT %all-reduce.1 = f32[64,64]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%sum
}
"""


def test_measured_times_stand_beside_the_roofline():
  """Two steps on two devices: the loop is a container; the all-reduce is partly hidden."""
  runs = []
  for device in (0, 1):
    for start in (0.0, 10.0):
      runs.append(Interval("while.1", device, start, start + 6))
      runs += [Interval("dot.1", device, start + 2 * i, start + 2 * i + 2) for i in range(3)]
      runs.append(Interval("all-reduce.1", device, start + 5, start + 8))
  chip = Chip(1e9, bandwidth=1e6)
  rates = KernelRates()
  measurement = Measurement(PROGRAM, "", 2, 0.5)
  found = step_profile.combine(measurement, runs, chip=chip, rates=rates, is_measured=True)
  assert (found.seconds, found.idle, found.num_devices) == (9.0, 1.0, 2)
  dot, reduce = found.kernels
  assert (dot.name, dot.kind, dot.count, dot.seconds) == ("dot.1", "matmul", 3, 6.0)
  assert dot.roofline == pytest.approx(3 * max(2 * 64**3 / 1e9, 3 * 4 * 64**2 / 1e6))
  assert (reduce.kind, reduce.count, reduce.seconds, reduce.busy) == ("collectives", 1, 2.0, 3.0)
  assert step_profile.place_of(dot) == "layers/mlp"
  assert found.microseconds == {"dot.1": 2e6, "all-reduce.1": 3e6}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [False, True])
def test_the_page_of_a_step_adds_up(layout, capsys):
  flags = (*TINY, "--mode=profile", f"--fdl.USE_REPEATED_LAYER={layout}", "--json")
  assert run(*flags, "--fdl.ICI_MESH_SHAPE=[4,2,1]", "--fdl.PROFILE_STEPS=[2,4]") == 0
  facts = json.loads(capsys.readouterr().out)
  kernels = facts["kernels"]
  measured = sum(one["seconds"] for one in kernels)
  assert measured + facts["idle"] == pytest.approx(facts["seconds"])
  assert (facts["steps"], facts["num_devices"]) == (3, 8)
  assert facts["peaks_are_measured"] and facts["peak_flops"] > 1e8
  # What ran is what the text of the program says, but for a few small loops, which XLA compiles
  # into one kernel. The roofline counts no reads of the device's id.
  ran = [one for one in kernels if one["count"]]
  assert len(ran) > 0.95 * len(kernels) and all(one["count"] % 1 == 0 for one in ran)
  unknown = {one["name"] for one in kernels if one["roofline"] is None}
  assert all(name.startswith(("partition-id", "while", "call")) for name in unknown)
  places = {one["place"] for one in kernels if one["kind"] == "matmul"}
  assert places == {"layers/attention", "layers/mlp", "head"}
  assert {"attention", "collectives", "memory-bound"} <= {one["kind"] for one in kernels}
  assert {"embedding", "optimizer"} <= {one["place"] for one in kernels}


@pytest.mark.slow
def test_the_page_is_a_table(tmp_path, capsys):
  assert run(*TINY, "--mode=profile", f"--job_log_dir={tmp_path}", "--fdl.NUM_LAYERS=2") == 0
  out = capsys.readouterr().out
  rows = out.partition("by kind\n")[2].partition("\n\n")[0].splitlines()
  *parts, whole = [float(row.split()[0]) for row in rows]
  assert whole == pytest.approx(sum(parts), abs=0.001 * len(parts))
  largest = out.partition("largest kernels\n")[2].strip().splitlines()
  assert len(largest) == 10
  times = [float(row.split()[0]) for row in largest]
  assert times == sorted(times, reverse=True)
  assert list((tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb"))
  assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_totals_are_those_of_the_kernels_page():
  text = program(scan=True)
  chip = CHIPS["H100"]
  measurement = Measurement(text, "", 1, None)
  runs = [Interval("none", 0, 0.0, 1.0)]
  rates = kernel_rates.of_chip(chip)
  found = step_profile.combine(measurement, runs, chip=chip, rates=rates, is_measured=False)
  total = hlo_kernels.total(hlo_kernels.kernels(text, chip))
  assert sum(one.roofline or 0 for one in found.kernels) == pytest.approx(total.seconds)
