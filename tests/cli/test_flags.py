# SPDX-License-Identifier: Apache-2.0
"""Laws of the command line."""

import dataclasses
import shlex
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from paxlike.cli import command_line, flag_types, flags, usage
from paxlike.errors import UserError


def parse(line: str) -> flags.Options:
  return command_line.parse(["paxlike", *shlex.split(line)])


def test_what_pax_writes_is_understood():
  options = parse(
    r"--fdl_config=paxml.contrib.gpu.scripts_gpu.configs.Pile126M --fdl.FPROP_DTYPE=\"bfloat16\""
    " --fdl.ICI_MESH_SHAPE=[8,1,1] --fdl.DCN_MESH_SHAPE='[1, 1, 1]' --fdl.PERCORE_BATCH_SIZE=4"
    " --tfds_data_dir=/data --job_log_dir=/logs --enable_checkpoint_saving=False"
    " --multiprocess_gpu --server_addr=host:12345 --num_hosts=8 --host_idx=3 --alsologtostderr"
  )
  assert options == flags.Options(
    fdl_config="paxml.contrib.gpu.scripts_gpu.configs.Pile126M",
    knobs=(
      ("FPROP_DTYPE", '"bfloat16"'),
      ("ICI_MESH_SHAPE", "[8,1,1]"),
      ("DCN_MESH_SHAPE", "[1, 1, 1]"),
      ("PERCORE_BATCH_SIZE", "4"),
    ),
    tfds_data_dir="/data",
    job_log_dir="/logs",
    enable_checkpoint_saving=False,
    multiprocess_gpu=True,
    server_addr="host:12345",
    num_hosts=8,
    host_idx=3,
  )


@pytest.mark.parametrize(
  "spelling",
  [
    "--fdl.NUM_LAYERS=4",
    "--fdl.NUM_LAYERS 4",
    "-fdl.NUM_LAYERS=4",
    "-fdl.NUM_LAYERS 4",
    "--fdl_set=NUM_LAYERS=4",
    "--fdl_set NUM_LAYERS=4",
  ],
)
def test_every_spelling_of_an_override_is_the_same(spelling):
  assert parse(f"--exp=A --job_log_dir=D {spelling}").knobs == (("NUM_LAYERS", "4"),)


def test_case_decides_and_order_is_kept():
  options = parse(
    "--exp=A --fdl.optimizer.b2=0.99 --fdl.B=1 --job_log_dir=D --fiddler='g(1, a=b)' --fdl_set=A=2"
    " --fdl.b=x=y --fdl.B=3 --fdl.model.stack[0].x=-1 --fiddler=f --fdl.sets['a=b'].size 2"
    """ --fdl.sets["'c'"].size=3"""
  )
  assert options.knobs == (("B", "1"), ("A", "2"), ("B", "3"))
  assert options.edits[:3] == (
    ("optimizer.b2", "0.99"),
    ("b", "x=y"),
    ("model.stack[0].x", "-1"),
  )
  assert [text for _, text in options.edits[3:]] == ["2", "3"]
  assert options.fiddlers == ("g(1, a=b)", "f")


def test_values_may_be_empty_negative_or_hold_signs():
  options = parse("--exp=A --job_log_dir=D --fdl.A= --fdl.B -1 --fdl.C=a=b --fdl.D='x y'")
  assert options.knobs == (("A", ""), ("B", "-1"), ("C", "a=b"), ("D", "x y"))


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("--fdl_confg=A", "unknown flag --fdl_confg. Did you mean --fdl_config?"),
    ("--zzzzzz", "unknown flag --zzzzzz. --help lists the flags."),
    ("", "which experiment? Give --fdl_config=NAME"),
    ("--fdl_config=A", "--mode=train needs --job_log_dir"),
    ("--fdl_config=A --mode=eval", "--mode=eval needs --job_log_dir"),
    (
      "--exp=A --mode=shw",
      "train, eval, decode, show, check, compile, plan, profile, transfer. Did you mean show?",
    ),
    ("--exp=A --fdl_config=B --job_log_dir=D", "--exp=A and --fdl_config=B"),
    ("--exp=A --fdl_config_file=F --job_log_dir=D", "not both"),
    ("--fdl_config_file=F --job_log_dir=D --fdl.NUM_LAYERS=3", "by their paths"),
    ("--fdl_config_file=F --fdl_help", "--fdl_config=NAME"),
    ("--exp=A --job_log_dir=D --fdl_allow_modules=m", "--fdl_config_file"),
    ("--exp=A --job_log_dir=D stray", "unexpected argument 'stray'"),
    ("--exp=A --job_log_dir=D --multiprocess_gpu False", "Give a bool as --flag=true"),
    ("--exp=A --job_log_dir=D --fdl.FLAG", "--fdl.FLAG needs a value"),
    ("--exp=A --fdl.FLAG --job_log_dir=D", "--fdl.FLAG needs a value"),
    ("--exp=A --job_log_dir=D --fdl_set=FLAG", "--fdl_set=FLAG: expected PATH=VALUE"),
    ("--exp=A --job_log_dir=D --fdl.Num=3", "knobs are UPPER_CASE"),
    ("--exp=A --job_log_dir=D --fdl.SHAPE[0]=3", "a knob cannot be set in part"),
    ("--exp=A --job_log_dir=D --multiprocess_gpu=maybe", "expected true or false, got 'maybe'"),
    (
      "--exp=A --job_log_dir=D --mode=eval --step=x",
      "--step=x: expected an int of at least 0, got 'x'.",
    ),
    ("--exp=A --job_log_dir=D --mode=eval --step=-1", "--step=-1: expected an int of at least 0"),
    (
      "--exp=A --job_log_dir=D --num_cpu_devices=0",
      "--num_cpu_devices=0: expected an int of at least 1",
    ),
    ("--exp=A --job_log_dir=D --mode=decode --prompt=a --temperature=nan", "expected a float of"),
    ("--exp=A --job_log_dir=D --mode=decode --prompt=a --temperature=inf", "expected a float "),
    ("--exp=A --job_log_dir=D --mode=decode --prompt=a --top_p=2", "from 1e-30 to 1"),
    ("--exp=A --job_log_dir=D --mode=decode --prompt=a --stop=", "expected a non-empty text"),
    ("--exp=A --job_log_dir=D --mode=decode --prompt=a --num_samples=1e9", "from 1 to 65536"),
    ("--exp=A --job_log_dir=D --num_hosts=2 --host_idx=2", "counts from 0"),
    ("--exp=A --job_log_dir=D --step=3", "--step goes with --mode=eval or --mode=decode, not"),
    ("--exp=A --job_log_dir=D --step=0", "--step goes with --mode=eval or --mode=decode, not"),
    ("--exp=A --job_log_dir=D --decode_seed=0", "--decode_seed goes with --mode=decode, not"),
    ("--exp=A --job_log_dir=D --continuous", "--continuous goes with --mode=eval"),
    ("--exp=A --job_log_dir=D --against=B", "--against goes with --mode=show"),
    ("--exp=A --job_log_dir=D --changed", "--changed goes with --mode=show, not --mode=train."),
    ("--exp=A --mode=show --changed --against=B", "--against=B with another experiment: leave"),
    ("--fdl_config_file=F --mode=show --changed", "a graph file has none: give --fdl_config=NAME"),
    ("--exp=A --job_log_dir", "job_log_dir"),
    ("--exp=A --job_log_dir=D --noenable_checkpoint_saving=1", "noenable_checkpoint_saving"),
    ("--list --mode=x", "--mode=x"),
    ("--exp=A --job_log_dir=D --fdl.", "--fdl.: the name of a knob or a path is missing"),
    ("--exp=A --job_log_dir=D --flagfile=F", "unknown flag --flagfile."),
    ("--exp=A --job_log_dir=D --undefok=foo --foo=3", "unknown flag --undefok."),
    ("--exp=A --job_log_dir=D -undefok foo", "unknown flag --undefok."),
    ("--list --full", "--full goes with --mode=check, not --mode=train."),
    ("--list --prompt=a", "--prompt goes with --mode=decode"),
    ("--exp=A --job_log_dir=D --fdl.=3", "--fdl.=3: the name of a knob or a path is missing"),
    ("--exp=A --job_log_dir=D '--fdl. =3'", "the name of a knob or a path is missing"),
    ("--exp=A --job_log_dir=D --fdl_set==3", "--fdl_set==3: the name of a knob or a path is"),
    ("--exp=A --mode=eval --job_log_dir=D --continuous --step=7", "--step=7 one: leave one out"),
    ("--exp=A --mode=eval --job_log_dir=D --continuous --step=best", "--step=best one"),
    ("--exp=A --mode=show --topology=h200-1 --num_cpu_devices=2", "--num_cpu_devices=2 name"),
  ],
)
def test_mistakes_end_in_one_line_that_names_them(line, message):
  with pytest.raises(UserError) as error:
    parse(line)
  assert message in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "name", [*flag_types.STRINGS, "exp", "fiddler", "fdl_allow_modules", "prompt_file"]
)
def test_an_empty_value_is_refused(name):
  with pytest.raises(UserError, match=f"--{name}=: expected a non-empty text"):
    parse(f"--{name}=")


@pytest.mark.parametrize("flag", ["--top_k=3", "--top_p=0.5", "--min_p=0.5", "--decode_seed=3"])
def test_flags_of_draws_need_draws(flag):
  decode = f"--job_log_dir=D --mode=decode --prompt=a {flag}"
  for temperature in ("", "--temperature=0"):
    with pytest.raises(UserError, match=f"{flag} needs a --temperature above 0"):
      parse(f"{decode} {temperature}")
  parse(f"{decode} --temperature=1")


def test_what_needs_no_folder():
  assert parse("--exp=A --mode=show").job_log_dir is None
  assert parse("--exp=A --fdl_help").fdl_help
  assert parse("--list").list
  assert parse("--exp=A --mode=show --against=B").against == "B"


def test_either_name_of_the_experiment_will_do():
  assert parse("--exp=A --fdl_config=A --mode=show") == parse("--fdl_config=A --mode=show")


@pytest.mark.parametrize(
  "flag", ["--help", "-h", "-help", "--help --mode=x", "--fdl_config=A --help"]
)
def test_help_wins_over_missing_flags(flag):
  assert parse(flag).help


def test_modules_are_a_list_with_commas_or_repeated():
  options = parse(
    "--fdl_config_file=F --mode=show --fdl_allow_modules=a,b.c --fdl_allow_modules=d,"
  )
  assert options.fdl_allow_modules == ("a", "b.c", "d")


def test_help_speaks_of_every_flag_and_fits_a_terminal():
  lists = {"knobs": "--fdl.KNOB", "edits": "--fdl.path", "fiddlers": "--fiddler"}
  for field in dataclasses.fields(flags.Options):
    assert lists.get(field.name, f"--{field.name}") in usage.HELP
  assert max(map(len, usage.HELP.splitlines())) <= 100
  examples = usage.HELP.partition("Examples\n")[2].splitlines()
  assert len(examples) == 3
  for example in examples:
    command_line.parse(shlex.split(example))


def test_options_cannot_be_changed():
  with pytest.raises(dataclasses.FrozenInstanceError):
    parse("--list").list = False  # pyright: ignore[reportAttributeAccessIssue]


def test_the_global_flags_stay_untouched():
  before = {*absl_flags.FLAGS}
  parse("--exp=A --mode=show")
  assert {*absl_flags.FLAGS} == before
  assert "fdl_config" not in absl_flags.FLAGS


def test_importing_the_command_line_is_light():
  slow = "{'jax', 'numpy', 'fiddle', 'flax'}"
  code = f"import sys, paxlike.cli.command_line; print({slow} & {{*sys.modules}})"
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == "set()"
