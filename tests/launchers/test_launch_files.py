# SPDX-License-Identifier: Apache-2.0
"""The scripts and manifests in scripts/launch, which `paxlike-launch` makes."""

import pathlib
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml
from helpers import launch_files, slurm_cluster
from helpers.job_set_schema import published
from helpers.launch_files import FILES
from helpers.launched import until

from paxlike import root_graph
from paxlike.cli import command_line
from paxlike.config import building
from paxlike.devices import xla_environment
from paxlike.launchers import command_comment, job, main

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
SCRIPTS = [file for file in FILES if file.suffix in (".sub", ".sh")]
every_script = pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
SUBS = [file for file in FILES if file.suffix == ".sub"]
# What a person sets; without them, the scripts say so and end.
REQUIRED = {
  "BASE_WORKSPACE_DIR": "/work",
  "BASE_TFDS_DATA_DIR": "/tfds",
  "BASE_VOCAB_PATH": "/vocab.model",
  "BASE_CHECKPOINT_RESTORE_PATH": "/llama",
  "STAGE_PATH": "/stage",
  "DTYPE": "bf16",
}
FOLDER = FILES[0].parent
GPUS = "--gpus-per-node=8"


def graph(flags: list[str]) -> Any:
  options = command_line.parse(["paxlike", *flags])
  return root_graph.of(options, root_graph.experiment_of(options))


@every_file
def test_a_file_is_what_its_command_makes(file):
  """The command checks its flags, with the defaults of variables."""
  assert launch_files.made_anew(file.read_text()) == file.read_text()


@pytest.mark.parametrize(
  "word", ["", "a b", "a  \n\n# b \\\nc\n", "it's", '"', "\\", "${A:-b}", "#", "a=$(touch f)"]
)
def test_a_command_is_read_as_it_was_written(word):
  argv = ["slurm", f"--setup={word}", word, "--flag"]
  made = command_comment.added("#!/usr/bin/env bash\n#SBATCH x\n", [*argv, "--submit", "--to", "x"])
  assert made.endswith("\n\n#SBATCH x\n") and made.startswith("#!/usr/bin/env bash\n# ")
  assert command_comment.read(made) == argv


def test_the_page_names_every_file():
  page = (FOLDER.parents[1] / "docs" / "guide" / "launching.md").read_text()
  assert [file.name for file in FILES if f"`{file.name}`" not in page] == []


@every_file
def test_meshes_have_the_devices_of_the_job(file):
  argv = command_comment.read(file.read_text())
  options, flags = main._parser().parse_known_args(argv)
  assert not any(flag.startswith("--fdl.") and job.has_open_variable(flag) for flag in flags)
  mesh = building.build(graph([job.with_defaults(flag) for flag in flags]).mesh, source="mesh")
  cls = main.TARGETS[options.target]
  target = cls(**main._fields(cls, options))
  assert target.devices() is not None or options.target == "ssh"
  main._check_mesh(mesh, target, options.nodes)


@every_script
def test_scripts_have_no_mistakes_that_linters_know(file):
  assert subprocess.run(["bash", "-n", file], check=False).returncode == 0
  shellcheck = launch_files.linter("shellcheck")
  if not shellcheck:
    pytest.skip("shellcheck is not installed")
  # SC2086: options that are several words. SC1091: the user's virtual environment.
  options = ["--severity=warning", "--exclude=SC2086,SC1091"]
  assert subprocess.run([shellcheck, *options, file], check=False).returncode == 0


@pytest.mark.parametrize("name", ["jobset_gpu.yaml", "jobset_tpu.yaml"])
def test_manifests_are_job_sets(name):
  jsonschema.validate(yaml.safe_load((FOLDER / name).read_text()), published())


def in_job(name: str, folder: pathlib.Path, *more: str, nodes: int, **variables: str):
  """Returns (words of srun, flags of paxlike, environment) of a script that runs in a job."""
  words, environment = launch_files.started(
    FOLDER / name,
    *more,
    folder=folder,
    program="srun",
    SLURM_JOB_ID="7",
    SLURM_JOB_NUM_NODES=str(nodes),
    **(REQUIRED | variables),
  )
  assert "paxlike" in words, words
  end = words.index("paxlike")
  return words[:end], words[end + 1 :], environment


@pytest.mark.parametrize(
  ("name", "nodes", "variables", "expected"),
  [
    ("pile_multinode.sub", 16, {"PREC": "float32"}, {"dcn": (16, 1, 1), "FPROP_DTYPE": "float32"}),
    ("pile_multinode.sub", 8, {"ENABLE_FP8": "1"}, {"dcn": (8, 1, 1), "USE_FP8": True}),
    ("pile_singlenode.sub", 1, {"NVTE_FUSED_ATTN": "0"}, {"ATTENTION_KERNEL": "xla"}),
    ("lambada.sub", 1, {"ENABLE_TE": "1", "GPUS_PER_NODE": "4"}, {"ici": (4, 1, 1)}),
    ("c4_175b.sub", 64, {"PERCORE_BATCH_SIZE": "3"}, {"dcn": (1, 64, 1), "PERCORE_BATCH_SIZE": 3}),
    ("base_config.sub", 32, {"CONFIG": "Synthetic5B256Gpus"}, {"dcn": (1, 32, 1)}),
    ("llama_lora.sub", 2, {"CONFIG": "LLaMA13B", "LORA_RANK": "8"}, {"LORA_RANK": 8}),
    ("llama_sft.sub", 2, {"LR_COS_WARMUP": "50"}, {"LR_COS_WARMUP": 50, "dcn": (1, 2, 1)}),
    ("llama2_70b_h100.sub", 8, {}, {"dcn": (1, 8, 1), "USE_FP8": False}),
    ("llama2_70b_h100.sub", 32, {"DTYPE": "fp8"}, {"dcn": (1, 32, 1), "USE_FP8": True}),
    ("llama2_70b_h100.sub", 64, {}, {"dcn": (4, 16, 1)}),
    ("llama2_70b_h100.sub", 256, {}, {"dcn": (16, 16, 1)}),
    ("gpt3_175b_pipeline.sub", 8, {"DTYPE": "bfloat16"}, {"dcn": (8, 1, 1, 1), "NUM_STAGES": None}),
    (
      "gpt3_175b_pipeline.sub",
      8,
      {"PP": "4", "DP": "4", "TP": "4", "VP": "2", "GA": "16", "MBS": "1", "DTYPE": "fp8"},
      {
        "dcn": (4, 4, 1, 1),
        "ici": (1, 1, 1, 4),
        "PERCORE_BATCH_SIZE": 1.0,
        "NUM_VIRTUAL_STAGES": 2,
        "NUM_MICROBATCHES": 16,
        "USE_FP8": True,
      },
    ),
    (
      "gpt3_175b_pipeline.sub",
      8,
      {"SCHEDULE": "1f1b", "VP": "1", "MBS": "1", "GA": "32", "DTYPE": "bfloat16"},
      {"PIPELINE_SCHEDULE": "1f1b", "PERCORE_BATCH_SIZE": 0.5, "NUM_MICROBATCHES": 32},
    ),
  ],
)
def test_variables_are_knobs(name, nodes, variables, expected, tmp_path):
  _, flags, _ = in_job(name, tmp_path, nodes=nodes, **variables)
  options = command_line.parse(["paxlike", *flags])
  experiment = root_graph.experiment_of(options)
  root_graph.of(options, experiment)
  for key, value in expected.items():
    knob = f"{key.upper()}_MESH_SHAPE" if key in ("ici", "dcn") else key
    found = getattr(experiment, knob)
    assert (tuple(found) if isinstance(found, list) else found) == value, knob


@pytest.mark.parametrize(
  ("dtype", "nodes", "bytes_"),
  [("bf16", 8, 2**25), ("fp8", 8, 2**26), ("bf16", 64, 2**24), ("fp8", 256, 2**25)],
)
def test_the_h100_recipe_has_its_settings(dtype, nodes, bytes_, tmp_path):
  _, _, environment = in_job("llama2_70b_h100.sub", tmp_path, nodes=nodes, DTYPE=dtype)
  assert f"reduce_scatter_combine_threshold_bytes={bytes_}\n" in environment["XLA_FLAGS"]
  assert environment["NCCL_IB_SL"] == "1" and environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"


@pytest.mark.parametrize("file", SUBS, ids=lambda file: file.name)
def test_xla_has_the_flags(file, tmp_path, monkeypatch):
  _, _, environment = in_job(file.name, tmp_path, nodes=8)
  monkeypatch.setenv("XLA_FLAGS", environment.get("XLA_FLAGS", ""))
  assert xla_environment.settle() == ""


@pytest.mark.parametrize("name", [file.name for file in SUBS if "BASE_XLA" in file.read_text()])
def test_flags_of_pax_and_of_the_user_are_passed(name, tmp_path):
  given = {"BASE_XLA_FLAGS": "--first", "XLA_FLAGS": "--second --third"}
  _, _, environment = in_job(name, tmp_path, nodes=8, **given)
  assert environment["XLA_FLAGS"] == "--first --second --third"


def test_a_profiler_and_a_container_are_optional(tmp_path):
  srun, _, _ = in_job("llama2_70b_h100.sub", tmp_path, nodes=8)
  assert not any(word.startswith(("nsys", "--container")) for word in srun)
  stage = tmp_path / "stage"
  on = {"PROFILE": "1", "CONTAINER": "image with blank", "STAGE_PATH": str(stage)}
  srun, flags, environment = in_job(
    "llama2_70b_h100.sub", tmp_path, "--fdl.MAX_STEPS=9", nodes=8, **on
  )
  name = "%q{SLURM_JOB_ID}-%q{SLURM_RESTART_COUNT}-%q{SLURM_PROCID}"
  assert "nsys" in srun and f"--output={stage}/nsys/{name}" in srun and (stage / "nsys").is_dir()
  assert environment["SLURM_RESTART_COUNT"] == "0"
  assert "--container-image=image with blank" in srun and f"--container-mounts={stage}" in srun
  assert flags[-1] == "--fdl.MAX_STEPS=9"  # Flags after the file's name.
  assert "--fdl.PROFILE_STEPS=[20,24]" in flags and "--fdl.PROFILER=nsys" in flags


@pytest.mark.parametrize("file", SUBS, ids=lambda file: file.name)
def test_containers_have_paths_and_variables_of_the_job(file, tmp_path):
  """Not buckets; a folder of the run that is relative is one of the host."""
  given = {"CONTAINER": "image", "CONTAINER_IMAGE": "image", "BASE_VOCAB_PATH": "gs://vocab"}
  given |= {"BASE_WORKSPACE_DIR": "out", "STAGE_PATH": "out", "SLURM_LOG_DIR": "out"}
  srun, flags, environment = in_job(file.name, tmp_path, nodes=8, PWD=str(tmp_path), **given)
  options = dict(word.split("=", 1) for word in srun if word.startswith("--container"))
  mounts = options["--container-mounts"].split(",")
  (folder,) = (flag.partition("=")[2] for flag in flags if flag.startswith("--job_log_dir="))
  assert all(mount.startswith("/") for mount in mounts) and folder.startswith(f"{mounts[0]}/")
  names = options.get("--container-env", "").split(",")
  assert {"XLA_FLAGS", "NCCL_IB_SL"} & environment.keys() <= {*names}


@pytest.mark.parametrize(
  ("name", "variables", "expected"),
  [
    ("llama2_70b_h100.sub", {"JOB_TOTAL_GPUS": "512"}, ["--nodes=64"]),
    ("llama2_70b_h100.sub", {"DTYPE": ""}, "DTYPE: fp8 or bf16"),
    ("llama2_70b_h100.sub", {"DTYPE": "fp16"}, "DTYPE=fp16: expected fp8 or bf16"),
    ("pile_multinode.sub", {"BASE_VOCAB_PATH": ""}, "BASE_VOCAB_PATH: a SentencePiece model"),
    ("pile_multinode.sub", {"BASE_SCRIPT": "x.sh"}, "BASE_SCRIPT=x.sh: edit this file instead."),
    ("pile_multinode.sub", {"NUM_NODES": "4"}, ["--nodes=4", "--gpus-per-node=8"]),
    ("llama_sft.sub", {"USE_LORA": "1"}, "USE_LORA=1: submit llama_lora.sub."),
    ("llama_lora.sub", {"EVAL_ONLY": "1"}, "EVAL_ONLY=1: llama_eval.sub."),
    ("llama_lora.sub", {"USE_LORA": "1", "EVAL_ONLY": "0"}, ["--nodes=2", GPUS]),
    ("llama_eval.sub", {"OUTPUT_DIR": "out"}, ["--nodes=2", GPUS, "--output={tmp}/out/%x-%j.out"]),
    ("base_config.sub", {"CONFIG": "Pile126M"}, ["--nodes=8", GPUS, "--job-name=Pile126M"]),
    ("c4_175b.sub", {"GPUS_PER_NODE": "4"}, ["--nodes=32", "--gpus-per-node=4"]),
    ("llama2_70b_h100.sub", {"JOB_TOTAL_GPUS": "4"}, "JOB_TOTAL_GPUS=4: expected a multiple of 8"),
    ("llama2_70b_h100.sub", {"JOB_TOTAL_GPUS": "60"}, "JOB_TOTAL_GPUS=60: expected"),
    ("llama2_70b_h100.sub", {"JOB_TOTAL_GPUS": "800"}, "JOB_TOTAL_GPUS=800: expected"),
    ("llama2_70b_h100.sub", {"JOB_TOTAL_GPUS": "x"}, "JOB_TOTAL_GPUS=x: expected"),
    ("gpt3_175b_pipeline.sub", {"TP": "16"}, "TP=16: expected 1, 2, 4 or 8"),
    ("gpt3_175b_pipeline.sub", {"PP": "0"}, "PP=0: expected a positive whole number."),
    ("gpt3_175b_pipeline.sub", {"GA": "a b"}, "GA=a b: expected a positive whole number."),
    ("gpt3_175b_pipeline.sub", {"NUM_NODES": "9"}, "TP=8 are 64 GPUs, and NUM_NODES=9 has 8 each."),
    ("gpt3_175b_pipeline.sub", {"PP": "3", "TP": "4"}, "are 12 GPUs, and NUM_NODES=1 has 8 each."),
    (
      "gpt3_175b_pipeline.sub",
      {"TP": "4", "DP": "2", "SLURM_ACCOUNT": "mine", "SLURM_TIME": "2:00"},
      ["--nodes=8", "--ntasks-per-node=2", "--time=2:00", "--account=mine"],
    ),
  ],
)
def test_outside_of_a_job_a_script_submits_itself(name, variables, expected, tmp_path):
  words, _ = launch_files.started(
    *(FOLDER / name, "--fdl.MAX_STEPS=9"),
    folder=tmp_path,
    program="sbatch",
    **(REQUIRED | {"BASE_WORKSPACE_DIR": str(tmp_path)} | variables),
  )
  if isinstance(expected, str):
    assert expected in words[0] and words[0].count("\n") == 1
  else:
    options = [option.format(tmp=tmp_path) for option in expected]
    assert words == [*options, str(FOLDER / name), "--fdl.MAX_STEPS=9"]
    assert (tmp_path / "out").is_dir() == ("OUTPUT_DIR" in variables)


@pytest.mark.slow  # Slurm waits between jobs.
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
def test_slurm_takes_and_runs_every_script(tmp_path):
  """With a program in the place of paxlike that prints its flags."""
  (tmp_path / "paxlike").write_text('#!/usr/bin/env bash\necho "of ${SLURM_NTASKS}: $*"\n')
  (tmp_path / "paxlike").chmod(0o755)
  # Two nodes, without GPUs; the user's variables.
  two = {"NUM_NODES": "2", "PP": "2", "JOB_TOTAL_GPUS": "16", "CONFIG": "LLaMA7B"}
  two |= {"SBATCH_GPUS_PER_NODE": "0", "GPUS_PER_NODE": "0", "SBATCH_OUTPUT": "%j.out"}
  with slurm_cluster.running() as cluster:
    path = {"PATH": f"{tmp_path}:{cluster.environment['PATH']}"}
    jobs = {}
    for file in SUBS:
      submitted = subprocess.run(
        ["bash", file, "--more"],
        env=cluster.environment | REQUIRED | two | path,
        cwd=tmp_path,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
      )
      jobs[submitted.stdout.split()[-1]] = file.name
    for number, name in jobs.items():
      until(lambda job=number: cluster.state(job)[0] == "COMPLETED", seconds=60, what=name)
      nodes = "1" if name in ("pile_singlenode.sub", "lambada.sub") else "2"
      lines = (tmp_path / f"{number}.out").read_text().splitlines()
      assert len(lines) == int(nodes), lines
      assert all(line.startswith(f"of {nodes}: --") and line.endswith(" --more") for line in lines)
