// SPDX-License-Identifier: Apache-2.0
// Numbers as text, ticks of axes, and elements of the page.
"use strict";

/** Returns a new element; text is never interpreted as HTML. */
function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle", "g"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Returns a number with about `digits` significant digits, with k, M, G, T for thousands. */
function spelled(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e15) return value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0+e/, "e");
  for (const [unit, power] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= power * (unit === "k" ? 10 : 1)) return `${Number((value / power).toPrecision(digits))}${unit}`;
  }
  return String(Number(value.toPrecision(digits)));
}

/** Returns round values within [low, high]: about `count`, or powers of ten for a logarithmic axis. */
function ticks(low, high, count, logarithmic) {
  if (logarithmic) {
    const found = [];
    const wide = Math.log10(high / low) > 2;
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of wide ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
    }
    const inside = found.filter((value) => value >= low && value <= high);
    const every = Math.max(1, Math.ceil(inside.length / (count + 1)));
    if (inside.length > 1) return inside.filter((_, index) => index % every === 0);
  }
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough) ?? power;
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
  return found;
}

/** Returns the place of the first of ascending points whose x is at least `x`. */
function firstFrom(points, x) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}
