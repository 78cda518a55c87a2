# SPDX-License-Identifier: Apache-2.0
"""Tables of what benchmarks/gpu.py measured, in markdown."""

import math
import statistics
from typing import Any

Result = dict[str, Any]

_HEAD = (
  *("case", "tokens/s", "ms a step", "TFLOP/s causal / full", "MFU causal / full", "peak GB"),
  *(
    "weights / moments",
    "compile s",
    "loss, first to last",
    "attention",
    "SM MHz",
    "W",
    "to be noted",
  ),
)


def derived(result: Result, facts: dict[str, Any], peak: float | None) -> Result:
  """Returns what follows from a result: tokens/s, TFLOP/s and MFU by both ways to count.

  Args:
    result: Of a case that trained.
    facts: Of its model; the FLOPs of both sides are those of our count.
    peak: Dense bf16 FLOP/s of the device; products in FP8 have twice as many. None: not known.
  """
  seconds = statistics.median(result["groups"])
  rate = result["batch"] * facts["time"] / seconds
  achieved = {way: rate * facts[f"flops_{way}"] for way in ("causal", "full")}
  told: Result = {"step_seconds": seconds, "tokens_per_second": rate}
  told |= {f"tflops_{way}": value / 1e12 for way, value in achieved.items()}
  if peak is not None:
    most = peak * (2 if facts["fp8"] else 1)
    told |= {f"mfu_{way}": value / most for way, value in achieved.items()}
  expected, first, last = math.log(facts["vocab"]), result["first_loss"], result["last_loss"]
  warnings = list(result["warnings"])
  if not abs(first - expected) < 0.5:
    warnings.append(f"begins with a loss of {first:.3f}, not ln V = {expected:.3f}")
  if not math.isfinite(last):
    warnings.append("ends with a loss that is not finite")
  return told | {"warnings": warnings}


def table(results: list[Result]) -> str:
  """Returns a row for each case, then comparisons of ours with the peers'."""
  trained = [result for result in results if "tokens_per_second" in result]
  lines = _told([result for result in results if "rates" in result])
  if trained:
    lines += [_row(_HEAD), "|---" + "|---:" * 5 + "|---|---:" + "|---" * 2 + "|---:" * 2 + "|---|"]
    lines += [_row(_cells(result)) for result in trained]
    lines += ["", *_compared(trained)]
  for word in ("failed", "skipped"):
    lines += [f"- {r['case']}: {word}: {r[word]}" for r in results if word in r]
  return "\n".join(lines) + "\n"


def _told(results: list[Result]) -> list[str]:
  lines = []
  for result in results:
    rates = result["rates"]
    told = "; ".join(["", *result["warnings"]])
    lines += [
      f"{result['device']}: bf16 {rates['bf16_flops'] / 1e12:.4g} TFLOP/s, FP8"
      f" {rates['fp8_flops'] / 1e12:.4g} TFLOP/s, copy {rates['copy_bytes'] / 1e9:.4g} GB/s{told}",
      "",
    ]
  return lines


def _cells(result: Result) -> list[str]:
  mfu = "" if "mfu_causal" not in result else _both(result, "mfu", 100, ".1f", " %")
  compiled, peak = result["compile_seconds"], result["peak_bytes"]
  cards = [result["before"], result["after"]]
  first, last = result["first_loss"], result["last_loss"]
  return [
    result["case"],
    f"{result['tokens_per_second']:,.0f}",
    f"{1000 * result['step_seconds']:.2f}",
    _both(result, "tflops", 1, ".4g", ""),
    mfu,
    "" if peak is None else f"{peak / 1e9:.4g}",
    result["dtypes"],
    # The second time it comes from a cache.
    "" if compiled is None or result.get("again") else f"{compiled:.0f}",
    f"{first:.3f} to {last:.3f}",
    result["attention"],
    *(_range([card.get(name) for card in cards]) for name in ("clocks.sm", "power.draw")),
    "; ".join(result["warnings"]),
  ]


def _both(result: Result, name: str, factor: float, form: str, unit: str) -> str:
  causal, full = (factor * result[f"{name}_{way}"] for way in ("causal", "full"))
  return f"{causal:{form}} / {full:{form}}{unit}"


def _range(values: list[float | None]) -> str:
  return " to ".join(f"{value:.0f}" for value in values if value is not None)


def _compared(results: list[Result]) -> list[str]:
  """Returns the ratios for each model and batch, and of the best batches of both sides."""
  lines: list[str] = []
  best: dict[str, list[list[float]]] = {}
  pairs = dict.fromkeys((result["model"], result["batch"]) for result in results)
  for model, batch in pairs:
    same = [result for result in results if (result["model"], result["batch"]) == (model, batch)]
    ours = [r["tokens_per_second"] for r in same if r["side"] == "gpu_ours"]
    theirs = [r["tokens_per_second"] for r in same if r["side"] != "gpu_ours"]
    sides = best.setdefault(model, [[], []])
    for rates, found in zip(sides, (ours, theirs), strict=True):
      rates += [statistics.mean(found)] if found is ours and found else found
    lines += [_row([f"{model}, {batch}", *_ratio(ours, theirs)])] if ours and theirs else []
  for model, (ours, theirs) in best.items():
    if len([pair for pair in pairs if pair[0] == model]) > 1 and ours and theirs:
      lines.append(_row([f"{model}, each at its best", *_ratio([max(ours)], theirs)]))
  head = ("model, sequences", "ours, tokens/s", "differ by", "peer, tokens/s", "ours / peer")
  return [_row(head), "|---" + "|---:" * 4 + "|", *lines, ""] if lines else []


def _ratio(ours: list[float], theirs: list[float]) -> list[str]:
  mean, peer = statistics.mean(ours), max(theirs)
  differ = (max(ours) - min(ours)) / mean
  spread = f"{100 * differ:.1f} %" if len(ours) > 1 else ""
  return [f"{mean:,.0f}", spread, f"{peer:,.0f}", f"{mean / peer:.3f}"]


def _row(cells: Any) -> str:
  return f"| {' | '.join(cells)} |"
