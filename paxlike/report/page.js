// SPDX-License-Identifier: Apache-2.0
// Connects the controls of the page with its charts and heat maps.

const TITLES = {
  loss: "Training loss",
  tokens_per_second: "Tokens per second",
  grad_norm: "Gradient norm",
  learning_rate: "Learning rate",
  seconds_per_step: "Seconds per step",
  mfu_causal: "MFU (causal attention)",
  mfu_full: "MFU (full attention)",
  tokens_per_second_per_device: "Tokens per second per device",
  tflops_per_second_per_device_causal: "TFLOP/s per device (causal attention)",
  tflops_per_second_per_device_full: "TFLOP/s per device (full attention)",
  peak_host_bytes: "Peak memory of the host process, bytes",
  peak_device_bytes: "Peak memory of the device, bytes",
  seconds_left: "Seconds to the end",
  skipped_steps: "Skipped steps",
  total_weights: "Target tokens of a step",
};
const MAIN = ["loss", "tokens_per_second", "grad_norm", "learning_rate"];
const HIDDEN = ["kind", "set", "step", "updates", "time"];

/** Returns the metrics of all runs: those shown first, and the others. */
function metricsOf(runs) {
  const found = new Map();
  for (const run of runs) {
    for (const record of run.records) {
      for (const [key, value] of Object.entries(record)) {
        if (typeof value !== "number" || HIDDEN.includes(key) || key.endsWith("_stderr")) continue;
        const set = record.set ?? null;
        const title = set === null ? TITLES[key] ?? key : key === "loss" ? `Loss on ${set}` : `${key} on ${set}`;
        found.set(JSON.stringify([record.kind, set, key]), {kind: record.kind, set, key, title});
      }
    }
  }
  const all = [...found.values()];
  const rank = ({kind, key}) => (kind === "eval" ? 0.5 : MAIN.indexOf(key));
  const first = all.filter(({kind, key}) => (kind === "eval" ? key === "loss" : MAIN.includes(key)));
  return [first.sort((a, b) => rank(a) - rank(b)), all.filter((metric) => !first.includes(metric))];
}

/** Replaces the options of a select, and keeps the chosen one if it is still there. */
function offer(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => node("option", {value: name}, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function connectCharts(runs) {
  const byId = (id) => document.getElementById(id);
  const redraw = () => charts.forEach((chart) => chart.element.clientWidth && chart.draw());
  const zoomTo = (zoom) => {
    view.zoom = zoom;
    byId("reset").disabled = zoom === null;
    redraw();
  };
  const [first, more] = metricsOf(runs).map((metrics) => metrics.map((metric) => new Chart(runs, metric, zoomTo)));
  const charts = [...first, ...more];
  byId("charts").append(...first.map((chart) => chart.element));
  byId("more-charts").append(...more.map((chart) => chart.element));
  byId("more").hidden = !more.length;
  byId("x").addEventListener("change", (event) => {
    view.x = event.target.value;
    zoomTo(null);
  });
  byId("smooth").addEventListener("input", (event) => {
    view.smooth = Number(event.target.value);
    byId("smoothing").textContent = event.target.value;
    redraw();
  });
  byId("log").addEventListener("change", (event) => {
    view.logarithmic = event.target.checked;
    redraw();
  });
  byId("reset").addEventListener("click", () => zoomTo(null));
  for (const box of document.querySelectorAll("[data-run]")) {
    box.addEventListener("change", () => {
      view.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
      redraw();
    });
  }
  byId("more").addEventListener("toggle", redraw);
  let width = null;
  new ResizeObserver(() => {
    if (width !== byId("charts").clientWidth) redraw();
    width = byId("charts").clientWidth;
  }).observe(byId("charts"));
}

function connectHeatMaps(runs) {
  const place = document.getElementById("heat");
  if (!place) return;
  const [run, statistic, group, logarithmic] = ["run", "statistic", "group", "log"].map((id) => document.getElementById(`heat-${id}`));
  const map = new HeatMap(place);
  const valuesOf = () =>
    runs[run.value].layers
      .map((record) => [record.updates, record.layers[statistic.value]?.[group.value]])
      .filter(([, values]) => values);
  const redraw = () => {
    const columns = valuesOf();
    if (columns.length) map.draw(columns, `${statistic.value} of ${group.value}`, logarithmic.checked);
  };
  const refill = () => {
    const {layers} = runs[run.value];
    offer(statistic, [...new Set(layers.flatMap((record) => Object.keys(record.layers)))]);
    // Those with a value for each layer come before those outside of the layers.
    const sizes = new Map();
    for (const record of layers) {
      for (const [name, all] of Object.entries(record.layers[statistic.value] ?? {})) sizes.set(name, all.length);
    }
    offer(group, [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a)));
    const values = valuesOf().flatMap(([, all]) => all.filter((value) => typeof value === "number"));
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    logarithmic.checked = low > 0 && values.some((value) => value > 100 * low);
    redraw();
  };
  for (const select of [run, statistic, group]) select.addEventListener("change", refill);
  logarithmic.addEventListener("change", redraw);
  refill();
}

document.documentElement.classList.add("js");
document.getElementById("theme").addEventListener("click", () => {
  const {style} = document.documentElement;
  const now = style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  style.colorScheme = now === "dark" ? "light" : "dark";
});
{
  const {runs} = JSON.parse(document.getElementById("data").textContent);
  connectCharts(runs);
  connectHeatMaps(runs);
}
