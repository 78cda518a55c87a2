# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that MaxText wrote compute here what they computed there."""

import json
import os

import numpy as np
import pytest
from helpers.jax_programs import archives, assert_same_logits, extract, flags, rewrite

from paxlike import registry
from paxlike.convert import layered_arrays, maxtext_config, tensorstore_arrays
from paxlike.convert.jax_checkpoint import JaxCheckpoint, Requested
from paxlike.convert.main import run
from paxlike.convert.tensorstore_arrays import TensorStoreArrays
from paxlike.errors import UserError

SIZES = {
  "VOCAB_SIZE": 64,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 24,
  "NUM_LAYERS": 3,
  "NUM_HEADS": 4,
  "DIMS_PER_HEAD": 8,
}
GROUPED = {**SIZES, "NUM_KV_HEADS": 2}
# Name without "_unscanned" -> (experiment, its knobs).
EXPERIMENTS = {
  "llama2": ("SyntheticLLaMA7B", GROUPED),
  "llama2_fused": ("Scaled16B", {**GROUPED, "NORM_EPSILON": 1e-5}),
  "llama31": ("Llama31_8B", GROUPED),
  "mistral": ("Mistral7B", {**GROUPED, "WINDOW": None, "ROPE_THETA": 1e6}),
  "mixtral": ("Mixtral8x7B", {**GROUPED, "NUM_EXPERTS": 4, "ROPE_THETA": 1e4, "NUM_LAYERS": 2}),
  "gemma": ("Gemma2B", {**SIZES, "NUM_KV_HEADS": 1}),
  "gemma2": ("Gemma2_2B", {**GROUPED, "NUM_LAYERS": 4, "WINDOW": 6}),
  "gemma3": ("Gemma3_4B", {**GROUPED, "NUM_LAYERS": 8, "WINDOW": 6}),
  "gpt3": ("Gpt3_52k", {**SIZES, "NUM_LAYERS": 2, "MAX_SEQ_LEN": 32}),
}


def experiment_of(name):
  return flags(*EXPERIMENTS[name.removesuffix("_unscanned").removesuffix("_parameters")])


def requested(name):
  experiment, sizes = EXPERIMENTS[name]
  return Requested(experiment, [(knob, str(value)) for knob, value in sizes.items()])


@pytest.mark.slow
@pytest.mark.parametrize("name", archives("maxtext"))
def test_logits_equal_those_of_maxtext(tmp_path, name):
  folder = extract("maxtext", name, tmp_path)
  assert_same_logits("maxtext", folder, tmp_path / "ours", *experiment_of(name))


def test_blocks_of_layers_are_read_one_after_the_other(tmp_path, monkeypatch):
  path = extract("maxtext", "llama2", tmp_path)
  whole = dict(JaxCheckpoint.maxtext(path, requested("llama2"))._weights())
  monkeypatch.setattr(layered_arrays, "_BLOCK_BYTES", 1)
  for name, weight in JaxCheckpoint.maxtext(path, requested("llama2"))._weights():
    np.testing.assert_array_equal(weight, whole[name])


def convert(path, to, *more):
  return run(["--from=maxtext", f"--path={path}", f"--to={to}", *more])


def test_a_checkpoint_is_found_from_any_folder_above_it(tmp_path, capsys):
  path = extract("maxtext", "llama2", tmp_path)
  tables = set()
  for inner in (".", "checkpoints", "checkpoints/1", "checkpoints/1/items"):
    assert convert(path / inner, "x", *experiment_of("llama2"), "--dry_run") == 0
    tables.add(capsys.readouterr().out)
  assert len(tables) == 1
  assert "stack.layers.2.mlp.up.w [16, 24] <- decoder.layers.2.mlp.wi_1.kernel" in tables.pop()


def configured(folder, **keys):
  """Writes the configuration of the run `llama2`."""
  given = {
    "decoder_block": "llama2",
    "vocab_size": 64,
    "base_emb_dim": 16,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 3,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "logits_via_embedding": False,
    "mlp_activations": ["silu", "linear"],
    "dtype": "!!python/object/apply:os.system [x]",
    **keys,
  }
  texts = {key: value if key == "dtype" else json.dumps(value) for key, value in given.items()}
  lines = [f"{key}: {text}" for key, text in texts.items()]
  (folder / maxtext_config.FILE).write_text("\n".join(lines))


def test_a_configuration_names_the_experiment_and_its_sizes(tmp_path):
  path = extract("maxtext", "llama2", tmp_path)
  configured(path, rope_max_timescale=500_000)
  assert convert(path, tmp_path / "ours") == 0
  experiment = registry.load(tmp_path / "ours" / "experiment.json")
  assert type(experiment).__name__ == "Llama"
  assert experiment.ROPE_THETA == 500_000 and experiment.NUM_KV_HEADS == 2
  assert experiment.NORM_EPSILON == 1e-5 and experiment.MAX_SEQ_LEN == 2048


def test_each_kind_of_block_is_read(tmp_path):
  common = {"head_dim": 8, "sliding_window_size": 6}
  gelu = {"mlp_activations": ["gelu", "linear"], "logits_via_embedding": True}
  blocks = {
    "mistral": ({}, {"WINDOW": None}),
    "mixtral": ({"num_experts": 4, "num_experts_per_tok": 2}, {"NUM_EXPERTS": 4}),
    "gemma": (gelu, {"USE_TIED_EMBEDDING": True}),
    "gemma2": (gelu | {"final_logits_soft_cap": 30.0}, {"NUM_LAYERS": 6, "LOGITS_SOFT_CAP": 30.0}),
    "gemma3": (gelu | {"local_rope_max_timescale": 7}, {"WINDOW": 6, "LOCAL_ROPE_THETA": 7}),
    "gpt3": (
      {
        "mlp_activations": ["gelu"],
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
        "trainable_position_size": 32,
      },
      {"MAX_SEQ_LEN": 32},
    ),
  }
  for block, (keys, expected) in blocks.items():
    configured(tmp_path, decoder_block=block, **common, **keys)
    found = maxtext_config.read(tmp_path / maxtext_config.FILE)
    assert expected.items() <= found.knobs.items()


def test_the_global_scale_is_that_of_the_scaled_models(tmp_path):
  scaled = registry.find("Scaled128B")
  sizes = {"base_emb_dim": 2048, "base_mlp_dim": 7168, "base_num_decoder_layers": 16}
  heads = {"base_num_query_heads": 16, "base_num_kv_heads": 16}
  configured(tmp_path, global_parameter_scale=128, **sizes, **heads)
  knobs = maxtext_config.read(tmp_path / maxtext_config.FILE).knobs
  for name in ("NUM_LAYERS", "MODEL_DIMS", "HIDDEN_DIMS", "NUM_HEADS"):
    assert knobs[name] == getattr(scaled, name)


MISTAKES = {
  "sizes": (
    {},
    [*flags("SyntheticLLaMA7B", GROUPED | {"NUM_LAYERS": 2, "HIDDEN_DIMS": 32})],
    "NUM_LAYERS is 3, not 2, HIDDEN_DIMS is 24, not 32. For its size add --fdl.NUM_LAYERS=3"
    " --fdl.HIDDEN_DIMS=24.",
  ),
  "no experiment": ({}, [], "--from=maxtext needs --fdl_config=NAME, as the run has no config.yml"),
  "another family": (
    {},
    flags("Gemma2_2B", GROUPED),
    "missing: decoder.layers.0.post_self_attention_norm.scale",
  ),
  "a knob without effect": (
    {},
    [*experiment_of("llama2"), "--fdl.LEARNING_RATE=1", "--fdl.EVAL_SPLIT=x"],
    "no knob EVAL_SPLIT",
  ),
  "another value in the configuration": (
    {"rope_max_timescale": 500_000},
    experiment_of("llama2"),
    "config.yml is of another model than SyntheticLLaMA7B: add --fdl.ROPE_THETA=500000.0",
  ),
  "an unknown block": ({"decoder_block": "olmo3"}, [], "decoder_block is 'olmo3'; paxlike has"),
  "biases": ({"attention_bias": True}, [], "attention_bias is True; for llama2 paxlike has False"),
  "a wrong type": ({"vocab_size": "many"}, [], "vocab_size: expected an int"),
  "another activation": (
    {"mlp_activations": ["relu"]},
    [],
    "mlp_activations is ['relu']; for llama2 paxlike has ['silu', 'linear'] only",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_in_one_line(tmp_path, capsys, mistake):
  keys, given, said = MISTAKES[mistake]
  path = extract("maxtext", "llama2", tmp_path)
  if keys:
    configured(path, **keys)
  assert convert(path, tmp_path / "ours", *given) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "ours").exists()


def weights(path):
  return dict(JaxCheckpoint.maxtext(path, requested("llama2"))._weights())


@pytest.mark.slow
def test_a_damaged_file_is_refused_or_has_no_effect(tmp_path):
  path = extract("maxtext", "llama2", tmp_path)
  whole, refused = weights(path), set()
  items = path / "checkpoints" / "1" / "items"
  for file in sorted(one for one in items.rglob("*") if one.is_file()):
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:-1] + b"\0", None):
      file.unlink() if damaged is None else file.write_bytes(damaged)
      try:
        found = weights(path)
      except UserError as error:
        assert str(items) in str(error)
        refused.add(file)
      else:
        assert all(np.array_equal(found[name], whole[name]) for name in whole)
      file.write_bytes(content)
  assert items / "manifest.ocdbt" in refused and len(refused) > 3


def test_links_and_pipes_are_refused(tmp_path, capsys):
  path = extract("maxtext", "llama2", tmp_path)
  inside = path / "checkpoints" / "1" / "items" / "d" / "more"
  for make, kind in ((lambda: inside.symlink_to("/etc/passwd"), "a link"), (inside.touch, None)):
    make()
    expected = 0 if kind is None else 2
    assert convert(path, "x", *experiment_of("llama2"), "--dry_run") == expected
    assert (f"{inside} is {kind}" in capsys.readouterr().err) == (kind is not None)
    inside.unlink()
  os.mkfifo(inside)
  assert convert(path, "x", *experiment_of("llama2"), "--dry_run") == 2
  assert f"{inside} is a pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("folder", "more", "said"),
  [
    ("llama2/nothing", (), "llama2/nothing is not a folder"),
    ("elsewhere", (), "elsewhere holds no checkpoint of MaxText"),
    ("llama2", ("--step=7",), "--step=7: "),
    ("llama2/checkpoints/1", ("--step=1",), "leave out --step"),
    ("llama2/checkpoints/1/items/d", (), "holds no checkpoint of MaxText"),
  ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, capsys, folder, more, said):
  extract("maxtext", "llama2", tmp_path)
  (tmp_path / "elsewhere").mkdir()
  assert convert(tmp_path / folder, "x", *experiment_of("llama2"), *more) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1


def test_flags_of_other_sources_are_refused(capsys):
  for given in ("--fdl_config=Llama3_8B", "--fdl.NUM_LAYERS=2", "--step=1"):
    assert run(["--from=hf", "--path=x", "--to=y", given]) == 2
    assert "goes with --from=" in capsys.readouterr().err


PREFIX = "params.params."


def stored(path):
  """The arrays of a run's parameters by their full names."""
  arrays = TensorStoreArrays(path / "checkpoints" / "1" / "items", prefixes=(PREFIX,), root="")
  return {f"{PREFIX}{name}": arrays.read(name) for name in arrays.specs}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_layers_may_be_stacked_along_the_first_dim(tmp_path, driver):
  path = extract("maxtext", "llama2", tmp_path)
  whole, arrays = weights(path), stored(path)
  moved = {n: np.moveaxis(a, 1, 0) if ".layers." in n else a for n, a in arrays.items()}
  rewrite(path / "checkpoints" / "1" / "items", moved, driver=driver)
  for name, weight in weights(path).items():
    np.testing.assert_array_equal(weight, whole[name])


OUT = f"{PREFIX}decoder.layers.self_attention.out.kernel"


def fused(arrays):
  at = f"{PREFIX}decoder.layers.self_attention"
  names = [f"{at}.{role}.kernel" for role in ("query", "key", "value")]
  joined = np.concatenate([arrays.pop(name) for name in names], axis=2)
  arrays[f"{at}.qkv_proj.kernel"] = joined


CHANGES = {
  "missing": (lambda a: a.pop(OUT), "missing: decoder.layers.0.self_attention.out.kernel"),
  "unexpected": (
    lambda a: a.update({f"{PREFIX}decoder.layers.lora.kernel": a[OUT]}),
    "unexpected: decoder.layers.0.lora.kernel",
  ),
  "wrong shape": (lambda a: a.update({OUT: a[OUT][..., None]}), "wrong shape: decoder.layers.0."),
  "fewer layers": (lambda a: a.update({OUT: a[OUT][:, :2]}), "missing: decoder.layers.2.self_att"),
  "too many layers": (
    lambda a: a.update({OUT: np.zeros((1, 5000, 1), np.float32)}),
    "has 5,000 layers: too many",
  ),
  "no dim of layers": (lambda a: a.update({OUT: a[OUT][0, 0, 0]}), "it has no dim of layers"),
  "fused queries": (fused, "with fused_qkv=true, the order of MaxText's heads depends"),
  "nothing": (
    lambda a: (a.clear(), a.update(x=np.zeros(1))),
    "has no arrays params.params.decoder.*: it has 1",
  ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_arrays_of_another_model_are_named(tmp_path, capsys, change):
  path = extract("maxtext", "llama2", tmp_path)
  arrays = stored(path)
  alter, said = CHANGES[change]
  alter(arrays)
  rewrite(path / "checkpoints" / "1" / "items", arrays)
  assert convert(path, tmp_path / "ours", *experiment_of("llama2")) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "ours").exists()


def test_arrays_that_unpack_to_far_more_than_their_files_are_refused(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(tensorstore_arrays, "_MOST_UNPACKED", 50)
  path = extract("maxtext", "llama2", tmp_path)
  arrays = {f"{PREFIX}decoder.x": np.zeros(2 * 10**7, np.float32)}
  rewrite(path / "checkpoints" / "1" / "items", arrays)
  assert convert(path, "x", *experiment_of("llama2")) == 2
  assert "unpack to 80,000,000: too many" in capsys.readouterr().err
