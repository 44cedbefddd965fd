// Downloads: the curves of a chart as CSV, and the chart as SVG.

const fileName = (title) => `${DATA.title} ${title}`.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "").slice(0, 100);

function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** The steps of the zoom, as indices of STEPS. */
function shownPoints() {
  const [low, high] = zoom ?? [-Infinity, Infinity];
  return STEPS.map((step, i) => i).filter((i) => STEPS[i] >= low && STEPS[i] <= high);
}

/** A row for each point: its steps, then each line's value, its lowest and highest step, and the limits of its band. */
function csvOf(lines) {
  const columns = SIZE > 1 ? [["first step", KEYS.map((key) => POINTS.get(key)[0])], ["last step", STEPS]] : [["step", STEPS]];
  for (const line of lines) {
    columns.push([line.label, line.shown ?? line.values]);
    const pairs = [["lowest", "highest", line.extremes], ["band from", "band to", line.isArea ? null : line.band]];
    for (const [low, high, limits] of pairs) if (limits) columns.push([`${line.label} ${low}`, limits[0]], [`${line.label} ${high}`, limits[1]]);
  }
  const quoted = (cell) => (/[",\r\n]/.test(cell) ? `"${cell.replace(/"/g, '""')}"` : cell);
  const head = columns.map(([name]) => quoted(/^[=+\-@\t]/.test(name) ? `'${name}` : name));
  const rows = STEPS.map((step, i) => columns.map(([, values]) => (values[i] == null ? "" : Number(values[i].toPrecision(7)))).join(","));
  return `${[head.join(","), ...rows].join("\n")}\n`;
}

/** Round numbers from low to high, about `count` of them. */
function ticksOf(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + 1e-9 * step; i += 1) found.push(i * step);
  return found;
}

const SVG = "http://www.w3.org/2000/svg";
function svgElement(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The chart as it is shown: within the zoom, smoothed, without hidden lines; in the colours of paper. */
function svgOf(title, help, lines) {
  document.documentElement.classList.add("printing");
  const colours = new Map(lines.map((line) => [line, css(line.fill ?? `--c${line.colour % PALETTE}`)]));
  const [ink, soft, grid] = ["--ink", "--soft", "--line"].map(css);
  document.documentElement.classList.toggle("printing", false);
  const shown = lines.filter((line) => !line.hidden);
  const points = shownPoints();
  const curve = (line) => (smoothing ? smooth(line.values) : line.values);
  const limits = shown.flatMap((line) => [curve(line), ...(line.band ?? []), ...(line.extremes ?? [])]);
  const numbers = limits.flatMap((values) => points.map((i) => values[i])).filter((value) => value != null);
  const [low, high] = heights(null, numbers.length ? numbers.reduce((a, b) => Math.min(a, b)) : null, numbers.length ? numbers.reduce((a, b) => Math.max(a, b)) : null);
  const notes = help.match(/.{1,115}(\s|$)/g) ?? [];
  const box = { left: 64, top: 44 + 14 * notes.length, width: 620, height: 300 };
  const [first, last] = [STEPS[points[0]] ?? 0, STEPS[points.at(-1)] ?? 1];
  const x = (i) => box.left + (last > first ? (box.width * (STEPS[i] - first)) / (last - first) : box.width / 2);
  const y = (value) => box.top + box.height * (1 - (value - low) / (high - low));
  const known = (values) => points.filter((i) => values[i] != null);
  const at = (values) => (i) => `${x(i).toFixed(2)},${y(values[i]).toFixed(2)}`;
  const text = (content, attributes) => svgElement("text", { fill: soft, "font-size": 11, ...attributes }, content);
  const height = box.top + box.height + 44 + 18 * shown.length;
  const svg = svgElement("svg", { xmlns: SVG, width: 700, height, viewBox: `0 0 700 ${height}`, "font-family": "system-ui, sans-serif" });
  svg.append(svgElement("rect", { width: 700, height, fill: "#fff" }), text(title, { x: 12, y: 22, fill: ink, "font-size": 15, "font-weight": 600 }), ...notes.map((note, row) => text(note, { x: 12, y: 40 + 14 * row })));
  for (const tick of ticksOf(low, high, 6)) {
    svg.append(svgElement("line", { x1: box.left, x2: box.left + box.width, y1: y(tick), y2: y(tick), stroke: grid }), text(format(tick), { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }));
  }
  for (const tick of ticksOf(first, last, 8).filter(Number.isInteger)) {
    const across = box.left + (last > first ? (box.width * (tick - first)) / (last - first) : box.width / 2);
    svg.append(text(whole(tick), { x: across, y: box.top + box.height + 16, "text-anchor": "middle" }));
  }
  svg.append(text("step", { x: box.left + box.width, y: box.top + box.height + 30, "text-anchor": "end" }));
  shown.forEach((line, row) => {
    const stroke = colours.get(line);
    for (const [area, opacity] of [[line.band, line.isArea ? 0.75 : 0.17], [line.extremes, 0.1]]) {
      if (!area) continue;
      const outline = [...known(area[1]).map(at(area[1])), ...known(area[0]).reverse().map(at(area[0]))];
      svg.append(svgElement("polygon", { points: outline.join(" "), fill: stroke, "fill-opacity": opacity }));
    }
    for (const limit of line.extremes ?? []) svg.append(svgElement("polyline", { points: known(limit).map(at(limit)).join(" "), fill: "none", stroke, "stroke-opacity": 0.55, "stroke-width": 0.75 }));
    const values = curve(line);
    const dashes = line.dash ? { "stroke-dasharray": `${2 + 4 * line.dash} 4` } : {};
    if (!line.isArea) svg.append(svgElement("polyline", { points: known(values).map(at(values)).join(" "), fill: "none", stroke, "stroke-width": 1.75, ...dashes }));
    const base = box.top + box.height + 44 + 18 * row;
    const ending = line.last ? ` ${format(line.last.value)} at ${stepsName(line.last.steps)}` : "";
    svg.append(svgElement("rect", { x: box.left, y: base - 9, width: 10, height: 10, fill: stroke }), text(line.label + ending, { x: box.left + 16, y: base, fill: ink }));
  });
  return new XMLSerializer().serializeToString(svg);
}
