# SPDX-License-Identifier: Apache-2.0
"""What the models of time and memory predict of a run as it is configured."""

from typing import NamedTuple

from jax.sharding import Mesh

from paxlike.devices import interconnect
from paxlike.devices.mesh import AXES
from paxlike.layers import flops
from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.stack import Stack
from paxlike.planning import cost_model, machines, memory_model, model_sizes
from paxlike.planning.machines import Machine
from paxlike.planning.memory_model import Memory
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration
from paxlike.planning.times import Times
from paxlike.training.trainer import Trainer


class Prediction(NamedTuple):
  """The predicted time and memory of a step.

  Attributes:
    model: The model's sizes.
    how: The configuration.
    machine: The hardware.
    times: Seconds.
    memory: Bytes per device.
  """

  model: ModelSizes
  how: Configuration
  machine: Machine
  times: Times
  memory: Memory


def of_trainer(trainer: Trainer) -> Prediction | None:
  """Returns what is predicted of a run; None: there is no data sheet, or no attention."""
  machine = machines.find(trainer.devices.devices.flat[0].device_kind)
  modules = (module for module, _ in flops.modules(trainer.definition))
  has_attention = any(isinstance(one, Attention | LatentAttention) for one in modules)
  if machine is None or not has_attention or not isinstance(trainer.model.stack, Stack):
    return None
  model = model_sizes.of_definition(
    trainer.definition,
    trainer.optimizer,
    seq_len=trainer.data.seq_len,
    beside=trainer.models_beside,
  )
  how = configuration(trainer, model)
  times = cost_model.of(model, how, machine)
  return Prediction(model, how, machine, times, memory_model.of(model, how, machine.network))


def configuration(trainer: Trainer, model: ModelSizes) -> Configuration:
  """Returns the configuration of a run, with the sizes that axes have in its slices or nodes."""
  stack = trainer.model.stack
  assert isinstance(stack, Stack)
  inner, outer = _sizes(trainer.devices)
  return Configuration(
    ici=inner,
    dcn=outer,
    batch=trainer.batch_size,
    remat=stack.remat,
    accumulation=trainer.accumulation_steps,
    pipeline=stack.pipeline,
    residual_over_tensor=model.sequence_parallel,
  )


def _sizes(devices: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the sizes of axes within and across slices or nodes, of the devices of a mesh."""
  inner, outer = [], []
  for number in range(len(AXES)):
    along = devices.devices[tuple(slice(None) if n == number else 0 for n in range(len(AXES)))]
    places = {interconnect.place(device) for device in along}
    # Where slices or nodes have different numbers of them, all are taken to be apart.
    count = len(places) if len(along) % len(places) == 0 else len(along)
    outer.append(count)
    inner.append(len(along) // count)
  return tuple(inner), tuple(outer)
