# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences are those of TRL on the same records, on one device and on eight."""

import importlib
import json
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import command_lines, hf_families, hf_models, tiny_model, tiny_tokenizers

from paxlike import fiddlers, layers
from paxlike.config import graph_file
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.data.tuning.labeled_answers import LabeledAnswers, LabeledRows
from paxlike.data.tuning.preferences import PairRows, Preferences, ScoredPreferences
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.layers.module import Definition
from paxlike.training.objectives import BradleyTerry, Dpo, Ipo, Kto, Orpo, SimPo, kto

COUNT, SIZE = 8, 32
HEAD = np.random.default_rng(1).normal(size=hf_families.COMMON["hidden_size"]).astype(np.float32)
SCALE = 1.1  # Of the reference's weights, so that the model is nearer to random texts.
TRAINED = {
  "per_device_train_batch_size": COUNT,
  "report_to": [],
  "use_cpu": True,
  "bf16": False,
  "gradient_checkpointing": False,
}


class Words(Tokenizer):
  """Words t3, t4, ... as ids."""

  vocab_size = 60
  eos_id = 1

  def encode(self, text):
    return np.array([int(word[1:]) for word in text.split()], np.int32)

  def decode(self, ids):
    raise NotImplementedError

  def fingerprint(self):
    return "words"


def records(*fields):
  """Records of random texts of several lengths; labels alternate."""
  rng = np.random.default_rng(0)

  def text():
    return " ".join(f"t{number}" for number in rng.integers(4, 60, rng.integers(2, 8)))

  made: list[dict[str, Any]] = [{name: text() for name in fields} for _ in range(COUNT)]
  for number, record in enumerate(made):
    for name in fields[1:]:
      record[name] = f" {record[name]}"  # After the prompt.
    if "completion" in fields:
      record["label"] = number % 3 != 0
  return made


PAIRS, LABELED = ("prompt", "chosen", "rejected"), ("prompt", "completion")
KTO = {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.2}
CENTERED = {"center_rewards_coefficient": 0.1}
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7}
# Name -> (objective, fields of the records, TRL's module and trainer, its options).
LOSSES: dict[str, Any] = {
  "dpo": (Dpo(beta=0.3), PAIRS, ("trl", "DPO"), {"beta": 0.3}),
  "ipo": (Ipo(beta=0.3), PAIRS, ("trl", "DPO"), {"beta": 0.3, "loss_type": ["ipo"]}),
  "simpo": (SimPo(beta=2.0, gamma=0.7), PAIRS, ("trl.experimental.cpo", "CPO"), SIMPO),
  "orpo": (Orpo(odds_weight=0.4), PAIRS, ("trl.experimental.orpo", "ORPO"), {"beta": 0.4}),
  "kto": (Kto(**KTO), LABELED, ("trl", "KTO"), KTO),
  "reward": (BradleyTerry(centering=0.1), PAIRS, ("trl", "Reward"), CENTERED),
}
READERS: dict[str, Any] = {
  "kto": (LabeledAnswers, LabeledRows),
  "reward": (ScoredPreferences, PairRows),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """A model of transformers and its folder, and what paxlike makes of it."""
  import torch
  import transformers

  folder = tmp_path_factory.mktemp("models")
  sizes = {**hf_families.COMMON, "num_hidden_layers": 1, "eos_token_id": 1, "pad_token_id": None}
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**sizes, initializer_range=0.3)
  config._attn_implementation = "eager"
  model = transformers.LlamaForCausalLM(config)
  model.save_pretrained(folder / "source")
  return folder, *hf_models.converted(folder / "source", folder / "model")


def reward_model(folder, params) -> tuple[Definition, dict[str, Any]]:
  """Returns a reward model of the same weights, its head apart."""
  graph = graph_file.read(folder / "model" / "config.json")
  fiddlers.precision(graph, "float32")
  fdl.update_callable(graph.model, layers.RewardModel)
  trainer: Any = fdl.build(graph)
  return trainer.definition, params | {"head.w": HEAD[:, None]}


def of_trl(folder, objective, made, place, options) -> tuple[float, float]:
  """Returns the loss of a batch and the norm of its gradient."""
  import datasets
  import torch
  import transformers

  task, more = "ForCausalLM", {}
  if isinstance(objective, BradleyTerry):
    task, more = "ForSequenceClassification", {"num_labels": 1}
  kind = getattr(transformers, f"Llama{task}")
  source, more = folder / "source", {"attn_implementation": "eager", **more}
  model, reference = (kind.from_pretrained(source, **more) for _ in range(2))
  with torch.no_grad():
    for weight in reference.parameters():
      weight *= SCALE
    if isinstance(objective, BradleyTerry):
      model.score.weight[:] = torch.tensor(HEAD)
  (module, kind), further = place, {"ref_model": reference} if objective.needs_reference else {}
  library: Any = importlib.import_module(module)
  config = getattr(library, f"{kind}Config")
  trainer = getattr(library, f"{kind}Trainer")(
    model=model,
    args=config(**TRAINED, **options, output_dir=str(folder / "trl")),
    train_dataset=datasets.Dataset.from_list(made),
    processing_class=transformers.PreTrainedTokenizerFast(
      tokenizer_object=tiny_tokenizers.words(), eos_token="</s>", pad_token="<s>"
    ),
    **further,
  )
  trainer.model.train()
  (batch,) = list(trainer.get_train_dataloader())
  loss = trainer.compute_loss(trainer.model, batch)
  loss.backward()
  gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
  return float(loss.detach()), float(torch.stack([g.norm() for g in gradients]).norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_trl_on_any_mesh(models, tmp_path, name):
  folder, definition, params = models
  if name == "reward":
    definition, params = reward_model(folder, params)
  objective, fields, *trl = LOSSES[name]
  made = records(*fields)
  expected = of_trl(folder, objective, made, *trl)
  path = tmp_path / "records.jsonl"
  path.write_text("".join(json.dumps(record) + "\n" for record in made))
  corpus, rows = READERS.get(name, (Preferences, PairRows))
  read = corpus(path=str(path), tokenizer=Words(), vocab_size=60)
  batch = rows(corpus=read, seq_len=SIZE, shuffle=False).rows(0, np.arange(COUNT))

  def loss(params, batch):
    before = {name: SCALE * w for name, w in params.items()}
    reference = definition.bind(jax.lax.stop_gradient(before))
    given = reference if objective.needs_reference else None
    total, aux = objective.total(definition.bind(params), given, batch, None)
    return total / objective.weight(batch), aux.metrics

  for spec, devices in ((MeshSpec(ici=(1, 1, 1)), 1), (MeshSpec(ici=(2, 2, 2)), 8)):
    built = spec.build(jax.devices()[:devices])
    with jax.set_mesh(built):
      weights = {
        name: jax.device_put(w, mesh.sharding(built, definition.weights[name].dims, w.shape))
        for name, w in jax.device_get(params).items()
      }
      placed = {
        name: jax.device_put(x, mesh.sharding(built, ("batch", "time"), x.shape))
        for name, x in batch.items()
      }
      step = jax.jit(jax.value_and_grad(loss, has_aux=True))
      (value, metrics), gradient = step(weights, placed)
      norm = jnp.sqrt(sum(jnp.square(g).sum() for g in gradient.values()))
    row = [f"{x:.7g}" for x in (value, expected[0], norm, expected[1])]
    print("|", " | ".join([name, str(devices), *row]), "|")  # With -s: a table of docs/results.md.
    np.testing.assert_allclose((value, norm), expected, rtol=1e-5)
    assert metrics.get("reference_kl", [1])[0] > 0  # Else it would have no effect.


def test_a_bad_combination_is_refused():
  one: dict[str, Any] = {name: jnp.asarray(x[:1]) for name, x in tiny_model.batch(2).items()}
  model: Any = tiny_model.tiny().module
  with pytest.raises(UserError, match="single sequence: raise PERCORE_BATCH_SIZE, or lower"):
    Kto().total(model, model, one, None)
  with pytest.raises(UserError, match=r"BradleyTerry trains a RewardModel: .*RewardPairs"):
    BradleyTerry().total(model, None, one, None)
  with pytest.raises(UserError, match="USE_LORA freezes the head of a reward model"):
    command_lines.TinyRewardPairs(USE_LORA=True).trainer()
  flags = [*command_lines.base("helpers.command_lines.TinyPreferences"), "--job_log_dir={run}"]
  answer = command_lines.run([*flags, "--fdl.PREFERENCE_LOSS=orpo", "--fdl.SIMPO_GAMMA=1"])
  assert answer.status == 2
  assert "SIMPO_GAMMA has no effect" in answer.err
  assert "PREFERENCE_LOSS=simpo would give it one" in answer.err


def test_the_answers_of_equal_sequences_are_mismatched_with_themselves():
  weights = np.zeros((2, 9), np.float32)
  weights[:, 3:6] = 1  # A prompt of four tokens, an answer of three, padding.
  tokens = np.arange(1, 8)
  row = {
    "inputs": np.pad(tokens[:-1], (0, 3)),
    "targets": np.pad(tokens[1:], (0, 3)),
    "positions": np.pad(np.arange(6), (0, 3)),
    "segments": np.pad(np.ones(6), (0, 3)),
  }
  batch: Any = {name: jnp.array([one, one], jnp.int32) for name, one in row.items()}
  found = kto.mismatched(batch | {"weights": jnp.array(weights)})
  for name in ("inputs", "targets", "positions"):
    np.testing.assert_array_equal(found[name], batch[name], err_msg=name)
  np.testing.assert_array_equal(found["weights"], weights)
