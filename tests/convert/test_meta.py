# SPDX-License-Identifier: Apache-2.0
"""LLaMA as Meta gives it away, made of a folder as Hugging Face has it."""

import json
import pickle
import zipfile

import numpy as np
import pytest
from helpers.tiny_llama import CONFIG, DIM, HEADS, KV_HEADS, shapes, values, write

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.convert import meta
from paxlike.convert.main import run
from paxlike.convert.torch_files import TorchFile
from paxlike.errors import UserError

PARAMS = {"dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "norm_eps": 1e-5}
NAMES = {theirs: (ours, dim) for ours, (theirs, dim) in (meta._OUTER | meta._INNER).items()}


def their_name(name):
  if name in NAMES:
    return NAMES[name]
  layer, rest = name.removeprefix("model.layers.").split(".", 1)
  ours, dim = NAMES[rest.removesuffix(".weight")]
  return f"layers.{layer}.{ours}.weight", dim


def interleaved(w, heads):
  """The order of rotary pairs before Hugging Face's conversion script changes it."""
  return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def save(folder, *, parts, rows=False, dtype="float32", params=None):
  import torch

  folder.mkdir()
  files = [{} for _ in range(parts)]
  for name, value in values(shapes()).items():
    if name.endswith(("q_proj.weight", "k_proj.weight")):
      value = interleaved(value, HEADS if "q_proj" in name else KV_HEADS)
    theirs, dim = their_name(name)
    dim = 0 if rows and "embed" in name else dim
    pieces = [value] * parts if dim is None else np.split(value, parts, axis=dim)
    for file, piece in zip(files, pieces, strict=True):
      file[theirs] = torch.tensor(piece).to(getattr(torch, dtype))
  for number, file in enumerate(files):
    file["rope.freqs"] = torch.zeros(2)
    torch.save(file, folder / f"consolidated.{number:02d}.pth")
  (folder / "params.json").write_text(json.dumps(PARAMS | (params or {})))


def stored(folder):
  with Checkpoints(folder / "checkpoints", keep=None) as saved:
    names = json.loads((saved.path(0) / "metadata" / "metadata").read_text())["tensors"]
    return {name: saved.at(0).read(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "rows"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_model_that_hugging_face_has(tmp_path, parts, rows, dtype):
  save(tmp_path / "meta", parts=parts, rows=rows, dtype=dtype)
  arrays = {name: value.astype(dtype) for name, value in values(shapes()).items()}
  write(tmp_path / "hf", arrays, CONFIG | {"max_position_embeddings": 4096})
  for kind in ("meta", "hf"):
    paths = (f"--path={tmp_path / kind}", f"--to={tmp_path / ('from_' + kind)}")
    assert run([f"--from={kind}", *paths]) == 0
  got, expected = stored(tmp_path / "from_meta"), stored(tmp_path / "from_hf")
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value)
  configs = [(tmp_path / f"from_{kind}" / "config.json").read_text() for kind in ("meta", "hf")]
  assert configs[0] == configs[1]


def test_generations_differ_in_their_positions():
  def positions(given):
    required = {"dim": 16, "n_layers": 1, "n_heads": 4, "norm_eps": 1e-5}
    return meta._positions(meta._DECLARED.read(required | given, place="params.json"))

  assert positions({})["max_position_embeddings"] == 4096
  assert positions({"rope_theta": 5e5})["max_position_embeddings"] == 8192
  longer = positions({"rope_theta": 5e5, "use_scaled_rope": True})
  assert longer["max_position_embeddings"] == 131_072
  assert longer["rope_scaling"]["rope_type"] == "llama3"
  assert longer["rope_scaling"]["factor"] == 8.0
  longer = positions({"use_scaled_rope": True, "rope_scale_factor": 32})
  assert longer["rope_scaling"]["factor"] == 32.0


REFUSED = {
  "mystery": (1, "mystery=1 is not known to paxlike"),
  "moe": ({"num_experts": 8}, "moe={'num_experts': 8} is not known to paxlike"),
  "use_qk_norm": (True, "paxlike has no use_qk_norm=True; expected False"),
  "rope_high_freq_factor": (2.0, "paxlike has no rope_high_freq_factor=2.0"),
  "rope_scale_factor": (32, "rope_scale_factor needs use_scaled_rope"),
  "vocab_size": (7, "vocab_size is 7, but the embedding has 64 ids"),
  "use_scaled_rope": ("false", "use_scaled_rope: expected bool, got 'false'"),
  "dim": (16.9, "dim: expected an int"),
  "n_heads": (0, "n_heads: expected an int of at least 1, got 0"),
  "n_kv_heads": (3, "not a multiple of 2 x 3 heads"),
  "n_layers": (None, "params.json lacks n_layers"),
  "norm_eps": ("1e-5", "norm_eps: expected a float"),
  "rope_theta": (0, "rope_theta: expected a float of at least 1.0001"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_makes_another_model_is_refused(tmp_path, capsys, key):
  value, said = REFUSED[key]
  save(tmp_path / "meta", parts=1, params={key: value})
  assert run(["--from=meta", f"--path={tmp_path / 'meta'}", f"--to={tmp_path / 'ours'}"]) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "ours").exists()


def test_keys_without_effect_are_left_out(tmp_path):
  given = {"multiple_of": 256, "ffn_dim_multiplier": 1.3, "vocab_size": -1, "use_qk_norm": False}
  save(tmp_path / "meta", parts=1, params=given)
  assert run(["--from=meta", f"--path={tmp_path / 'meta'}", "--to=x", "--dry_run"]) == 0


class Code:
  def __reduce__(self):
    return print, ("this must not run",)


def zipped(path, content, *, compression=zipfile.ZIP_STORED):
  with zipfile.ZipFile(path, "w", compression) as archive:
    archive.writestr("archive/data.pkl", content)


@pytest.mark.parametrize(
  ("content", "said"),
  [
    (pickle.dumps({"x": Code()}), "needs builtins.print"),
    (pickle.dumps([1, 2]), "more than named weights"),
    (pickle.dumps({"x": 1}), "more than named weights"),
    (b"\x80\x02", "damaged"),
  ],
  ids=["code", "list", "number", "cut"],
)
def test_a_file_of_anything_else_is_refused_and_nothing_in_it_runs(tmp_path, capsys, content, said):
  zipped(tmp_path / "a.pth", content)
  with pytest.raises(UserError, match=said):
    TorchFile(tmp_path / "a.pth")
  assert capsys.readouterr().out == ""


def test_what_is_no_zip_file_is_said(tmp_path):
  (tmp_path / "a.pth").write_bytes(b"abc" * 100)
  with pytest.raises(UserError, match="damaged, or not a file of torch"):
    TorchFile(tmp_path / "a.pth")
