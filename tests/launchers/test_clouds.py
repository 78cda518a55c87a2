# SPDX-License-Identifier: Apache-2.0
"""Scripts for clouds, run with programs that take the place of `gcloud` and `xpk`."""

import os
import pathlib
import re
import shlex
import signal
import subprocess

import pytest
import yaml
from helpers.launched import until
from helpers.pods import expanded

from paxlike.launchers import job, main

RUN = ("--fdl_config=Pile126M", "--job_log_dir=gs://bucket/${NAME:-run}")
# The request is unknown, then pending, then active; ssh runs the command here.
GCLOUD = """\
echo "$*" >> calls
case "$*" in
  *queued-resources\\ describe*) [ -e state ] || exit 1; cat state; echo ACTIVE > state ;;
  *queued-resources\\ create*) echo PROVISIONING > state ;;
  *networks\\ describe*) [ -e network ] ;;
  *networks\\ create*) touch network ;;
  *ssh*) words="$*"; bash -c "${words##*--command=}" ;;
esac
"""
# Ends with the first status of a list in a file.
PROGRAM = """\
echo "$*" >> runs
status="$(head -n1 statuses)"
sed -i 1d statuses
exit "${status:-0}"
"""


def program(folder: pathlib.Path, name: str, text: str):
  (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
  (folder / name).chmod(0o755)


def path_to(folder: pathlib.Path) -> dict[str, str]:
  """Returns an environment in which programs of a folder come first."""
  return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "NAME": "mine"}


def script(
  folder: pathlib.Path,
  capsys: pytest.CaptureFixture,
  *flags: str,
  stderr: pathlib.Path | None = None,
) -> int:
  """Makes a script and runs it in a folder; returns its exit status."""
  assert main.run([*flags, *RUN]) == 0
  program(folder, "job.sh", capsys.readouterr().out)
  command = [folder / "job.sh"]
  with open(stderr or os.devnull, "w") as errors:
    done = subprocess.run(
      command, cwd=folder, env=path_to(folder), stderr=errors, timeout=60, check=False
    )
  return done.returncode


QUEUED = ("gce", "--accelerator_type=v5litepod-256", "--runtime_version=v2-alpha-tpuv5-lite")
QUEUED = (*QUEUED, "--zone=us-east5-a", "--pause=0")


@pytest.mark.parametrize(
  ("statuses", "status", "runs"), [("", 0, 1), ("75\n143\n0", 0, 3), ("2\n0", 2, 1)]
)
def test_slices_are_requested_once_and_lost_jobs_restarted(
  statuses, status, runs, tmp_path, capsys
):
  program(tmp_path, "gcloud", GCLOUD)
  program(tmp_path, "paxlike", PROGRAM)
  (tmp_path / "statuses").write_text(statuses)
  flags = (*QUEUED, "--spot", "--network=wide", "--create_network")
  assert script(tmp_path, capsys, *flags, f"--program={tmp_path}/paxlike") == status
  calls = (tmp_path / "calls").read_text().splitlines()
  create = next(call for call in calls if "queued-resources create" in call)
  assert "--node-id=pile126m" in create and create.endswith("--network=wide --spot")
  assert "networks create wide --mtu=8896" in calls[1]
  assert (tmp_path / "runs").read_text().splitlines() == [
    "--fdl_config=Pile126M --job_log_dir=gs://bucket/mine"
  ] * runs
  subprocess.run([tmp_path / "job.sh"], cwd=tmp_path, env=path_to(tmp_path), check=False)
  calls = (tmp_path / "calls").read_text()
  assert calls.count("queued-resources create") == calls.count("networks create") == 1


@pytest.mark.parametrize(("moment", "runs"), [("before", 0), ("after a step", 1)])
def test_a_request_that_failed_is_to_be_deleted(moment, runs, tmp_path, capsys):
  """Before the processes start, or as they run, when they are lost."""
  program(tmp_path, "gcloud", GCLOUD.replace("echo ACTIVE > state", ""))
  program(tmp_path, "paxlike", f"echo SUSPENDED > {tmp_path}/state\n{PROGRAM}")
  (tmp_path / "statuses").write_text("137\n")
  (tmp_path / "state").write_text("ACTIVE" if runs else "FAILED")
  flags = (*QUEUED, f"--program={tmp_path}/paxlike")
  assert script(tmp_path, capsys, *flags, stderr=tmp_path / "errors") == 1
  errors = (tmp_path / "errors").read_text()
  state = "SUSPENDED" if runs else "FAILED"
  assert f"the request pile126m is {state}. Delete it, then run this script again" in errors
  assert "queued-resources delete pile126m" in errors and "are kept" not in errors
  assert (tmp_path / "runs").exists() is bool(runs), moment


# Ends as paxlike does when it is stopped, and says by which signals.
STOPPABLE = """\
trap 'echo INT >> signals' INT
trap 'echo TERM >> signals; exit 143' TERM
touch started
while :; do sleep 0.1; done
"""


# A shell cannot trap a signal that is ignored when it starts, as by `nohup` and `&`.
IN_FOREGROUND = ("env", "--default-signal=INT,HUP")


@pytest.mark.parametrize(
  ("moment", "sent", "status"),
  [
    ("started", signal.SIGINT, 143),
    ("started", signal.SIGHUP, 143),
    ("asked", signal.SIGTERM, 143),  # Before the process is there.
    ("queued", signal.SIGTERM, 143),
    ("queued", signal.SIGINT, 130),
  ],
)
def test_a_stopped_script_stops_processes_and_says_what_is_left(
  moment, sent, status, tmp_path, capsys
):
  """A terminal sends Ctrl-C to all of a process group, of which the connections must not be."""
  slow = GCLOUD.replace("echo ACTIVE > state", "touch queued") if moment == "queued" else GCLOUD
  slow = slow.replace("*ssh*) ", '*ssh*) case "$*" in *exec*Pile*) touch asked; sleep 0.5; esac; ')
  program(tmp_path, "gcloud", slow)
  program(tmp_path, "paxlike", STOPPABLE)
  flags = [flag for flag in QUEUED if "pause" not in flag]
  flags += ["--pause=30" if moment == "queued" else "--pause=0", f"--program={tmp_path}/paxlike"]
  assert main.run([*flags, *RUN]) == 0
  program(tmp_path, "job.sh", capsys.readouterr().out)
  job_script = subprocess.Popen(
    [*IN_FOREGROUND, tmp_path / "job.sh"],
    cwd=tmp_path,
    env=path_to(tmp_path),
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  until((tmp_path / moment).exists, seconds=20, what=f"it is not {moment}")
  os.killpg(job_script.pid, sent)
  _, errors = job_script.communicate(timeout=20)
  assert job_script.returncode == status
  if moment == "started":
    assert (tmp_path / "signals").read_text() == "TERM\n"
  else:  # A process that has just begun ends before it can say so.
    assert (tmp_path / "asked").exists() is (moment == "asked")
    assert not (tmp_path / "started").exists() or moment == "asked"
  assert "stopping" in errors and "the TPUs of pile126m are kept" in errors
  assert "gcloud compute tpus queued-resources delete pile126m --zone=us-east5-a --force" in errors


def test_several_slices_are_prepared_and_joined(tmp_path, capsys):
  program(tmp_path, "gcloud", GCLOUD)
  program(tmp_path, "paxlike", PROGRAM)
  for name in ("sysctl", "ip", "sudo"):
    program(tmp_path, name, f'echo "{name} $*" >> prepared')
  (tmp_path / "statuses").write_text("")
  assert script(tmp_path, capsys, *QUEUED, "--nodes=2") == 0
  calls = (tmp_path / "calls").read_text()
  assert "--node-count=2 --node-prefix=pile126m" in calls
  assert calls.count("ssh pile126m-0 ") == calls.count("ssh pile126m-1 ") == 2
  assert (tmp_path / "prepared").read_text().count("rto_min 5ms") == 2
  assert len((tmp_path / "runs").read_text().splitlines()) == 2


XPK = ("xpk", "--cluster=mine", "--zone=us-east5-a", "--image=registry/paxlike")


def test_xpk_gets_the_workload(tmp_path, capsys):
  program(tmp_path, "xpk", 'printf "%s\\n" "$@" >> words')
  program(tmp_path, "gcloud", GCLOUD)
  flags = (*XPK, "--tpu_type=v5litepod-256", "--nodes=2", "--create_cluster")
  flags += ("--setup=echo $$ $(id -un) > ids;", "--env=A=it's b", "--fdl.MAX_STEPS=9")
  assert script(tmp_path, capsys, *flags) == 0
  words = (tmp_path / "words").read_text()
  assert words.startswith("cluster\ncreate\n") and "\n--on-demand\n" in words
  assert "--network=mine-network --subnetwork=mine-network" in words
  assert "workload\ncreate\n" in words and words.count("--num-slices=2") == 2
  assert '"--job_log_dir=gs://bucket/${NAME:-run}"' in words  # For the shell of the job.
  assert "rto_min 5ms" in words and "sudo" not in words
  assert "--restart-on-exit-codes=75," in words  # Its own are 42 and from 127.
  assert "--termination-grace-period-seconds=120" in words
  # XPK pastes the command into a block of a YAML file, of which it indents the first line.
  (command,) = re.findall("^--command=(.*)$", words, re.M)
  pod = yaml.safe_load(f"command:\n- bash\n- -c\n- |\n  ({command}) & PID=$!;\n  wait $PID\n")
  shell = expanded(pod["command"][2])
  program(tmp_path, "paxlike", 'printf "%s\\n" "$A" "$@" > started')
  for name in ("sysctl", "ip"):
    program(tmp_path, name, "")
  subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=path_to(tmp_path), check=True)
  assert (tmp_path / "started").read_text().splitlines() == [
    *("it's b", "--fdl.MAX_STEPS=9", RUN[0], "--job_log_dir=gs://bucket/mine")
  ]
  assert re.fullmatch(r"\d+ \S+\n", (tmp_path / "ids").read_text())


def test_machines_with_gpus_need_no_preparation(tmp_path, capsys):
  program(tmp_path, "xpk", 'printf "%s\\n" "$@" >> words')
  assert script(tmp_path, capsys, *XPK, "--device_type=h100-80gb-8", "--nodes=2") == 0
  words = (tmp_path / "words").read_text()
  assert "--device-type=h100-80gb-8\n--num-nodes=2" in words and "rto_min" not in words


def test_a_task_of_sky_pilot_names_the_other_machines(capsys):
  flags = ("sky", "--accelerators=H100:8", "--nodes=2", "--spot", "--install=pip install paxlike")
  assert main.run([*flags, *RUN]) == 0
  task = yaml.safe_load(capsys.readouterr().out)
  assert (task["num_nodes"], task["resources"]["use_spot"]) == (2, True)
  assert 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"]
  values = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
  shown = task["run"].replace("exec paxlike", "echo")
  words = subprocess.run(
    ["bash", "-c", shown],
    env=os.environ | values | {"SKYPILOT_NODE_RANK": "1"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout
  assert shlex.split(words)[2:] == ["--server_addr=10.0.0.1:8476", "--num_hosts=2", "--host_idx=1"]


SLURM = ("slurm", "--nodes=4", "--gpus_per_node=8")
TOO_FEW = ("--fdl.ICI_MESH_SHAPE=[8,1,1]", "--fdl.DCN_MESH_SHAPE=[2,1,1]")


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("gce", "--zone=z"), "gce needs --accelerator_type"),
    ((*QUEUED, "--create_network"), "--create_network: name it with --network=NAME"),
    (XPK, "xpk needs --tpu_type or --device_type"),
    (("xpk",), "xpk needs --cluster"),
    (("sky",), "sky needs --accelerators"),
    (("ssh",), "ssh needs --hosts"),
    (("ssh", "--hosts=a,-oProxyCommand=x"), "-oProxyCommand=x is not the name of a machine"),
    (("ssh", "--hosts=a,b", "--nodes=3"), "--nodes=3, but --hosts has 2 machines"),
    (("ssh", "--hosts=a", "--copy=."), "--copy needs --directory"),
    (("slurm", "--mounts=/a:/a"), "--mounts needs --container"),
    (("slurm", "--grace=70000"), "--grace=70000: expected 0 to 65535"),
    (("slurm", "--output=${X}.out"), "Slurm expands no variables in a directive"),
    (
      ("slurm", '--output=a".out'),
      "Slurm takes no quote in it; --directive passes a line as it is",
    ),
    (("slurm", "--container=i", "--job_log_dir=runs/x"), "=runs/x is relative, and lost with the"),
    (("slurm", "--container=${I}", "--job_log_dir", "${X:-runs}/x"), "}/x is relative, and lost"),
    ((*XPK, "--tpu_type=v5e-8", "--setup=a\nb"), "XPK takes a command of one line"),
    ((*XPK, "--tpu_type=v5e-8", "--env=A=a\nb"), "XPK takes a command of one line"),
    ((*XPK, "--tpu_type=v5e-8", "--setup=a # b"), "which a comment would end"),
    (("sky", "--accelerators=H100:8", "--max_restarts=3"), "SkyPilot has no such limit"),
    (
      (*SLURM, *TOO_FEW),
      "--nodes=4 --gpus_per_node=8: ICI_MESH_SHAPE=[8, 1, 1] (data 8) x DCN_MESH",
    ),
    ((*SLURM, "--fdl.ICI_MESH_SHAPE=[16,1,1]", TOO_FEW[1]), "has 2 parts, and the job 4 nodes"),
    (
      ("sky", "--accelerators=H100:8", "--fdl.ICI_MESH_SHAPE=[4,1,1]"),
      "--accelerators=H100:8: ICI_",
    ),
    (
      (*QUEUED, "--fdl.ICI_MESH_SHAPE=[128,1,1]"),
      "--accelerator_type=v5litepod-256: ICI_MESH_SHAPE",
    ),
    (("slurm", "--fiddler=nonsense(1)"), "nonsense"),
    (("slurm", "--mode=show"), "print: give them to paxlike itself"),
    (("slurm", "--exp=${X}"), "give the variable a default"),
    (("slurm", "--to=/nowhere/at/all/x.sub", "--bad"), "unknown flag --bad"),
  ],
)
def test_mistakes_are_named(flags, message, capsys):
  assert main.run([flags[0], *RUN, *flags[1:]]) == 2
  captured = capsys.readouterr()
  assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
  "text", ["a b", 'x"y', "$(touch f)", "`id`", "it's", "\\", "${A:-b c}", '${A:-x"y$(touch f)}']
)
def test_the_shell_sees_each_word_as_it_was_given(text):
  """Only variables are expanded; here they have their defaults."""
  shown = subprocess.run(
    ["bash", "-c", f"printf %s {job.quoted(text)}"], stdout=subprocess.PIPE, text=True, check=True
  )
  assert shown.stdout == job.with_defaults(text)


def test_what_cannot_be_written_or_submitted_is_said(tmp_path, monkeypatch, capsys):
  (tmp_path / "file").write_text("")
  assert main.run(["slurm", f"--to={tmp_path}/file/x.sub", *RUN]) == 2
  assert f"--to={tmp_path}/file/x.sub cannot be written" in capsys.readouterr().err
  monkeypatch.setenv("PATH", str(tmp_path))
  assert main.run(["slurm", "--submit", *RUN]) == 2
  assert "this machine has no sbatch; save the file with --to=FILE" in capsys.readouterr().err
  assert main.run(["slurm", f"--to={tmp_path}/x.sub", *RUN]) == 0
  made = (tmp_path / "x.sub").read_text()
  # Slurm reads directives up to the first line that is neither a comment nor empty.
  first = next(line for line in made.splitlines() if line and not line.startswith("# "))
  assert first == "#!/usr/bin/env bash" and "\n\n#SBATCH --job-name=" in made


def test_names_that_are_shortened_stay_different():
  names = [
    f"{x},NUM_LAYERS={n},MODEL_DIMS={d}"
    for x in ("a=1e-3", "a=1e+3")
    for n in "12"
    for d in (16, 32)
  ]
  names += ["run", "a b", "a-b", "x" * 50, "x" * 51]
  titles = {job.Job(flags=(), name=name).title for name in names}
  assert len(titles) == len(names) and "run" in titles
  assert all(re.fullmatch("[a-z][a-z0-9-]{0,39}", title) for title in titles), titles
