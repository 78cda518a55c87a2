# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction go to Hugging Face and back; transformers runs them alike."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from helpers import tiny_llama
from helpers.hf_families import FAMILIES
from helpers.hf_models import config_of, converted, save_random

from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.training.objectives import NextToken

NUM_LAYERS = FAMILIES["deepseek_v3"][1].get("num_hidden_layers", 3)
DEPTHS = 2


def published(model: Any) -> dict[str, np.ndarray]:
  """Returns the tensors of transformers' module, by the names of DeepSeek's files."""
  found: dict[str, np.ndarray] = {}
  for name, tensor in model.state_dict().items():
    _, layer, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
    at, value = f"model.layers.{NUM_LAYERS + int(layer or 0)}", tensor.numpy()
    rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    if not layer:
      continue
    if rest == "mlp.experts.gate_up_proj":
      for expert, (gate, up) in enumerate(np.split(one, 2) for one in value):
        found[f"{at}.mlp.experts.{expert}.gate_proj.weight"] = gate
        found[f"{at}.mlp.experts.{expert}.up_proj.weight"] = up
    elif rest == "mlp.experts.down_proj":
      for expert, down in enumerate(value):
        found[f"{at}.mlp.experts.{expert}.down_proj.weight"] = down
    else:
      found[f"{at}.{rest}"] = value
  return found


def save(folder: pathlib.Path) -> tuple[Any, Any]:
  """Saves a model with layers that transformers runs; returns it and them."""
  import torch
  from transformers.modeling_layers import MtpModel

  main = save_random("deepseek_v3", folder)
  main.config.num_mtp_layers = DEPTHS
  further = MtpModel(main, DEPTHS).eval()
  with torch.no_grad():
    for name, tensor in further.layers.state_dict().items():  # Some of it is not initialized.
      tensor.copy_(0.1 * torch.randn(tensor.shape) + ("norm" in name))
  saved = TensorFolder(folder)
  arrays = {name: saved.read(name).copy() for name in saved.specs} | published(further)
  for depth in range(DEPTHS):
    at = f"model.layers.{NUM_LAYERS + depth}"
    arrays[f"{at}.embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
    arrays[f"{at}.shared_head.head.weight"] = arrays["lm_head.weight"]
  config = config_of(folder)
  config.pop("num_mtp_layers", None)
  tiny_llama.write(folder, arrays, config | {"num_nextn_predict_layers": DEPTHS})
  return main, further


@pytest.mark.slow
def test_losses_equal_hugging_face_and_the_way_back_is_exact(tmp_path):
  import torch
  from transformers.cache_utils import MtpCache

  main, further = save(tmp_path / "theirs")
  tokens = np.random.default_rng(0).integers(3, 96, (2, 25)).astype(np.int64)
  expected = []
  with torch.no_grad():
    inputs = torch.tensor(tokens[:, :-1])
    hidden = main.model(inputs).last_hidden_state
    positions, cache = torch.arange(24)[None], MtpCache(config=main.config.get_mtp_config())
    for depth in (1, 2):
      hidden, inputs = hidden[:, :-1], inputs[:, 1:]
      positions = positions[:, 1:]
      hidden = further.forward_layer(depth - 1, hidden, positions, cache, input_ids=inputs)
      logits, targets = main.lm_head(hidden), torch.tensor(tokens[:, 1 + depth :])
      loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
      )
      expected.append(loss.item())
  definition, params = converted(tmp_path / "theirs", tmp_path / "ours")
  assert np.isfinite(expected).all()
  tokens = tokens.astype(np.int32)
  batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((2, 24), "f")}
  _, aux = jax.jit(lambda p: NextToken().total(definition.bind(p), None, batch, None))(params)
  total, weight = aux.metrics["mtp_loss"]
  np.testing.assert_allclose(total, sum(expected), rtol=1e-5)
  assert weight == 2 * (23 + 22)
  np.testing.assert_allclose(aux.summed["mtp_loss"], 0.1 * sum(expected) / 2, rtol=1e-5)

  assert run(["--from=paxlike", f"--path={tmp_path / 'ours'}", f"--to={tmp_path / 'back'}"]) == 0
  before, after = TensorFolder(tmp_path / "theirs"), TensorFolder(tmp_path / "back")
  assert after.specs.keys() == before.specs.keys()
  for tensor in before.specs:
    assert after.read(tensor).tobytes() == before.read(tensor).tobytes(), tensor
  assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == DEPTHS


@pytest.mark.slow
def test_layers_that_a_configuration_declares_may_not_be_there(tmp_path):
  source = tmp_path / "theirs"
  save_random("deepseek_v3", source)
  for declared in (1, 10**9, None):
    config = config_of(source) | {"num_nextn_predict_layers": declared}
    (source / "config.json").write_text(json.dumps(config))
    definition, _ = converted(source, tmp_path / f"ours{declared}")
    assert definition.module.mtp is None  # pyright: ignore[reportAttributeAccessIssue]
