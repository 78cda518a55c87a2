# SPDX-License-Identifier: Apache-2.0
"""What nobody foresaw while a run is built and checked ends in one line that names what is near."""

import re
import sys

import pytest
from helpers.program import TINY, run

from paxlike.cli import error_diagnosis, flags, show_page
from paxlike.errors import RunError, UserError
from paxlike.training import optimizers

MINE = """
import fiddle as fdl

from paxlike import layers
from paxlike.experiments.gpt import Gpt3_52k

class Mine(Gpt3_52k):
  GROUPS: int = 1

  def model(self):
    model = super().model()
    model.dim = model.dim // self.GROUPS
    return model

class Broken(Gpt3_52k):
  def model(self):
    return {}["nothing"]

class BrokenNorm(layers.RmsNorm):
  def __call__(self, x, *arguments, **more):
    raise RuntimeError("my layer is broken")

class BrokenInTheTrace(Gpt3_52k):
  def block(self):
    block = super().block()
    block.norm = fdl.Partial(BrokenNorm)
    return block
"""

# Of methods that return or do what they must not, with what is said of it; status 2, one line.
BROKEN_METHODS = {
  "def pattern(self): return []": "Mine.pattern() returns is []: expected a list of at least one",
  "def pattern(self): pass": "Mine.pattern() returns is None",
  "def pattern(self): yield self.block()": "Mine.pattern() returns is a generator",
  "def dropout(self): pass": "to_break.py, class Mine: unexpected TypeError: Mine.dropout() takes",
  "def __init__(self, a): pass": "to_break.py, class Mine: unexpected TypeError: Mine.__init__()",
  "def optimizer(self): return fdl.Config(optax.sgd, learning_rate=0.1)": (
    "optimizer=Config[optax.sgd]: expected a (subclass of)"
    " paxlike.training.optimizers.optimizer.Optimizer"
  ),
  "def objective(self): return fdl.Config(dict)": (
    "objective=Config[dict]: expected a (subclass of)"
    " paxlike.training.objectives.objective.Objective."
  ),
  "def train_data(self): return [1, 2]": (
    "train_data=[1, 2]: expected a (subclass of) paxlike.data.dataset.Dataset or None."
  ),
  "def train_data(self): return '/x'": "train_data='/x': expected a (subclass of) paxlike.data",
  "def eval_data(self): return {'a': self.train_data()}": (
    "eval_data={'a': Config[RandomTokens]}: expected a (subclass of) "
    "paxlike.training.evaluation.EvalSet for"
  ),
  "def eval_data(self): return {'a': self.eval_set(self.train_data())}": (
    "the eval set a never ends: set num_batches of its EvalSet, as by"
  ),
  "def eval_data(self): return {3: self.eval_set(self.train_data(), num_batches=1)}": (
    "eval_data has a set named 3: expected a text"
  ),
  "def mesh(self): pass": "Mine.mesh() returns is None: expected an fdl.Config",
  "def trainer(self): super().trainer()": "Mine.trainer() returns is None: expected an fdl.Config",
  "def trainer(self): return {}": "Mine.trainer() returns is {}: expected an fdl.Config of Trainer",
  "def trainer(self): return self.model()": (
    "Mine.trainer() returns is Config[Decoder]: expected an fdl.Config of Trainer"
  ),
  "def trainer(self): return fdl.build(super().trainer())": "Mine.trainer() returns is a Trainer",
  "def mlp(self): return super().mlp().foo": (
    "line 5, in mlp: AttributeError: No parameter 'foo' has been set on Partial[Mlp]"
  ),
  "def block(self): return [super().block()]": "pattern=[[Partial[Block]]]: expected a function",
  "def mlp(self): sys.exit()": "line 5, in mlp: sys.exit() was called",
  "def train_data(self): sys.exit(5)": "line 5, in train_data: sys.exit(5) was called",
  "def trainer(self): raise SystemExit('bye')": "line 5, in trainer: sys.exit('bye') was called",
  "sys.exit()": "line 5, in Mine: sys.exit() was called",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
  (tmp_path / "mine_to_break.py").write_text(MINE)
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def answer(capsys, folder, *given) -> tuple[int, str]:
  status = run(*given, f"--job_log_dir={folder / 'run'}")
  assert not (folder / "run").exists()
  return status, capsys.readouterr().err


def test_the_knob_is_found(capsys, mine):
  flags = ("--fdl_config=mine_to_break.Mine", "--fdl.MODEL_DIMS=32", "--fdl.GROUPS=0")
  status, err = answer(capsys, mine, *flags)
  assert status == 2
  assert re.fullmatch(
    r"paxlike: --fdl\.GROUPS=0: ZeroDivisionError: .*mine_to_break\.py, line 12, in model\).*\n",
    err,
  )
  status, err = answer(capsys, mine, *flags, "--traceback")
  assert status == 2 and "Traceback (most recent call last)" in err
  assert err.splitlines()[-1].startswith("paxlike: --fdl.GROUPS=0: ")


def test_an_edit_is_named_where_the_error_speaks_of_its_knob(capsys, tmp_path):
  status, err = answer(
    capsys, tmp_path, *TINY, "--fdl.mesh.ici=-1", "--fdl.model.norm.epsilon=1e-5"
  )
  assert status == 2
  assert err.startswith("paxlike: --fdl.mesh.ici=-1: ICI_MESH_SHAPE=[-1] has 1 entries: give 3 (")
  # Also where something else is wrong, which comes later.
  found = answer(capsys, tmp_path, *TINY, "--fdl.mesh.ici=-1", "--fiddler=transformer_engine")
  assert found[1].startswith("paxlike: --fdl.mesh.ici=-1: ICI_MESH_SHAPE=[-1] has 1 entries")
  # Not an edit that has nothing to do with it.
  status, err = answer(
    capsys, tmp_path, *TINY, "--fdl.DCN_MESH_SHAPE=[1]", "--fdl.model.norm.epsilon=1e-5"
  )
  assert (status, err.count("\n")) == (2, 1)
  assert err.startswith("paxlike: DCN_MESH_SHAPE=[1] has 1 entries"), err


def test_the_line_of_the_user_is_found(capsys, mine):
  status, err = answer(capsys, mine, "--fdl_config=mine_to_break.Broken", "--fdl.NUM_LAYERS=1")
  assert status == 2 and err.count("\n") == 1
  assert "mine_to_break.py, line 17, in model: KeyError: 'nothing'" in err


def test_flags_that_are_not_to_blame_are_not_blamed(capsys, mine, monkeypatch):
  given = ("--fdl.VOCAB_SIZE=64", "--fdl.MAX_SEQ_LEN=16", "--fdl.MAX_STEPS=3")
  status, err = answer(capsys, mine, "--fdl_config=mine_to_break.BrokenInTheTrace", *given)
  assert (status, err.count("\n")) == (2, 1)
  assert re.match(r"paxlike: \S+mine_to_break\.py, line 21, in __call__: RuntimeError: my", err), (
    err
  )

  monkeypatch.setattr(show_page, "everything", None)
  status, err = answer(capsys, mine, *TINY, *given, "--mode=show")
  assert (status, err.count("\n")) == (1, 1)
  assert err.startswith("paxlike: unexpected: TypeError: 'NoneType' object is not callable."), err


def test_flags_each_of_which_is_to_blame_are_said_to_be():
  options = flags.Options(knobs=(("A", "1"), ("B", "2"), ("C", "3")))

  def attempt(options: flags.Options):
    given = dict(options.knobs)
    if "A" in given and "B" in given:
      raise KeyError("both")

  with pytest.raises(UserError) as caught, error_diagnosis.explained(options) as stage:
    stage.attempt = attempt
    attempt(options)
  assert str(caught.value).startswith("--fdl.B=2, --fdl.A=1: KeyError: 'both' (")
  assert "). Without any one of these flags it succeeds." in str(caught.value)
  # Neither what the attempt does not meet, nor what it meets otherwise.
  for failure in (OSError("full"), TypeError("another")):
    with pytest.raises(UserError, match=r"^(?!--fdl)"), error_diagnosis.explained(options) as stage:
      stage.attempt = attempt if isinstance(failure, TypeError) else lambda options: None
      raise failure


@pytest.mark.parametrize("method", BROKEN_METHODS)
def test_what_a_method_of_the_user_does_wrong_is_said_with_its_place(capsys, mine, method):
  imports = "import fiddle as fdl, optax, sys\nfrom paxlike.experiments.gpt import Gpt3_52k\n\n"
  module = f"to_break_{list(BROKEN_METHODS).index(method)}"
  (mine / f"{module}.py").write_text(f"{imports}class Mine(Gpt3_52k):\n  {method}\n")
  name = f"--fdl_config={module}.Mine"
  status, err = answer(capsys, mine, name, "--fdl.MAX_STEPS=1", "--fdl.MAX_SEQ_LEN=16")
  assert (status, err.count("\n")) == (2, 1), err
  said = BROKEN_METHODS[method].replace("to_break", module)
  assert said in err and "<" not in err and "MAX_" not in err


def test_arguments_that_a_module_of_the_user_parses_itself_end_in_its_line(
  capsys, mine, monkeypatch
):
  monkeypatch.setattr(sys, "argv", ["paxlike", "--fdl_config=parses.Mine"])
  (mine / "parses.py").write_text(
    "import argparse\nargparse.ArgumentParser(usage='x').parse_args()"
  )
  status, err = answer(capsys, mine, "--fdl_config=parses.Mine", "--fdl.NUM_LAYERS=1")
  assert status == 2
  assert re.search(r"parses\.py, line 2, in <module>: sys\.exit\(2\) was called", err), err


def test_a_file_that_is_no_python_is_named(capsys, mine):
  (mine / "no_python.py").write_text("x = 1\nclass Mine(\n")
  status, err = answer(capsys, mine, "--fdl_config=no_python.Mine", "--fdl.NUM_LAYERS=1")
  assert (status, err.count("\n")) == (2, 1)
  assert re.match(r"paxlike: \S+no_python\.py, line 2: SyntaxError: ", err), err


def test_our_own_defects_name_the_knobs_near_them(capsys, tmp_path, monkeypatch):
  monkeypatch.setattr(optimizers, "adamw", None)
  status, err = answer(capsys, tmp_path, *TINY)
  assert (status, err.count("\n")) == (1, 1)
  assert err.startswith("paxlike: unexpected near OPTIMIZER, WEIGHT_DECAY, ")


def test_pipelines_are_refused_without_the_words_of_fiddle(capsys, tmp_path):
  mesh = ("--fdl.ICI_MESH_SHAPE={pipeline: 2, data: -1}", "--fdl.NUM_LAYERS=1")
  circular = ("--fdl.PIPELINE_SCHEDULE=circular", "--fdl.NUM_LAYERS=4")
  for more, says in {
    (): "NUM_STAGES=2 x NUM_VIRTUAL_STAGES=1 are more than NUM_LAYERS=1 of 1 layers",
    circular: "PIPELINE_SCHEDULE=circular has more .*, but NUM_VIRTUAL_STAGES=1",
    (*circular, "--fdl.CIRCULAR_REPEAT=2", "--fdl.NUM_MICROBATCHES=3"): (
      "NUM_MICROBATCHES=3 is not a multiple of NUM_STAGES=2, which PIPELINE_SCHEDULE=circular"
    ),
  }.items():
    status, err = answer(capsys, tmp_path, *TINY, *mesh, *more)
    assert (status, err.count("\n")) == (2, 1), err
    assert re.match(f"paxlike: {says}", err), err


@pytest.mark.parametrize(
  ("given", "says"),
  [
    (["--fdl.ATTENTION_KERNEL=ring"], "ATTENTION_KERNEL=ring does not support bias_NTS: use xla_"),
    (["--fiddler=attention(ring)"], "kernel=ring (ATTENTION_KERNEL=auto) does not support bias"),
  ],
)
def test_what_a_kernel_lacks_names_the_knob(capsys, tmp_path, given, says):
  sizes = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 32, "NUM_HEADS": 2, "NUM_EXPERTS": 4}
  knobs = {**sizes, "VOCAB_SIZE": 64, "MAX_SEQ_LEN": 32, "ICI_MESH_SHAPE": "{context: -1}"}
  flags = [f"--fdl.{knob}={value}" for knob, value in knobs.items()]
  name = "--fdl_config=SyntheticGLaM126M64E"
  status, err = answer(capsys, tmp_path, name, *flags, "--fdl.PERCORE_BATCH_SIZE=1", *given)
  assert (status, err.count("\n")) == (2, 1), err
  assert says in err


def test_a_running_program_keeps_its_tracebacks():
  with pytest.raises(KeyError), error_diagnosis.explained(flags.Options()) as stage:
    stage.is_over = True
    raise KeyError("a defect")
  with (
    pytest.raises(RunError, match=r"too little memory.*PERCORE_BATCH_SIZE"),
    error_diagnosis.explained(flags.Options()) as stage,
  ):
    stage.is_over = True
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")
  with (
    pytest.raises(UserError, match=r"line \d+.*sys\.exit\(0\) was called"),
    error_diagnosis.explained(flags.Options()) as stage,
  ):
    stage.is_over = True
    sys.exit(0)
  with pytest.raises(UserError, match=r"^as it is$"), error_diagnosis.explained(flags.Options()):
    raise UserError("as it is")


@pytest.mark.parametrize(
  ("given", "says"),
  [
    (["--fdl.model.vocab_size=10"], ["ids up to 63", "vocab_size=10 (VOCAB_SIZE=64) "]),
    (["--fdl.train_data.seq_len=99"], ["99 tokens", "MAX_SEQ_LEN=16 of", "at least 99"]),
    (["--fdl.MODEL_DIMS=16777216"], ["training state takes", "embedding.table, 64 x 16777216)"]),
    (
      ["--fdl.NUM_HEADS=16777216"],
      ["training state takes", ".attention.key.w, ", " x 16777216 x "],
    ),
    (["--fdl.model.stack.repeats=0"], ["model.stack.repeats=0", "no layers"]),
    (["--fdl.NUM_HEADS=0"], ["--fdl.NUM_HEADS=0: expected an int of at least 1"]),
    (["--fdl.FPROP_DTYPE=int4"], ["--fdl.FPROP_DTYPE=int4: expected one of bfloat16"]),
    (["--fdl.trained=nothing_like_this"], ["trained='nothing_like_this'", "no weight"]),
    (["--fdl.trained=("], ["--fdl.trained=(", "unterminated subpattern"]),
    (["--fdl.ICI_MESH_SHAPE=x"], ["expected a list whose items are each an int of at least 1"]),
    (["--fdl.=3"], ["--fdl.=3: the name of a knob or a path is missing"]),
    (["--fdl_config=..", "--traceback"], ["--fdl_config=..: expected NAME"]),
    (["--fdl.model.norm=none"], ["model.norm", "expected a function or a layer"]),
  ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(capsys, tmp_path, given, says):
  status, err = answer(capsys, tmp_path, *TINY, *given)
  assert status == 2 and (err.count("\n") == 1 or "--traceback" in given), err
  for words in says:
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize(
  ("name", "given", "says"),
  [
    ("Mixtral8x7B", {"NUM_EXPERTS_PER_TOKEN": 9}, "more than NUM_EXPERTS=8"),
    ("Mixtral8x7B", {"DIMS_PER_HEAD": 3}, "DIMS_PER_HEAD=3 must be even"),
    ("Mixtral8x7B", {"NUM_KV_HEADS": 5}, "NUM_KV_HEADS=5 does not divide NUM_HEADS=32"),
    ("DeepSeekV3", {"NUM_EXPERT_GROUPS": 3}, "NUM_EXPERT_GROUPS=3"),
    ("DeepSeekV3", {"NUM_EXPERT_GROUPS_PER_TOKEN": 9}, "more than NUM_EXPERT_GROUPS=8"),
    (
      "DeepSeekV3",
      {"NUM_EXPERTS_PER_TOKEN": 200},
      "NUM_EXPERT_GROUPS_PER_TOKEN=4 have only 128 experts",
    ),
    ("DeepSeekV3", {"DIMS_PER_ROPE_HEAD": 3}, "DIMS_PER_ROPE_HEAD=3 must be even"),
    (
      "DeepSeekV32",
      {"INDEX_DIMS_PER_HEAD": 32},
      "INDEX_DIMS_PER_HEAD=32 must be at least DIMS_PER_ROPE_HEAD=64",
    ),
    ("DeepSeekV32", {"QUERY_LATENT_DIMS": "none"}, "QUERY_LATENT_DIMS is None"),
    ("DeepSeekV32", {"USE_LORA": True, "LORA_DROPOUT": 0.1}, "the adapter of key_value has no dr"),
    ("SyntheticGLaM126M64E", {"RELATIVE_DISTANCE": 16}, "RELATIVE_DISTANCE=16"),
  ],
)
def test_knobs_that_do_not_go_together(capsys, tmp_path, name, given, says):
  knobs = {"NUM_LAYERS": 4, **given}
  flags = [f"--fdl.{knob}={value}" for knob, value in knobs.items()]
  status, err = answer(capsys, tmp_path, f"--fdl_config={name}", *flags)
  assert (status, err.count("\n")) == (2, 1), err
  assert says in err
