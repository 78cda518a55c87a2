# SPDX-License-Identifier: Apache-2.0
"""Laws of every registered experiment, on its graph alone."""

import re
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest
from fiddle import selectors
from helpers.declared import DECLARED, EXPERIMENTS, every_declaring_class, every_experiment
from helpers.shrunk import ONE_OF_EACH

from paxlike import fiddlers, layers, registry
from paxlike.config import building, graph_file
from paxlike.convert.exporting import config_of
from paxlike.data.examples import ExampleRows
from paxlike.data.tuning.conversations import Conversations
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.layers.module import Definition
from paxlike.training import optimizers

# Knobs that count only beside another: knob -> the setting under which they are read.
CONDITIONS = {
  "BASE_": {"PARAMETRIZATION": "completep", "BASE_MODEL_DIMS": 64, "BASE_NUM_LAYERS": 2},
  "CLIP_": {"UPDATES_PER_STEP": 2},
  "IMPORTANCE_CAP": {"ROLLOUTS_BEHIND": 1},
  "GAE_": {"ADVANTAGES": "gae"},
  "KL_IN": {"KL_BETA": 0.1},
  "EVAL_PROMPTS": {"EVAL_DATA_PATH": "x.jsonl"},
  "REWARD_MODEL_": {"REWARD_MODEL": "run"},
  "VOCAB_PATH": {"TOKENIZER": "sentencepiece", "VOCAB_PATH": "x.model"},
  "MOE_DISPATCH": {"MOE_DISPATCH": "capacity"},
  "CHECKPOINT_RESTORE_PATH": {"CHECKPOINT_RESTORE_PATH": "run"},
  "LORA_": {"USE_LORA": True, "LORA_ALPHA": 8.0},
  "NUM_EXPERTS": {"NUM_EXPERTS": 8},
  "SHARED_EXPERT_DIMS": {"LAYER_TYPES": ["mamba", "mlp", "moe"], "SHARED_EXPERT_DIMS": 8},
  "ROPE_": {"USE_ROPE": True},
  "MTP_": {"MTP_NUM_LAYERS": 1},
  "BEST_CHECKPOINT_MODE": {"BEST_CHECKPOINT_METRIC": "validation/log_pplx"},
  "PROFILE": {"PROFILE_STEPS": [1, 2]},
  "MAX_SEGMENTS_PER_ROW": {"ATTENTION_KERNEL": "cudnn"},
  "PIPELINE_": {"NUM_STAGES": 2, "ICI_MESH_SHAPE": {"pipeline": 2}, "DCN_MESH_SHAPE": [1, 1, 1]},
}


def num_params(experiment: Experiment) -> int:
  model = experiment.model()
  fiddlers.stack(model, scan=True)  # `test_both_layouts_have_the_same_parameters` is why it may be.
  return Definition(fdl.build(model)).num_params


@every_experiment
def test_its_graph_is_of_no_machine_survives_a_file_and_builds(cls, monkeypatch):
  with monkeypatch.context() as patch:
    for module in (topology, jax):
      patch.setattr(module, "devices", lambda: pytest.fail("a graph asks for devices"))
    graph = cls().trainer()
  # Faster than comparing graphs, and than building each layer.
  assert graph_file.difference(graph_file.load(graph_file.dump(graph)), graph) == ""
  fiddlers.stack(graph, scan=True)
  assert fdl.build(graph).definition.num_params > 0


def read_names(cls: type[Experiment]) -> frozenset[str]:
  """Returns the knobs that an experiment reads, as it is or under some condition."""
  knobs, read = cls.knobs(), set()
  for name in optimizers.OPTIMIZERS:
    experiment = cls(OPTIMIZER=name, EMA_HALF_LIVES=(2.0,), ON_SPIKE="skip")
    experiment.optimizer()
    read |= experiment.read_names()
  for name in optimizers.SCHEDULES:
    experiment = cls(LR_SCHEDULE=name)
    experiment.schedule()
    read |= experiment.read_names()
  settings = [setting for setting in CONDITIONS.values() if setting.keys() <= knobs.keys()]
  together = {name: value for setting in settings for name, value in setting.items()}
  for setting in ({}, together, *settings):  # One by one only if it takes that.
    if read < knobs.keys():
      experiment = cls(**setting)
      experiment.trainer()
      read |= experiment.read_names()
  return frozenset(read)


@pytest.mark.slow
def test_every_knob_is_read():
  unread = {}  # By the class that declares it: a mistake there is one of all that inherit it.
  for cls in EXPERIMENTS.values():
    knobs = cls.knobs()
    for name in knobs.keys() - read_names(cls):
      unread.setdefault(f"{knobs[name].declared_in.__name__}.{name}", []).append(cls.__name__)
  assert not unread, (
    f"these knobs are never read in the experiments beside them: {unread}; read them in the method"
    " that returns the sub-graph; if they count only beside another knob, add a row to CONDITIONS"
    " in this file"
  )


@every_declaring_class
def test_every_knob_is_documented(owner):
  bare = [name for name, knob in DECLARED[owner].items() if not knob.doc]
  assert not bare, (
    f"{owner.__name__} declares {bare} without a description, which --fdl_help prints: add a `#:`"
    " comment behind or above the declaration"
  )


@pytest.mark.slow
@every_experiment
def test_parameters_are_affine_in_repeats_of_the_pattern(cls):
  stack = cls().stack()
  ends = len(stack.prologue) + len(stack.epilogue)
  layers = [ends + repeats * len(stack.pattern) for repeats in (2, 3, 5)]
  counts = [num_params(cls(NUM_LAYERS=count)) for count in layers]
  assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0


@pytest.mark.slow
@every_experiment
def test_both_layouts_have_the_same_parameters(cls):
  counts, graph = [], cls(NUM_LAYERS=5).trainer()
  for scan in (False, True):  # In this order: stages could not share five layers.
    fiddlers.stack(graph, scan=scan)
    model: Any = fdl.build(graph.model)
    counts.append(Definition(model).num_params)
  assert counts[0] == counts[1]


def said_count(cls: type[Experiment]) -> int | None:
  """Returns the number of parameters that the class, or the one that it takes its size of, says."""
  for base in cls.__mro__:
    if found := re.search(r"([\d,]+) parameters", base.__doc__ or ""):
      return int(found[1].replace(",", ""))
    if "MODEL_DIMS" in vars(base):
      return None
  return None


COUNTED = [cls for cls in EXPERIMENTS.values() if said_count(cls) is not None]


def test_most_experiments_say_how_many_parameters_they_have():
  assert len(COUNTED) > 50


@pytest.mark.parametrize("cls", COUNTED, ids=lambda c: c.__name__)
def test_parameters_are_as_many_as_said(cls):
  assert num_params(cls()) == said_count(cls)


@pytest.mark.slow
@pytest.mark.parametrize(
  "cls", [c for c in EXPERIMENTS.values() if c.hugging_face()], ids=lambda c: c.__name__
)
def test_parameters_are_as_many_as_those_of_hugging_face(cls):
  import torch
  import transformers

  experiment = cls()
  config = transformers.AutoConfig.for_model(**config_of(experiment, dtype="float32"))
  with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
  assert sum(p.numel() for p in model.parameters()) == num_params(experiment)


@pytest.mark.parametrize(
  ("name", "peak", "schedule", "std", "batch", "dropout", "remat"),
  [
    ("Synthetic126M", 6e-4, (636, 637, 500_000), 0.023, 4, None, "SAVE_EVERYTHING"),
    ("Synthetic5B", 1.6e-4, (115, 116, 62_500), 0.01, 8, 0.1, "SAVE_DOT_WITH_NO_BATCH_DIM"),
    ("Synthetic175B", 2e-5, (265, 266, 108_600), 0.006, 6, None, "SAVE_NOTHING"),
    ("C4Gpt175B", 6e-5, (265, 266, 108_600), 0.006, 6, None, "SAVE_NOTHING"),
  ],
)
def test_gpt_recipes_have_the_values_of_pax(name, peak, schedule, std, batch, dropout, remat):
  graph = registry.find(name)().trainer()
  optimizer, model = graph.optimizer, graph.model
  rate = optimizer.learning_rate
  assert (rate.peak, rate.warmup, rate.decay_start, rate.decay_end) == (peak, *schedule)
  assert rate.min_ratio == 0.1
  assert (optimizer.b1, optimizer.b2, optimizer.eps) == (0.9, 0.95, 1e-8)
  assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)
  assert optimizer.decayed.__name__ == "everything"
  assert {node.std for node in selectors.select(graph, layers.gaussian)} == {std}
  assert all(linear.use_bias for linear in fiddlers.select(graph, layers.Linear))
  assert all(norm.epsilon == 1e-5 for norm in fiddlers.select(graph, layers.LayerNorm))
  assert all(n.dtype == jnp.bfloat16 for n in fiddlers.select(graph, layers.Linear))
  assert graph.percore_batch_size == batch
  assert graph.seed == 1234
  assert (model.dropout.rate if model.dropout else None) == dropout
  assert model.stack.pattern[0].dropout is None
  assert model.stack.remat.name == remat
  assert model.positions.max_len == 2048
  assert model.head is None


def test_derived_values_follow_their_knobs():
  gpt = registry.find("NanoGptChar")
  graph = gpt(MODEL_DIMS=64).trainer()
  block = graph.model.stack.pattern[0]
  assert block.mlp.hidden_dim == 256
  assert block.attention.head_dim == 16
  graph = gpt(LR_COS_WARMUP=7, MAX_STEPS=90).trainer()
  assert graph.optimizer.learning_rate.decay_start == 8
  assert graph.optimizer.learning_rate.decay_end == 90


@every_experiment
@pytest.mark.parametrize("schedule", ["linear_rampup_cosine_decay", "wsd"])
def test_its_schedule_takes_any_number_of_steps(cls, schedule):
  for steps in (0, 1, 3, 2**31 - 1):
    building.build(cls(LR_SCHEDULE=schedule, MAX_STEPS=steps).schedule())
  most = cls(LR_SCHEDULE=schedule, LR_COS_DECAY_START=None, LR_COS_DECAY_END=None)
  most.set("LR_COS_WARMUP", 2**31 - 1, source="").set("LR_LRED_WARMUP", 2**31 - 1, source="")
  most.set("LR_WARMUP", 2**31 - 1, source="")
  building.build(most.schedule())


@pytest.mark.parametrize(
  ("schedule", "kind"),
  [("linear_rampup_cosine_decay", "COS"), ("linear_rampup_exponential_decay", "LRED")],
)
@pytest.mark.parametrize(
  ("given", "later", "sooner"),
  [
    ({"WARMUP": 0, "DECAY_START": 5, "DECAY_END": 2}, "DECAY_END=2", "DECAY_START=5"),
    ({"WARMUP": 7, "DECAY_START": 5, "DECAY_END": None}, "DECAY_START=5", "WARMUP=7"),
    ({"WARMUP": 7, "DECAY_START": None, "DECAY_END": 5}, "DECAY_END=5", "WARMUP=7"),
  ],
)
def test_a_schedule_that_contradicts_itself_is_refused(schedule, kind, given, later, sooner):
  knobs: dict[str, Any] = {f"LR_{kind}_{name}": value for name, value in given.items()}
  experiment = registry.find("Synthetic126M")(LR_SCHEDULE=schedule, **knobs)
  with pytest.raises(UserError, match=f"^LR_{kind}_{later} is below LR_{kind}_{sooner}: "):
    experiment.schedule()


def test_zero_is_zero_and_not_a_default():
  experiment = registry.find("Synthetic126M")(
    ADAM_BETA1=0.0,
    WEIGHT_DECAY=0.0,
    CLIP_GRADIENT_NORM_TO_VALUE=None,
    LR_COS_WARMUP=0,
    LR_COS_DECAY_START=0,
  )
  optimizer = experiment.trainer().optimizer
  assert (optimizer.b1, optimizer.weight_decay, optimizer.clip_norm) == (0.0, 0.0, None)
  assert optimizer.learning_rate.decay_start == 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_data_mixin_replaces_the_data_of_any_family(name):
  cls: Any = type("Tuned", (datasets.Jsonl, registry.find(name)), {"__module__": __name__})
  graph: Any = cls(DATA_PATH="x.jsonl").trainer()
  assert fdl.get_callable(graph.train_data) is ExampleRows
  assert fdl.get_callable(graph.train_data.corpus) is Conversations


def test_heads_that_do_not_divide_the_width_are_refused():
  with pytest.raises(UserError, match=r"MODEL_DIMS=768 is not a multiple of NUM_HEADS=7"):
    registry.find("Synthetic126M")(NUM_HEADS=7, DIMS_PER_HEAD=None).trainer()
