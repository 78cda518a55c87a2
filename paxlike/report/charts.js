// SPDX-License-Identifier: Apache-2.0
// Charts of curves. All charts share the x axis, its zoom, the smoothing and the hidden runs.

const NUM_COLORS = 10;
const DASHES = ["", "7 4", "2 3"];
const view = {x: "updates", smooth: 0, logarithmic: false, zoom: null, hidden: new Set()};

/** Returns a run's value on the x axis of a record. */
function xOf(run, record) {
  if (view.x === "updates") return record.updates;
  if (view.x === "tokens") return run.tokensPerStep === null ? null : record.updates * run.tokensPerStep;
  // The results of evaluations outside of training have no time.
  run.start ??= run.records.find(({time}) => typeof time === "number")?.time;
  return (record.time - run.start) / 3600;
}

/** Returns the [x, y] points of a metric, ascending in x, without missing values; kept for the next call. */
function pointsOf(run, metric) {
  const name = JSON.stringify([view.x, metric.kind, metric.set, metric.key]);
  run.points ??= new Map();
  if (!run.points.has(name)) run.points.set(name, readPoints(run, metric));
  return run.points.get(name);
}

function readPoints(run, metric) {
  const points = [];
  for (const record of run.records) {
    if (record.kind !== metric.kind || (record.set ?? null) !== metric.set) continue;
    const y = record[metric.key];
    const x = xOf(run, record);
    if (typeof y === "number" && Number.isFinite(x)) points.push([x, y]);
  }
  return points.sort((a, b) => a[0] - b[0]);
}

/** Returns exponential moving averages of points, without a bias towards zero at the start. */
function smoothed(points, weight) {
  let sum = 0;
  let norm = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return [x, sum / norm];
  });
}

class Chart {
  constructor(runs, metric, zoomTo) {
    this.runs = runs;
    this.metric = metric;
    this.zoomTo = zoomTo;
    this.svg = node("svg", {class: "plot", tabindex: 0, role: "img"});
    this.tip = node("div", {class: "tip", role: "status", hidden: ""});
    this.element = node("figure", {class: "chart"}, node("h3", {}, metric.title), this.svg, this.tip);
    this.from = null;
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => this.cancel());
    this.svg.addEventListener("pointerleave", () => this.from === null && this.point(null));
    this.svg.addEventListener("dblclick", () => this.zoomTo(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.point(null));
  }

  /** Draws the chart for the current view and width. */
  draw() {
    this.width = Math.max(this.element.clientWidth, 200);
    this.height = this.width > 640 ? 320 : 240;
    this.box = {left: 52, right: this.width - 8, top: 8, bottom: this.height - 22};
    this.curves = [];
    this.runs.forEach((run, number) => {
      if (view.hidden.has(number)) return;
      const raw = pointsOf(run, this.metric).filter(([, y]) => !view.logarithmic || y > 0);
      const smooth = view.smooth > 0 && raw.length > 2 && this.metric.kind === "train";
      if (raw.length) this.curves.push({number, raw, main: smooth ? smoothed(raw, view.smooth) : raw});
    });
    const xs = this.curves.flatMap(({raw}) => [raw[0][0], raw[raw.length - 1][0]]);
    this.full = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    this.x = view.zoom ?? (this.full[0] < this.full[1] ? this.full : [this.full[0] - 0.5, this.full[0] + 0.5]);
    this.y = this.range();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("aria-label", this.summary());
    const clip = node("svg", {
      x: this.box.left, y: this.box.top, overflow: "hidden",
      width: this.box.right - this.box.left, height: this.box.bottom - this.box.top,
      viewBox: `${this.box.left} ${this.box.top} ${this.box.right - this.box.left} ${this.box.bottom - this.box.top}`,
    });
    this.overlay = node("g");
    for (const {number, raw, main} of this.curves) {
      if (raw !== main) clip.append(node("path", {class: `raw s${number % NUM_COLORS}`, d: this.path(raw)}));
      const dash = DASHES[Math.floor(number / NUM_COLORS) % DASHES.length];
      clip.append(node("path", {class: `curve s${number % NUM_COLORS}`, "stroke-dasharray": dash, d: this.path(main)}));
      if (main.length <= 40) {
        for (const [x, y] of main) clip.append(this.dot(number, x, y, 2.5));
      }
    }
    this.svg.replaceChildren(...this.axes(), clip, this.overlay);
    this.point(null);
  }

  /** Returns what a screen reader says of the chart. */
  summary() {
    const parts = this.curves.map(({number, main}) => {
      const [x, y] = main[main.length - 1];
      return `${this.runs[number].name} ends at ${spelled(y)} after ${spelled(x)}`;
    });
    return `${this.metric.title} over ${view.x}: ${parts.join("; ") || "no values"}`;
  }

  /** Returns [low, high] of the y axis: of the values within the x axis. */
  range() {
    let low = Infinity;
    let high = -Infinity;
    for (const {raw, main} of this.curves) {
      for (const points of raw === main ? [main] : [raw, main]) {
        for (let i = firstFrom(points, this.x[0]); i < points.length && points[i][0] <= this.x[1]; i++) {
          low = Math.min(low, points[i][1]);
          high = Math.max(high, points[i][1]);
        }
      }
    }
    if (low > high) return view.logarithmic ? [1, 10] : [0, 1];
    if (view.logarithmic) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
    const margin = (high - low || Math.abs(high) || 1) * 0.05;
    return [low - margin, high + margin];
  }

  across(x) {
    return this.box.left + ((x - this.x[0]) / (this.x[1] - this.x[0])) * (this.box.right - this.box.left);
  }

  down(y) {
    const [low, high] = view.logarithmic ? this.y.map(Math.log) : this.y;
    return this.box.bottom - (((view.logarithmic ? Math.log(y) : y) - low) / (high - low)) * (this.box.bottom - this.box.top);
  }

  dot(number, x, y, radius) {
    return node("circle", {cx: this.across(x), cy: this.down(y), r: radius, style: `fill:var(--c${number % NUM_COLORS})`});
  }

  /** Returns the path of points: of those within a column of pixels, the first, least, largest and last. */
  path(points) {
    const first = Math.max(firstFrom(points, this.x[0]) - 1, 0);
    const last = Math.min(firstFrom(points, this.x[1]) + 1, points.length - 1);
    const places = [];
    for (let i = first; i <= last; ) {
      const column = Math.round(this.across(points[i][0]));
      let j = i;
      let low = i;
      let high = i;
      for (; j <= last && Math.round(this.across(points[j][0])) === column; j++) {
        if (points[j][1] < points[low][1]) low = j;
        if (points[j][1] > points[high][1]) high = j;
      }
      places.push(...new Set([i, Math.min(low, high), Math.max(low, high), j - 1]));
      i = j;
    }
    return places.map((i, n) => `${n ? "L" : "M"}${this.across(points[i][0]).toFixed(1)} ${this.down(points[i][1]).toFixed(1)}`).join("");
  }

  axes() {
    const {left, right, top, bottom} = this.box;
    const made = [];
    for (const y of ticks(this.y[0], this.y[1], 5, view.logarithmic)) {
      const at = this.down(y);
      made.push(node("line", {class: "grid", x1: left, x2: right, y1: at, y2: at}));
      made.push(node("text", {x: left - 5, y: at + 4, "text-anchor": "end"}, spelled(y)));
    }
    for (const x of ticks(this.x[0], this.x[1], Math.max(2, Math.floor(this.width / 110)), false)) {
      made.push(node("line", {class: "grid", x1: this.across(x), x2: this.across(x), y1: top, y2: bottom}));
      const anchor = this.across(x) > right - 15 ? "end" : "middle";
      made.push(node("text", {x: this.across(x), y: bottom + 15, "text-anchor": anchor}, spelled(x)));
    }
    return made;
  }

  /** Shows the values at x, or none for null. */
  point(x) {
    this.at = x;
    this.overlay?.replaceChildren();
    this.tip.hidden = true;
    const values = [];
    for (const {number, main} of x === null ? [] : this.curves) {
      const next = firstFrom(main, x);
      const near = [next - 1, next].filter((i) => i >= 0 && i < main.length);
      const i = near.reduce((a, b) => (Math.abs(main[a][0] - x) <= Math.abs(main[b][0] - x) ? a : b));
      if (main[i][0] >= this.x[0] && main[i][0] <= this.x[1]) values.push({number, x: main[i][0], y: main[i][1]});
    }
    if (!values.length) return;
    const nearest = values.reduce((a, b) => (Math.abs(a.x - x) <= Math.abs(b.x - x) ? a : b)).x;
    const at = this.across(nearest);
    this.overlay.append(node("line", {class: "cursor", x1: at, x2: at, y1: this.box.top, y2: this.box.bottom}));
    for (const one of values) this.overlay.append(this.dot(one.number, one.x, one.y, 4));
    const lines = values.map(({number, x: place, y}) => {
      const key = node("span", {class: `key k${number % NUM_COLORS}`});
      const where = place === nearest ? "" : ` (at ${spelled(place)})`;
      return node("div", {}, key, node("b", {}, spelled(y, 5)), ` ${this.runs[number].name}${where}`);
    });
    this.tip.replaceChildren(node("div", {}, `${view.x} ${spelled(nearest, 6)}`), ...lines);
    this.tip.hidden = false;
    const onLeft = at > this.width / 2;
    const above = this.svg.getBoundingClientRect().top - this.element.getBoundingClientRect().top;
    this.tip.style.top = `${above + this.box.top}px`;
    this.tip.style.left = onLeft ? "" : `${at + 10}px`;
    this.tip.style.right = onLeft ? `${this.width - at + 10}px` : "";
  }

  /** Returns the x of an event, within the axis. */
  under(event) {
    const bounds = this.svg.getBoundingClientRect();
    const share = ((event.clientX - bounds.left) / bounds.width * this.width - this.box.left) / (this.box.right - this.box.left);
    return this.x[0] + Math.min(Math.max(share, 0), 1) * (this.x[1] - this.x[0]);
  }

  press(event) {
    if (event.button !== 0) return;
    this.from = this.under(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const x = this.under(event);
    this.point(x);
    if (this.from === null) return;
    const [low, high] = [Math.min(this.from, x), Math.max(this.from, x)].map((value) => this.across(value));
    const {top, bottom} = this.box;
    this.overlay.append(node("rect", {class: "selected", x: low, width: high - low, y: top, height: bottom - top}));
  }

  release(event) {
    if (this.from === null) return;
    const x = this.under(event);
    const zoom = [Math.min(this.from, x), Math.max(this.from, x)];
    this.cancel();
    if (this.across(zoom[1]) - this.across(zoom[0]) > 6) this.zoomTo(zoom);
  }

  cancel() {
    this.from = null;
    this.point(null);
  }

  key(event) {
    const [low, high] = this.x;
    const at = this.at ?? low;
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    const factor = {"+": 0.5, "=": 0.5, "-": 2}[event.key];
    if (step) this.point(Math.min(Math.max(at + (step * (high - low)) / 50, low), high));
    else if (factor) {
      const zoom = [at - (at - low) * factor, at + (high - at) * factor];
      const all = zoom[0] <= this.full[0] && zoom[1] >= this.full[1];
      this.zoomTo(all ? null : zoom);
      this.point(at);
    } else if (event.key === "Escape") this.zoomTo(null);
    else return;
    event.preventDefault();
  }
}
