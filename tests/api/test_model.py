# SPDX-License-Identifier: Apache-2.0
"""`paxlike.load` and what a model answers."""

import json

import numpy as np
import pytest

import paxlike
from paxlike import main

pytestmark = pytest.mark.slow


def test_a_text_is_what_the_command_decodes(trained, model):
  text = model.generate("3 bottles", max_new_tokens=6)
  flags = ("--prompt=3 bottles", "--max_new_tokens=6", f"--job_log_dir={trained.folder}")
  assert main.main(["", "--mode=decode", *flags]) == 0
  (line,) = (trained.folder / "decode_out" / "decode_00000004.jsonl").read_text().splitlines()
  assert text == json.loads(line)["text"]
  assert len(text) == 6


def test_prompts_are_texts_or_ids_one_or_several(model):
  text = model.generate("3 b", max_new_tokens=4)
  assert model.generate(["3 b", "9 b"], max_new_tokens=4)[0] == text
  ids = [int(i) for i in model.tokenizer.encode("3 b")]
  more = model.generate(ids, max_new_tokens=4)
  assert model.tokenizer.decode(np.array(more)) == text
  assert model.generate([ids, ids[:1]], max_new_tokens=4)[0] == more
  assert model.generate(np.array([ids]), max_new_tokens=4) == [more]
  assert model.generate([], max_new_tokens=4) == []
  assert model.generate("3 b", max_new_tokens=4, stop=text[2]) == text[: text.index(text[2])]


def test_draws_follow_the_seed(model):
  def draw(seed):
    return model.generate("3 b", max_new_tokens=8, temperature=1.0, seed=seed)

  assert draw(1) == draw(1) != draw(2)


def test_logits_are_what_greedy_decoding_goes_by(model):
  ids = [int(i) for i in model.tokenizer.encode("3 bott")]
  logits_BTV = model.logits([ids, ids])
  assert logits_BTV.shape == (2, len(ids), 257) and logits_BTV.dtype == np.float32
  np.testing.assert_array_equal(logits_BTV[0], logits_BTV[1])
  assert logits_BTV[0, -1].argmax() == model.generate(ids, max_new_tokens=1)[0]


def test_evaluation_finds_what_the_run_found(trained, model):
  (record,) = [r for r in trained.records() if r["kind"] == "eval" and r["updates"] == 4]
  before = sorted(path.name for path in trained.folder.iterdir())
  (values,) = model.evaluate().values()
  assert values["log_pplx"] == record["log_pplx"]
  assert sorted(path.name for path in trained.folder.iterdir()) == before


def test_a_checkpoint_is_chosen(trained):
  assert trained.load(2).step == 2
  assert trained.load().step == 4
  with pytest.raises(paxlike.UserError, match="no checkpoint 3"):
    trained.load(3)
  with pytest.raises(paxlike.UserError, match="BEST_CHECKPOINT_METRIC"):
    trained.load("best")


def test_a_graph_of_known_parts_needs_no_module_of_the_user(trained, model):
  loaded = paxlike.load(trained.folder)
  assert loaded.generate("3 b", max_new_tokens=4) == model.generate("3 b", max_new_tokens=4)


@pytest.mark.parametrize(
  ("ask", "says"),
  [
    (lambda model: model.generate("x" * 99), "leaves no room for new ones in 16"),
    (lambda model: model.generate([400]), "expected ids from 0 to 256, got"),
    (lambda model: model.generate("x", top_p=3.0), "top_p=3.0"),
    (lambda model: model.generate([[]]), "no tokens"),
    (lambda model: model.logits([1, 2]), r"tokens are \[2\]: expected \[B, T\], T at most 16"),
    (lambda model: model.logits([[1], [2, 3]]), "ids of one length"),
    (lambda model: model.logits([[1.5]]), "expected ids"),
  ],
)
def test_a_mistake_is_one_line(model, ask, says):
  with pytest.raises(paxlike.UserError, match=says):
    ask(model)


def test_a_folder_without_a_model_is_named(tmp_path):
  with pytest.raises(paxlike.UserError, match=r"no config\.json"):
    paxlike.load(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(paxlike.UserError, match=r"config\.json is damaged"):
    paxlike.load(tmp_path)
  with pytest.raises(paxlike.UserError, match="no such folder"):
    paxlike.load(tmp_path / "none")


def test_what_is_exported_is_loaded_again(model, tmp_path, monkeypatch, capfd):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "cache"))
  model.export(tmp_path / "theirs")
  tokens = np.arange(12).reshape(2, 6)
  ours = paxlike.load(tmp_path / "theirs")
  np.testing.assert_allclose(ours.logits(tokens), model.logits(tokens), rtol=1e-5, atol=1e-5)
  assert "converting" in capfd.readouterr().err
  again = paxlike.load(tmp_path / "theirs")
  assert "converting" not in capfd.readouterr().err
  assert again.folder == ours.folder and again.folder.is_relative_to(tmp_path / "cache")
  with pytest.raises(paxlike.UserError, match="already exists"):
    model.export(tmp_path / "theirs")


@pytest.mark.slow
def test_transformers_reads_what_is_exported(model, tmp_path):
  import torch
  from transformers import AutoModelForCausalLM

  model.export(tmp_path / "theirs")
  theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
  tokens = np.arange(12).reshape(2, 6)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  np.testing.assert_allclose(model.logits(tokens), expected, rtol=1e-4, atol=1e-5)
