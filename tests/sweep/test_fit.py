# SPDX-License-Identifier: Apache-2.0
"""`paxlike-fit` finds the law that losses were drawn from, or says why there is none."""

import itertools
import json

import numpy as np
import pytest

from paxlike import registry
from paxlike.config import building
from paxlike.convert import experiment_files
from paxlike.errors import UserError
from paxlike.sweep import fit, scaling_law
from paxlike.sweep.scaling_law import Points, ScalingLaw

# As published by Besiroglu et al. (2024, arXiv:2404.10102).
LAW = ScalingLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)


def drawn(count, *, noise=0.0, seed=0):
  """Runs of 50M to 16B parameters on 1B to 500B tokens, as in Chinchilla's data."""
  rng = np.random.default_rng(seed)
  params, tokens = 10 ** rng.uniform(7.7, 10.2, count), 10 ** rng.uniform(9, 11.7, count)
  return Points(params, tokens, LAW.loss(params, tokens) * np.exp(noise * rng.normal(size=count)))


@pytest.mark.parametrize("count", [9, 240])
def test_a_law_without_noise_is_found(count):
  found = scaling_law.fit(drawn(count))
  for name, value in vars(LAW).items():
    assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_a_law_with_noise_is_found_and_its_intervals_cover_it():
  """With noise of 0.2 %: exponents to 0.02, E to 0.02, the loss of Chinchilla to 0.5 %."""
  points = drawn(60, noise=2e-3, seed=1)
  found = scaling_law.fit(points)
  laws = scaling_law.bootstrap(points, found, times=60)
  for name, value in vars(LAW).items():
    low, high = scaling_law.interval(laws, lambda law, name=name: getattr(law, name))
    assert low < value < high, name
  for name in ("alpha", "beta", "E"):
    assert getattr(found, name) == pytest.approx(getattr(LAW, name), abs=0.02), name
  loss = LAW.loss(70e9, 1.4e12)
  low, high = scaling_law.interval(laws, lambda law: law.loss(70e9, 1.4e12))
  assert low < loss < high < low * 1.01
  assert found.loss(70e9, 1.4e12) == pytest.approx(loss, rel=5e-3)


def test_a_run_that_went_wrong_does_not_count_much():
  points = drawn(40, noise=1e-3)
  points.loss[7] *= 1.3
  found = scaling_law.fit(points)
  assert (found.alpha, found.beta) == pytest.approx((LAW.alpha, LAW.beta), abs=0.01)


def test_the_optimum_is_the_least_loss_of_its_flops():
  params, tokens = LAW.optimum(5.76e23)
  assert 6 * params * tokens == pytest.approx(5.76e23)
  others = params * np.geomspace(0.1, 10, 2001)
  best = others[LAW.loss(others, 5.76e23 / 6 / others).argmin()]
  assert params == pytest.approx(best, rel=3e-3)


LINE = np.geomspace(1e8, 1e10, 9)


def grid(params, tokens, loss=LAW.loss):
  N, D = np.array([*itertools.product(params, tokens)]).T
  return Points(N, D, loss(N, D))


@pytest.mark.parametrize(
  ("points", "says"),
  [
    (drawn(5), "^5 runs: a law needs at least 6"),
    (grid([1e8, 1e9], [1e9, 1e10, 1e11]), "^the runs have 2 sizes of the model: "),
    (grid([1e8, 1e9, 1e10], [1e9, 1e10]), "^the runs have 2 numbers of tokens: "),
    (Points(LINE, 20 * LINE, 1 / LINE), "^the tokens of the"),
    (grid([1e8, 1e9, 1e10], [1e9, 1e10, 1e11], lambda n, d: 2 + 9 / n**0.3), "with the tokens"),
    (grid([1e8, 1e9, 1e10], [1e9, 1e10, 1e11], lambda n, d: 2 + d / d), "with the size of"),
  ],
)
def test_runs_that_determine_no_law_are_refused(points, says):
  with pytest.raises(UserError, match=says):
    scaling_law.fit(points)


def make(folder, *, dims, steps, state="finished", sets=("validation",)):
  """Makes the folder of a run whose loss is that of the law for 1,000 N parameters.

  Returns N, N without embeddings, and D.
  """
  experiment = registry.find("Gpt3_52k")(MODEL_DIMS=dims, NUM_HEADS=2, DIMS_PER_HEAD=8)
  folder.mkdir(parents=True)
  graph = experiment.trainer()
  experiment_files.write(folder, graph, experiment)
  definition = building.build(graph).definition
  speed = {"tokens_per_second": 2e6, "seconds_per_step": 0.5}
  at = [steps // 2, steps]  # After half of the steps, batches get twice as large.
  records = [
    {"kind": "train", "updates": at[0], "loss": 9.0, **speed},
    {"kind": "train", "updates": at[1], "loss": 3.0, **speed, "seconds_per_step": 1.0},
  ]
  tokens = 1e6 * at[0] + 2e6 * (at[1] - at[0])
  loss = float(LAW.loss(definition.num_params * 1e3, tokens))
  for number, name in enumerate(sets):
    for updates, one in ((at[0], 8.0), (at[1], loss + number)):
      records.append({"kind": "eval", "set": name, "updates": updates, "loss": one})
  records.append({"kind": "eval", "set": "dropped", "updates": at[0], "loss": 1.0})
  (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
  (folder / "status.json").write_text(json.dumps({"state": state, "step": steps}))
  specs = definition.weights.values()
  embedded = sum(spec.size for spec in specs if {*spec.dims} & {"vocab", "position"})
  return definition.num_params, definition.num_params - embedded, tokens


def test_runs_are_read_and_their_law_is_printed(tmp_path, capsys):
  sizes = {}
  for dims, steps in itertools.product([16, 32, 64], [1000, 3000, 9000]):
    name = f"{dims},{steps}"
    sizes[name] = make(tmp_path / "sweep" / name, dims=dims, steps=steps)
  make(tmp_path / "sweep" / "stopped", dims=16, steps=1000, state="stopped")
  target = ["--params=2e6", "--tokens=3e10", "--flops=1e18"]
  assert fit.run([str(tmp_path / "sweep"), *target, "--bootstrap=10"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "stopped is left out: it is stopped"
  assert lines[1] == "9 runs: loss of validation; N: active parameters; D: tokens"
  table = {line[:5].strip(): line for line in lines[3:8]}
  for name, factor in (("E", 1), ("alpha", 1), ("beta", 1), ("A", 1e3**-LAW.alpha), ("B", 1)):
    value = getattr(LAW, name) * factor
    found = [float(word.replace(",", "")) for word in table[name].split()[1:]]
    assert found == pytest.approx([value] * 3, rel=1e-3), name
  assert lines[8].split()[:4] == ["loss", "at", "N=2e+06,", "D=3e+10"]
  assert float(lines[8].split()[4]) == pytest.approx(LAW.loss(2e9, 3e10), rel=1e-4)
  for name, (total, without, tokens) in sizes.items():
    for non_embedding, params in ((False, total), (True, without)):
      one = fit.read(str(tmp_path / "sweep" / name), (), non_embedding=non_embedding)
      assert (one.params, one.tokens, one.train_loss) == (params, tokens, 3.0)


def test_a_mistake_is_one_line(tmp_path, capsys):
  make(tmp_path / "two" / "a", dims=16, steps=100, sets=("x", "y"))
  make(tmp_path / "other" / "b", dims=16, steps=100, sets=("x",))
  make(tmp_path / "none" / "c", dims=16, steps=100, sets=())
  two, other, none = (str(tmp_path / name) for name in ("two", "other", "none"))
  for given, says in (
    ([two, "--params=7e9"], "--params and --tokens go together"),
    ([two, "--params=x", "--tokens=1"], "'x': expected a positive number, such as 7e9"),
    ([two, "--bootstrap=1"], "expected 0, or at least 2"),
    ([two], "set --set to one of x, y."),
    ([two, "--set=z"], "--set=z: the runs have x, y."),
    ([two, other, "--set=y"], "b has no loss of y after its last update"),
    ([other, none], "c has no loss of x after its last update"),
    ([none], "1 runs: a law needs at least 6."),
    ([str(tmp_path / "nothing")], "is not the folder of a run"),
  ):
    assert fit.run(given) == 2, given
    out, err = capsys.readouterr()
    assert err.startswith("paxlike-fit: ") and err.count("\n") == 1 and not out, (out, err)
    assert says in err, err
