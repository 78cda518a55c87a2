# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Pax wrote compute here what they computed there."""

import shutil

import numpy as np
import pytest
from helpers import tiny_tokenizers
from helpers.jax_programs import archives, assert_same_logits, extract, flags, rewrite
from helpers.program import run as paxlike

from paxlike.convert.jax_checkpoint import JaxCheckpoint, Requested
from paxlike.convert.main import run
from paxlike.convert.tensorstore_arrays import TensorStoreArrays
from paxlike.errors import UserError

SIZES = {
  "VOCAB_SIZE": 64,
  "MAX_SEQ_LEN": 32,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 24,
  "NUM_LAYERS": 4,
  "NUM_HEADS": 4,
  "DIMS_PER_HEAD": 4,
}
EXPERIMENTS = {
  "gpt": ("Pile126M", SIZES),
  "llama": ("LLaMA7B", SIZES),
  "llama_grouped": ("LLaMA7B", {**SIZES, "NUM_KV_HEADS": 2}),
  "llama_one_kv_head": ("LLaMA7B", {**SIZES, "NUM_KV_HEADS": 1}),
  "glam": ("LambadaGLaM126M64E", {**SIZES, "NUM_EXPERTS": 4, "MODEL_DIMS": 32, "DIMS_PER_HEAD": 8}),
}


def experiment_of(name):
  return EXPERIMENTS[name.removesuffix("_repeated").removesuffix("_database")]


@pytest.mark.slow
@pytest.mark.parametrize("name", archives("pax"))
def test_logits_equal_those_of_pax(tmp_path, name):
  folder = extract("pax", name, tmp_path)
  assert_same_logits("pax", folder, tmp_path / "ours", *flags(*experiment_of(name)))


def opened(path):
  experiment, sizes = experiment_of("gpt")
  return JaxCheckpoint.pax(path, Requested(experiment, [(k, str(v)) for k, v in sizes.items()]))


def weights(path):
  return dict(opened(path)._weights())


def test_layouts_and_formats_hold_the_same_model(tmp_path):
  one, other = (
    weights(extract("pax", f"gpt_{kind}", tmp_path)) for kind in ("repeated", "database")
  )
  assert one.keys() == other.keys()
  for name, weight in one.items():
    np.testing.assert_array_equal(weight, other[name])


STATE = "checkpoints/checkpoint_00000002/state"
TABLE = "mdl_vars.params.lm.softmax.logits_ffn.linear.w"


def test_padding_for_a_mesh_is_removed(tmp_path):
  path = extract("pax", "gpt_repeated", tmp_path)
  whole = weights(path)
  arrays = TensorStoreArrays(path / STATE, prefixes=("mdl_vars.",), root="")
  padded = {f"mdl_vars.{name}": arrays.read(name) for name in arrays.specs}
  padded[TABLE] = np.pad(padded[TABLE], ((0, 0), (0, 8)))
  rewrite(path / STATE, padded)
  for name, weight in weights(path).items():
    np.testing.assert_array_equal(weight, whole[name])
  (path / STATE).parent.joinpath("metadata", "metadata").unlink()
  with pytest.raises(UserError, match="VOCAB_SIZE is 72, not 64"):
    weights(path)


MISTAKES = {
  "metadata": (lambda state: (state.parent / "metadata" / "metadata").write_text("{"), "not JSON"),
  "a missing array": (lambda state: shutil.rmtree(state / TABLE), "missing: lm."),
  "a missing chunk": (lambda state: (state / TABLE / "0.0").unlink(), "is missing or damaged"),
  "a broken array": (lambda state: (state / TABLE / ".zarray").write_text("{"), TABLE),
  "other arrays": (
    lambda state: (shutil.rmtree(state), (state / "step").mkdir(parents=True)),
    "holds no arrays of Orbax",
  ),
  "msgpack": (
    lambda state: (shutil.rmtree(state), state.mkdir(), (state / "checkpoint").touch()),
    "a file of Flax's msgpack",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_in_one_line(tmp_path, capsys, mistake):
  path = extract("pax", "gpt_repeated", tmp_path)
  damage, said = MISTAKES[mistake]
  damage(path / STATE)
  given = [f"--path={path}", f"--to={tmp_path / 'ours'}", *flags(*experiment_of("gpt"))]
  assert run(["--from=pax", *given]) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "ours").exists()


def test_pax_needs_an_experiment(tmp_path, capsys):
  path = extract("pax", "gpt", tmp_path)
  assert run(["--from=pax", f"--path={path}", "--to=x"]) == 2
  assert "--from=pax needs --fdl_config=NAME" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tokenizer_can_be_added(tmp_path, capsys):
  path = extract("pax", "gpt", tmp_path)
  vocabulary = tmp_path / "words.json"
  tiny_tokenizers.words(size=60).save(str(vocabulary))
  given = [*flags(*experiment_of("gpt")), f"--fdl.VOCAB_PATH={vocabulary}"]
  assert run(["--from=pax", f"--path={path}", f"--to={tmp_path / 'ours'}", *given]) == 0
  assert "has no tokenizer" not in capsys.readouterr().out
  again = tmp_path / "moved"
  (tmp_path / "ours").rename(again)
  vocabulary.unlink()
  assert (
    paxlike(f"--job_log_dir={again}", "--mode=decode", "--prompt=t5 t6", "--max_new_tokens=2") == 0
  )
