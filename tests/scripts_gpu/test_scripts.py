# SPDX-License-Identifier: Apache-2.0
"""Every script runs, at tiny size and on CPUs, with the arguments that Pax's take."""

import json
import os
import socket
import subprocess
import sys

import pytest
import sentencepiece
from helpers import warm_python
from helpers.sources import REPOSITORY

from paxlike.data.seqio import tfds_writer
from paxlike.data.seqio.tfds_writer import Schema

SCRIPTS = REPOSITORY / "paxlike" / "scripts_gpu"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TensorFlow's own.

MODEL = {
  "VOCAB_SIZE": 90,
  "NUM_LAYERS": 1,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 32,
  "NUM_HEADS": 2,
  "DIMS_PER_HEAD": 8,
}
SMALL = [f"--fdl.{name}={value}" for name, value in MODEL.items()]
SHORT = ["--fdl.MAX_SEQ_LEN=96", "--fdl.MAX_STEPS=2", "--fdl.LR_COS_WARMUP=1"]
SHORT += ["--fdl.LR_COS_DECAY_START=2", "--fdl.LR_COS_DECAY_END=9"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
  """What runs paxlike, with TensorFlow already imported."""
  with warm_python.served(tmp_path_factory.mktemp("warm"), "tensorflow_datasets") as python:
    yield python


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """A folder of TFDS data sets, and in it a vocabulary."""
  folder = tmp_path_factory.mktemp("tfds")
  texts = [{"text": f"number {i} is {'very ' * (i % 5)}number {i}"} for i in range(100)]
  asked = [
    {"passage": "number " * (i % 5), "question": "is it a number", "label": i % 2 == 0}
    for i in range(20)
  ]
  text: dict = {"text": (("text",), str)}
  question: dict = {"passage": (("passage",), str), "question": (("question",), str)}
  question |= {"label": (("label",), int)}
  for name, splits, fields, rows in (
    ("the_pile:1.0.0", ("train", "validation"), text, texts),
    ("my_lambada:1.0.0", ("test",), text, texts),
    ("super_glue/boolq:1.0.2", ("train", "validation"), question, asked),
  ):
    files = []
    for split in splits:
      files.append(folder / f"{split}.jsonl")
      files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    tfds_writer.write(Schema(name=name, splits=splits, fields=fields), files, folder)
  with (folder / "pieces.model").open("wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([row["text"] for row in texts] + ["question: answer: a it ?"]),
      model_writer=model,
      vocab_size=90,
      model_type="bpe",
      user_defined_symbols=["▁yes", "▁no"],
      minloglevel=2,
      hard_vocab_limit=False,
    )
  return folder


def start(script, *arguments, cwd, **environment):
  return subprocess.Popen(
    ["bash", str(SCRIPTS / script), *map(str, arguments)],
    cwd=cwd,
    env=os.environ
    | {"PYTHON": sys.executable, "PYTHONPATH": str(SCRIPTS.parents[1])}
    | {name: str(value) for name, value in environment.items()},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(script, *arguments, cwd, **environment):
  """Returns (status, output)."""
  process = start(script, *arguments, cwd=cwd, **environment)
  out, _ = process.communicate(timeout=300)
  return process.returncode, out


def test_the_pile_then_lambada_on_one_node(data, tmp_path, program):
  common = (data, data / "pieces.model", "float32", 1, 2, "logs")
  own = {"cwd": tmp_path, "PYTHON": program}
  status, out = run("run_pile_singlenode.sh", *common, *SMALL, *SHORT, **own)
  assert status == 0, out
  assert "completed step: 1" in (tmp_path / "logs" / "pile_output.log").read_text()
  small = [*SMALL, "--fdl.MAX_SEQ_LEN=96"]
  status, out = run("run_lambada_singlenode.sh", *common, *small, **own)
  assert status == 0, out
  log = (tmp_path / "logs" / "lambada_output.log").read_text()
  assert "evaluated lambada after 2 updates: acc_strict: " in log
  records = (tmp_path / "logs" / "eval_out" / "lambada" / "eval_00000002.jsonl").read_text()
  assert [json.loads(line)["example"] for line in records.splitlines()] == list(range(100))
  # What fails says so, although its output goes through tee.
  assert run("run_lambada_singlenode.sh", *common, "--fdl.NO=1", *small, **own)[0] == 2
  assert run("run_lambada_singlenode.sh", data, cwd=tmp_path)[0] != 0


def slurm(index: int, port: int) -> dict:
  return {
    "SLURM_JOB_NUM_NODES": 2,
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_NTASKS": 2,
    "SLURM_PROCID": index,
    "PORT": port,
  }


def told(script, *arguments, cwd, **environment) -> dict[str, str]:
  """Returns the variables that a script starts the program with."""
  program = cwd / "program"
  program.write_text("#!/bin/sh\nenv\n")
  program.chmod(0o755)
  status, out = run(script, *arguments, cwd=cwd, PYTHON=program, **environment)
  assert status == 0, out
  return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)


ALONE = [
  ("run_pile_singlenode.sh", ("data", "pieces")),
  ("run_lambada_singlenode.sh", ("data", "pieces", "float32", 1, 2, "logs")),
  ("run_pile_multinode.sh", ("data", "pieces")),
  ("run_base_config_multinode.sh", ("Pile126M",)),
  ("run_llama_boolq.sh", ()),
]
LLAMA = {"VOCAB_PATH": "pieces", "TFDS_DATA_DIR": "data", "CHECKPOINT_RESTORE_PATH": "base"}


@pytest.mark.parametrize(("script", "arguments"), ALONE)
def test_options_of_xla_and_memory_are_the_program_s_and_the_user_s(tmp_path, script, arguments):
  (tmp_path / "logs").mkdir()
  given = slurm(0, 1) | LLAMA
  nothing = {"XLA_FLAGS": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}
  own = told(script, *arguments, cwd=tmp_path, **nothing, **given)
  assert own["XLA_FLAGS"] == own["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ""
  flags = {"BASE_XLA_FLAGS": "--first", "XLA_FLAGS": "--second --third"}
  users = told(script, *arguments, cwd=tmp_path, **flags, **given)
  assert users["XLA_FLAGS"] == "--first --second --third"


def free_port() -> int:
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


@pytest.mark.parametrize(
  ("script", "arguments"),
  [
    ("run_pile_multinode.sh", ("{data}", "{data}/pieces.model", "float32", 1, 2, "logs", *SHORT)),
    (
      "run_base_config_multinode.sh",
      ("Pile126M", "float32", 1, "logs", "{data}", "{data}/pieces.model", " ".join(SHORT)),
    ),
  ],
)
def test_two_nodes_train_together(data, tmp_path, program, script, arguments):
  given = [str(argument).format(data=data) for argument in arguments]
  if script.startswith("run_base"):
    more = " --fdl.DCN_MESH_SHAPE=[2,1,1] --fdl.ICI_MESH_SHAPE=[1,1,1]"
    given[-1] += " " + " ".join(SMALL) + more
  else:
    given += SMALL
  port = free_port()
  own = {"cwd": tmp_path, "PYTHON": program}
  both = [start(script, *given, **own, **slurm(index, port)) for index in range(2)]
  outputs = [process.communicate(timeout=300)[0] for process in both]
  assert [process.returncode for process in both] == [0, 0], outputs
  assert "completed step: 1" in outputs[0] and "devices:    2 x cpu" in outputs[0]


def test_llama_is_tuned_and_evaluated_on_boolq(data, tmp_path, program):
  tiny = [*SMALL, "--fdl.NUM_KV_HEADS=1", "--fdl.FPROP_DTYPE=float32"]
  environment = {
    "PYTHON": program,
    "TFDS_DATA_DIR": data,
    "VOCAB_PATH": data / "pieces.model",
    "CHECKPOINT_RESTORE_PATH": tmp_path / "base",
    "MAX_SEQ_LEN": 128,
    "MAX_STEPS": 2,
    "LR_COS_WARMUP": 1,
  }
  base = [program, "-m", "paxlike.main", "--fdl_config=SyntheticLLaMA7B", *tiny]
  base += [f"--job_log_dir={tmp_path / 'base'}", "--fdl.MAX_STEPS=1", "--fdl.MAX_SEQ_LEN=16"]
  subprocess.run(base, check=True, capture_output=True, cwd=SCRIPTS.parents[1])
  for name, more in (
    ("sft", {}),
    ("lora", {"USE_LORA": 1, "LORA_RANK": 2}),
    ("only", {"EVAL_ONLY": 1}),
  ):
    status, out = run(
      "run_llama_boolq.sh", *tiny, cwd=tmp_path, LOG_DIR=name, **(environment | more)
    )
    assert status == 0, out
    log = (tmp_path / name / "logs" / "eval.log").read_text()
    updates = 0 if name == "only" else 2
    assert f"evaluated boolq after {updates} updates: boolq_acc: " in log
    assert (tmp_path / name / "checkpoints").exists() is (name != "only")
  assert "trained" in (tmp_path / "lora" / "logs" / "train.log").read_text()


@pytest.mark.parametrize(
  ("script", "arguments"),
  [
    ("run_pile_multinode.sh", ("DATA", "VOCABULARY", "bfloat16", "8", "4", "LOGS", "--fdl.X=1")),
    (
      "run_base_config_multinode.sh",
      ("Pile126M", "bfloat16", "8", "LOGS", "None", "V", "--fdl.X=1"),
    ),
  ],
)
def test_variables_of_pax_are_flags_which_the_user_s_follow(script, arguments):
  slurm = dict.fromkeys(("LAUNCH_NODE_IPADDR", "NTASKS", "PROCID", "JOB_NUM_NODES"), "1")
  environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
  given = {"ENABLE_TE": "1", "ENABLE_FP8": "1", "NVTE_FUSED_ATTN": "0"}
  for variables, flags in (
    (given, ["--fdl.ENABLE_TE=true", "--fdl.USE_FP8=true", "--fdl.ATTENTION_KERNEL=xla"]),
    ({"NVTE_FUSED_ATTN": "1", "ENABLE_FP8": "0"}, ["--fdl.ATTENTION_KERNEL=cudnn"]),
    ({}, []),
  ):
    shown = subprocess.run(
      ["bash", SCRIPTS / script, *arguments],
      env=environment | {"PYTHON": "echo"} | variables,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    ).stdout.split()
    assert shown[-1] == "--fdl.X=1" and shown[-1 - len(flags) : -1] == flags
    assert ("--fdl.USE_FP8=true" in shown) == ("--fdl.USE_FP8=true" in flags)
