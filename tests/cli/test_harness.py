# SPDX-License-Identifier: Apache-2.0
"""The harness finds in our model what it finds in Hugging Face's of the same weights."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers

from paxlike.convert.main import run
from paxlike.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # The harness's own.
QUESTIONS = [
  {"question": f"{a} and {b} are", "choices": [f"{a + b}", f"{a + b + 1}", "many"], "answer": 0}
  for a in range(5)
  for b in range(4)
]
TASKS = {
  "sums": {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
  },
  "text": {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}} {{choices[0]}}, and so it goes on and on and on for long.",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
  },
  "say": {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
  },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """The folder of a random LLaMA as Hugging Face has it, and of the same for paxlike."""
  import torch
  import transformers

  folder = tmp_path_factory.mktemp("models")
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
  made.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
  trainer = tokenizers.trainers.BpeTrainer(
    special_tokens=["<s>", "</s>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    vocab_size=300,
    show_progress=False,
  )
  made.train_from_iterator([row["question"] for row in QUESTIONS], trainer)
  made.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore
    single="<s> $A", special_tokens=[("<s>", 0)]
  )
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
  )
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=1,
  )
  model = transformers.LlamaForCausalLM(config)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  model.save_pretrained(folder / "theirs")
  tokenizer.save_pretrained(folder / "theirs")
  assert run(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'ours'}"]) == 0
  return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  """A folder of tasks over a local file."""
  folder = tmp_path_factory.mktemp("tasks")
  data = folder / "data.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
  for name, task in TASKS.items():
    whole = {
      "task": name,
      "dataset_path": "json",
      "dataset_kwargs": {"data_files": {"test": str(data)}},
      "test_split": "test",
      **task,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML.
  return folder


def evaluate(model, tasks) -> Any:
  import lm_eval
  from lm_eval.tasks import TaskManager

  simple_evaluate: Any = lm_eval.simple_evaluate
  return simple_evaluate(
    model=model,
    tasks=list(TASKS),
    task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
  )


def test_both_backends_answer_alike(models, tasks, tmp_path, monkeypatch):
  from lm_eval.models import huggingface

  from paxlike.cli import harness

  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
  paxlike_lm: Any = harness.PaxlikeLM
  hf_lm: Any = huggingface.HFLM
  ours = paxlike_lm(folder=str(models / "ours"), batch_size=7, dtype="float32")
  theirs = hf_lm(
    pretrained=str(models / "theirs"),
    device="cpu",
    dtype="float32",
    batch_size=4,
    max_length=32,
    # It takes windows for the same that share their tokens but not their number of asked ones.
    logits_cache=False,
  )
  texts = [row["question"] for row in QUESTIONS]
  assert [ours.tok_encode(text) for text in texts] == [theirs.tok_encode(text) for text in texts]
  found, expected = (evaluate(model, tasks) for model in (ours, theirs))
  for task in TASKS:
    for one, other in zip(found["samples"][task], expected["samples"][task], strict=True):
      if task == "say":
        assert one["resps"] == other["resps"]
        continue
      values = [np.ravel(sample["resps"]).astype(object) for sample in (one, other)]
      likelihoods = [[float(v) for v in part if not isinstance(v, bool)] for part in values]
      # Of texts of up to 40 tokens: far less than 1e-4 a token.
      np.testing.assert_allclose(likelihoods[0], likelihoods[1], rtol=0, atol=5e-4)
      assert [v for v in values[0] if isinstance(v, bool)] == [
        v for v in values[1] if isinstance(v, bool)
      ]
  assert found["results"]["sums"]["acc,none"] == expected["results"]["sums"]["acc,none"]
  for metric in ("bits_per_byte,none", "word_perplexity,none"):
    assert found["results"]["text"][metric] == pytest.approx(expected["results"]["text"][metric])


@pytest.mark.parametrize(
  ("given", "says"),
  [
    (["--tasks", "no_such_task"], "no_such_task"),
    (["--tasks", "arc_easy", "--model_args", "folder=/nowhere"], "/nowhere/config.json"),
  ],
)
def test_a_mistake_is_one_line(given, says, monkeypatch, capsys):
  from paxlike.cli import harness

  monkeypatch.setattr("sys.argv", ["harness", "--model", "paxlike", *given])
  assert harness.main() == 2
  last = capsys.readouterr().err.splitlines()[-1]
  assert last.startswith("paxlike.cli.harness: ") and says in last


ARGUMENTS = {
  "paxlike has no path. There are folder, step, batch_size": {"path": "/nowhere"},
  "paxlike has no fodler. Did you mean folder?": {"folder": "/nowhere", "fodler": "/b"},
  "--model_args needs folder=DIR": {"step": 3},
  "step=last: expected an int of at least 0": {"folder": "/nowhere", "step": "last"},
  "dtype=int4: expected one of": {"folder": "/nowhere", "dtype": "int4"},
  "give --batch_size=4 instead of": {"folder": "/nowhere", "batch_size": 4},
  "/nowhere/config.json": {"folder": "/nowhere", "step": "3", "trust_remote_code": True},
}


@pytest.mark.parametrize("says", ARGUMENTS)
def test_a_wrong_argument_of_the_model_is_named(says):
  from paxlike.cli import harness

  own = {"batch_size": 1, "max_batch_size": 4, "device": "cpu"}  # What the harness passes itself.
  with pytest.raises(UserError, match=re.escape(says)):
    harness.PaxlikeLM.create_from_arg_obj(ARGUMENTS[says], own)


def test_without_the_harness_the_extra_is_named(tmp_path):
  (tmp_path / "lm_eval").mkdir()
  (tmp_path / "lm_eval" / "__init__.py").write_text("raise ImportError('no lm_eval')")
  path = os.pathsep.join([str(tmp_path), *sys.path])
  ended = subprocess.run(
    [sys.executable, "-m", "paxlike.cli.harness"],
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 2
  assert ended.stderr == "paxlike.cli.harness: no lm_eval: pip install 'paxlike[lm_eval]'.\n"
