// The sample browser: responses, filtered; the same prompt at other steps; tokens in colours.

const SAMPLES = RUNS.flatMap((run, number) => run.samples.map((sample) => ({ ...sample, run: number }))).sort((a, b) => b.step - a.step);
const COLOURINGS = {
  none: "nothing",
  advantages: "advantage",
  values: "value",
  returns: "return",
  ratio: "ratio to the reference",
  diff: "difference from the engine",
  old_log_probs: "log-prob",
  staleness: "staleness",
};
const state = { set: "", step: "", run: "", pass: "", text: "", colouring: "none", chosen: null };

const isRight = (sample) => sample.passed ?? (sample.score == null ? null : sample.score > 0);
const mark = (sample) => {
  const right = isRight(sample);
  return right == null ? el("span", {}, "·") : el(`span.${right ? "good" : "bad"}`, { title: right ? "right" : "wrong" }, right ? "✓" : "✗");
};
const oneLine = (text) => String(text ?? "").replace(/\s+/g, " ").slice(0, 200);
/** The end of a prompt, as the beginnings are often alike. */
const promptEnd = (sample) => String(sample.prompt ?? "").replace(/\s+/g, " ").slice(-60) || "(empty prompt)";
const setName = (sample) => sample.dataset ?? "training";
const promptKey = (sample) => `${setName(sample)}\n${sample.prompt}`;

/** Numbers of each token to colour it by, or undefined. */
function numbersOf(sample, kind) {
  const differences = (a, b, map) => a && b && a.map((value, i) => (value == null || b[i] == null ? null : map(value - b[i])));
  const old = sample.old_log_probs ?? sample.rollout_log_probs;  // a run may leave out the pass for the former
  if (kind === "ratio") return differences(old, sample.ref_log_probs, Math.exp);
  if (kind === "old_log_probs") return old;
  if (kind === "diff") return differences(sample.old_log_probs, sample.rollout_log_probs, (value) => value);
  return sample[kind] ?? undefined;
}

function selected() {
  const words = state.text.toLowerCase();
  return SAMPLES.filter((sample) => {
    if (state.set && setName(sample) !== state.set) return false;
    if (state.step && String(sample.step) !== state.step) return false;
    if (state.run && String(sample.run) !== state.run) return false;
    if (state.pass && String(isRight(sample)) !== state.pass) return false;
    return !words || `${sample.prompt}\n${sample.response}\n${sample.label ?? ""}`.toLowerCase().includes(words);
  });
}

function tokenSpans(sample, info) {
  const numbers = numbersOf(sample, state.colouring);
  const known = (numbers ?? []).filter((value) => value != null);
  const centre = state.colouring === "ratio" ? 1 : 0;
  const most = Math.max(...known.map((value) => Math.abs(value - centre)), 1e-9);
  const spans = sample.texts.map((text, i) => {
    const written = sample.response_mask?.[i] !== 0;
    const span = el(`span.token${written ? "" : ".masked"}`, {}, text.replace(/\n/g, "↵\n"));
    const value = numbers?.[i];
    if (value != null && written) {
      const share = Math.round((70 * Math.abs(value - centre)) / most);
      span.style.backgroundColor = `color-mix(in srgb, var(${value < centre ? "--bad" : "--good"}) ${share}%, transparent)`;
    }
    span.addEventListener("mouseenter", () => point(i));
    return span;
  });
  let at = -1;
  const point = (index) => {
    spans[at]?.classList.remove("current");
    at = Math.max(0, Math.min(spans.length - 1, index));
    spans[at].classList.add("current");
    const parts = Object.entries(COLOURINGS).filter(([kind]) => numbersOf(sample, kind)).map(([kind, label]) => `${label} ${format(numbersOf(sample, kind)[at])}`);
    info.textContent = `token ${at + 1} of ${spans.length} ${JSON.stringify(sample.texts[at])}: ${parts.join(" · ")}`;
  };
  const press = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    point(at + move);
  };
  const scale = numbers ? el("span.small.soft", {}, format(centre - most), gradient(), format(centre + most)) : null;
  return [scale, el("pre", { tabindex: 0, "aria-label": "Tokens of the response", keydown: press }, spans)];
}

function gradient() {
  const scale = el("span.scale");
  scale.style.background = "linear-gradient(90deg, color-mix(in srgb, var(--bad) 70%, transparent), transparent, color-mix(in srgb, var(--good) 70%, transparent))";
  return scale;
}

function detail(sample, choose) {
  const info = el("p.small.soft", { "aria-live": "polite" }, "\u00a0");
  const facts = [`step ${sample.step}`, setName(sample), sample.score == null ? null : `score ${format(sample.score)}`, sample.finish_reason ? `ended by ${sample.finish_reason}` : null, sample.texts ? `${sample.texts.length} tokens` : null];
  if (RUNS.length > 1) facts.unshift(RUNS[sample.run].name);
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => `${name} ${format(value)}`);
  const same = SAMPLES.filter((one) => promptKey(one) === promptKey(sample)).sort((a, b) => a.step - b.step);
  const more = ["scores", "answers"].filter((name) => sample[name]);
  const others = same.map((one) =>
    el("button.other", { type: "button", "aria-current": String(one === sample), click: () => choose(one) }, mark(one), el("span", {}, `${RUNS.length > 1 ? RUNS[one.run].name + " " : ""}step ${one.step}`), el("span", {}, format(one.score)), el("span", {}, oneLine(one.response))),
  );
  return [
    el("div", {}, mark(sample), " ", facts.concat(parts).filter(Boolean).join(" · ")),
    el("h3", {}, "Prompt"), el("pre", {}, sample.prompt),
    el("h3", {}, "Response"), ...(sample.texts ? [...tokenSpans(sample, info).filter(Boolean), info] : [el("pre", {}, sample.response)]),
    ...(sample.label == null ? [] : [el("h3", {}, "Label"), el("pre", {}, sample.label)]),
    ...more.flatMap((name) => [el("h3", {}, name === "scores" ? "Scores of all responses" : "Answers of all responses"), el("pre", {}, JSON.stringify(sample[name]))]),
    ...(same.length > 1 ? [el("h3", {}, `The same prompt: ${same.length} responses`), el("div", {}, others)] : []),
  ];
}

function samplesSection() {
  if (!SAMPLES.length) return null;
  const list = el("div.box.list", { role: "listbox", tabindex: 0, "aria-label": "Responses" });
  const view = el("div.box.detail");
  const count = el("span");
  const choose = (sample) => {
    state.chosen = sample;
    for (const item of list.children) item.setAttribute("aria-selected", String(item.sample === sample));
    view.replaceChildren(...(sample ? detail(sample, choose) : ["No response fits the filter."]));
  };
  const refresh = () => {
    const found = selected();
    count.textContent = `${found.length} of ${SAMPLES.length}`;
    const items = found.slice(0, 300).map((sample) => {
      const where = `${RUNS.length > 1 ? `${RUNS[sample.run].name} · ` : ""}${sample.step}`;
      const item = el("button.item", { type: "button", role: "option", tabindex: -1, click: () => choose(sample) }, mark(sample), el("span", {}, promptEnd(sample), " ", el("span.soft", {}, oneLine(sample.response))), el("span.small.soft", { title: "step" }, where));
      item.sample = sample;
      return item;
    });
    list.replaceChildren(...items);
    choose(found.includes(state.chosen) ? state.chosen : found[0]);
    return found;
  };
  const move = (by) => {
    const items = [...list.children];
    const at = items.findIndex((item) => item.sample === state.chosen);
    const next = items[Math.max(0, Math.min(items.length - 1, at + by))];
    if (!next) return;
    choose(next.sample);
    next.scrollIntoView({ block: "nearest" });
  };
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    move(by);
  });
  const set = (key) => (value) => { state[key] = value; refresh(); };
  const values = (pick) => [...new Set(SAMPLES.map(pick))];
  const sets = values(setName).map((name) => [name, name]);
  const steps = values((sample) => sample.step).sort((a, b) => b - a).map((step) => [String(step), `step ${step}`]);
  const kinds = Object.entries(COLOURINGS).filter(([kind]) => kind === "none" || SAMPLES.some((sample) => numbersOf(sample, kind)));
  if (kinds.length > 1) state.colouring = kinds[1][0];
  const passes = [["", "all"], ["true", "right"], ["false", "wrong"]].map(([value, text]) => {
    const press = (event) => {
      for (const button of event.currentTarget.parentElement.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      set("pass")(value);
    };
    return el("button", { type: "button", "aria-pressed": String(value === ""), click: press }, text);
  });
  const search = el("input", { type: "search", id: "search", placeholder: "search prompts and responses  ( / )", "aria-label": "Search responses", input: (event) => set("text")(event.target.value) });
  const controls = [search, el("span.segments", { role: "group", "aria-label": "Right or wrong" }, passes)];
  if (sets.length > 1) controls.push(select("Prompts", [["", "all"], ...sets], set("set"), ""));
  if (steps.length > 1) controls.push(select("Step", [["", "all"], ...steps], set("step"), ""));
  if (RUNS.length > 1) controls.push(select("Run", [["", "all"], ...RUNS.map((run, i) => [String(i), run.name])], set("run"), ""));
  if (kinds.length > 1) controls.push(select("Colour tokens by", kinds, set("colouring"), state.colouring));
  const first = refresh().find((sample) => sample.texts);
  if (first) choose(first);
  return section("Responses", el("div.controls", {}, controls, count), el("div.browser", {}, list, view));
}
