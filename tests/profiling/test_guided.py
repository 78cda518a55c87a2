# SPDX-License-Identifier: Apache-2.0
"""XLA schedules a step for GPUs by the profile that it is given; other files are refused."""

import re
from unittest import mock

import pytest
from helpers.program import TINY, curve, run

from paxlike import root_graph, run_mode
from paxlike.cli import command_line, compile_page
from paxlike.compilation import aot, hlo_kernels, hlo_schedule
from paxlike.devices import chips, pgle, topology
from paxlike.errors import UserError
from paxlike.profiling import guided

SIZES = ("--fdl.DIMS_PER_HEAD=8", "--fdl.MODEL_DIMS=64", "--fdl.ICI_MESH_SHAPE=[1,8,1]")
FLAGS = (
  *(flag for flag in TINY if "DTYPE" not in flag),
  *(*SIZES, "--fdl.NUM_LAYERS=1", "--mode=compile", "--topology=h100-8"),
)


@pytest.fixture
def trainer():
  """A run on eight H100, which are not there."""
  options = command_line.parse(["paxlike", *FLAGS])
  with topology.target(options.topology):
    yield run_mode.build_trainer(root_graph.of(options, root_graph.experiment_of(options)))


@pytest.mark.slow
def test_a_profile_changes_the_schedule(trainer, tmp_path, capfd):
  """By the durations of the profile, more of the collectives is beside computation than before."""
  before = aot.compile_step(trainer).text
  names = [one.name for one in hlo_kernels.kernels(before, chips.CHIPS["H100"])]
  moving = [one.name for one in hlo_schedule.transfers(before)]
  costs = dict.fromkeys(names, 1.0) | dict.fromkeys(moving, 50.0)
  path = tmp_path / "p.pbtxt"
  path.write_text(pgle.text(costs))
  guided_trainer = guided.scheduled(trainer, str(path))
  program = aot.compile_step(guided_trainer)
  found = re.search(r"Found (\d+) instructions from the profile", capfd.readouterr().err)
  assert found and int(found[1]) > 0.9 * len(costs)
  (left, whole), (left_before, _) = (
    hlo_schedule.exposed(text, costs) for text in (program.text, before)
  )
  assert left < left_before <= whole == 50 * len(moving)
  page = compile_page.text(guided_trainer, program, with_kernels=False)
  shown = f"{(whole - left) / 1e3:.3f} of {whole / 1e3:.3f} ms are beside computation"
  assert re.search(rf"collectives, by the profile +{re.escape(shown)}\n", page)


@pytest.mark.slow
def test_a_profile_of_another_program_is_refused(tmp_path, capsys):
  path = tmp_path / "p.pbtxt"
  path.write_text(pgle.text({"fusion.12345": 1.0, "all-gather-start.77": 2.0}))
  assert run(*FLAGS, f"--pgle_profile={path}") == 2
  (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("paxlike")]
  assert "p.pbtxt is of another program: of its 2 instructions, the step has 0." in line


@pytest.mark.parametrize(
  ("flags", "content", "message"),
  [
    (FLAGS, b"costs {", "p.pbtxt is not a profile of instructions"),
    (FLAGS, b"", "p.pbtxt is not a profile of instructions"),
    (FLAGS, None, "p.pbtxt: No such file or directory."),
    (("--topology=v5e-8", *FLAGS[:-1]), b"", "p.pbtxt is for GPUs: XLA schedules no programs"),
  ],
)
def test_what_is_no_profile_is_refused(flags, content, message, tmp_path, capsys):
  path = tmp_path / "p.pbtxt"
  if content is not None:
    path.write_bytes(content)
  assert run(*flags, f"--pgle_profile={path}") == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert message in line
  assert run(*FLAGS, "--pgle_profile=p.pb") == 2
  assert "--pgle_profile=p.pb: the name must end in .pbtxt." in capsys.readouterr().err


def test_a_compiled_step_takes_no_profile(capsys):
  flags = (*TINY, "--job_log_dir=D", "--compiled_step=s", "--pgle_profile=p.pbtxt")
  assert run(*flags) == 2
  assert "give it to --mode=compile --save=FILE instead." in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_names_its_flag(monkeypatch, tmp_path):
  """As when the disk has filled up in the minutes of the measurement."""
  for module, name in ((guided, "_check"), (guided.measurement, "measure")):
    monkeypatch.setattr(module, name, lambda *_, **__: None)
  for name in ("_with_options", "step_profile"):
    monkeypatch.setattr(guided, name, mock.MagicMock())
  path = tmp_path / "gone" / "p.pbtxt"
  for flag in ("--save", "--pgle_profile"):
    with pytest.raises(UserError, match=rf"^{flag}={path}: No such file or directory\.$"):
      guided.profile(mock.MagicMock(), to=str(path), flag=flag)


@pytest.mark.slow
def test_one_command_makes_a_profile_and_trains_by_it(monkeypatch, tmp_path, capsys):
  """On a CPU, whose compiler takes the option and ignores it, and whose trace is a real one."""
  monkeypatch.setattr(guided, "_check", lambda *_, **__: None)
  path, folder = tmp_path / "p.pbtxt", tmp_path / "run"
  flags = (*TINY, f"--pgle_profile={path}", "--fdl.NUM_LAYERS=1", "--fdl.PROFILE_STEPS=[1,2]")
  assert run(*flags, "--fdl.MAX_STEPS=3", f"--job_log_dir={folder}") == 0
  assert f"--pgle_profile={path}: no such file; profiling the step" in capsys.readouterr().err
  assert [updates for updates, _ in curve(folder)] == [1, 2, 3]
  costs = pgle.read(str(path)).costs
  assert len(costs) > 50 and sum(costs.values()) > 0
  content = path.read_text()
  assert run(*flags, "--fdl.MAX_STEPS=4", f"--job_log_dir={folder}") == 0
  assert "no such file" not in capsys.readouterr().err
  assert path.read_text() == content
