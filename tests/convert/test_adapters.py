# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: merged or not, ours or PEFT's, they make the same model."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_families import COMMON
from helpers.hf_models import converted, imported, logits, save_random
from helpers.program import run as train

from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.layers.decoder import forward

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # PEFT's own.
TOKENS = np.random.default_rng(0).integers(3, 96, (2, 24)).astype(np.int32)
KNOBS = {
  "VOCAB_SIZE": COMMON["vocab_size"],
  "MAX_SEQ_LEN": COMMON["max_position_embeddings"],
  "NUM_LAYERS": COMMON["num_hidden_layers"],
  "MODEL_DIMS": COMMON["hidden_size"],
  "HIDDEN_DIMS": COMMON["intermediate_size"],
  "NUM_HEADS": COMMON["num_attention_heads"],
  "NUM_KV_HEADS": COMMON["num_key_value_heads"],
  "DIMS_PER_HEAD": COMMON["head_dim"],
  "NORM_EPSILON": 1e-6,
  "FPROP_DTYPE": "float32",
  "PERCORE_BATCH_SIZE": 1,
  "MAX_STEPS": 3,
  "LEARNING_RATE": 0.1,
  "LR_SCHEDULE": "constant",
  "USE_LORA": True,
  "LORA_RANK": 4,
  "LORA_ALPHA": 6.0,
}


def theirs(model, tokens=TOKENS):
  import torch

  with torch.no_grad():
    return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A folder with a model as Hugging Face has it in `theirs`, and as we do in `ours`."""
  folder = tmp_path_factory.mktemp("base")
  save_random("llama", folder / "theirs")
  converted(folder / "theirs", folder / "ours")
  return folder


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
  """The folder of a run that trained adapters of the base, scanned over layers on eight devices."""
  folder = tmp_path_factory.mktemp("tuned") / "run"
  knobs = KNOBS | {
    "LORA_TARGET_LAYERS": "all",
    "CHECKPOINT_RESTORE_PATH": base / "ours",
  }
  flags = [f"--fdl.{name}={value}" for name, value in knobs.items()]
  assert train("--fdl_config=SyntheticLLaMA7B", f"--job_log_dir={folder}", *flags) == 0
  return folder


def load(folder):
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_trained_adapter_is_the_same_for_peft_and_merged(base, tuned, tmp_path):
  import peft

  ours = logits(*imported(tuned), TOKENS)
  before = theirs(load(base / "theirs"))
  assert np.abs(ours - before).max() > 0.1

  assert run(["--from=paxlike", f"--path={tuned}", f"--to={tmp_path / 'merged'}"]) == 0
  np.testing.assert_allclose(theirs(load(tmp_path / "merged")), ours, atol=1e-4)
  again = logits(*converted(tmp_path / "merged", tmp_path / "merged_ours"), TOKENS)
  np.testing.assert_allclose(again, ours, atol=1e-4)

  flags = ["--from=paxlike", "--adapter", f"--path={tuned}", f"--to={tmp_path / 'adapter'}"]
  assert run(flags) == 0
  adapted = peft.PeftModel.from_pretrained(load(base / "theirs"), str(tmp_path / "adapter"))
  np.testing.assert_allclose(theirs(adapted.eval()), ours, atol=1e-4)

  back = ["--from=peft", f"--path={tmp_path / 'adapter'}", f"--base={base / 'ours'}"]
  assert run([*back, f"--to={tmp_path / 'back'}"]) == 0
  np.testing.assert_allclose(logits(*imported(tmp_path / "back"), TOKENS), ours, atol=1e-5)


def test_a_base_that_was_moved_is_named_by_a_flag(base, tuned, tmp_path, capsys):
  plain = [f"--path={tuned}", f"--to={tmp_path / 'out'}"]
  assert run(["--from=paxlike", "--adapter", "--dry_run", *plain]) == 0
  table = capsys.readouterr().out
  assert table.count("\n") == table.count(".lora_") > 0
  moved = (base / "ours").rename(tmp_path / "moved")
  try:
    assert run(["--from=paxlike", *plain]) == 2
    error = capsys.readouterr().err
    assert "is missing: set --base to its path" in error and error.count("\n") == 1
    assert run(["--from=paxlike", *plain, f"--base={moved}"]) == 0
    for name, flags, named in (("a", [], base / "ours"), ("b", [f"--base={moved}"], moved)):
      adapter = ["--from=paxlike", "--adapter", f"--path={tuned}", f"--to={tmp_path / name}"]
      assert run([*adapter, *flags]) == 0
      config = json.loads((tmp_path / name / "adapter_config.json").read_text())
      assert config["base_model_name_or_path"] == str(named)
    assert run([*adapter[:-1], f"--to={tmp_path / 'c'}", f"--base={tmp_path / 'nowhere'}"]) == 2
    assert (
      run(["--from=paxlike", f"--path={moved}", f"--to={tmp_path / 'no'}", f"--base={moved}"]) == 2
    )
    assert "needs no base: leave --base out" in capsys.readouterr().err
    again = ["--from=paxlike", f"--path={tuned}", f"--to={tmp_path / 'again'}"]
    assert run([*again, f"--base={tuned}"]) == 2
    assert f"--base={tuned} has no checkpoint 0, from which the run in" in capsys.readouterr().err
    converted(base / "theirs", tmp_path / "copy")
    assert run([*again, "--dry_run", f"--base={tmp_path / 'copy'}"]) == 0
    save_random("llama", tmp_path / "others", seed=5)
    converted(tmp_path / "others", tmp_path / "other")
    assert run([*again, f"--base={tmp_path / 'other'}"]) == 2
    assert "is not the one that the run in" in capsys.readouterr().err
  finally:
    moved.rename(base / "ours")


@pytest.mark.parametrize(
  ("family", "experiment", "targets", "modules"),
  [
    ("mixtral", "Mixtral8x7B", "all", ["k_proj", "o_proj", "q_proj", "v_proj"]),
    ("mixtral", "Mixtral8x7B", "query,experts", None),
    ("llama", "SyntheticLLaMA7B", "query,embedding,head", ["embed_tokens", "lm_head", "q_proj"]),
    ("llama_tied", "SyntheticLLaMA7B", "query,embedding", ["embed_tokens", "q_proj"]),
    ("falcon_h1", "FalconH1_0_5B", "query,up", ["q_proj", "up_proj"]),
  ],
)
def test_every_kind_of_layer_is_merged_and_written_for_peft(
  tmp_path, capsys, family, experiment, targets, modules
):
  """Adapters of experts are merged alone: PEFT's are of a matrix that fuses two of ours."""
  import peft

  save_random(family, tmp_path / "theirs", num_hidden_layers=2)
  converted(tmp_path / "theirs", tmp_path / "base")
  knobs = {"LEARNING_RATE": 0.1, "LR_SCHEDULE": "constant", "PERCORE_BATCH_SIZE": 1, "MAX_STEPS": 2}
  knobs |= {
    "FPROP_DTYPE": "float32",
    "USE_LORA": True,
    "LORA_TARGET_LAYERS": targets,
    "CHECKPOINT_RESTORE_PATH": tmp_path / "base",
  }
  told = json.loads((tmp_path / "base" / "experiment.json").read_text())
  own = {name: value for name, value in told["knobs"].items() if name not in knobs}
  flags = [f"--fdl.{name}={value}" for name, value in (own | knobs).items()]
  folder = tmp_path / "run"
  assert train(f"--fdl_config={experiment}", f"--job_log_dir={folder}", *flags) == 0
  ours = logits(*imported(folder), TOKENS)
  assert np.abs(ours - theirs(load(tmp_path / "theirs"))).max() > 0.01
  assert run(["--from=paxlike", f"--path={folder}", f"--to={tmp_path / 'merged'}"]) == 0
  np.testing.assert_allclose(theirs(load(tmp_path / "merged")), ours, atol=1e-4)
  capsys.readouterr()
  out = ["--from=paxlike", "--adapter", f"--path={folder}", f"--to={tmp_path / 'peft'}"]
  if modules is None:
    assert run(out) == 2
    error = capsys.readouterr().err
    assert "PEFT cannot represent the adapter of" in error and error.count("\n") == 1
    return
  assert run(out) == 0
  config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
  assert config["target_modules"] == modules
  adapted = peft.PeftModel.from_pretrained(load(tmp_path / "theirs"), str(tmp_path / "peft"))
  np.testing.assert_allclose(theirs(adapted.eval()), ours, atol=1e-4)
  adapted.save_pretrained(str(tmp_path / "again"))  # With copies of the base's embeddings.
  back = ["--from=peft", f"--path={tmp_path / 'again'}", f"--base={tmp_path / 'base'}"]
  assert run([*back, f"--to={tmp_path / 'back'}"]) == 0
  np.testing.assert_allclose(logits(*imported(tmp_path / "back"), TOKENS), ours, atol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_an_adapter_of_peft_is_the_same_here(base, tmp_path, kind):
  """Its logits, its gradients, and what is written again for PEFT."""
  import peft
  import torch

  config = peft.LoraConfig(
    r=4,
    lora_alpha=10,
    target_modules=["q_proj", "down_proj"],
    init_lora_weights=False,
    **kind,
  )
  torch.manual_seed(1)
  adapted = peft.get_peft_model(load(base / "theirs"), config).eval()
  trained = {name: w for name, w in adapted.named_parameters() if w.requires_grad}
  for name, w in trained.items():
    if "magnitude" in name:
      w.data *= 1 + 0.3 * torch.rand_like(w)
  adapted.save_pretrained(str(tmp_path / "adapter"))
  flags = ["--from=peft", f"--path={tmp_path / 'adapter'}", f"--base={base / 'ours'}"]
  assert run([*flags, f"--to={tmp_path / 'ours'}"]) == 0
  definition, params = imported(tmp_path / "ours")
  np.testing.assert_allclose(logits(definition, params, TOKENS), theirs(adapted), atol=1e-4)

  seen = np.random.default_rng(1).normal(size=(*TOKENS.shape, 96)).astype(np.float32)

  def total(own):
    return (forward(definition, params | own, {"inputs": jnp.array(TOKENS)})[0] * seen).mean()

  ours = jax.grad(total)({name: w for name, w in params.items() if ".lora." in name})
  (adapted(torch.tensor(TOKENS, dtype=torch.long)).logits * torch.tensor(seen)).mean().backward()
  assert len(ours) == len(trained)
  for name, w in ours.items():
    found = [g for n, g in trained.items() if counterpart(n) == name]
    gradient: Any = found[0].grad
    expected = gradient.numpy().T.reshape(w.shape)
    np.testing.assert_allclose(w, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-3)

  out = ["--from=paxlike", "--adapter", f"--path={tmp_path / 'ours'}"]
  assert run([*out, f"--to={tmp_path / 'again'}"]) == 0
  before, after = (TensorFolder(tmp_path / name) for name in ("adapter", "again"))
  assert before.specs == after.specs
  for name in before.specs:
    if "magnitude" in name:  # Ours is relative to the norm of the base.
      np.testing.assert_allclose(before.read(name), after.read(name), rtol=1e-6)
    else:
      assert before.read(name).tobytes() == after.read(name).tobytes()
  written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
  assert {name: written[name] for name in ("r", "lora_alpha", *kind)} == {
    "r": 4,
    "lora_alpha": 10,
    **kind,
  }
  assert run(["--from=paxlike", f"--path={tmp_path / 'ours'}", f"--to={tmp_path / 'merged'}"]) == 0
  np.testing.assert_allclose(theirs(load(tmp_path / "merged")), theirs(adapted), atol=1e-4)


def counterpart(name):
  """Returns our name of a parameter of PEFT."""
  pattern = r"(.*)layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.lora_(A|B|magnitude)\S*"
  found = re.fullmatch(pattern, name)
  assert found is not None
  _, layer, module, part = found.groups()
  place = {"q": "attention.query", "down": "mlp.down"}[module]
  return f"stack.layers.{layer}.{place}.lora.{part.lower()}"


@pytest.mark.parametrize(
  ("changed", "says"),
  [
    ({"peft_type": "IA3"}, "is not a LoRA adapter"),
    (
      {"use_dora": True},
      "the adapter lacks base_model.model.model.layers.0.self_attn.q_proj.lora_m",
    ),
    ({"bias": "all"}, "has no bias='all'"),
    ({"r": 5}, r"lora_A.weight is [4, 32], but "),
  ],
)
def test_what_is_no_plain_adapter_is_refused(base, tmp_path, capsys, changed, says):
  import peft

  config = peft.LoraConfig(r=4, target_modules=["q_proj"])
  peft.get_peft_model(load(base / "theirs"), config).save_pretrained(str(tmp_path / "adapter"))
  path = tmp_path / "adapter" / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changed))
  flags = ["--from=peft", f"--path={tmp_path / 'adapter'}", f"--base={base / 'ours'}"]
  capsys.readouterr()
  assert run([*flags, f"--to={tmp_path / 'out'}"]) == 2
  error = capsys.readouterr().err
  assert says in error and error.count("\n") == 1
  assert not (tmp_path / "out").exists()


def test_flags_that_do_not_fit_are_refused(base, tmp_path, capsys):
  for flags in (
    ["--from=peft", f"--path={tmp_path}"],
    ["--from=hf", f"--path={base / 'theirs'}", f"--base={base / 'ours'}"],
    ["--from=hf", f"--path={base / 'theirs'}", "--adapter"],
    ["--from=paxlike", f"--path={base / 'ours'}", "--adapter"],
    ["--from=paxlike", f"--path={base / 'ours'}", "--adapter", "--dry_run"],
  ):
    assert run([*flags, f"--to={tmp_path / 'out'}"]) == 2
    assert capsys.readouterr().err.startswith("paxlike-convert: ")
    assert not (tmp_path / "out").exists()
