// SPDX-License-Identifier: Apache-2.0
// Heat maps of statistics by layer: a column a record, a row a layer.

const RAMP = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

/** Returns the [red, green, blue] of a share from 0 to 1. */
function color(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const parts = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [a, b] = [parts(RAMP[low]), parts(RAMP[low + 1])];
  return a.map((value, i) => Math.round(value + (b[i] - value) * (at - low)));
}

class HeatMap {
  constructor(place) {
    this.canvas = node("canvas", {tabindex: 0, role: "img"});
    this.tip = node("div", {class: "tip", role: "status", hidden: ""});
    this.ramp = node("div", {class: "ramp"}, node("span"), node("span"), node("span"));
    this.ramp.children[1].style.background = `linear-gradient(to right, ${RAMP.join(", ")})`;
    this.ends = node("div", {class: "ramp"}, node("span"), node("span"), node("span"));
    place.append(node("div", {class: "heat"}, this.canvas, this.tip), this.ends, this.ramp);
    this.canvas.addEventListener("pointermove", (event) => {
      const bounds = this.canvas.getBoundingClientRect();
      const column = Math.floor(((event.clientX - bounds.left) / bounds.width) * this.columns.length);
      const row = Math.floor(((event.clientY - bounds.top) / bounds.height) * this.rows);
      this.point(column, row);
    });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const [right, down] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key] ?? [];
      if (right === undefined) return;
      const [column, row] = this.at ?? [0, 0];
      this.point(column + right, row + down);
      event.preventDefault();
    });
  }

  /** Draws [updates, values by layer] columns. */
  draw(columns, name, logarithmic) {
    this.columns = columns;
    this.rows = Math.max(...columns.map(([, values]) => values.length), 1);
    const usable = (value) => typeof value === "number" && (!logarithmic || value > 0);
    const values = columns.flatMap(([, all]) => all.filter(usable));
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const scale = logarithmic ? Math.log : (value) => value;
    const cell = [Math.max(1, Math.ceil(800 / columns.length)), Math.max(6, Math.min(24, Math.ceil(240 / this.rows)))];
    this.canvas.width = columns.length * cell[0];
    this.canvas.height = this.rows * cell[1];
    const context = this.canvas.getContext("2d");
    columns.forEach(([, all], column) => {
      all.forEach((value, row) => {
        if (!usable(value)) return;  // The page shows through.
        const share = high > low ? (scale(value) - scale(low)) / (scale(high) - scale(low)) : 0.5;
        context.fillStyle = `rgb(${color(share).join(",")})`;
        context.fillRect(column * cell[0], row * cell[1], cell[0], cell[1]);
      });
    });
    const [first, last] = [columns[0][0], columns[columns.length - 1][0]];
    const found = values.length ? `${spelled(low)} to ${spelled(high)}` : "no values";
    this.canvas.setAttribute("aria-label", `${name} of ${this.rows} layers, updates ${first} to ${last}: ${found}`);
    this.ramp.children[0].textContent = values.length ? spelled(low) : "no values";
    this.ramp.children[2].textContent = values.length ? spelled(high) : "";
    this.ends.children[0].textContent = `after ${spelled(first, 6)} updates`;
    this.ends.children[1].textContent = this.rows > 1 ? `layer 0 on top, ${this.rows - 1} at the bottom` : "";
    this.ends.children[1].style.textAlign = "center";
    this.ends.children[1].style.height = "auto";
    this.ends.children[2].textContent = `${spelled(last, 6)}`;
    this.point(null);
  }

  /** Shows the value of a cell, or none for null. */
  point(column, row) {
    this.tip.hidden = true;
    this.at = null;
    if (column === null) return;
    const place = Math.min(Math.max(column, 0), this.columns.length - 1);
    const [updates, values] = this.columns[place];
    const layer = Math.min(Math.max(row, 0), this.rows - 1);
    this.at = [place, layer];
    const value = values[layer];
    const text = typeof value === "number" ? spelled(value, 5) : "no number";
    this.tip.replaceChildren(node("b", {}, text), ` layer ${layer} after ${spelled(updates, 6)} updates`);
    this.tip.hidden = false;
    const share = (place + 0.5) / this.columns.length;
    this.tip.style.left = share < 0.5 ? `${100 * share + 1}%` : "";
    this.tip.style.right = share < 0.5 ? "" : `${100 * (1 - share) + 1}%`;
    this.tip.style.top = `${(100 * layer) / this.rows}%`;
  }
}
