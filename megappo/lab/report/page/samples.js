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
const ORDERS = { newest: "newest first", lowest: "lowest score first", highest: "highest score first" };
const state = { set: "", step: "", run: "", pass: "", text: "", colouring: "none", order: "newest", low: "", high: "", chosen: null };

/** A tick or a cross; nothing where the scores of a data set are more than right or wrong. */
const mark = ({ passed }) => {
  if (passed == null) return el("span", {});
  return el(`span.${passed ? "good" : "bad"}`, { title: passed ? "right" : "wrong" }, passed ? "✓" : "✗");
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

/**
 * [turn, text, reward, first token, end, fields] of each turn of an episode; turn 0 is the environment's or agent's.
 * None of a response. The tokens are in one segment: other turns have none.
 */
function turnsOf(sample) {
  const turns = (sample.turns ?? []).map((fields) => [fields.turn, fields.text, fields.reward, 0, 0, fields]);
  if (!turns.length || !sample.texts) return turns;
  const response = sample.texts.join("");
  const fits = (i) => response && turns.slice(i).map(([, text]) => text).join("").startsWith(response.slice(0, 2000));
  const own = turns.findIndex(([, text, , , , { begins }], i) => begins && text === sample.prompt && fits(i + 1));
  const begin = own < 0 ? turns.findIndex((turn, i) => fits(i)) : own + 1;
  let [at, missing] = [0, 0];
  for (const turn of begin < 0 ? [] : turns.slice(begin)) {
    turn[3] = at;
    for (missing += turn[1].length; missing > 0 && at < sample.texts.length; at += 1) missing -= sample.texts[at].length;
    turn[4] = at;
  }
  return turns;
}

/** A response on one line; of an episode, arrows say who writes: \u2192 the policy, \u2190 the environment. */
function brief(sample) {
  const turns = turnsOf(sample);
  if (!turns.length) return oneLine(sample.response);
  const own = turns.filter(([, , , , , { begins }]) => !begins);  // the prompt of another segment repeats turns
  return oneLine(own.map(([turn, text]) => `${turn ? "\u2192" : "\u2190"} ${text}`).join(" "));
}

function selected() {
  const words = state.text.toLowerCase();
  const [low, high] = [state.low === "" ? -Infinity : Number(state.low), state.high === "" ? Infinity : Number(state.high)];
  const found = SAMPLES.filter((sample) => {
    if (state.set && setName(sample) !== state.set) return false;
    if (state.step && String(sample.step) !== state.step) return false;
    if (state.run && String(sample.run) !== state.run) return false;
    if (state.pass && String(sample.passed) !== state.pass) return false;
    if ((low > -Infinity || high < Infinity) && !(sample.score >= low && sample.score <= high)) return false;
    return !words || `${sample.prompt}\n${sample.response}\n${sample.label ?? ""}`.toLowerCase().includes(words);
  });
  const sign = { lowest: 1, highest: -1 }[state.order];
  return sign ? found.sort((a, b) => sign * ((a.score ?? Infinity) - (b.score ?? Infinity))) : found;
}

const CALL = /<tool_call>[^]*?(?:<\/tool_call>|$)|<function=[^]*?(?:<\/function>|$)|\[TOOL_CALLS\][^]*|<\|python_tag\|>[^]*|<｜tool▁calls?▁begin｜>[^]*?(?:<｜tool▁calls?▁end｜>|$)/gu;

/** [from, to] of the tool calls in a text. */
const callsIn = (text) => [...text.matchAll(CALL)].map((match) => [match.index, match.index + match[0].length]);

/** A text with its tool calls marked. */
function withCalls(text) {
  const parts = [];
  let at = 0;
  for (const [from, to] of callsIn(text)) {
    parts.push(text.slice(at, from), el("span.call", {}, text.slice(from, to)));
    at = to;
  }
  return [...parts, text.slice(at)];
}

/** A turn of an episode: who wrote it, the reward that it got, and its text. Branches are indented; the prompt with which another segment begins is folded, as it mostly repeats turns. */
function turnBox([turn, text, reward, , , { begins, follows, depth }], content) {
  const writer = begins ? `${begins} after turn ${follows}` : "environment";
  const isRewarded = reward !== 0 && reward != null;
  const shown = content ?? el("pre", {}, turn ? withCalls(text) : text);
  const head = el("span.small.soft", {}, turn ? `policy, turn ${turn}` : writer, isRewarded ? [" · ", el(`b.${reward > 0 ? "good" : "bad"}`, {}, `reward ${format(reward)}`)] : null);
  const box = el(`div.turn.${turn ? "policy" : "environment"}${begins ? ".begins" : ""}`, {}, begins ? el("details", {}, el("summary", {}, head), shown) : [head, shown]);
  if (depth) box.style.marginLeft = `${1.5 * depth}rem`;
  return box;
}

/** The colours of a response's texts, in words. */
function turnLegend(sample) {
  const turns = turnsOf(sample);
  const hasCalls = turns.some(([turn, text]) => turn && callsIn(text).length) || (!turns.length && callsIn(String(sample.response ?? "")).length);
  const kinds = [];
  if (turns.length) kinds.push(["policy", "policy"], ["environment", `${turns.some(([, , , , , { begins }]) => begins) ? "environment or agent" : "environment"} (not trained)`]);
  else if (sample.response_mask?.includes(0)) kinds.push(["masked", "not trained"]);
  if (hasCalls) kinds.push(["call", "tool call"]);
  const items = kinds.map(([kind, text]) => el("span.soft", {}, el(`span.swatch.of-${kind}`), text));
  return items.length ? el("div.legend", {}, items) : null;
}

function tokenSpans(sample, info) {
  const numbers = numbersOf(sample, state.colouring);
  const known = (numbers ?? []).filter(Number.isFinite);
  const centre = state.colouring === "ratio" ? 1 : 0;
  const most = Math.max(...known.map((value) => Math.abs(value - centre)), 1e-9);
  const calls = new Set();
  let start = 0;
  const starts = sample.texts.map((text) => { const own = start; start += text.length; return own; });
  for (const [from, to] of callsIn(sample.texts.join(""))) starts.forEach((own, i) => own >= from && own < to && sample.response_mask?.[i] !== 0 && calls.add(i));
  const spans = sample.texts.map((text, i) => {
    const written = sample.response_mask?.[i] !== 0;
    const span = el(`span.token${written ? "" : ".masked"}${calls.has(i) ? ".call" : ""}`, {}, text.replace(/\n/g, "↵\n"));
    const value = numbers?.[i];
    if (Number.isFinite(value) && written) {
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
  const turns = turnsOf(sample);
  const shown = turns.some((turn) => turn[4]) ? turns.map((turn) => turnBox(turn, turn[4] > turn[3] ? el("pre", {}, spans.slice(turn[3], turn[4])) : null)) : el("pre", {}, spans);
  return [scale, el("div.tokens", { tabindex: 0, "aria-label": "Tokens of the response", keydown: press }, shown)];
}

function gradient() {
  const scale = el("span.scale");
  scale.style.background = "linear-gradient(90deg, color-mix(in srgb, var(--bad) 70%, transparent), transparent, color-mix(in srgb, var(--good) 70%, transparent))";
  return scale;
}

function responseParts(sample, info) {
  const turns = turnsOf(sample);
  const title = el("h3", {}, turns.length ? "Episode" : "Response");
  if (sample.texts) return [title, turnLegend(sample), ...tokenSpans(sample, info), info];
  return [title, turnLegend(sample), turns.length ? el("div.tokens", {}, turns.map((turn) => turnBox(turn))) : el("pre", {}, withCalls(String(sample.response ?? "")))];
}

function detail(sample, choose) {
  const info = el("p.small.soft", { "aria-live": "polite" }, "\u00a0");
  const facts = [`step ${sample.step}`, setName(sample), sample.score == null ? null : `score ${score(sample.score)}`, sample.finish_reason ? `ended by ${sample.finish_reason}` : null, sample.texts ? `${sample.texts.length} tokens` : null];
  if (RUNS.length > 1) facts.unshift(RUNS[sample.run].name);
  const parts = Object.entries(sample.parts ?? {}).map(([name, value]) => `${name} ${format(value)}`);
  const same = SAMPLES.filter((one) => promptKey(one) === promptKey(sample)).sort((a, b) => a.step - b.step);
  const more = ["scores", "answers"].filter((name) => sample[name]);
  const others = same.map((one) =>
    el("button.other", { type: "button", "aria-current": String(one === sample), click: () => choose(one) }, mark(one), el("span", {}, `${RUNS.length > 1 ? RUNS[one.run].name + " " : ""}step ${one.step}`), el("span", {}, score(one.score)), el("span", {}, brief(one))),
  );
  return [
    el("div", {}, mark(sample), " ", facts.concat(parts).filter(Boolean).join(" · ")),
    el("h3", {}, "Prompt"), ...(sample.images ?? []).map((src) => el("img", { src, alt: "an image of the prompt" })), el("pre", {}, sample.prompt),
    ...responseParts(sample, info),
    ...(sample.label == null ? [] : [el("h3", {}, "Label"), el("pre", {}, sample.label)]),
    ...more.flatMap((name) => [el("h3", {}, name === "scores" ? "Scores of all responses" : "Answers of all responses"), el("pre", {}, JSON.stringify(sample[name]))]),
    ...(same.length > 1 ? [el("h3", {}, `The same prompt: ${same.length} responses`), el("div", {}, others)] : []),
  ].filter(Boolean);
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
    count.textContent = `${found.length} of ${SAMPLES.length}${found.length > 300 ? ", the first 300 shown" : ""}`;
    const items = found.slice(0, 300).map((sample) => {
      const where = `${RUNS.length > 1 ? `${RUNS[sample.run].name} · ` : ""}step ${sample.step}`;
      const item = el("button.item", { type: "button", role: "option", tabindex: -1, click: () => choose(sample) }, mark(sample), el("span", {}, promptEnd(sample), " ", el("span.soft", {}, brief(sample))), el("span.small.score", { title: "score" }, sample.score == null ? "" : score(sample.score)), el("span.small.soft", {}, where));
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
  const scores = SAMPLES.map((sample) => sample.score).filter(Number.isFinite);
  const limit = (key, text, end) => el("input", { type: "number", step: "any", placeholder: scores.length ? score(end(...scores)) : "", "aria-label": text, input: (event) => set(key)(event.target.value) });
  const controls = [search];
  if (SAMPLES.some((sample) => sample.passed != null)) controls.push(el("span.segments", { role: "group", "aria-label": "Right or wrong" }, passes));
  if (new Set(scores).size > 1) {
    controls.push(el("label", {}, "Score from", limit("low", "Lowest score", Math.min), "to", limit("high", "Highest score", Math.max)));
    controls.push(select("Order", Object.entries(ORDERS), set("order"), state.order));
  }
  if (sets.length > 1) controls.push(select("Prompts", [["", "all"], ...sets], set("set"), ""));
  if (steps.length > 1) controls.push(select("Step", [["", "all"], ...steps], set("step"), ""));
  if (RUNS.length > 1) controls.push(select("Run", [["", "all"], ...RUNS.map((run, i) => [String(i), run.name])], set("run"), ""));
  if (kinds.length > 1) controls.push(select("Colour tokens by", kinds, set("colouring"), state.colouring));
  const first = refresh().find((sample) => sample.texts);
  if (first) choose(first);
  return section("Responses", el("div.controls", {}, controls, count), el("div.browser", {}, list, view));
}
