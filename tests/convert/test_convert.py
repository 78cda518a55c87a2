# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert` on a small LLaMA: what it writes, and what it says of mistakes."""

import json
import re

import fiddle as fdl
import ml_dtypes
import numpy as np
import pytest
from helpers.program import run as paxlike
from helpers.tiny_llama import CONFIG, DIM, VOCAB, shapes, values, write

from paxlike.checkpoints import warm_start
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.config import building, graph_file
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.errors import UserError


def convert(source, to, *more, kind="hf"):
  return run([f"--from={kind}", f"--path={source}", f"--to={to}", *more])


def stored(folder, name):
  with Checkpoints(folder / "checkpoints", keep=None) as saved:
    return saved.at(0).read(f"params.{name}")


@pytest.mark.parametrize(
  ("declared", "said"),
  [
    ("bfloat16", "computes in bfloat16 (as declared)"),
    ("auto", "computes in float32 (none is declared, and weights are float32)"),
    ("float8", "computes in float32 ('float8' is declared, and weights are float32)"),
    ({}, "computes in float32 (none is declared, and weights are float32)"),
    ({"a": 1}, "computes in float32 ({'a': 1} is declared, and weights are float32)"),
  ],
)
def test_the_dtype_of_a_conversion_and_why_are_printed(tmp_path, capsys, declared, said):
  write(tmp_path / "theirs", config={**CONFIG, "torch_dtype": declared})
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  assert said in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_in_the_dtype_asked_for(tmp_path, dtype):
  write(tmp_path / "theirs")
  assert convert(tmp_path / "theirs", tmp_path / "ours", f"--dtype={dtype}") == 0
  theirs = values(shapes())["model.layers.1.self_attn.q_proj.weight"]
  got = stored(tmp_path / "ours", "stack.layers.1.attention.query.w")
  assert got.dtype == dtype
  np.testing.assert_array_equal(got.reshape(DIM, DIM), theirs.T.astype(dtype))
  assert convert(tmp_path / "ours", tmp_path / "back", f"--dtype={dtype}", kind="paxlike") == 0
  back = TensorFolder(tmp_path / "back")
  for name, value in values(shapes()).items():
    np.testing.assert_array_equal(back.read(name), value.astype(dtype))


def test_a_dry_run_says_what_goes_where_and_writes_nothing(tmp_path, capsys):
  write(tmp_path / "theirs")
  assert convert(tmp_path / "theirs", tmp_path / "ours", "--dry_run") == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(shapes())
  assert "stack.layers.0.mlp.up.w [16, 24] <- model.layers.0.mlp.up_proj.weight" in lines
  assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def without(name):
  return {key: value for key, value in values(shapes()).items() if key != name}


NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"
MISTAKES = {
  "missing": ({"arrays": without(NORM)}, f"missing: {NORM}"),
  "extra": ({"arrays": values(shapes() | {"extra.weight": (2,)})}, "unexpected: extra.weight"),
  "wrong shape": (
    {"arrays": values(shapes() | {GATE: (20, DIM)})},
    f"wrong shape: {GATE} is [20, 16], not [24, 16]",
  ),
  "no_name_of_a_family": ({"config": {**CONFIG, "model_type": ["llama"]}}, "is ['llama']; paxlike"),
  "another_family": ({"config": {**CONFIG, "model_type": "mamba"}}, "model_type is 'mamba'"),
  "another_activation": ({"config": {**CONFIG, "hidden_act": "relu"}}, "hidden_act is 'relu'"),
  "another_rope": (
    {"config": {**CONFIG, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
    "rope_type is 'dynamic'",
  ),
  "no_relative": (
    {"config": {**CONFIG, "model_type": "parrot"}, "arrays": values({"beak.w": (2,)})},
    "No family has a tensor of these names.",
  ),
  "no_size": (
    {"config": {k: v for k, v in CONFIG.items() if k != "hidden_size"}},
    "lacks hidden_size",
  ),
}


@pytest.mark.parametrize(("given", "said"), MISTAKES.values(), ids=MISTAKES)
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path, capsys, given, said):
  write(tmp_path / "theirs", **given)
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_the_family_nearest_to_an_unknown_model_is_named(tmp_path, capsys):
  sizes = {re.sub(r"post_attention_(layer)?norm", "final_norm", n): s for n, s in shapes().items()}
  config = {**CONFIG, "model_type": "parrot", "clip_qkv": 8.0}
  write(tmp_path / "theirs", arrays=values(sizes), config=config)
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  assert (
    "The nearest is llama: configuration keys that differ (1): clip_qkv;"
    " tensors that llama lacks (1): model.layers.*.final_norm.weight; tensors of llama that this"
    " model lacks (1): model.layers.*.post_attention_layernorm.weight."
  ) in capsys.readouterr().err


@pytest.mark.parametrize("size", [4, 500, -10])
def test_a_truncated_file_is_named(tmp_path, capsys, size):
  write(tmp_path / "theirs")
  file = tmp_path / "theirs" / "model.safetensors"
  file.write_bytes(file.read_bytes()[:size])
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  error = capsys.readouterr().err
  assert str(file) in error and error.count("\n") == 1
  assert ("cut short" in error) if size == -10 else ("damaged" in error)
  assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("kind", ["hf", "meta", "paxlike"])
def test_a_missing_folder_is_named(tmp_path, capsys, kind):
  assert convert(tmp_path / "nowhere", tmp_path / "ours", kind=kind) == 2
  error = capsys.readouterr().err
  assert "nowhere" in error and error.count("\n") == 1
  assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
  write(tmp_path / "theirs")
  (tmp_path / "ours").mkdir()
  (tmp_path / "ours" / "mine.txt").write_text("mine")
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  assert "already exists" in capsys.readouterr().err
  assert [path.name for path in (tmp_path / "ours").iterdir()] == ["mine.txt"]


def test_a_tokenizer_of_another_model_is_said(tmp_path, capsys):
  write(tmp_path / "theirs")
  _byte_level_tokenizer(300).save(str(tmp_path / "theirs" / "tokenizer.json"))
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  assert f"ids, but the model has {VOCAB}" in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def _byte_level_tokenizer(size):
  import tokenizers

  vocabulary = {f"t{index}": index for index in range(size)} | {"<unk>": size}
  model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return tokenizer


@pytest.mark.slow
def test_a_model_with_a_tokenizer_json_is_converted_and_decodes(tmp_path):
  write(tmp_path / "theirs", config={**CONFIG, "eos_token_id": None})
  _byte_level_tokenizer(VOCAB - 1).save(str(tmp_path / "theirs" / "tokenizer.json"))
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  flags = ("--mode=decode", f"--job_log_dir={tmp_path / 'ours'}", "--max_new_tokens=3")
  assert paxlike(*flags, "--prompt=t1 t2") == 0
  (line,) = (tmp_path / "ours/decode_out/decode_00000000.jsonl").read_text().splitlines()
  assert len(json.loads(line)["tokens"]) == 3
  assert convert(tmp_path / "ours", tmp_path / "back", kind="paxlike") == 0
  assert (tmp_path / "back" / "tokenizer.json").exists()


def test_decoding_with_the_experiment_of_another_family_is_said(tmp_path, capsys):
  write(tmp_path / "theirs")
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  flags = (f"--job_log_dir={tmp_path / 'ours'}", "--fdl_config=Text126M", "--fdl.DATA_PATH=x")
  assert paxlike("--mode=decode", *flags, "--prompt=a") == 2
  error = capsys.readouterr().err
  assert "is of another experiment" in error and "Traceback" not in error


@pytest.mark.parametrize("mode", ["eval", "decode"])
@pytest.mark.parametrize(
  ("knob", "unread"),
  [
    ("NUM_LAYERS=1", "params.stack.layers.1.attention.key.w: only in the checkpoint;"),
    ("USE_TIED_EMBEDDING=True", "params.head.w: only in the checkpoint."),
  ],
)
def test_weights_that_nothing_reads_are_refused(tmp_path, capsys, mode, knob, unread):
  write(tmp_path / "theirs")
  _byte_level_tokenizer(VOCAB - 1).save(str(tmp_path / "theirs" / "tokenizer.json"))
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  flags = [f"--mode={mode}", f"--job_log_dir={tmp_path / 'ours'}"]
  if mode == "decode":
    flags += ["--prompt=t1 t2", "--max_new_tokens=1"]
  else:
    (tmp_path / "text.txt").write_text("t1 t2 t3")
    flags += [f"--fdl.DATA_PATH={tmp_path / 'text.txt'}"]
  capsys.readouterr()
  assert paxlike(*flags, f"--fdl.{knob}") == 2
  error = capsys.readouterr().err
  assert unread in error and error.count("\n") == 1
  assert ("; and 4 more." in error) == knob.startswith("NUM_LAYERS")


def test_weights_to_start_from_are_all_read_unless_rules_leave_them_out(tmp_path):
  write(tmp_path / "theirs")
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  graph = graph_file.read(tmp_path / "ours" / "config.json")
  graph.model.stack.repeats = 1
  graph.restore = fdl.Config(warm_start.Restore, path=str(tmp_path / "ours"))
  with pytest.raises(UserError, match=r"layers\.1\.attention\.key\.w: only in the checkpoint"):
    building.build(graph).load(tmp_path / "new")
  graph.restore.ignore = (r"layers\.1\.",)
  assert "stack.layers.0.attention.key.w" in building.build(graph).load(tmp_path / "new")


@pytest.mark.slow
def test_a_converted_model_is_trained_in_a_folder_of_its_own(tmp_path, capsys):
  write(tmp_path / "theirs")
  assert convert(tmp_path / "theirs", tmp_path / "ours", "--dtype=bfloat16") == 0
  knobs = json.loads((tmp_path / "ours" / "experiment.json").read_text())["knobs"]
  flags = [
    "--fdl_config=SyntheticLLaMA7B",
    *(f"--fdl.{knob}={value}" for knob, value in knobs.items()),
  ]
  assert paxlike(*flags, f"--job_log_dir={tmp_path / 'ours'}") == 2
  assert f"--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / 'ours'}" in capsys.readouterr().err
  origin = f"--fdl.CHECKPOINT_RESTORE_PATH={tmp_path / 'ours'}"
  steps = ("--fdl.MAX_STEPS=1", f"--job_log_dir={tmp_path / 'run'}")
  assert paxlike(*flags, origin, *steps) == 0
  # The rate of the first step is 0.
  with Checkpoints(tmp_path / "run" / "checkpoints", keep=None) as saved:
    trained = saved.at(1).read("params.embedding.table")
  expected = values(shapes())["model.embed_tokens.weight"].astype("bfloat16").astype("float32")
  np.testing.assert_array_equal(trained, expected)


@pytest.mark.slow
def test_a_trained_run_is_exported(tmp_path):
  tiny = ("--fdl_config=SyntheticLLaMA7B", "--fdl.MODEL_DIMS=16", "--fdl.HIDDEN_DIMS=24")
  heads = ("--fdl.NUM_HEADS=4", "--fdl.VOCAB_SIZE=64", "--fdl.MAX_SEQ_LEN=8", "--fdl.NUM_LAYERS=2")
  scanned = ("--fdl.USE_REPEATED_LAYER=True", "--fdl.MAX_STEPS=1")
  assert paxlike(*tiny, *heads, *scanned, f"--job_log_dir={tmp_path / 'run'}") == 0
  assert convert(tmp_path / "run", tmp_path / "theirs", kind="paxlike") == 0
  config = json.loads((tmp_path / "theirs" / "config.json").read_text())
  assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 2)
  assert convert(tmp_path / "theirs", tmp_path / "again") == 0
  with Checkpoints(tmp_path / "run" / "checkpoints", keep=None) as saved:
    trained = saved.at(1).read("params.stack.pattern.0.mlp.up.w")
  for layer in range(2):
    np.testing.assert_array_equal(
      stored(tmp_path / "again", f"stack.layers.{layer}.mlp.up.w"), trained[layer]
    )


def test_quantised_tensors_are_read_as_numbers(tmp_path):
  arrays = values(shapes())
  exact = arrays[GATE]
  scales = np.array([[0.5], [2.0], [0.25]], np.float32)
  blocks = (exact / np.repeat(scales, 8, axis=0)).astype(ml_dtypes.float8_e4m3fn)
  # Blocks of 8 x 16: side 16 would be one block, so a side of 8 has two columns of factors.
  factors = np.repeat(scales, 2, axis=1)
  arrays |= {GATE: blocks, f"{GATE}_scale_inv": factors}
  quantisation = {"quant_method": "fp8", "weight_block_size": [8, 8]}
  write(tmp_path / "theirs", arrays, {**CONFIG, "quantization_config": quantisation})
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 0
  expected = blocks.astype(np.float32) * np.repeat(scales, 8, axis=0)
  got = stored(tmp_path / "ours", "stack.layers.1.mlp.gate.w")
  np.testing.assert_array_equal(got.T, expected)
  np.testing.assert_allclose(got.T, exact, rtol=0.07, atol=0.01)


def test_a_scale_that_is_missing_is_named(tmp_path, capsys):
  arrays = values(shapes())
  arrays[GATE] = arrays[GATE].astype(ml_dtypes.float8_e4m3fn)
  write(tmp_path / "theirs", arrays)
  assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
  assert f"{GATE}_scale_inv is missing" in capsys.readouterr().err
