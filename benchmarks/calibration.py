# SPDX-License-Identifier: Apache-2.0
"""Predicts by `paxlike.planning.cost_model` the published step times, and prints the errors.

  python benchmarks/calibration.py

A row is a model (an experiment of paxlike, with knobs), chips, a mesh, a batch, and what its source
says of the time. Nothing is fitted to a row. Each family of chips has one number, the share of data
sheets' rates that programs reach (`cost_model.ACHIEVED`): the median over its rows of the predicted
time at those rates by the published one. So half of a family's rows err to each side by
construction, and what the errors tell is how far rows of other models, meshes, batches and
precisions lie from that median. Three rules were chosen when the rows had been seen: that sums over
tensor go on beside products on TPUs, that what goes from layer to layer is cut over tensor, as it
is in MaxText, and that attention that is not fused moves 8 bytes a score. The programs are those of
the sources, not paxlike's.

Sources:
- v5e, v5p: README and pages of MaxText at the end of 2024: TFLOP/s or MFU, with attention over all
  pairs of tokens. Left out: 1160B, whose sizes are nowhere, and the README's row of 1024B on
  v5p-2048, which contradicts itself; the other page's is here.
- Llama 2 70B: NVIDIA's recipe with the container maxtext-2024-12-09, its table of step times. The
  recipe does not say what is recomputed; MaxText's models/gpu/llama2_70b.yml says everything.
- Pax: the README of its GPU recipes, sequences/s. With Transformer Engine (TE) attention is fused,
  but for 126M on H100, whose row says that it is not; without TE it is not.
- JaxPP: the README of its MaxText fork. All stages but the last recompute their layers, which is
  taken for all. The row whose GPU has no name is left out.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")

import fiddle as fdl

from paxlike import registry
from paxlike.devices.mesh import AXES
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning import cost_model, model_sizes
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.telemetry import formatting

NOTHING, DOTS = Remat.SAVE_NOTHING, Remat.SAVE_DOT_WITH_NO_BATCH_DIM
EVERYTHING = Remat.SAVE_EVERYTHING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """What was published.

  Attributes:
    name: Of the row.
    experiment: Of the model.
    knobs: Of the experiment.
    kind: Of the chips.
    within: How many are in a slice or node; the rest of the mesh is across.
    mesh: Axis -> size.
    batch: Sequences of a step.
    remat: See `Configuration`.
    pipeline: See there.
    residual_over_tensor: See there.
    fused_attention: See `ModelSizes`.
    seconds: Of a step, published or from what was published.
  """

  name: str
  experiment: str
  knobs: tuple[tuple[str, Any], ...] = ()
  kind: str
  within: int
  mesh: tuple[tuple[str, int], ...]
  batch: int
  remat: Remat
  pipeline: Pipeline | None = None
  residual_over_tensor: bool = True
  fused_attention: bool = True
  seconds: float | None = None
  tflops: float | None = None

  @property
  def configuration(self) -> Configuration:
    """How it was computed: of the axes, fast to slow, what a slice or node has room for."""
    ici, dcn, room = [], [], self.within
    for axis in reversed(AXES):
      size = dict(self.mesh).get(axis, 1)
      inner = min(size, room)
      assert size % inner == 0 and room % inner == 0
      room //= inner
      ici.append(inner)
      dcn.append(size // inner)
    return Configuration(
      ici=tuple(reversed(ici)),
      dcn=tuple(reversed(dcn)),
      batch=self.batch,
      remat=self.remat,
      pipeline=self.pipeline,
      reduced_once=True,
      residual_over_tensor=self.residual_over_tensor,
    )

  @property
  def published(self) -> float:
    """Seconds of a step."""
    if self.seconds is not None:
      return self.seconds
    assert self.tflops is not None
    model = model_of(self)
    work = model.flops.full * model.seq_len * self.batch
    return work / self.configuration.num_devices / (self.tflops * 1e12)


def _scaled() -> list[Row]:
  rows = []
  # Batch a chip, then TFLOP/s on 1, 2, 4, ... slices.
  v5e = {
    "16": (6, (120, 117, 117, 115, 111, 108)),
    "32": (4, (132, 128, 126, 125, 123, 119)),
    "64": (2, (118, 112, 110, 108, 105, 99)),
    "128": (1, (110, 110, 108, 104, 100, 91)),
  }
  for scale, (batch, rates) in v5e.items():
    cut = (("fsdp", 16), ("tensor", 16)) if scale == "128" else (("fsdp", 256),)
    for power, rate in enumerate(rates):
      slices = 2**power
      rows.append(
        Row(
          name=f"MaxText {scale}B, {slices} x v5e-256",
          experiment=f"Scaled{scale}B",
          kind="TPU v5 lite",
          within=256,
          mesh=(*cut, ("data", slices)),
          batch=256 * slices * batch,
          remat=NOTHING,
          tflops=rate,
        )
      )
  # Chips, tensor, batch a chip, remat, MFU in % on one slice and on two.
  v5p = {
    "32": [(64, 4, 6, DOTS, 71.47, 69.43)],
    "64": [(64, 4, 3, DOTS, 70.31, 67.26)],
    "128": [(128, 8, 1, DOTS, 68.68, None), (256, 8, 1, DOTS, 68.53, None)],
    "256": [(512, 8, 1, DOTS, 67.09, 62.99)],
    "512": [(512, 8, 2, NOTHING, 63.99, 61.45)],
    "1024": [(1024, 16, 2, NOTHING, 55.35, None), (2048, 16, 2, NOTHING, 64.80, 60.83)],
  }
  for scale, found in v5p.items():
    for chips, tensor, batch, remat, *shares in found:
      for slices, share in enumerate(shares, 1):
        if share is None:
          continue
        rows.append(
          Row(
            name=f"MaxText {scale}B, {slices} x v5p-{2 * chips}",
            experiment=f"Scaled{scale}B",
            kind="TPU v5",
            within=chips,
            mesh=(("data", slices), ("fsdp", chips // tensor), ("tensor", tensor)),
            batch=chips * slices * batch,
            remat=remat,
            tflops=4.59 * share,
          )
        )
  return rows


def _llama() -> list[Row]:
  times = {
    64: (6.999, 4.324),
    128: (7.072, 4.556),
    256: (7.153, 4.959),
    512: (7.091, 5.043),
    1024: (7.084, 5.062),
    2048: (7.066, 4.93),
  }
  return [
    Row(
      name=f"MaxText Llama 2 70B {'FP8' if in_8_bits else 'BF16'}, {gpus} H100",
      experiment="SyntheticLLaMA70B",
      knobs=(("USE_FP8", in_8_bits),),
      kind="H100",
      within=8,
      mesh=(("fsdp", gpus),) if gpus <= 256 else (("data", gpus // 128), ("fsdp", 128)),
      batch=2 * gpus,
      remat=NOTHING,
      seconds=seconds,
    )
    for in_8_bits in (False, True)
    for gpus, of_kinds in times.items()
    for seconds in (of_kinds[in_8_bits],)
  ]


def _pax() -> list[Row]:
  rows = []

  def add(name: str, experiment: str, gpus: int, batch: float, rate: float, **more: Any):
    cut = "data" if "126M" in name else "fsdp"
    kind = "A100" if "A100" in name else "H100"
    defaults = {"remat": EVERYTHING, "fused_attention": " TE" in name}
    rows.append(
      Row(
        name=f"Pax {name}",
        experiment=experiment,
        kind=kind,
        within=8,
        mesh=((cut, gpus),),
        batch=int(batch * gpus),
        seconds=batch * gpus / rate,
        **{**defaults, **more},
      )
    )

  add("126M BF16, 64 A100", "Synthetic126M", 64, 4, 2098.16)
  add("126M TE BF16, 64 A100", "Synthetic126M", 64, 4, 2526.72)
  add("5B BF16, 256 A100", "Synthetic5B", 256, 8, 594.13, remat=DOTS)
  add("5B TE BF16, 256 A100", "Synthetic5B", 256, 8, 718.19, remat=DOTS)
  add("175B TE BF16, 256 A100", "Synthetic175B", 256, 6, 20.44, remat=NOTHING)
  add("126M TE BF16, 64 H100", "Synthetic126M", 64, 4, 4709.12, fused_attention=False)
  add("5B TE BF16, 256 H100", "Synthetic5B", 256, 8, 1657.24, remat=DOTS)
  fp8 = (("USE_FP8", True),)
  add("5B TE FP8, 256 H100", "Synthetic5B", 256, 8, 2374.66, remat=DOTS, knobs=fp8)
  add("175B TE BF16, 256 H100", "Synthetic175B", 256, 6, 51.00, remat=NOTHING)
  add("175B TE FP8, 256 H100", "Synthetic175B", 256, 6, 84.45, remat=NOTHING, knobs=fp8)
  llama, lora = "SyntheticLLaMA7B", (("USE_LORA", True), ("LORA_RANK", 32))
  add("SFT 7B BF16, 16 H100", llama, 16, 2, 43.24)
  add("SFT 7B TE BF16, 16 H100", llama, 16, 2, 53.69)
  add("LoRA 7B TE BF16, 2 a GPU, 16 H100", llama, 16, 2, 63.2, knobs=lora)
  add("LoRA 7B TE BF16, 1 a GPU, 16 H100", llama, 16, 1, 56.0, knobs=lora)
  add("LoRA 7B BF16, 2 a GPU, 16 H100", llama, 16, 2, 43.8, knobs=lora)
  return rows


def _jaxpp() -> list[Row]:
  pipeline = Pipeline(
    schedule="interleaved_1f1b", stages=8, chunks=3, microbatches=64, recompute=False
  )
  return [
    Row(
      name=f"JaxPP 175B {'FP8' if in_8_bits else 'BF16'}, 64 H100",
      experiment="Synthetic175B",
      knobs=(("VOCAB_SIZE", 51200), ("USE_FP8", in_8_bits)),
      kind="H100",
      within=8,
      mesh=(("pipeline", 8), ("tensor", 8)),
      batch=128,
      remat=NOTHING,
      pipeline=pipeline,
      seconds=seconds,
    )
    for in_8_bits, seconds in ((False, 10.98), (True, 9.93))
  ]


ROWS = (*_scaled(), *_llama(), *_pax(), *_jaxpp())
KINDS = tuple(dict.fromkeys(row.kind for row in ROWS))


@functools.cache
def _sizes(experiment: str, knobs: tuple[tuple[str, Any], ...]) -> ModelSizes:
  made = registry.find(experiment)(USE_REPEATED_LAYER=True, **dict(knobs))
  trainer: Any = fdl.build(made.trainer())
  return model_sizes.of_definition(trainer.definition, trainer.optimizer, seq_len=made.MAX_SEQ_LEN)


def model_of(row: Row) -> ModelSizes:
  """Returns the sizes of a row's model."""
  sizes = _sizes(row.experiment, row.knobs)
  return dataclasses.replace(sizes, fused_attention=row.fused_attention)


@dataclasses.dataclass(frozen=True)
class Result:
  """A row, what is predicted of it in seconds by what that goes to, and the share for its chips."""

  row: Row
  times: cost_model.Times
  achieved: float

  @property
  def error(self) -> float:
    """Of the prediction, as a share of what was published."""
    return self.times.total / self.row.published - 1

  @property
  def reached(self) -> float:
    """The share of data sheets' rates with which there would be no error."""
    return self.achieved * self.times.total / self.row.published


def result(row: Row) -> Result:
  """Predicts a row."""
  machine = cost_model.machine(row.kind)
  assert machine is not None
  model, how = model_of(row), row.configuration
  times = cost_model.of(model, how, machine)
  return Result(row, times, machine.achieved)


def main():
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  arguments = parser.parse_args()
  results = [result(row) for row in ROWS]
  if arguments.json:
    print(json.dumps([_facts(one) for one in results]))
  else:
    print(page(results))


def _facts(one: Result) -> dict[str, Any]:
  return {
    "row": one.row.name,
    "kind": one.row.kind,
    "predicted_seconds": one.times.total,
    "published_seconds": one.row.published,
    "error": one.error,
    "parts": one.times.parts,
  }


def page(results: list[Result]) -> str:
  """Returns a row for each result, and their errors by family of chips."""
  header = ("row", "predicted s", "published s", "error", "bound by")
  rows = [
    (
      one.row.name,
      f"{one.times.total:.3f}",
      f"{one.row.published:.3f}",
      f"{100 * one.error:+.1f} %",
      one.times.bound,
    )
    for one in results
  ]
  page = [formatting.table(header, rows, right=(1, 2, 3)), ""]
  groups = {kind: [one for one in results if one.row.kind == kind] for kind in KINDS}
  summary = []
  for kind, found in {**groups, "all": results}.items():
    errors = [abs(one.error) for one in found]
    middle = statistics.median(one.reached for one in found)
    share = f"{found[0].achieved:.3g} ({middle:.3f})" if kind != "all" else ""
    mean, median = statistics.mean(errors), statistics.median(errors)
    cells = (f"{100 * mean:.1f} %", f"{100 * median:.1f} %", f"{100 * max(errors):.1f} %")
    summary.append((kind, str(len(found)), share, *cells))
  header = ("chips", "rows", "achieved (median now)", "mean error", "median", "largest")
  return "\n".join([*page, formatting.table(header, summary, right=range(1, 6))])


if __name__ == "__main__":
  main()
