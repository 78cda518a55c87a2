# SPDX-License-Identifier: Apache-2.0
"""Plots of how plans scale."""

import json

import pytest
from helpers.program import run

from paxlike.cli import plan_plot, plot

SMALL = ("--fdl_config=Scaled16B", "--fdl.NUM_LAYERS=2", "--fdl.MODEL_DIMS=256", "--mode=plan")


def planned(capsys, path, *flags):
  assert run(*SMALL, *flags, "--json") == 0
  path.write_text(capsys.readouterr().out)
  return path


@pytest.mark.slow
def test_a_point_for_each_topology_and_a_line_for_each_kind_of_device(tmp_path, capsys):
  weak = planned(capsys, tmp_path / "weak.json", "--topology=h100-16,v5e-4,h100-8")
  topologies = "--topology=h100-8,h100-16"
  strong = planned(capsys, tmp_path / "strong.json", topologies, "--global_batch=64")
  facts = {one["topology"]: one for one in json.loads(weak.read_text())["topologies"]}
  lines = {one.name: one for one in plan_plot.read(str(weak))}
  assert set(lines) == {"NVIDIA H100, weak", "TPU v5 lite, weak"}
  points = lines["NVIDIA H100, weak"].points
  assert [point.devices for point in points] == [8, 16]
  best = facts["h100-16"]["plans"][0]
  assert points[1].seconds == best["seconds"]["total"] and points[1].mfu == best["mfu_full"]
  assert points[1].nbytes == best["predicted_bytes"]["total"] < points[1].capacity
  assert not lines["NVIDIA H100, weak"].is_strong
  assert plan_plot.read(str(strong))[0].is_strong
  assert plot.run(["--plan", str(weak), str(strong), f"--output={tmp_path}/a.png"]) == 0
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
  figure = plan_plot.draw([*lines.values(), *plan_plot.read(str(strong))])
  _, labels = figure.axes[0].get_legend_handles_labels()
  assert "NVIDIA H100, strong: 64 sequences a step" in labels


@pytest.mark.parametrize(
  ("text", "says"),
  [
    (None, "cannot be read: No such file or directory"),
    ("{", "is not the output of --mode=plan --json: JSONDecodeError"),
    ("{}", "is not the output of --mode=plan --json: KeyError 'plans'"),
    ('{"plans": []}', "has no plan that fits."),
  ],
)
def test_other_files_are_refused(tmp_path, capsys, text, says):
  file = tmp_path / "a.json"
  if text is not None:
    file.write_text(text)
  assert plot.run(["--plan", str(file), f"--output={tmp_path}/a.png"]) == 2
  assert f"paxlike-plot: {file} {says}" in capsys.readouterr().err
