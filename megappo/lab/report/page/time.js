// The time of a step: phases over steps, and phases over ranks.

for (const run of RUNS) {
  run.phases = phasesOf(run);
  for (const ranks of Object.values(run.timeline)) {
    for (const [rank, spans] of Object.entries(ranks)) ranks[rank] = spans.filter(([phase]) => !phase.includes("/"));
  }
}

/** Seconds of each outermost phase over the steps, stacked, in the order of a step. */
function phaseLines(run) {
  const names = run.phases.map((phase) => `timing_s/${phase}`);
  let top = STEPS.map(() => 0);
  const lines = names.map((name, i) => {
    const shown = aligned(run, run.metrics[name]);
    const below = top;
    top = top.map((value, at) => value + (shown[at] ?? 0));
    const isStep = aligned(run, run.metrics["timing_s/step"]);
    const hold = (values) => values.map((value, at) => (isStep[at] == null ? null : value));
    const [step, value] = run.ends[name].at(-1) ?? [];
    const last = step == null ? null : { steps: [step], value };
    return { label: run.phases[i], fill: phaseColour(run, run.phases[i]), shown, last, runs: [run], values: hold(top), band: [hold(below), hold(top)], isArea: true };
  });
  return lines.filter((line) => line.shown.some((value) => value > 0));
}

/** The name of a phase's colour; exchanges are grey. */
function phaseColour(run, phase) {
  if (run.exchanges.includes(phase)) return "--wait";
  if (phase === "other") return "--line";
  const computing = run.phases.filter((one) => !run.exchanges.includes(one));
  return `--p${computing.indexOf(phase) % 12}`;
}

/** The outermost phases of a run in the order of a step; "other" is the last. */
function phasesOf(run) {
  const named = Object.keys(run.metrics).filter((name) => /^timing_s\/[^/]+$/.test(name)).map((name) => name.slice(9));
  const found = named.filter((phase) => phase !== "step" && phase !== "other");
  return found.length ? [...found, "other"] : [];
}

function phaseTable() {
  const names = [...new Set(RUNS.flatMap((run) => run.phases))];
  const rows = names.map((name) => [name, ...RUNS.map((run) => seconds(total(run, `timing_s/${name}`) / (numTimed(run) || 1)))]);
  return table(["mean of a step", ...RUNS.map((run) => run.name)], rows);
}

/** Bars of every rank in a step, from the first phase of any rank. */
function lanes(run, ranks) {
  const all = Object.values(ranks).flat();
  const start = Math.min(...all.map((span) => span[1]));
  const end = Math.max(...all.map((span) => span[1] + span[2]));
  const length = end - start || 1;
  const bar = ([phase, from, duration]) => {
    const waits = run.exchanges.includes(phase);
    const text = `${phase}: ${seconds(duration)}, from ${seconds(from - start)} on`;
    const span = el(`span.span${waits ? ".waits" : ""}`, { title: text });
    span.style.left = `${(100 * (from - start)) / length}%`;
    span.style.width = `${(100 * duration) / length}%`;
    if (!waits) span.style.background = `var(${phaseColour(run, phase)})`;
    return span;
  };
  const lane = ([rank, spans]) => el("div.lane", {}, `rank ${rank}`, el("div.track", {}, spans.map(bar)));
  const ticks = [0, 1, 2, 3, 4].map((i) => el("span", {}, seconds((length * i) / 4)));
  return [...Object.entries(ranks).map(lane), el("div.axis", {}, ticks)];
}

/**
 * [rank, seconds it waits for others, seconds that others wait for it] in a step, means over the steps.
 * All ranks leave an exchange together: the one that spends the least time in it was the last to arrive.
 */
function waitsOf(run, steps) {
  const sums = new Map();
  const add = (rank, waited, caused) => {
    const own = sums.get(rank) ?? [0, 0];
    sums.set(rank, [own[0] + waited, own[1] + caused]);
  };
  for (const step of steps) {
    for (const exchange of run.exchanges) {
      const times = Object.entries(run.timeline[step]).map(([rank, spans]) => [rank, spans.filter(([phase]) => phase === exchange).reduce((sum, span) => sum + span[2], 0)]);
      const [last, least] = times.reduce((a, b) => (b[1] < a[1] ? b : a));
      for (const [rank, time] of times) add(rank, time - least, 0);
      add(last, 0, times.reduce((sum, [, time]) => sum + time - least, 0));
    }
  }
  return [...sums].map(([rank, [waited, caused]]) => [rank, waited / steps.length, caused / steps.length]);
}

function timeline(run) {
  const steps = Object.keys(run.timeline).map(Number);
  if (!steps.length) return null;
  const view = el("div");
  const title = el("b");
  const show = (index) => {
    title.textContent = `step ${steps[index]}`;
    view.replaceChildren(...lanes(run, run.timeline[steps[index]]));
  };
  const last = steps.length - 1;
  show(last);
  const slider = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "Step of the timeline", input: (event) => show(Number(event.target.value)) });
  const drawn = new Set(Object.values(run.timeline).flatMap((ranks) => Object.values(ranks).flat()).map(([phase]) => phase));
  const legend = run.phases.filter((phase) => drawn.has(phase) && !run.exchanges.includes(phase) && phase !== "other").map((phase) => {
    const swatch = el("span.swatch");
    swatch.style.background = `var(${phaseColour(run, phase)})`;
    return el("span.soft", {}, swatch, phase);
  });
  const waits = el("span.soft", {}, el("span.swatch.span.waits"), "exchange, or waiting for other ranks");
  waits.firstChild.style.position = "static";
  const rows = waitsOf(run, steps).map(([rank, waited, caused]) => [`rank ${rank}`, seconds(waited), seconds(caused)]);
  return el("div.box", {},
    el("header", {}, el("h3", {}, "Phases over ranks")),
    el("div.controls", {}, title, slider), view, el("div.legend", {}, legend, waits),
    rows.length > 1 ? [el("h3.group", {}, `Waiting in a step, mean of the last ${steps.length}`), table(["", "waits for others", "others wait for it"], rows)] : null);
}

/** The peak memory of each phase beside the estimate of `megappo plan`. */
function memoryTable(run) {
  const rows = Object.entries(run.planned_gib).map(([phase, planned]) => {
    const name = `memory/${phase}_peak_gib`;
    const measured = (run.highest[name] ?? run.metrics[name])?.filter((value) => value != null);
    return measured?.length ? [phase, `${format(Math.max(...measured))} GiB`, `${format(planned)} GiB`] : null;
  }).filter(Boolean);
  if (!rows.length) return null;
  return [el("p"), el("div.box", {}, el("h3", {}, "Peak memory of phases"), table(["", "measured", "planned"], rows))];
}

function timeSection() {
  const trained = RUNS.filter((run) => run.phases.length);
  if (!trained.length) return null;
  if (RUNS.length > 1) return section("Time", el("div.box", {}, phaseTable()));
  const [run] = RUNS;
  const help = `Seconds of a step${SIZE > 1 ? `, means of ${SIZE} steps` : ""}. The phases add up to the step; a step with an evaluation or a checkpoint takes longer.`;
  return section("Time", chartBox("Phases over steps", help, phaseLines(run), { tall: true }), el("p"), timeline(run), memoryTable(run));
}
