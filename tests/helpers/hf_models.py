# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny model of Hugging Face of any family, and the paxlike model that is made of it."""

import functools
import json
import pathlib
from typing import Any

import fiddle as fdl
import jax
import numpy as np
from etils import epath

from helpers.hf_families import COMMON, FAMILIES
from paxlike import fiddlers
from paxlike.config import graph_file
from paxlike.convert.main import run
from paxlike.layers.decoder import forward
from paxlike.layers.module import Definition
from paxlike.training.initial_state import StateSource


def configuration(name: str, **more: Any) -> Any:
  """Returns the configuration of a family, as transformers has it.

  `more`: keys that differ from those in `FAMILIES`.
  """
  import transformers

  config_class, options = FAMILIES[name]
  # What GPT-2 has not would be saved as keys that nobody knows.
  foreign = ("intermediate_size", "num_key_value_heads", "head_dim") if name == "gpt2" else ()
  common = {key: value for key, value in COMMON.items() if key not in foreign}
  return getattr(transformers, config_class)(**{**common, **options, **more})


def save_random(name: str, folder: pathlib.Path, *, seed: int = 0, **more: Any) -> Any:
  """Saves a random model of `configuration` as Hugging Face does, and returns it."""
  import torch
  import transformers

  torch.manual_seed(seed)
  config = configuration(name, **more)
  config._attn_implementation = "eager"
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      # As drawn, norms are all the same and biases are nothing.
      parameter.add_(0.1 * torch.randn_like(parameter))
    for name_of, buffer in model.named_buffers():
      if name_of.endswith("layer_scalar"):
        buffer.mul_(1 + 0.1 * torch.randn_like(buffer))
  model.save_pretrained(folder)
  if name == "kimi_k2":  # Its type, which transformers does not have.
    config = config_of(folder) | {"model_type": name}
    (folder / "config.json").write_text(json.dumps(config))
  return model


def converted(source: pathlib.Path, folder: pathlib.Path) -> tuple[Definition, dict[str, Any]]:
  """Converts a model of Hugging Face and returns what paxlike makes of it."""
  assert run(["--from=hf", f"--path={source}", f"--to={folder}"]) == 0
  return imported(folder)


def imported(
  folder: pathlib.Path, *, dtype: str = "float32", quantization: str | None = None
) -> tuple[Definition, dict[str, Any]]:
  """Returns the model and the weights of a folder that `paxlike-convert` made."""
  graph = graph_file.read(folder / "config.json")
  fiddlers.precision(graph, dtype)
  if quantization is not None:
    fiddlers.quantize(graph, quantization)
  trainer: Any = fdl.build(graph)
  definition, devices = trainer.definition, trainer.mesh.build(jax.devices()[:1])
  source = StateSource(
    folder=epath.Path(folder),
    definition=definition,
    optimizer=trainer.optimizer,
    devices=devices,
    seed=0,
    restore=None,
  )
  with jax.set_mesh(devices):
    return definition, source.params(None)[1]


def logits(definition: Definition, params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
  """Returns [B, T, V]."""
  return np.asarray(jax.jit(functools.partial(forward, definition))(params, {"inputs": tokens})[0])


def config_of(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the configuration of a model of Hugging Face."""
  return json.loads((folder / "config.json").read_text())
