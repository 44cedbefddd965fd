// The lines of charts: one or several runs at the points of a page, what lies around each line, and what a caption says.

const SIZE = Math.max(...RUNS.map((run) => run.size)); // steps of a point; the sizes of runs are powers of 2
/** The points of the page: the first and the last step of each. */
const POINTS = new Map();
for (const run of RUNS) joinPoints(run);
const KEYS = [...POINTS.keys()].sort((a, b) => a - b);
const STEPS = KEYS.map((key) => POINTS.get(key)[1]);

/** [lowest, mean, highest, number] of the values of several points, or null. */
function joined(points) {
  const known = points.filter((point) => point != null).map((point) => (Array.isArray(point) ? point : [point, point, point, 1]));
  if (!known.length) return null;
  const count = known.reduce((sum, point) => sum + point[3], 0);
  return [Math.min(...known.map((point) => point[0])), known.reduce((sum, point) => sum + point[1] * point[3], 0) / count, Math.max(...known.map((point) => point[2])), count];
}

/** Bring a run to the page's points: `steps`, and of each metric `metrics` (means), `lowest`, `highest` and `counts`. */
function joinPoints(run) {
  const members = new Map();
  run.steps.forEach(([first, last], i) => {
    const key = Math.floor(last / SIZE);
    members.set(key, [...(members.get(key) ?? []), i]);
    const point = POINTS.get(key) ?? [Infinity, -Infinity];
    POINTS.set(key, [Math.min(point[0], first), Math.max(point[1], last)]);
  });
  run.last = run.steps.at(-1)?.[1] ?? 0;
  run.at = new Map([...members.keys()].map((key, i) => [key, i]));
  const groups = [...members.values()];
  Object.assign(run, { points: run.metrics, metrics: {}, lowest: {}, highest: {}, counts: {} });
  for (const [name, points] of Object.entries(run.points)) {
    const all = groups.map((group) => joined(group.map((i) => points[i])));
    run.metrics[name] = all.map((point) => point && point[1]);
    run.counts[name] = all.map((point) => (point ? point[3] : 0));
    if (!all.some((point) => point && point[0] < point[2])) continue;
    run.lowest[name] = all.map((point) => point && point[0]);
    run.highest[name] = all.map((point) => point && point[2]);
  }
  delete run.points;
  // A phase that a step lacks took no time, so that the means of phases add up.
  const timed = run.counts["timing_s/step"];
  for (const [name, values] of Object.entries(run.metrics)) {
    if (/^timing_s\/[^/]+$/.test(name) && timed && SIZE > 1) run.metrics[name] = values.map((value, i) => value && (value * run.counts[name][i]) / timed[i]);
  }
}

/** The sum of a metric over all steps. */
const total = (run, metric) => (run.metrics[metric] ?? []).reduce((sum, value, i) => sum + (value ?? 0) * run.counts[/^timing_s\//.test(metric) && SIZE > 1 ? "timing_s/step" : metric][i], 0);
const numTimed = (run) => (run.counts["timing_s/step"] ?? []).reduce((sum, count) => sum + count, 0);

let seedsAsBand = new Set(RUNS.map((run) => run.alike)).size < RUNS.length;

/** A run's values at each of STEPS; null where it has none. */
function aligned(run, values) {
  if (!values) return null;
  return KEYS.map((key) => values[run.at.get(key)] ?? null);
}

/** "step 7", or "steps 7 to 9" of a point that several steps are. */
function pointName(index) {
  const [first, last] = POINTS.get(KEYS[index]);
  return first === last ? `step ${whole(last)}` : `steps ${whole(first)} to ${whole(last)}`;
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

const BANDS = {
  std: "Band: one standard deviation on either side, within the lowest and the highest.",
  ci95: "Band: 95 % confidence interval.",
  range: "Band: from the lowest to the highest of the step.",
};

/** The lower and upper limit of the band around a line, or null. */
function bandOf(run, metric, kind) {
  const means = run.metrics[metric];
  const beside = (suffix, of = run.metrics) => of[metric.replace(/\/mean$/, `/${suffix}`)] ?? run.metrics[metric.replace(/\/mean$/, `/${suffix}`)];
  const [least, most] = [beside("min", run.lowest), beside("max", run.highest)];
  if (kind === "range" && least && most) return [least, most];
  const widths = kind === "std" ? beside("std") : kind === "ci95" ? run.metrics[`${metric}/ci95`] : null;
  if (!widths) return null;
  const shifted = (sign, limit) =>
    means.map((value, i) => {
      if (value == null || widths[i] == null) return value;
      const end = value + sign * widths[i];
      return kind !== "std" || limit?.[i] == null ? end : sign < 0 ? Math.max(end, limit[i]) : Math.min(end, limit[i]);
    });
  return [shifted(-1, least), shifted(1, most)];
}

/** Runs that are one line: runs that differ by their seed alone, if they are shown as a band. */
function groupsOfRuns(together = seedsAsBand) {
  if (!together) return RUNS.map((run) => [run]);
  const groups = new Map();
  for (const run of RUNS) groups.set(run.alike, [...(groups.get(run.alike) ?? []), run]);
  return [...groups.values()];
}

const atEach = (all, reduce) => STEPS.map((step, i) => {
  const known = all.map((values) => values[i]).filter((value) => value != null);
  return known.length ? reduce(known) : null;
});
const least = (values) => Math.min(...values);
const most = (values) => Math.max(...values);

/** The lowest and the highest value of any step of each point, or null where points are single steps. */
function extremes(runs, metric) {
  if (!runs.some((run) => run.lowest[metric])) return null;
  const ends = (name) => runs.map((run) => aligned(run, run[name][metric] ?? run.metrics[metric])).filter(Boolean);
  return [atEach(ends("lowest"), least), atEach(ends("highest"), most)];
}

/** A metric of one run, or the mean of several between the lowest and the highest of them. */
function lineOf(runs, metric, kind) {
  const all = runs.map((run) => aligned(run, run.metrics[metric])).filter(Boolean);
  const line = { values: atEach(all, mean), extremes: extremes(runs, metric), band: null, bandText: null };
  const last = runs.map((run) => run.ends[metric]?.at(-1)).filter(Boolean);
  line.last = last.length ? { steps: last.map(([step]) => step), value: mean(last.map(([, value]) => value)) } : null;
  if (runs.length > 1) {
    line.band = [atEach(all, least), atEach(all, most)];
    line.bandText = "Band: from the lowest to the highest seed.";
    line.counts = atEach(all, (values) => values.length);
  } else if (RUNS.length === 1) {
    line.band = bandOf(runs[0], metric, kind)?.map((limit) => aligned(runs[0], limit)) ?? null;
    line.bandText = line.band ? BANDS[kind] : null;
  }
  return line;
}

/** The lines of a chart: {label, colour, values, extremes, band, last}. */
function linesOf(chart) {
  const lines = [];
  groupsOfRuns().forEach((runs, number) => {
    const found = new Map();
    for (const run of runs) {
      for (const [label, pattern] of Object.entries(chart.lines)) {
        for (const [name, metric] of matches(run, label, pattern, chart.except)) found.set(metric, name);
      }
    }
    for (const [metric, name] of found) {
      const line = lineOf(runs, metric, chart.band);
      if (line.values.some((value) => value != null)) lines.push({ ...line, runs, number, name });
    }
  });
  const names = [...new Set(lines.map((line) => line.name))];
  lines.forEach((line, i) => {
    const owner = RUNS.length > 1 ? groupName(line.runs) : null;
    line.label = owner && names.length > 1 ? `${owner}: ${line.name}` : owner ?? line.name;
    line.colour = owner ? line.number : i;
    line.dash = owner ? names.indexOf(line.name) : 0;
  });
  return lines;
}

const groupName = (runs) => runs.map((run) => run.name).join(", ");

/** What a chart shows, and what its bands are, in words. */
function caption(chart, lines) {
  const sentences = [...new Set([chart.help, ...lines.map((line) => line.bandText)].filter(Boolean))];
  return sentences.map((text) => (text.endsWith(".") ? text : `${text}.`)).join(" ");
}

/** What all lines have in common, in words. */
function pointsText(hasSeeds = seedsAsBand) {
  const texts = [];
  if (hasSeeds) texts.push("A line is the mean of the runs that differ by their seed alone.");
  if (SIZE > 1) texts.push(`A point is the mean of ${SIZE} steps; thin lines are the lowest and the highest of these steps.`);
  return texts.join(" ");
}
