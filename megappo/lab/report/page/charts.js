// Charts over steps: one zoom and one cursor for all of them.

const plots = new Set();
let smoothing = 0;
let zoom = null; // [first step, last step]

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
  if (line.extremes) {
    data.push(...line.extremes);
    bands.push({ series: [series.length + 1, series.length], fill: `${stroke}18` });
    for (const _ of line.extremes) series.push({ ...hidden, stroke: `${stroke}90`, width: 0.75 });
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

const FEW = 12; // entries of a legend that are shown without a click

function buildLegend(legend, lines, plot) {
  const more = lines.length > FEW ? el("button.more", { type: "button", click: () => legend.classList.add("whole") }, `${lines.length - FEW} more`) : null;
  legend.replaceChildren(
    el("span.at.soft"),
    ...lines.map((line) => {
      const swatch = el(line.dash ? "span.swatch.dashed" : "span.swatch");
      const paint = line.fill ? `var(${line.fill})` : colour(line.colour);
      const dash = 2 + 4 * line.dash;
      swatch.style.background = line.dash ? `repeating-linear-gradient(90deg, ${paint} 0 ${dash}px, transparent ${dash}px ${dash + 4}px)` : paint;
      const toggle = (event) => {
        line.hidden = !line.hidden;
        event.currentTarget.setAttribute("aria-pressed", String(!line.hidden));
        plot.series.forEach((one, i) => one.line === line && plot.setSeries(i, { show: !line.hidden }));
      };
      const button = el("button", { type: "button", "aria-pressed": String(!line.hidden), click: toggle }, swatch, `${line.label} `, el("b"), el("span.soft"));
      if (line.hidden) plot.series.forEach((one, i) => one.line === line && plot.setSeries(i, { show: false }));
      return button;
    }),
    ...(more ? [more] : []),
  );
}

/** "step 7", or "steps 7 to 9". */
function stepsName(steps) {
  const [first, last] = [least(steps), most(steps)];
  return first === last ? `step ${whole(last)}` : `steps ${whole(first)} to ${whole(last)}`;
}

/** The values at the cursor, or else the last values: of the step that the legend names. */
function showValues(legend, lines, index) {
  const at = legend.querySelector(".at");
  const ends = lines.filter((line) => line.last).flatMap((line) => line.last.steps);
  const isOneStep = new Set(ends).size === 1;
  at.textContent = index != null ? `${pointName(index)}:` : isOneStep ? `${stepsName(ends)}:` : "last values:";
  const cells = legend.querySelectorAll("b");
  lines.forEach((line, i) => {
    const values = line.shown ?? line.values;
    const value = index == null ? line.last?.value ?? values.findLast((one) => one != null) : values[index];
    const beside = cells[i].nextSibling;
    cells[i].textContent = format(value);
    cells[i].parentElement.title = line.last ? `last value at ${stepsName(line.last.steps)}` : "";
    const [low, high] = (line.extremes ?? []).map((limit) => limit[index]);
    const count = line.counts?.[index];
    const range = index != null && low != null && low < high ? ` (${format(low)} to ${format(high)})` : "";
    beside.textContent = range + (index != null && count && count < line.runs.length ? ` of ${count} runs` : "");
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
  const file = fileName(title);
  const exports = el("span.exports", {},
    el("button", { type: "button", title: "Download the curves as CSV", click: () => download(`${file}.csv`, csvOf(lines), "text/csv") }, "CSV"),
    el("button", { type: "button", title: "Download the chart as SVG", click: () => download(`${file}.svg`, svgOf(title, `${help} ${pointsText(lines.some((line) => line.runs.length > 1))}`, lines), "image/svg+xml") }, "SVG"));
  const box = el("figure.box.chart", { tabindex: 0, "aria-label": title, keydown: press }, el("header", {}, el("h3", {}, title), exports), el("p.help", {}, help), holder, legend);
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

/** On paper: every chart, light, at the paper's width. */
function setPrinting(isPrinting) {
  document.documentElement.classList.toggle("printing", isPrinting);
  for (const [element, action] of [...waiting]) {
    near.unobserve(element);
    waiting.delete(element);
    if (element.isConnected) action();
  }
  redrawAll();
}
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));

function smoothingControl() {
  const change = (event) => { smoothing = Number(event.target.value); redrawAll(); };
  return el("label", {}, "Smoothing", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, input: change }));
}

function chartGroups() {
  for (const plot of [...plots]) if (!plot.root.isConnected) forget(plot);
  return Object.entries(DATA.charts).map(([group, all]) => {
    const boxes = all.map((chart) => [chart, linesOf(chart)]).filter(([, lines]) => lines.length);
    if (!boxes.length) return null;
    const charts = el("div.charts", {}, boxes.map(([chart, lines]) => chartBox(chart.title, caption(chart, lines), lines)));
    return el(boxes.length > 2 ? "div" : "div.few", {}, el("div.group", {}, group), charts);
  }).filter(Boolean);
}

function chartSections() {
  const holder = el("div.groups", {}, chartGroups());
  const note = el("p.small.soft", {}, pointsText());
  const press = (event) => {
    seedsAsBand = !seedsAsBand;
    note.textContent = pointsText();
    event.currentTarget.setAttribute("aria-pressed", String(seedsAsBand));
    holder.replaceChildren();
    holder.append(...chartGroups());
  };
  const bands = seedsAsBand ? el("button", { type: "button", "aria-pressed": "true", click: press }, "Seeds as a band") : null;
  const reset = el("button", { type: "button", click: () => zoomTo(STEPS[0], STEPS.at(-1)) }, "Reset zoom");
  const hint = el("span.small.keys", {}, "Drag to zoom all charts, double-click to reset. In a chart: ", el("kbd", {}, "+"), " ", el("kbd", {}, "-"), " ", el("kbd", {}, "\u2190"), " ", el("kbd", {}, "\u2192"), " ", el("kbd", {}, "0"));
  return section("Charts", el("div.controls", {}, smoothingControl(), reset, bands, hint), note, holder);
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
    count.textContent = words.length ? `${found.length} of ${names.length}${found.length > 30 ? ", the first 30 shown" : ""}` : `${names.length} metrics`;
    const boxes = found.slice(0, 30).map((name) => {
      const lines = linesOf({ lines: { [name]: name } });
      return chartBox(name, caption({}, lines), lines);
    });
    grid.replaceChildren(...boxes);
  };
  show("");
  const input = el("input", { type: "search", placeholder: "a part of a name, such as ratio", "aria-label": "Filter metrics", input: (event) => show(event.target.value) });
  return section("All metrics", el("div.controls", {}, input, count), grid);
}
