"use strict";
// Elements are built from text nodes alone, so nothing that a run contains is ever parsed as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const PALETTE = 8; // colours --c0 to --c7 of page.css

/** An element: el("p.note", {title: "..."}, "text", child). Attributes that are functions are event listeners. */
function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null));
  return element;
}

function section(title, ...content) {
  const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
  return el("section", { id, "aria-label": title }, el("h2", {}, title), ...content.flat().filter(Boolean));
}

function table(headings, rows) {
  const head = el("thead", {}, el("tr", {}, headings.map((text) => el("th", { scope: "col" }, text))));
  const cells = (row) => row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell ?? "–"));
  return el("div.scroll", { tabindex: 0 }, el("table", {}, head, el("tbody", {}, rows.map((row) => el("tr", {}, cells(row))))));
}

function select(label, options, onChange, value) {
  const items = options.map(([key, text]) => el("option", { value: key, selected: key === value }, text));
  return el("label", {}, label, el("select", { change: (event) => onChange(event.target.value) }, items));
}

const whole = (value) => value.toLocaleString("en");

/** A score in at most 4 digits, as the console has it. */
function score(value) {
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(Number(value.toPrecision(4)));
  if (size >= 1e4 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return value.toFixed(size < 10 ? 3 : size < 100 ? 2 : size < 1000 ? 1 : 0);
}

/** A number in at most 4 significant digits. */
function format(value) {
  if (value == null) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return whole(Math.round(value));
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value >= 1) return `${format(value)} s`;
  return `${format(1000 * value)} ms`;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const colour = (index) => `var(--c${index % PALETTE})`;
/** A colour of page.css as the canvas takes it. */
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
