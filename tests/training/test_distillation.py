# SPDX-License-Identifier: Apache-2.0
"""Distillation: its loss is that of TRL, and a student gets nearer to its teacher."""

import dataclasses
import importlib.util
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from helpers import damaged_files, hf_models, steps, tiny_model
from helpers.program import curve, run
from helpers.sources import REPOSITORY

import paxlike
from paxlike import fiddlers
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.teacher import Teacher
from paxlike.checks import runner as checks
from paxlike.config import graph_file
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.training.objectives import Gkd, distillation
from paxlike.training.reinforcement.rollout_training import RolloutTraining
from paxlike.training.train_step import make_train_step

COUNT, SIZE, VOCAB, PADDED = 8, 16, 60, 64
LOSSES = [
  Gkd(beta=0.0, cross_entropy=0.5),
  Gkd(beta=1.0, temperature=2.0),
  Gkd(beta=0.3, temperature=0.7, cross_entropy=0.2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """A student and a teacher of another family: in transformers, and their converted folders.

  The teacher has more ids, as if its vocabulary were padded further.
  """
  folder, made = tmp_path_factory.mktemp("models"), {}
  for seed, (role, family, more) in enumerate(
    (("student", "llama", {"num_hidden_layers": 1}), ("teacher", "qwen3", {"vocab_size": PADDED}))
  ):
    source, to = folder / f"{role}_source", folder / role
    model = hf_models.save_random(family, source, seed=seed, **{"vocab_size": VOCAB, **more})
    hf_models.converted(source, to)
    graph = graph_file.read(to / "config.json")
    fiddlers.precision(graph, "float32")
    (to / "config.json").write_text(graph_file.dump(graph))
    made[role] = model, to
  return made


def random_batch():
  """Random tokens of several lengths, prompts without weight."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, VOCAB, (COUNT, SIZE + 1)).astype(np.int32)
  place = np.arange(SIZE)[None]
  ends, begins = rng.integers(10, SIZE + 1, (COUNT, 1)), rng.integers(0, 5, (COUNT, 1))
  weights = ((place >= begins) & (place < ends)).astype(np.float32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def of_trl(models, objective, batch):
  """Returns the loss of a batch and the norm of its gradient."""
  import torch
  from trl.experimental.gkd import GKDTrainer

  student, teacher = (models[role][0] for role in ("student", "teacher"))
  inputs, targets = (torch.tensor(batch[name]).long() for name in ("inputs", "targets"))
  labels = torch.where(torch.tensor(batch["weights"]) > 0, targets, -100)
  student.zero_grad()
  logits = student(inputs).logits
  with torch.no_grad():
    of_teacher = teacher(inputs).logits[..., :VOCAB]
  loss = GKDTrainer.generalized_jsd_loss(
    logits, of_teacher, labels, beta=objective.beta, temperature=objective.temperature
  )
  of_data = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
  loss = loss + objective.cross_entropy * of_data
  loss.backward()
  gradients = [weight.grad for weight in student.parameters() if weight.grad is not None]
  return float(loss.detach()), float(torch.stack([g.norm() for g in gradients]).norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_trl_on_any_mesh(models):
  definition, params = hf_models.imported(models["student"][1])
  teacher, batch = Teacher(path=str(models["teacher"][1])), random_batch()
  optimizer = tiny_model.adamw(clip_norm=None)
  for spec, devices, losses in (
    (MeshSpec(ici=(1, 1, 1)), 1, LOSSES[:2]),
    (MeshSpec(ici=(2, 2, 2)), 8, LOSSES[2:]),
  ):
    built = spec.build(jax.devices()[:devices])
    with jax.set_mesh(built):
      first = steps.first_state(definition, optimizer, built)
      weights = {name: jax.device_put(params[name], w.sharding) for name, w in first.params.items()}
      state = dataclasses.replace(first, params=weights, reference=teacher.load(built).params)
      placed = {
        name: jax.device_put(x, mesh.sharding(built, ("batch", "time"), x.shape))
        for name, x in batch.items()
      }
      for number, one in enumerate(losses, start=devices):
        objective = dataclasses.replace(one, teacher=teacher)
        step = make_train_step(
          definition, optimizer, seed=0, objective=objective, num_microbatches=1 + number % 2
        )
        _, metrics = jax.jit(step)(state, placed)
        found = [float(total / weight) for total, weight in map(metrics.get, ("loss", "grad_norm"))]
        np.testing.assert_allclose(found, of_trl(models, objective, batch), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_losses_on_the_most_probable_tokens_are_those_of_trl():
  """All other tokens are one event; with all tokens it is the loss on logits."""
  import torch
  from trl.experimental.server_distillation import server_distillation_trainer as trl

  rng = np.random.default_rng(0)
  student, teacher = (
    jax.nn.log_softmax(jnp.array(rng.normal(size=(1, 9, VOCAB), scale=2), jnp.float32))
    for _ in range(2)
  )
  for count, beta in itertools.product((1, 8, VOCAB), (0.0, 0.3, 1.0)):
    values, ids = jax.lax.top_k(teacher, count)
    pair = distillation.on_top_k(student, ids, values)
    found = distillation.divergence(*pair, beta=beta)
    if count == VOCAB:
      expected = distillation.divergence(student, teacher, beta=beta)
    else:
      logs = [torch.tensor(np.array(x)) for x in (jnp.take_along_axis(student, ids, -1), values)]
      mask = torch.ones_like(logs[0], dtype=torch.bool)
      (ours, mask_of_all), (theirs, _) = (trl._add_tail_bucket(x, mask) for x in logs)
      expected = trl._jsd_divergence(ours, theirs, beta, mask_of_all).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


TASK = """
from paxlike.experiments import datasets
from paxlike.experiments.distillation import Distillation, OnPolicyDistillation
from paxlike.experiments.gpt import Gpt
from paxlike.experiments.llama import Llama
from paxlike.experiments.reinforcement import PromptFiles

class Small(datasets.Tokenized):
  VOCAB_SIZE = 257
  MAX_SEQ_LEN = 16
  NUM_LAYERS = 1
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  FPROP_DTYPE = "float32"
  PERCORE_BATCH_SIZE = 1
  LEARNING_RATE = 0.03
  LR_SCHEDULE = "constant"
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 0
  MAX_STEPS = 4

class Teacher(Small, datasets.LocalText, Gpt):
  NUM_LAYERS = 2
  MODEL_DIMS = 32
  MAX_STEPS = 40
  TRAIN_SHARE = 1.0

class Student(Small, Distillation, datasets.LocalText, Llama):
  NUM_KV_HEADS = 2
  TRAIN_SHARE = 1.0

class Prepared(Small, Distillation, datasets.Prepared, Llama):
  NUM_KV_HEADS = 2
  EVAL_SPLIT = None

class OnPolicy(Small, OnPolicyDistillation, PromptFiles, Llama):
  NUM_KV_HEADS = 2
  PROMPTS_PER_STEP = 5
  GROUP_SIZE = 8
  MAX_PROMPT_TOKENS = 8
  MAX_NEW_TOKENS = 6
  DISTILLATION_BETA = 0.3
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory, text):
  """Runs the experiments above; the first one is the teacher of the others."""
  folder = tmp_path_factory.mktemp("task")
  (folder / "distillation_task.py").write_text(TASK)

  def go(experiment, name, *more):
    own = (f"--fdl_config=distillation_task.{experiment}", f"--fdl.DATA_PATH={text}")
    return run(*own, f"--job_log_dir={folder / name}", *more)

  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(folder))
    assert go("Teacher", "teacher") == 0
    yield folder, go


def final_state(folder, step):
  import orbax.checkpoint as ocp

  with Checkpoints(folder / "checkpoints", keep=None) as saved, ocp.StandardCheckpointer() as io:
    return io.restore(saved.path(step) / "state")


@pytest.mark.slow
def test_a_student_gets_nearer_to_its_teacher_and_resumes_exactly(task, capsys, monkeypatch):
  folder, go = task
  own = (f"--fdl.TEACHER={folder / 'teacher'}", "--fdl.ICI_MESH_SHAPE=[2,2,2]")
  own = (*own, "--fdl.GRADIENT_ACCUMULATION_STEPS=2", "--fdl.MAX_STEPS=30")
  assert go("Student", "whole", *own) == 0
  losses = [loss for _, loss in curve(folder / "whole")]
  assert np.mean(losses[-3:]) < 0.5 * losses[0]
  for count in (7, 30):
    assert go("Student", "parts", *own, f"--fdl.num_steps={count}") == 0
  assert curve(folder / "parts") == curve(folder / "whole")
  expected, got = (final_state(folder / name, 30) for name in ("whole", "parts"))
  assert expected.keys() == got.keys()
  for name, value in expected.items():
    assert np.asarray(value).tobytes() == np.asarray(got[name]).tobytes(), name
  # The teacher is the recorded checkpoint, or none.
  record = json.loads((folder / "whole" / "teacher.json").read_text())
  assert record["step"] == 40 and record["path"] == str(folder / "teacher")
  capsys.readouterr()
  longer = ("--fdl.MAX_STEPS=31", f"--fdl.TEACHER={folder / 'whole'}")
  assert go("Student", "whole", *own, *longer) == 2
  assert "is not the teacher of the steps so far" in capsys.readouterr().err
  for module in (checks.attention, checks.grouped, checks.precision):  # They are of no model.
    kind = "kernels" if module is checks.attention else "matmuls"
    monkeypatch.setattr(module, kind, lambda devices: iter(()))
  assert go("Student", "checked", *own, "--mode=check") == 0
  for flags, says in (
    (("--fdl.VOCAB_SIZE=300",), "has a vocabulary of 257 tokens, and the model of 300"),
    ((f"--fdl.TEACHER={folder}",), "has no config.json"),
    (("--fdl.TEACHER_STEP=3",), "no checkpoint 3 in"),
    (("--fdl.TEACHER=none",), "TEACHER is not set, and the data have no predictions"),
    (("--fdl.Z_LOSS=0.1",), "set DISTILLATION_CROSS_ENTROPY"),
  ):
    assert go("Student", "other", *own, *flags) == 2
    assert says in capsys.readouterr().err
  assert not (folder / "other").exists()


@pytest.mark.slow
def test_vocabularies_may_be_padded_to_other_sizes_if_tokenizers_are_the_same(
  task, models, text, capsys
):
  folder, go = task
  teacher = models["teacher"][1]
  damaged_files.write_tokenizer(teacher)
  damaged_files.write_sentencepiece(folder / "other_tokenizer")
  own = (f"--fdl.TEACHER={teacher}", f"--fdl.VOCAB_SIZE={VOCAB}", "--fdl.MAX_STEPS=2")
  same = ("--fdl.TOKENIZER=huggingface", f"--fdl.VOCAB_PATH={teacher / 'tokenizer.json'}")
  assert go("Student", "padded", *own, *same) == 0
  given = ("--fdl_config=distillation_task.Student", f"--fdl.DATA_PATH={text}", *own, *same)
  assert prepare(*given, f"--teacher_top_k={PADDED}", f"--to={folder / 'x'}") == 2
  assert f"must be from 1 to the vocabulary's {VOCAB}" in capsys.readouterr().err
  path = folder / "other_tokenizer" / "tokenizer.model"
  other = ("--fdl.TOKENIZER=sentencepiece", f"--fdl.VOCAB_PATH={path}")
  assert go("Student", "refused", *own, *other) == 2
  assert "a converted model with the tokenizer of the data" in capsys.readouterr().err


def prepare(*flags):
  """Runs scripts/prepare_data.py in this process; returns the exit status."""
  path = REPOSITORY / "scripts" / "prepare_data.py"
  spec = importlib.util.spec_from_file_location("prepare_data", path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.main(["prepare_data.py", *flags])


@pytest.mark.slow
def test_a_student_learns_from_stored_predictions_without_the_teacher(task, text, capsys):
  folder, go = task
  teacher = f"--fdl.TEACHER={folder / 'teacher'}"
  given = ("--fdl_config=distillation_task.Student", f"--fdl.DATA_PATH={text}")
  for count in (6, 257):
    to = folder / f"top{count}"
    assert prepare(*given, teacher, f"--teacher_top_k={count}", f"--to={to}", "--shards=2") == 0
  curves = {}
  for name, data, more in (
    ("online", "top257", (teacher,)),
    ("all", "top257", ()),
    ("top", "top6", ()),
    ("mesh", "top6", ("--fdl.ICI_MESH_SHAPE=[2,2,2]", "--fdl.GRADIENT_ACCUMULATION_STEPS=2")),
    ("context", "top6", ("--fdl.ICI_MESH_SHAPE={data:4,context:2}",)),
  ):
    more = (*more, f"--fdl.DATA_PATH={folder / data}")
    assert go("Prepared", name, *more) == 0
    curves[name] = np.array(curve(folder / name))
  np.testing.assert_allclose(curves["all"], curves["online"], rtol=1e-5)
  for name in ("mesh", "context"):
    np.testing.assert_allclose(curves[name], curves["top"], rtol=1e-5)
  assert (curves["top"][:, 1] < curves["all"][:, 1]).all()  # Fewer events, less divergence.
  assert curves["top"][-1, 1] < curves["top"][0, 1]
  capsys.readouterr()
  wrong = ("--fdl.DISTILLATION_TEMPERATURE=2", f"--fdl.DATA_PATH={folder / 'top6'}")
  assert go("Prepared", "other", *wrong) == 2
  assert "the predictions in DATA_PATH were made at 1.0" in capsys.readouterr().err
  for flags, says in (
    ((), "--teacher_top_k needs --fdl.TEACHER=DIR"),
    ((teacher, "--teacher_top_k=258"), "must be from 1 to the vocabulary's 257"),
  ):
    assert prepare(*given, "--teacher_top_k=2", f"--to={folder / 'x'}", *flags) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_on_policy_losses_are_of_sampled_answers_and_fall(task, tmp_path, monkeypatch, capsys):
  folder, go = task
  teacher = f"--fdl.TEACHER={folder / 'teacher'}"
  prompts = tmp_path / "prompts.jsonl"
  records = [{"prompt": text} for text in ("1 bottl", "of ", "beer", "the wa", "on t")]
  prompts.write_text("".join(f"{json.dumps(one)}\n" for one in records))
  assert go("Student", "start", teacher, "--fdl.MAX_STEPS=2") == 0
  seen, sampled = [], RolloutTraining._sampled

  def recorded(self, sampler, prepared, answers):
    found = sampled(self, sampler, prepared, answers)
    seen.append([(answer.prompt, answer.tokens) for answer in answers])
    return found

  monkeypatch.setattr(RolloutTraining, "_sampled", recorded)
  own = (teacher, f"--fdl.CHECKPOINT_RESTORE_PATH={folder / 'start'}", "--fdl.MAX_STEPS=16")
  own = (*own, f"--fdl.DATA_PATH={prompts}", "--fdl.ICI_MESH_SHAPE=[2,2,2]")
  assert go("OnPolicy", "own", *own) == 0
  for count in (5, 16):
    assert go("OnPolicy", "own_parts", *own, f"--fdl.num_steps={count}") == 0
  assert curve(folder / "own_parts") == curve(folder / "own")
  losses = [loss for _, loss in curve(folder / "own")]
  assert np.mean(losses[-3:]) < 0.7 * losses[0]

  student, of_teacher = (paxlike.load(folder / name) for name in ("start", "teacher"))
  total = count = 0
  for prompt, tokens in seen[0]:
    ids = [*map(int, prompt), *tokens]
    p, q = (
      scipy.special.softmax(
        np.asarray(one.logits([ids[:-1]]), np.float64)[0, len(prompt) - 1 :], -1
      )
      for one in (of_teacher, student)
    )
    m = 0.3 * p + 0.7 * q
    total += (0.3 * p * np.log(p / m) + 0.7 * q * np.log(q / m)).sum()
    count += len(tokens)
  np.testing.assert_allclose(losses[0], total / count, rtol=1e-4)
