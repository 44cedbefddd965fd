// The page: header, health, charts, time, responses, config.

const TONES = { finished: "good", running: "warn", interrupted: "warn", failed: "bad" };

function duration(value) {
  const whole = Math.ceil(value);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** The first and last value of a metric, as a card. */
function change(run, title, metric) {
  const values = run.metrics[metric] ?? [];
  const [first, last] = [values.findIndex((value) => value != null), values.findLastIndex((value) => value != null)];
  if (first < 0) return [];
  const width = run.metrics[`${metric}/ci95`]?.[last];
  const detail = first < last ? `${values[first].toFixed(3)} at step ${run.steps[first]}` : `at step ${run.steps[last]}`;
  return [{ title, value: values[last].toFixed(3), spread: width ? `± ${width.toFixed(3)}` : null, detail }];
}

/** The figures at the top: {title, value, spread, detail}. */
function figures(run) {
  const last = run.steps.at(-1) ?? 0;
  const found = [{ title: "Steps", value: run.total_steps ? `${last} of ${run.total_steps}` : String(last), detail: run.status || "status unknown" }];
  found.push(...change(run, "Reward", "reward/score/mean"));
  for (const [name, metric] of matches(run, "*", "val/*/mean@*")) found.push(...change(run, `Held out: ${name}`, metric));
  const times = (run.metrics["timing_s/step"] ?? []).filter((value) => value != null);
  if (times.length) {
    const median = [...times].sort((a, b) => a - b)[Math.floor(times.length / 2)];
    found.push({ title: "Training time", value: duration(run.seconds), detail: `${seconds(median)} a step (median)` });
  }
  if (run.differences.length) found.push({ title: "Config", value: `${run.differences.length} keys`, detail: "differ from the defaults" });
  if (run.hardware.device) found.push({ title: "Hardware", value: run.hardware.device, detail: `ranks: ${run.hardware.ranks ?? "?"}` });
  const [commit, state] = run.commit.split("-");
  if (commit) found.push({ title: "Commit", value: commit.slice(0, 10), detail: state ? "with changes" : "no changes" });
  return found;
}

function cards(run) {
  const card = ({ title, value, spread, detail }) =>
    el("div.card", {}, el("span.small.soft", {}, title), el(`b${value.length > 14 ? ".long" : ""}`, {}, value, spread ? [" ", el("small", {}, spread)] : null), el("span.small.soft", {}, detail));
  return el("div.cards", {}, figures(run).map(card));
}

function overview() {
  if (RUNS.length === 1) return cards(RUNS[0]);
  const all = RUNS.map(figures);
  const titles = [...new Set(all.flat().map((card) => card.title))];
  const cell = (own, title) => {
    const card = own.find((one) => one.title === title);
    return card ? el("span", {}, el("b", {}, card.value), ` ${card.spread ?? ""} `, el("span.small.soft", {}, card.detail)) : null;
  };
  return el("div.box", {}, table(["", ...RUNS.map((run) => run.name)], titles.map((title) => [title, ...all.map((own) => cell(own, title))])));
}

function healthSection() {
  const findings = [];
  const quiet = [];
  for (const run of RUNS) {
    for (const rule of run.health) {
      if (!rule.steps.length) { quiet.push(rule); continue; }
      const name = rule.name.replace(/_/g, " ");
      const isNow = rule.steps.at(-1) === run.steps.at(-1);
      const when = `${rule.steps.length === 1 ? "step" : "steps"} ${rule.steps.length > 8 ? `${rule.steps[0]} to ${rule.steps.at(-1)}, ${rule.steps.length} in all` : rule.steps.join(", ")}`;
      findings.push(el(`div.box.finding${isNow ? ".now" : ""}`, {},
        el("b", {}, RUNS.length > 1 ? `${run.name}: ${name}` : name), el("span.small.soft", {}, `  ${isNow ? "in the last step; " : ""}${when}`),
        el("p", {}, rule.meaning), el("p", {}, rule.remedy, rule.page ? el("span.soft", {}, ` (${rule.page})`) : null)));
    }
  }
  if (!findings.length && !quiet.length) return null;
  const names = [...new Set(quiet.map((rule) => rule.name))];
  const chips = el("div.chips", {}, names.map((name) => el("span.chip", { title: quiet.find((rule) => rule.name === name).meaning }, name.replace(/_/g, " "))));
  return section("Health", findings.length ? null : el("p.good", {}, "No rule has found anything unhealthy."), findings, chips);
}

function configSection() {
  const parts = [];
  if (RUNS.length === 1) {
    const [run] = RUNS;
    if (run.differences.length) parts.push(el("h3", {}, "Differences from the defaults"), table(["key", "value", "default"], run.differences));
    const facts = Object.entries({ "run id": run.run_id, commit: run.commit, ...run.placement, ...run.hardware }).filter(([, value]) => value);
    if (facts.length) parts.push(el("details", {}, el("summary", {}, "Hardware, versions and placement"), table(["", ""], facts)));
  } else {
    const keys = [...new Set(RUNS.flatMap((run) => run.differences.map(([key]) => key)))];
    const value = (run, key) => {
      const own = run.differences.find((row) => row[0] === key);
      return own ? own[1] : RUNS.flatMap((one) => one.differences).find((row) => row[0] === key)[2];
    };
    const rows = keys.map((key) => [key, ...RUNS.map((run) => value(run, key))]).filter(([, ...values]) => new Set(values).size > 1);
    parts.push(el("h3", {}, "Keys that differ"), rows.length ? table(["key", ...RUNS.map((run) => run.name)], rows) : el("p.soft", {}, "none"));
  }
  return section("Config", el("div.box", {}, parts));
}

function build() {
  const [first] = RUNS;
  const status = RUNS.length === 1 && first.status ? el(`span.pill.${TONES[first.status] ?? "soft"}`, {}, first.status) : null;
  const top = el("header.top", {}, el("h1", {}, DATA.title), status, el("span.soft.small", {}, `written ${DATA.written}`));
  const sections = [healthSection(), STEPS.length ? chartSections() : null, timeSection(), samplesSection(), STEPS.length ? allMetrics() : null, configSection()].filter(Boolean);
  const message = RUNS.length === 1 && first.message ? el("p.box.finding.now", {}, first.message) : null;
  const links = sections.map((one) => el("a", { href: `#${one.id}` }, one.getAttribute("aria-label")));
  const footer = el("footer", {}, "Written by megappo. The charts are drawn by uPlot (MIT licence).");
  document.getElementById("page").append(...[top, el("nav", { "aria-label": "Sections" }, links), message, overview(), ...sections, footer].filter(Boolean));
  resized.observe(document.getElementById("page"));
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    const search = document.getElementById("search");
    if (event.key !== "/" || isTyping || !search) return;
    event.preventDefault();
    search.focus();
  });
}

build();
