// Charts over steps: one zoom and one cursor for all of them.

const STEPS = [...new Set(RUNS.flatMap((run) => run.steps))].sort((a, b) => a - b);
const plots = new Set();
let smoothing = 0;
let seedsAsBand = new Set(RUNS.map((run) => run.alike)).size < RUNS.length;
let zoom = null; // [first step, last step]

/** A run's values at each of STEPS; null where it has none. */
function aligned(run, values) {
  if (!values) return null;
  if (run.steps.length === STEPS.length) return values;
  const at = new Map(run.steps.map((step, i) => [step, values[i]]));
  return STEPS.map((step) => at.get(step) ?? null);
}

function smooth(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

function expression(pattern) {
  const parts = pattern.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("([^/]+)")}$`);
}

/** [label, metric] of each metric of the run that a pattern stands for. */
function matches(run, label, pattern, except) {
  const found = [];
  for (const name of Object.keys(run.metrics)) {
    const match = name.match(expression(pattern));
    if (!match || (except && expression(except).test(name))) continue;
    found.push([label === "*" ? match.slice(1).join("@") : label, name]);
  }
  return found;
}

/** The lower and upper limit of the band around a line, or null. */
function bandOf(run, metric, kind) {
  const means = run.metrics[metric];
  const beside = (suffix) => run.metrics[metric.replace(/\/mean$/, `/${suffix}`)];
  if (kind === "range" && beside("min") && beside("max")) return [beside("min"), beside("max")];
  const widths = kind === "std" ? beside("std") : kind === "ci95" ? run.metrics[`${metric}/ci95`] : null;
  if (!widths) return null;
  const [least, most] = kind === "std" ? [beside("min"), beside("max")] : [];
  const shifted = (sign, limit) =>
    means.map((value, i) => {
      if (value == null || widths[i] == null) return value;
      const end = value + sign * widths[i];
      return limit?.[i] == null ? end : sign < 0 ? Math.max(end, limit[i]) : Math.min(end, limit[i]);
    });
  return [shifted(-1, least), shifted(1, most)];
}

/** Runs that are one line: those that differ by their seed alone, if they are shown as a band. */
function groupsOfRuns() {
  if (!seedsAsBand) return RUNS.map((run) => [run]);
  const groups = new Map();
  for (const run of RUNS) groups.set(run.alike, [...(groups.get(run.alike) ?? []), run]);
  return [...groups.values()];
}

/** The mean of several runs at each step, between the lowest and the highest of them. */
function together(runs, metric) {
  const all = runs.map((run) => aligned(run, run.metrics[metric])).filter(Boolean);
  const known = STEPS.map((step, i) => all.map((values) => values[i]).filter((value) => value != null));
  const reduced = (reduce) => known.map((values) => (values.length ? reduce(values) : null));
  return { values: reduced(mean), band: [reduced((values) => Math.min(...values)), reduced((values) => Math.max(...values))] };
}

function alone(run, metric, kind) {
  const band = RUNS.length > 1 ? null : bandOf(run, metric, kind)?.map((limit) => aligned(run, limit));
  return { values: aligned(run, run.metrics[metric]), band };
}

/** The lines of a chart: {label, colour, values, band}. */
function linesOf(chart) {
  const lines = [];
  groupsOfRuns().forEach((runs, number) => {
    for (const [label, pattern] of Object.entries(chart.lines)) {
      for (const [name, metric] of matches(runs[0], label, pattern, chart.except)) {
        const line = runs.length > 1 ? together(runs, metric) : alone(runs[0], metric, chart.band);
        if (line.values.some((value) => value != null)) lines.push({ ...line, runs, number, name });
      }
    }
  });
  const names = [...new Set(lines.map((line) => line.name))];
  lines.forEach((line, i) => {
    const several = line.runs.length > 1 ? ` and ${line.runs.length - 1} more` : "";
    const owner = RUNS.length > 1 ? line.runs[0].name + several : null;
    line.label = owner && names.length > 1 ? `${owner}: ${line.name}` : owner ?? line.name;
    line.colour = owner ? line.number : i;
    line.dash = owner ? names.indexOf(line.name) : 0;
  });
  return lines;
}

function axes() {
  const grid = { stroke: css("--line"), width: 1 };
  const shared = { stroke: css("--soft"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return [
    { ...shared, size: 24, gap: 4, space: 50, incrs: [1, 2, 5, 10, 20, 50].flatMap((one) => [one, 100 * one, 10_000 * one]).sort((a, b) => a - b) },
    { ...shared, size: 46, gap: 4, space: 28, values: (plot, ticks) => ticks.map(format) },
  ];
}

/** The range of the y axis: with some room, and not empty where all values are equal. */
function heights(plot, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 1.2 * low), Math.max(0, 1.2 * low)];
  return uPlot.rangeNum(low, high, 0.08, true);
}

/** Add a line, after its band, to the data and series of a plot. */
function addLine(line, data, series, bands) {
  const stroke = css(line.fill ?? `--c${line.colour % PALETTE}`);
  const hidden = { label: "", stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, line };
  if (line.band) {
    data.push(...line.band);
    bands.push({ series: [series.length + 1, series.length], fill: stroke + (line.isArea ? "c0" : "2b") });
    series.push({ ...hidden }, { ...hidden });
  }
  if (smoothing) {
    data.push(line.values);
    series.push({ ...hidden, stroke: `${stroke}55`, width: 1 });
  }
  const isSparse = !line.isArea && line.values.filter((value) => value != null).length <= 40;
  data.push(smoothing ? smooth(line.values) : line.values);
  const dash = line.dash ? [2 + 4 * line.dash, 4] : undefined;
  series.push({ label: line.label, stroke, width: line.isArea ? 0 : 1.75, dash, spanGaps: true, points: { show: isSparse, size: 5, fill: stroke }, line });
}

/** Draw lines into an element; the legend shows the values at the cursor, else the last ones. */
function draw(holder, legend, lines, height) {
  const data = [STEPS];
  const series = [{}];
  const bands = [];
  for (const line of lines) addLine(line, data, series, bands);
  const show = (plot) => showValues(legend, lines, plot.cursor.idx);
  const options = {
    width: holder.clientWidth, height, series, bands, axes: axes(), legend: { show: false },
    scales: { y: { range: heights }, x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
    cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false, dist: 5 }, points: { size: 6 } },
    hooks: { setCursor: [show], setScale: [(plot, key) => key === "x" && zoomAll(plot)] },
  };
  const plot = new uPlot(options, data, holder);
  plot.redo = () => { forget(plot); holder.replaceChildren(); draw(holder, legend, lines, height); };
  plots.add(plot);
  if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
  buildLegend(legend, lines, plot);
  show(plot);
  return plot;
}

function forget(plot) {
  plots.delete(plot);
  plot.destroy();
}

function zoomAll(source) {
  const { min, max } = source.scales.x;
  if (min == null || (zoom && zoom[0] === min && zoom[1] === max)) return;
  zoom = [min, max];
  for (const plot of plots) if (plot !== source) plot.setScale("x", { min, max });
}

function zoomTo(first, last) {
  const [start, end] = [STEPS[0], STEPS.at(-1)];
  const [any] = plots;
  any?.setScale("x", { min: Math.max(first, start), max: Math.min(last, end) });
}

function buildLegend(legend, lines, plot) {
  legend.replaceChildren(
    ...lines.map((line) => {
      const swatch = el("span.swatch");
      swatch.style.background = line.fill ? `var(${line.fill})` : colour(line.colour);
      const toggle = (event) => {
        line.hidden = !line.hidden;
        event.currentTarget.setAttribute("aria-pressed", String(!line.hidden));
        plot.series.forEach((one, i) => one.line === line && plot.setSeries(i, { show: !line.hidden }));
      };
      return el("button", { type: "button", "aria-pressed": "true", click: toggle }, swatch, `${line.label} `, el("b"));
    }),
  );
}

function showValues(legend, lines, index) {
  const cells = legend.querySelectorAll("b");
  lines.forEach((line, i) => {
    const values = line.shown ?? line.values;
    const value = index == null ? values.findLast((one) => one != null) : values[index];
    if (cells[i]) cells[i].textContent = format(value);
  });
}

/** A box with a chart of these lines, drawn when it comes near the window. */
function chartBox(title, help, lines, { tall = false } = {}) {
  const holder = el(`div.plot${tall ? ".tall" : ""}`);
  const legend = el("div.legend");
  const keys = {
    "+": (low, high) => [low + (high - low) / 4, high - (high - low) / 4],
    "-": (low, high) => [low - (high - low) / 2, high + (high - low) / 2],
    ArrowLeft: (low, high) => [low - (high - low) / 4, high - (high - low) / 4],
    ArrowRight: (low, high) => [low + (high - low) / 4, high + (high - low) / 4],
    0: () => [STEPS[0], STEPS.at(-1)],
  };
  const press = (event) => {
    const plot = [...plots].find((one) => holder.contains(one.root));
    const move = keys[event.key];
    if (!plot || !move || event.target !== box) return;
    event.preventDefault();
    zoomTo(...move(plot.scales.x.min, plot.scales.x.max));
  };
  const box = el("figure.box.chart", { tabindex: 0, "aria-label": title, keydown: press }, el("header", {}, el("h3", {}, title)), el("p.help", {}, help), holder, legend);
  box.style.margin = 0;
  whenNear(box, () => draw(holder, legend, lines, tall ? 260 : 170));
  return box;
}

const waiting = new Map();
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    waiting.get(target)();
    waiting.delete(target);
  }
}, { rootMargin: "1200px" });

function whenNear(element, action) {
  waiting.set(element, action);
  near.observe(element);
}

const resized = new ResizeObserver(() => {
  for (const plot of plots) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
  }
});
const redrawAll = () => [...plots].forEach((plot) => plot.redo());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

function smoothingControl() {
  const change = (event) => { smoothing = Number(event.target.value); redrawAll(); };
  return el("label", {}, "Smoothing", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, input: change }));
}

function chartGroups() {
  for (const plot of [...plots]) if (!plot.root.isConnected) forget(plot);
  return Object.entries(DATA.charts).map(([group, all]) => {
    const boxes = all.map((chart) => [chart, linesOf(chart)]).filter(([, lines]) => lines.length);
    if (!boxes.length) return null;
    const charts = el("div.charts", {}, boxes.map(([chart, lines]) => chartBox(chart.title, chart.help, lines)));
    return el(boxes.length > 2 ? "div" : "div.few", {}, el("div.group", {}, group), charts);
  }).filter(Boolean);
}

function chartSections() {
  const holder = el("div.groups", {}, chartGroups());
  const press = (event) => {
    seedsAsBand = !seedsAsBand;
    event.currentTarget.setAttribute("aria-pressed", String(seedsAsBand));
    holder.replaceChildren();
    holder.append(...chartGroups());
  };
  const bands = seedsAsBand ? el("button", { type: "button", "aria-pressed": "true", click: press }, "Seeds as a band") : null;
  const reset = el("button", { type: "button", click: () => zoomTo(STEPS[0], STEPS.at(-1)) }, "Reset zoom");
  const hint = el("span.small.keys", {}, "Drag to zoom all charts, double-click to reset. In a chart: ", el("kbd", {}, "+"), " ", el("kbd", {}, "-"), " ", el("kbd", {}, "\u2190"), " ", el("kbd", {}, "\u2192"), " ", el("kbd", {}, "0"));
  return section("Charts", el("div.controls", {}, smoothingControl(), reset, bands, hint), holder);
}

/** Charts of any metrics, by a part of their names. */
function allMetrics() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].sort();
  const grid = el("div.charts");
  const count = el("span");
  const show = (text) => {
    for (const plot of [...plots]) if (grid.contains(plot.root)) forget(plot);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length ? names.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : [];
    count.textContent = words.length ? `${found.length} of ${names.length}` : `${names.length} metrics`;
    const boxes = found.slice(0, 30).map((name) => chartBox(name, "", linesOf({ lines: { [name]: name } })));
    grid.replaceChildren(...boxes);
  };
  show("");
  const input = el("input", { type: "search", placeholder: "a part of a name, such as ratio", "aria-label": "Filter metrics", input: (event) => show(event.target.value) });
  return section("All metrics", el("div.controls", {}, input, count), grid);
}
