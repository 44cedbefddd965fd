// The page: header, health, charts, time, responses, config.

const TONES = { finished: "good", running: "warn", interrupted: "warn", failed: "bad" };

function duration(value) {
  const whole = Math.ceil(value);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** The values of a metric in its first and its last step, as a card. */
function change(run, title, metric) {
  const ends = run.ends[metric];
  if (!ends?.length) return [];
  const [[first, start], [last, end]] = [ends[0], ends.at(-1)];
  const [step, width] = run.ends[`${metric}/ci95`]?.at(-1) ?? [];
  const detail = first < last ? `at step ${whole(last)}; ${score(start)} at step ${whole(first)}` : `at step ${whole(last)}`;
  return [{ title, value: score(end), spread: step === last && width ? `± ${score(width)}` : null, detail }];
}

/** [title, metric] of the results of a run. */
function results(run) {
  const held = (title, pattern) => matches(run, "*", pattern).map(([name, metric]) => [`${title}: ${name}`, metric]);
  const single = [["Reward", "reward/score/mean"], ["Loss", "actor/nll_loss"], ["Loss", "reward_model/bt_loss"]];
  return [...single.filter(([, metric]) => run.ends[metric]?.length), ...held("Held out", "val/*/mean@*"), ...held("Held-out accuracy", "val/*/accuracy"), ...held("Held-out loss", "val/*/loss"), ...held("Explained variance", "val/*/critic/vf_explained_var")];
}

/** Seconds until the last step of a run that trains, at the pace of the later half of its steps; else null. */
function remainingSeconds(run) {
  const times = run.metrics["timing_s/step"] ?? [];
  const later = times.map((value, i) => [value, run.counts["timing_s/step"][i]]).filter(([value]) => value != null);
  const half = later.slice(Math.floor(later.length / 2));
  const count = half.reduce((sum, [, number]) => sum + number, 0);
  if (run.status !== "running" || !count || run.total_steps < run.last) return null;
  return ((run.total_steps - run.last) * half.reduce((sum, [value, number]) => sum + value * number, 0)) / count;
}

/** The figures at the top: {title, value, spread, detail}. */
function figures(run) {
  const { last } = run;
  const found = [{ title: "Steps", value: run.total_steps ? `${whole(last)} of ${whole(run.total_steps)}` : whole(last), detail: run.status || "status unknown" }];
  for (const [title, metric] of results(run)) found.push(...change(run, title, metric));
  if (numTimed(run)) found.push({ title: "Training time", value: duration(run.seconds), detail: `${seconds(run.seconds / numTimed(run))} a step (mean)` });
  const remaining = remainingSeconds(run);
  if (remaining != null) found.push({ title: "Remaining, about", value: duration(remaining), detail: `until about ${clock(DATA.written + remaining)}` });
  if (run.differences.length) found.push({ title: "Config", value: `${run.differences.length} keys`, detail: "differ from the defaults" });
  if (run.hardware.device) found.push({ title: "Hardware", value: run.hardware.device, detail: `ranks: ${run.hardware.ranks ?? "?"}` });
  const [commit, state] = run.commit.split("-");
  if (commit) found.push({ title: "Commit", value: commit.slice(0, 8), detail: state ? "with changes" : "no changes" });
  return found;
}

/** A time in seconds since 1970, by the viewer's clock; with the day, unless it is today. */
function clock(at) {
  const date = new Date(1000 * at);
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString()} ${time}`;
}

function cards(run) {
  const card = ({ title, value, spread, detail }) =>
    el("div.card", {}, el("span.small.soft", {}, title), el(`b${value.length > 14 ? ".long" : ""}`, {}, value, spread ? [" ", el("small", {}, spread)] : null), el("span.small.soft", {}, detail));
  return el("div.cards", {}, figures(run).map(card));
}

function overview() {
  const all = RUNS.map(figures);
  const titles = [...new Set(all.flat().map((card) => card.title))];
  const cell = (own, title) => {
    const card = own.find((one) => one.title === title);
    return card ? el("span", {}, el("b", {}, card.value), ` ${card.spread ?? ""} `, el("span.small.soft", {}, card.detail)) : null;
  };
  return el("div.box", {}, table(["", ...RUNS.map((run) => run.name)], titles.map((title) => [title, ...all.map((own) => cell(own, title))])));
}

/** Each rule once, with the runs and the steps in which it held. */
function healthSection() {
  const rules = new Map();
  for (const run of RUNS) {
    for (const rule of run.health) rules.set(rule.name, [...(rules.get(rule.name) ?? []), { ...rule, run }]);
  }
  if (!rules.size) return null;
  const findings = [];
  const chips = [];
  for (const [name, of] of rules) {
    const title = name.replace(/_/g, " ");
    const held = of.filter((rule) => rule.steps.length);
    if (!held.length) { chips.push(el("span.chip", { title: of[0].meaning }, title)); continue; }
    const isNow = (rule) => rule.steps.at(-1) === rule.run.last;
    const when = (rule) => {
      const steps = rule.steps.length > 8 ? `${rule.steps[0]} to ${rule.steps.at(-1)}, ${rule.steps.length} in all` : rule.steps.join(", ");
      return `${isNow(rule) ? "in the last step; " : ""}${rule.steps.length === 1 ? "step" : "steps"} ${steps}`;
    };
    const runs = RUNS.length > 1 ? el("ul", {}, held.map((rule) => el("li", {}, `${rule.run.name}: `, el("span.soft", {}, when(rule))))) : null;
    findings.push(el(`div.box.finding${held.some(isNow) ? ".now" : ""}`, {},
      el("b", {}, title), RUNS.length > 1 ? null : el("span.small.soft", {}, `  ${when(held[0])}`),
      el("p", {}, held[0].meaning), el("p", {}, held[0].remedy, held[0].page ? el("span.soft", {}, ` (${held[0].page})`) : null), runs));
  }
  return section("Health", findings.length ? null : el("p.good", {}, "No rule has found anything unhealthy."), findings, chips.length ? el("div.chips", {}, chips) : null);
}

/** Keys in which runs differ: [key, value in each run]. */
function differingKeys() {
  const keys = [...new Set(RUNS.flatMap((run) => run.differences.map(([key]) => key)))];
  const value = (run, key) => {
    const own = run.differences.find((row) => row[0] === key);
    return own ? own[1] : RUNS.flatMap((one) => one.differences).find((row) => row[0] === key)[2];
  };
  return keys.filter((key) => key !== "trainer.output_dir").map((key) => [key, ...RUNS.map((run) => value(run, key))]).filter(([, ...values]) => new Set(values).size > 1);
}

function differencesSection() {
  const rows = differingKeys();
  return section("Differences", el("div.box", {}, rows.length ? table(["key", ...RUNS.map((run) => run.name)], rows) : el("p.soft", {}, "The configs are the same.")));
}

/** The last values of runs that differ by their seed alone: mean and standard deviation. */
function seedsTable() {
  const groups = groupsOfRuns(true);
  if (groups.length === RUNS.length) return null;
  const metrics = new Map(RUNS.flatMap(results).map(([title, metric]) => [metric, title]));
  const cell = (runs, metric) => {
    const ends = runs.map((run) => run.ends[metric]?.at(-1)).filter(Boolean);
    if (!ends.length) return null;
    const values = ends.map(([, value]) => value);
    const centre = mean(values);
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (values.length - 1));
    const count = values.length < runs.length ? `, ${values.length} of ${runs.length} runs` : "";
    return el("span", {}, el("b", {}, score(centre)), values.length > 1 ? ` ± ${score(deviation)} ` : " ", el("span.small.soft", {}, `${stepsName(ends.map(([step]) => step))}${count}`));
  };
  const rows = groups.map((runs) => [groupName(runs), String(runs.length), ...[...metrics.keys()].map((metric) => cell(runs, metric))]);
  return el("div.box", {}, el("h3", {}, "Runs that differ by their seed alone: mean and standard deviation of the last values"), table(["", "runs", ...metrics.values()], rows));
}

/** Values of the critic beside the returns, by tenth of the range of the values, and by turn of episodes: of the rollouts, and of held-out ones. */
function calibrationSection() {
  const tables = [];
  for (const run of RUNS) {
    const heldOut = matches(run, "*", "val/*/critic/vf_tenth/0/predicted").map(([name]) => [name, `val/${name}/`]);
    for (const [name, prefix] of [["rollouts", ""], ...heldOut]) {
      for (const [kind, first] of [["tenth", 0], ["turn", 1]]) {
        const last = (part, of) => run.ends[`${prefix}critic/vf_${kind}/${part}/${of}`]?.at(-1);
        const parts = [...Array(10).keys()].filter((part) => last(part, "predicted"));
        if (!parts.length) continue;
        const newest = Math.max(...parts.map((part) => last(part, "predicted")[0]));
        const columns = { predicted: "predicted", observed: "observed" };
        if (parts.some((part) => last(part, "vf_explained_var")?.[0] === newest)) columns.vf_explained_var = "explained variance";
        const cell = (part, of) => (last(part, of)?.[0] === newest ? score(last(part, of)[1]) : "-");
        const rows = parts.filter((part) => last(part, "predicted")[0] === newest).map((part) => [String(part + 1 - first), ...Object.keys(columns).map((of) => cell(part, of))]);
        const title = `${RUNS.length > 1 ? `${run.name}, ` : ""}${name}, step ${whole(newest)}`;
        tables.push(el("div.box", {}, el("h3", {}, title), table([kind, ...Object.values(columns)], rows)));
      }
    }
  }
  if (!tables.length) return null;
  return section("Calibration of values", el("p.soft", {}, "Mean value and mean return of the tokens, by tenth of the range of the values, and by turn of episodes (turn 8: and later); equal if calibrated."), tables);
}

function configSection() {
  const [run] = RUNS;
  const parts = [];
  if (run.differences.length) parts.push(el("h3", {}, "Differences from the defaults"), table(["key", "value", "default"], run.differences));
  const facts = Object.entries({ "run id": run.run_id, commit: run.commit, ...run.placement, ...run.hardware }).filter(([, value]) => value);
  if (facts.length) parts.push(el("details", {}, el("summary", {}, "Hardware, versions and placement"), table(["", ""], facts)));
  return section("Config", el("div.box", {}, parts));
}

/** While a run trains: how old the page is, and a reload every so often, unless someone is at work on the page. */
function reloadControl() {
  if (!RUNS.some((run) => run.status === "running")) return null;
  const kept = (key) => { try { return sessionStorage.getItem(key); } catch { return null; } };
  const keep = (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a browser without storage */ } };
  let touched = -Infinity;
  for (const kind of ["pointerdown", "keydown", "wheel", "touchmove"]) addEventListener(kind, () => { touched = performance.now(); }, { passive: true });
  const box = el("input", { type: "checkbox", checked: kept("reload") !== "off", change: () => keep("reload", box.checked ? "on" : "off") });
  const age = el("span.soft.small");
  const show = () => {
    const minutes = Math.floor((Date.now() / 1000 - DATA.written) / 60);
    const isOld = minutes >= 10 && minutes * 60 > 3 * Math.max(...RUNS.map((run) => run.seconds / (numTimed(run) || 1)));
    age.textContent = minutes < 1 ? "" : `${minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h`} ago${isOld ? "; the run may have been killed" : ""}`;
  };
  show();
  setInterval(show, 10_000);
  setInterval(() => {
    const isAtWork = performance.now() - touched < 60_000 || document.hidden;
    if (box.checked && !isAtWork) location.reload();
  }, 1000 * DATA.reload);
  return [age, el("label.small.soft.reload", {}, box, `reload every ${DATA.reload} s`), el("button.small.reload", { type: "button", click: () => location.reload() }, "Reload")];
}

function build() {
  const [first] = RUNS;
  const status = RUNS.length === 1 && first.status ? el(`span.pill.${TONES[first.status] ?? "soft"}`, {}, first.status) : null;
  const top = el("header.top", {}, el("h1", {}, DATA.title), status, el("span.soft.small", {}, `written ${new Date(1000 * DATA.written).toLocaleString("sv").slice(0, 16)}`), reloadControl() ?? []);
  const isOne = RUNS.length === 1;
  const before = isOne ? [] : [differencesSection(), section("Results", seedsTable(), overview())];
  const sections = [...before, healthSection(), STEPS.length ? chartSections() : null, calibrationSection(), timeSection(), samplesSection(), STEPS.length ? allMetrics() : null, isOne ? configSection() : null].filter(Boolean);
  const message = RUNS.length === 1 && first.message ? el("p.box.finding.now", {}, first.message) : null;
  const links = sections.map((one) => el("a", { href: `#${one.id}` }, one.getAttribute("aria-label")));
  const footer = el("footer", {}, "Written by megappo. The charts are drawn by uPlot (MIT licence).");
  document.getElementById("page").append(...[top, el("nav", { "aria-label": "Sections" }, links), message, isOne ? cards(first) : null, ...sections, footer].filter(Boolean));
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
