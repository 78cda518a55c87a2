# SPDX-License-Identifier: Apache-2.0
"""The models of --mode=transfer, their training, and what follows from it."""

import json
import re

import numpy as np
import pytest
from helpers.program import TEXT, TINY, run

import paxlike
from paxlike import fiddlers, registry
from paxlike.config import building
from paxlike.errors import UserError
from paxlike.transfer import coordinate_check, rate_table, shapes
from paxlike.transfer.program import Program, RateScale
from paxlike.transfer.rate_table import Table, best
from paxlike.transfer.shapes import Shape


@pytest.mark.slow
def test_activations_grow_in_the_standard_parametrization_only(tmp_path, capsys):
  text = tmp_path / "text.txt"
  text.write_text("It was the best of times, it was the worst of times. " * 200)
  flags = [flag for flag in TEXT if not re.search("DIMS_PER_HEAD|LEARNING|WARMUP", flag)]
  given = (f"--fdl.DATA_PATH={text}", "--fdl.LEARNING_RATE=1e-3", "--fdl.NUM_LAYERS=1")
  picture = f"--save={tmp_path}/check.png"
  assert run(*flags, *given, "--mode=transfer", "--widths=32,128", "--json", picture) == 0
  found = json.loads(capsys.readouterr().out)["parametrizations"]
  assert list(found["mup"]["slopes"]) == [
    *("embedding", "attention 0", "mlp 0", "residual 0", "logits"),
  ]
  assert max(map(abs, found["mup"]["slopes"].values())) < 0.1 < 0.3
  for name in ("attention 0", "mlp 0", "residual 0", "logits"):
    assert found["standard"]["slopes"][name] > 0.3, name
  base = [one["rms_before_and_after_each_step"]["logits"][0][0] for one in found.values()]
  assert base[0] == base[1]  # The narrowest model is the base model.
  assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")


def program(**knobs) -> Program:
  experiment = registry.find("Gpt3_52k")(VOCAB_SIZE=64, MAX_SEQ_LEN=16, MAX_STEPS=6, **knobs)
  graph, scale = experiment.trainer(), RateScale()
  fiddlers.change_rate(graph, scale)
  return Program(building.build(graph), scale)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "schedule_free_adamw"])
def test_a_factor_of_the_rate_is_another_rate(optimizer):
  knobs = {"OPTIMIZER": optimizer, "EMA_HALF_LIVES": [] if "free" in optimizer else [10.0]}
  knobs |= {"LR_SCHEDULE": "linear", "LR_WARMUP": 2, "WEIGHT_DECAY": 1.0}
  one, other = program(LEARNING_RATE=0.01, **knobs), program(LEARNING_RATE=0.04, **knobs)
  with one.batches(6) as batches:
    base, scaled = one.train(batches), one.train(batches, 4.0)
  with other.batches(6) as batches:
    np.testing.assert_allclose(scaled, other.train(batches), rtol=1e-5)
    drawn = other.train(batches, draw=1)
  found = rate_table.measured(one, (0.01, 0.04), draws=2)[1]
  assert found == pytest.approx((scaled[-1] + drawn[-1]) / 2, rel=1e-5)
  assert drawn[-1] != pytest.approx(scaled[-1], rel=1e-4)
  assert abs(scaled - base).max() > 0.01


@pytest.mark.slow
def test_rates_that_change_nothing_are_refused():
  graph = registry.find("Gpt3_52k")(VOCAB_SIZE=64, MAX_SEQ_LEN=16, MAX_STEPS=3).trainer()
  apart = Program(building.build(graph), RateScale())  # As of an optimizer with a rate of its own.
  with pytest.raises(UserError, match="all rates give the same loss"):
    rate_table.measured(apart, (0.01, 0.04))


@pytest.mark.slow
def test_losses_are_those_of_a_run(tmp_path):
  assert run(*TINY, "--fdl.MAX_STEPS=4", f"--job_log_dir={tmp_path}/run") == 0
  records = [one for one in paxlike.Run(tmp_path / "run").records() if one["kind"] == "train"]
  experiment = registry.find("Gpt3_52k")()
  for flag in (*TINY[1:], "--fdl.MAX_STEPS=4"):
    name, _, value = flag.removeprefix("--fdl.").partition("=")
    experiment.set(name, value, source="test")
  trained = Program(building.build(experiment.trainer()), RateScale())
  with trained.batches(4) as batches:
    found = trained.train(batches)
  np.testing.assert_allclose(found, [record["loss"] for record in records], rtol=1e-6)


def test_slopes_are_exponents():
  widths = (128, 256, 512)
  rms = np.stack([np.ones(3), 0.1 * np.array(widths) ** 0.7], 1)
  sizes = coordinate_check.joined(widths, [({"x": row}, np.zeros(1)) for row in rms])
  assert sizes.slopes()["x"] == pytest.approx(0.7)
  assert sizes.slopes(step=0)["x"] == pytest.approx(0)
  assert np.isnan(coordinate_check.slope(widths, np.array([1.0, 0, 1])))
  assert [coordinate_check.draws(w, 2048) for w in (128, 512, 2048)] == [8, 4, 1]


RATES = (0.01, 0.02, 0.04, 0.08)


def test_the_best_rate_is_the_minimum_of_a_parabola():
  losses = 2 + np.log(np.array(RATES) / 0.03) ** 2
  assert best(RATES, losses) == (pytest.approx(0.03), "")
  assert best(RATES, np.array([1.0, 2, 3, 4])) == (0.01, "<")
  assert best(RATES, np.array([4.0, 3, 2, 1])) == (0.08, ">")
  assert best(RATES, np.array([3.0, 2, np.nan, np.nan])) == (0.02, "")
  assert best(RATES, np.array([2.0, 2, 2, 2])).rate == 0.01
  assert np.isnan(best(RATES, np.full(4, np.nan)).rate)
  shifted = 2 + np.log(np.array(RATES) / 0.021) ** 2
  table = Table(RATES, {Shape(8, 1): losses, Shape(16, 1): shifted})
  assert table.spread() == pytest.approx(30 / 21)


def test_heads_and_widths_grow_with_the_model():
  values = {"MODEL_DIMS": 8192, "NUM_HEADS": 64, "NUM_KV_HEADS": 8, "HIDDEN_DIMS": 28672}
  grown = {"MODEL_DIMS": 1024, "NUM_HEADS": 8, "NUM_KV_HEADS": 1, "HIDDEN_DIMS": 3584}
  assert shapes.grown(values | {"EXPERT_DIMS": None}, 1024) == grown
  with pytest.raises(UserError, match=r"^--widths=512: NUM_KV_HEADS=8 of MODEL_DIMS=8192 stays"):
    shapes.grown(values, 512)


MODE = ("--fdl_config=Gpt3_52k", "--mode=transfer")


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (("--widths=20,32",), r"--widths=20: NUM_HEADS=2 of MODEL_DIMS=16 .* multiples of 8\."),
    (("--widths=32",), "--widths=32: expected at least 2 different numbers"),
    (("--widths=32,x",), "--widths=32,x: expected an int"),
    (("--rates=0.1",), "--rates needs --widths"),
    (("--depths=1,2",), "--depths goes with --rates"),
    (("--widths=16,32", "--rates=0,1"), "--rates: a rate of 0 trains nothing"),
    (("--widths=16,32", "--fdl.MAX_STEPS=0"), "needs MAX_STEPS of at least 1"),
    (("--widths=16,32", "--fdl.ON_SPIKE=skip"), "leave ON_SPIKE out"),
    (("--fdl.MAX_SEQ_LEN_RAMP={2: 8}",), "--mode=transfer has no ramps"),
    (("--fdl.MAX_STEPS=1000000000",), "holds all .* tokens of a run in memory"),
    (("--widths=16,32", "--rates=1", "--fdl.LEARNING_RATE=1"), "chooses LEARNING_RATE here"),
    (("--fdl.LR_WARMUP=2",), "LR_WARMUP has no effect with the other knobs"),
    (("--fdl_config=Lambada126M",), "no training data"),
    (("--widths=16,32", "--save=/no/such/folder/a.png"), "--save=.*: there is no such folder"),
    (("--fdl.CHECKPOINT_RESTORE_PATH=/tmp", "--widths=16,32"), "begins with initial weights"),
    (("--mode=train", "--widths=16,32"), "--widths goes with --mode=transfer, not --mode=train"),
  ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(flags, says, capsys):
  assert run(*MODE, *flags) == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert re.search(says, line), line
