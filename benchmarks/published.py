# SPDX-License-Identifier: Apache-2.0
"""Published training step times, and how their programs differ from paxlike.

`published_steps.json` has a row in each line: the model (an experiment of paxlike, with knobs), the
chips, mesh and batch, and the seconds of a step. `within` is the number of devices of a slice or
node. `tier` is A if the source says all of it, B if `note` says what was assumed. `attended` is the
fraction of causal pairs that attention computes, 1 if it is missing. Context parallelism is counted
as data parallelism.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")

import fiddle as fdl
import jax

from paxlike import layers, registry
from paxlike.devices.mesh import AXES
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat
from paxlike.planning import model_sizes
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.software import PAXLIKE, Software

FILE = pathlib.Path(__file__).with_name("published_steps.json")


class Nemotron4_15B(datasets.Synthetic, Llama):
  """Nemotron-4 (Parmar et al., 2024): a LLaMA whose MLP has no gate."""

  VOCAB_SIZE = 256_000
  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS = 32, 6144, 24576
  NUM_HEADS, NUM_KV_HEADS = 48, 8
  MAX_SEQ_LEN = 4096

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    mlp.gate, mlp.activation = None, jax.nn.gelu  # Squared ReLU moves the same bytes.
    return mlp


# NVIDIA's Megatron, with the overlap of its recipes.
_MEGATRON = Software(
  hides_tensor=True, optimizer_over_data=True, all_to_all=True, spreads_loss=False
)
_OF_EACH_EXPERT = dataclasses.replace(_MEGATRON, splits_experts=False)
# The start of a row's source, its chip if not any -> the program. The first that fits is taken.
_SOFTWARE = (
  ("llm-foundry", "", Software(attention="flash1", libraries_of_2023=True)),
  # These H100s have HBM2e and a limit of 500 W instead of 700 W.
  ("torchtitan", "", Software(attention="flash2", power=500 / 700, bandwidth=2.4e12)),
  ("Korthikanti", "", Software(spreads_loss=False)),
  (
    "NeMo AutoModel",
    "",
    Software(all_to_all=True, sends_once=True, splits_experts=False, spreads_loss=False),
  ),
  # Dropless runs within NVL72 use HybridEP.
  *(
    (f"Megatron-Bridge {version}", chip, dataclasses.replace(_OF_EACH_EXPERT, sends_once=True))
    for version in ("25.11", "26.02")
    for chip in ("GB200", "GB300")
  ),
  ("Megatron-Bridge", "", _OF_EACH_EXPERT),
  ("dgxc-benchmarking Grok-1 (NeMo 25.04)", "H100", _OF_EACH_EXPERT),
  *((name, "", _MEGATRON) for name in ("NeMo", "Megatron", "dgxc", "gpu-recipes")),
  ("Pax", "", Software(libraries_of_2023=True)),
  ("JaxPP", "", Software(spreads_loss=False)),
)
# Programs that reduce gradients once per microbatch; all others do once per step.
_REDUCED_EACH = ("llm-foundry", "torchtitan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A published step; see the module.

  Attributes:
    facts: The row of the file.
  """

  facts: Mapping[str, Any]

  @property
  def source(self) -> str:
    return self.facts["source"]

  @property
  def name(self) -> str:
    return self.facts["name"]

  @property
  def chip(self) -> str:
    return self.facts["chip"]

  @property
  def published(self) -> float:
    """Seconds of a step."""
    return self.facts["published_seconds"]

  @property
  def key(self) -> tuple[Any, ...]:
    """Equal for rows that differ in the number of devices only."""
    facts = self.facts
    size = math.prod(facts["mesh"].values())
    mesh = {axis: n for axis, n in facts["mesh"].items() if axis not in ("data", "fsdp")}
    knobs = json.dumps(facts["knobs"], sort_keys=True)
    of_device = facts["global_batch"] / size
    others = ("accumulation", "pipeline", "remat", "fused_attention", "attended")
    rest = (str(facts.get(name)) for name in (*others, "sequence_parallel"))
    return (self.source, self.chip, facts["experiment"], knobs, str(mesh), of_device, *rest)

  @functools.cached_property
  def configuration(self) -> Configuration:
    """The mesh, with axes from fast to slow within a slice or node as long as there is room."""
    facts = self.facts
    ici, dcn, room = [], [], facts["within"]
    for axis in reversed(AXES):
      size = facts["mesh"].get(axis, 1)
      inner = math.gcd(size, room)
      room //= inner
      ici.append(inner)
      dcn.append(size // inner)
    pipeline = None
    if (stages := facts.get("pipeline")) is not None:
      pipeline = Pipeline(
        schedule="interleaved_1f1b" if stages["virtual"] > 1 else "1f1b",
        stages=stages["stages"],
        chunks=stages["virtual"],
        microbatches=stages["microbatches"],
        recompute=False,
      )
    return Configuration(
      ici=tuple(reversed(ici)),
      dcn=tuple(reversed(dcn)),
      batch=facts["global_batch"],
      remat=Remat[facts["remat"]],
      accumulation=facts["accumulation"],
      pipeline=pipeline,
      reduced_once=not self.source.startswith(_REDUCED_EACH),
      residual_over_tensor=facts["sequence_parallel"],
    )

  @functools.cached_property
  def model(self) -> ModelSizes:
    """The sizes of its model."""
    facts = self.facts
    knobs = json.dumps(facts["knobs"], sort_keys=True)
    sizes = _sizes(facts["experiment"], knobs)
    attended = facts.get("attended", 1)
    spans = tuple(span._replace(flops=span.flops * attended) for span in sizes.spans)
    return dataclasses.replace(sizes, fused_attention=facts["fused_attention"], spans=spans)

  @property
  def software(self) -> Software:
    """The program that it is a time of."""
    for source, chip, software in _SOFTWARE:
      if self.source.startswith(source) and chip in ("", self.chip):
        return dataclasses.replace(software, scans_ticks=False)  # No pipeline is one of paxlike.
    return PAXLIKE

  @property
  def groups(self) -> list[str]:
    """The names of the groups that it is in."""
    facts, mesh = self.facts, self.facts["mesh"]
    found = [self.chip]
    for axis, name in (("fsdp", "FSDP"), ("tensor", "TP"), ("pipeline", "PP")):
      if mesh.get(axis, 1) > 1:
        found.append(name)
    if facts["knobs"].get("USE_FP8"):
      found.append("FP8")
    if self.model.moe_layers:
      found.append("MoE")
    if self.model.seq_len >= 16_384:
      found.append("long sequence")
    return found


def load(path: str | os.PathLike[str] = FILE) -> list[Row]:
  """Returns the rows of a file in the format of `published_steps.json`."""
  return [Row(facts=facts) for facts in json.loads(pathlib.Path(path).read_text())]


@functools.cache
def _sizes(experiment: str, knobs: str) -> ModelSizes:
  given = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(knobs).items()}
  own = {"Nemotron4_15B": Nemotron4_15B, "Nemo4": Nemotron4_15B}.get(experiment)
  made = (own or registry.find(experiment))(USE_REPEATED_LAYER=True, **given)
  trainer: Any = fdl.build(made.trainer())
  return model_sizes.of_definition(trainer.definition, trainer.optimizer, seq_len=made.MAX_SEQ_LEN)
