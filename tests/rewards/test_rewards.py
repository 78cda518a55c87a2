# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers, and the processes that compute them."""

import functools
import socket
import subprocess
import sys
import time

import pytest

from paxlike.errors import UserError
from paxlike.rewards import AnswerTags, ExactAnswer, MathAnswer, Overlong, PythonTests
from paxlike.rewards.pool import RewardPool, find

REWARDS = """
import os, time

def length(answer, record):
  print("a reward may print")
  return len(answer) + record["more"]

def parts(answer, record):
  return {"form": 0.25, "right": 0.5}

def slow(answer, record):
  time.sleep(float(answer))
  return 1

def ends(answer, record):
  os._exit(7)

def wrong(answer, record):
  return {"a": 1}[answer]

def text(answer, record):
  return "much"
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
  """Makes pools of the functions above; all are closed."""
  (tmp_path / "my_rewards.py").write_text(REWARDS)
  monkeypatch.syspath_prepend(str(tmp_path))
  pools = []

  def make(name, *, num_workers=2, seconds=20.0):
    reward = find(f"my_rewards.{name}")
    pools.append(RewardPool(reward, num_workers=num_workers, seconds=seconds))
    return pools[-1]

  yield make
  for one in pools:
    one.__exit__()
  sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
  "given, expected, right",
  [
    ("so it is 46.", "46", True),
    ("first 12, then 1,234", "1234", True),
    ("\\boxed{\\frac{1}{2}} of 8", "0.5", True),
    ("\\boxed{\\text{Carla}}", "\\boxed{\\text{Evelyn}}", False),
    ("\\boxed{\\text{Carla}}", "\\boxed{ \\text{Carla} }", True),
    ("\\boxed{}", "\\boxed{}", False),
    ("\\boxed{5\\text{ cm}}", "5", True),
    ("\\boxed{\\frac{21}{2}}", "\\boxed{2\\frac{1}{2}}", False),
    ("\\boxed{2.5}", "\\boxed{2\\frac{1}{2}}", True),
    ("\\boxed{31/2}", "\\boxed{3 1/2}", False),
    ("\\boxed{-2^2}", "4", False),
    ("\\boxed{" + "1" * 5000 + "^2}", "4", False),
    ("\\boxed{1e999999999}", "4", False),
    ("\\boxed{\\sqrt{2}}", "\\sqrt{2}", True),
    ("\\boxed{2}", "\\sqrt{2}", False),
    ("\\boxed{\\frac34}", "\\frac{3}{4}", True),
    ("\\boxed{(1,2)}", "(1, 2)", True),
    ("\\boxed{\\$5}", "5", True),
    ("#### 72", "He sold 48/2 = 24 clips.\n#### 72", True),
    ("the answer is $-3.50$", "-3.5", True),
    ("50\\%", "50", True),
    ("\\boxed{2^{10}}", "1024", True),
    ("\\boxed{x+1}", "\\boxed{x + 1}", True),
    ("\\boxed{x+1}", "\\boxed{1 + x}", False),
    ("46 or 47", "46", False),
    ("nothing", "46", False),
    ("\\boxed{46", "46", False),
    ("1/0", "46", False),
  ],
)
def test_an_answer_is_right_if_it_is_the_same_number_or_text(given, expected, right):
  math_answer = MathAnswer()
  assert math_answer(given, {"answer": expected}) == right


def test_rewards_of_form():
  exact_answer, answer_tags = ExactAnswer(), AnswerTags()
  assert exact_answer(" 46\n", {"answer": 46}) == 1 and exact_answer("46.", {"answer": "46"}) == 0
  with pytest.raises(UserError, match=r"no `answer`.* It has: question\."):
    exact_answer("46", {"question": "?"})
  assert answer_tags("<think>a\nb</think> <answer>c</answer>", {}) == 1
  assert answer_tags("c <think></think><answer></answer>", {}) == 0
  overlong = Overlong(limit=10, margin=4)
  assert [overlong("x" * size, {}) for size in (6, 8, 20)] == [0, -0.5, -1]


def test_a_program_is_rewarded_by_the_tests_that_it_passes(monkeypatch):
  python_tests = PythonTests()
  with pytest.raises(UserError, match="set PAXLIKE_ALLOW_CODE=1 to allow that"):
    python_tests("", {"tests": ["pass"]})
  monkeypatch.setenv("PAXLIKE_ALLOW_CODE", "1")
  monkeypatch.setattr("paxlike.rewards.programs.SECONDS", 2)
  record = {"tests": ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "import os", "0 / 0"]}
  code = "def add(a, b):\n  print('0')\n  return a + b"
  assert python_tests(f"So:\n```python\nbroken\n```\nor\n```python\n{code}\n```", record) == 0.5
  assert python_tests(code, record) == 0.5
  for bad in ("def add(", "import os; os._exit(0)", "raise SystemExit(0)", "x = [0] * 10**10"):
    assert python_tests(bad, {"tests": ["assert add(1, 2) == 3"]}) == 0
  began = time.monotonic()
  assert python_tests("while True: pass", {"tests": ["pass"]}) == 0
  assert python_tests("import os\nif not os.fork(): os.setsid()\nwhile True: pass", record) == 0
  assert time.monotonic() - began < 30
  with pytest.raises(UserError, match="no `tests`"):
    python_tests(code, {"tests": "assert True"})


def test_a_program_has_no_network_where_linux_allows_that(monkeypatch):
  monkeypatch.setenv("PAXLIKE_ALLOW_CODE", "1")
  unshare = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x50000000) != 0)"
  if subprocess.run([sys.executable, "-c", unshare], check=False).returncode:
    pytest.skip("users may not make namespaces here")
  with socket.create_server(("127.0.0.1", 0)) as server:
    code = f"import socket\nsocket.create_connection({server.getsockname()}, 1)"
    assert PythonTests()(code, {"tests": ["pass"]}) == 0


def test_a_reward_may_be_an_object():
  with RewardPool(Overlong(limit=4, margin=2), num_workers=1, seconds=20) as pool:
    assert [one.total for one in pool([("abc", {}), ("a", {})])] == [-0.5, 0]


def test_workers_return_rewards_in_order(pool, monkeypatch, capfd):
  monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
  found = pool("length")([("a" * size, {"more": 0.5}) for size in range(9)])
  assert capfd.readouterr().err.count("a reward may print") == 9
  assert [one.total for one in found] == [size + 0.5 for size in range(9)]
  (both,) = pool("parts")([("", {})])
  assert both.parts == {"form": 0.25, "right": 0.5} and both.total == 0.75


def test_a_reward_that_takes_too_long_is_zero(pool):
  slow = pool("slow", num_workers=1, seconds=0.5)
  assert [one.total for one in slow([("0", {})])] == [1.0]  # From now on the limit is short.
  found = slow([("60", {}), ("0", {})])
  assert [(one.total, one.timed_out) for one in found] == [(0, True), (1, False)]


@pytest.mark.parametrize(
  "name, message",
  [
    ("wrong", r"my_rewards\.wrong: .*my_rewards\.py, line \d+, in wrong: KeyError: 'b'"),
    ("text", r"must be a finite number or a mapping to such, not 'much'"),
    ("ends", r"its worker process ended with status 7"),
  ],
)
def test_a_reward_that_fails_is_named(pool, name, message):
  with pytest.raises(UserError, match=message):
    pool(name)([("b", {})])


@pytest.mark.parametrize(
  "name, message",
  [
    ("exact", r"REWARD=exact: expected MODULE\.FUNCTION, or one of answer_tags, exact_answer"),
    ("no_module.of", r"REWARD=no_module\.of cannot be imported: ModuleNotFoundError"),
    ("math.pi", r"REWARD=math\.pi is not a function"),
  ],
)
def test_a_reward_that_is_not_there(name, message):
  with pytest.raises(UserError, match=message):
    find(name)


def test_a_reward_within_a_function_cannot_be_imported():
  inner = lambda answer, record: 1  # noqa: E731
  for reward in (inner, functools.partial(inner, record={})):
    with pytest.raises(UserError, match=r"make it a function \(def\) of a module"):
      RewardPool(reward, num_workers=1, seconds=1)
