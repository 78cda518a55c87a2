# SPDX-License-Identifier: Apache-2.0
"""Adapters of several runs in one batch give what each gives alone."""

import pytest

import paxlike

pytestmark = pytest.mark.slow
PROMPTS = ["3 bottles", "9 b", "no", "3 bottles", "take one", "of be", "wall"]


@pytest.fixture(scope="module")
def runs(trained, tiny, text, tmp_path_factory):
  """Three runs that trained other adapters of the same base: ranks, scales and layers differ."""
  folder = tmp_path_factory.mktemp("adapters")
  made = {}
  for name, more in {
    "a": {"LORA_RANK": 2, "LORA_ALPHA": 6.0},
    "b": {"LORA_RANK": 4, "LORA_TARGET_LAYERS": "query,down"},
    "c": {"LORA_RANK": 2, "LORA_TARGET_LAYERS": "mlp", "LORA_RSLORA": True, "LORA_ALPHA": 2.0},
    "dora": {"LORA_DORA": True},
  }.items():
    knobs = {
      "DATA_PATH": str(text),
      "LEARNING_RATE": 0.3,
      "CHECKPOINT_RESTORE_PATH": str(trained.folder),
    }
    made[name] = paxlike.train(tiny, folder / name, USE_LORA=True, **knobs, **more)
  return made


def test_a_mixed_batch_is_each_adapter_alone(trained, model, runs):
  folders = {name: runs[name].folder for name in "abc"}
  mixed = paxlike.load(trained.folder, adapters=folders)
  chosen = ["a", None, "c", "b", "a", "c", "b"]
  texts = mixed.generate(PROMPTS, max_new_tokens=6, adapters=chosen)
  alone = {None: model, **{name: runs[name].load() for name in folders}}
  for prompt, name, text in zip(PROMPTS, chosen, texts, strict=True):
    assert text == alone[name].generate(prompt, max_new_tokens=6), name
  of_all = {name: mixed.generate(PROMPTS, max_new_tokens=6, adapters=name) for name in alone}
  assert len(set(map(tuple, of_all.values()))) == 4
  assert texts == [of_all[name][place] for place, name in enumerate(chosen)]
  assert (mixed.logits([[5, 6]]) == model.logits([[5, 6]])).all()
  with pytest.raises(paxlike.UserError, match="no 'd'; there are a, b, c"):
    mixed.generate(["x", "y"], adapters=["a", "d"])
  with pytest.raises(paxlike.UserError, match="1 for 2 prompts"):
    mixed.generate(["x", "y"], adapters=["a"])


def test_what_cannot_be_decoded_together_is_refused(trained, model, runs):
  with pytest.raises(paxlike.UserError, match="this model has none"):
    model.generate("x", adapters="a")
  for base, name, says in (
    (trained.folder, "dora", "without LORA_DORA"),
    (runs["a"].folder, "b", "were not trained on checkpoint 4 of"),
    (runs["a"].folder, "a", "were not trained on checkpoint 4 of"),
  ):
    with pytest.raises(paxlike.UserError, match=says):
      paxlike.load(base, adapters={"one": runs[name].folder})
  with pytest.raises(paxlike.UserError, match="were not trained on checkpoint 2 of"):
    paxlike.load(trained.folder, 2, adapters={"one": runs["a"].folder})
  with pytest.raises(paxlike.UserError, match="has no adapters"):
    paxlike.load(trained.folder, adapters={"one": trained.folder})
  (runs["c"].folder / "restored_from.json").rename(runs["c"].folder / "gone.json")
  with pytest.raises(paxlike.UserError, match="were not trained on checkpoint 4 of"):
    paxlike.load(trained.folder, adapters={"one": runs["c"].folder})
