"use strict";
// Shared by all parts of the page: elements, numbers as text, colours, and what is selected.
const alpa = {};

// Returns an element. Children are elements or texts; texts are never read as HTML.
alpa.el = function (tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};

// Control characters are drawn as escapes, so that no name hides anything.
alpa.text = function (value) {
  return String(value).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (character) => "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0"));
};

function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

alpa.seconds = function (value) {
  if (value === null || value === undefined) return "not known";
  if (value === 0) return "0 s";
  if (value >= 119.5) {
    const whole = Math.round(value);
    return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  for (const [factor, unit] of [[1, "s"], [1e3, "ms"]]) {
    if (Math.abs(value) * factor >= 0.9995) return `${threeDigits(value * factor)} ${unit}`;
  }
  return `${threeDigits(value * 1e6)} µs`;
};

alpa.bytes = function (value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let index = 0;
  while (value >= 999.5 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${index ? threeDigits(value) : value.toFixed(0)} ${units[index]}`;
};

alpa.count = function (value) {
  for (const [factor, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) {
    if (value >= factor) return `${threeDigits(value / factor)} ${unit}`;
  }
  return value >= 1e4 ? `${threeDigits(value / 1e3)} k` : String(Math.round(value));
};

alpa.percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
// The bytes at the peak, of the limit if there is one, as the terminal has them.
alpa.peakText = (peak, limit) => `peak ${alpa.bytes(peak)}` + (limit ? ` of ${alpa.bytes(limit)} (${alpa.percent(peak / limit)}), ${alpa.bytes(Math.abs(limit - peak))} ${limit < peak ? "too much" : "left"}` : "");
alpa.shape = (dims) => (dims.length ? dims.join(" × ") : "scalar");
alpa.elements = (dims) => dims.reduce((product, size) => product * size, 1);
alpa.sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

alpa.color = function (name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
};

alpa.PARTS = {
  compute: "forward", communication: "message", optimizer: "update", host: "temporary", waiting: "waiting",
};
alpa.ACTIONS = {
  F: ["forward", "forward"],
  B: ["backward", "backward"],
  I: ["backward", "backward to the inputs"],
  W: ["gradients", "backward to the weights"],
  U: ["update", "once per step: gradients and update"],
};
// The parts of a device's memory, as the terminal names them.
alpa.MEMORY = [
  ["weights", "weights"],
  ["gradients", "gradients"],
  ["state", "state"],
  ["activations", "activations"],
  ["temporary", "temporary"],
];

// Hues of groups of equal stages. Their numbers are drawn too: colour alone tells nothing.
const GROUP_COLORS = ["#0072b2", "#b45309", "#00785a", "#8e3d73", "#5b5fc7", "#7a6a00", "#a3362b", "#3b6978"];
alpa.groupColor = (index) => GROUP_COLORS[index % GROUP_COLORS.length];

alpa.groupOf = (plan, stage) => plan.groups.findIndex((members) => members.includes(stage));

alpa.stageName = function (plan, stage) {
  const layers = plan.stages[stage].layers;
  return plan.stages.length === 1 ? "Model" : `Stage ${stage}` + (layers ? `, ${alpa.text(layers)}` : "");
};

alpa.ranges = function (numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([low, high]) => (low === high ? `${low}` : `${low}–${high}`)).join(", ");
};

alpa.swatch = (color) => alpa.el("span", { class: "swatch", style: `background:${color}`, "aria-hidden": "true" });
alpa.legend = function (entries) {
  return alpa.el("ul", { class: "legend" },
    entries.map(([color, ...texts]) => alpa.el("li", {}, alpa.swatch(color), alpa.el("span", {}, ...texts))));
};

// A table. Columns are texts; one that begins with `#` is of numbers.
alpa.table = function (columns, rows) {
  const cell = (tag, content, column) => alpa.el(tag, { class: column.startsWith("#") ? "n" : null }, content);
  return alpa.el("div", { class: "wide" }, alpa.el("table", {},
    alpa.el("thead", {}, alpa.el("tr", {}, columns.map((name) => cell("th", name.replace("#", ""), name)))),
    alpa.el("tbody", {}, rows.map((row) =>
      alpa.el("tr", {}, row.map((content, index) => cell("td", content, columns[index])))))));
};

alpa.facts = function (pairs) {
  const shown = pairs.filter((pair) => pair && pair[1] !== null && pair[1] !== undefined && pair[1] !== "");
  return alpa.el("dl", { class: "facts" },
    shown.flatMap(([name, ...values]) => [alpa.el("dt", {}, name), alpa.el("dd", {}, ...values)]));
};

// A stacked bar with a legend below. Parts are [colour name, label, number].
alpa.stack = function (parts, format, total) {
  const shown = parts.filter((part) => part[2] > 0);
  const whole = total || alpa.sum(shown.map((part) => part[2]));
  const bar = alpa.el("div", { class: "bar", "aria-hidden": "true" }, shown.map(([color, , number]) =>
    alpa.el("span", { style: `width:${(100 * number) / whole}%;background:var(--${color})` })));
  return [bar, alpa.legend(shown.map(([color, label, number]) =>
    [`var(--${color})`, `${label} `, alpa.el("strong", {}, format(number))]))];
};

// Returns the memory of the devices that have a stage: {stages, peak, part -> bytes}.
alpa.memoryOf = (plan, stage) => plan.memory.find((of) => of.stages.includes(stage));

alpa.memoryParts = (parts) => alpa.MEMORY.map(([key, label]) => [key, label, parts[key] || 0]);

alpa.tip = function (event, lines) {
  const tip = document.getElementById("tip");
  if (!lines) {
    tip.hidden = true;
    return;
  }
  tip.replaceChildren(...lines.map((line) => alpa.el("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - box.height - 8))}px`;
};

// What is selected: {kind: "parameter" | "op" | "device" | "stage" | "action", ...}. Parts listen.
alpa.listeners = [];
alpa.select = function (selection) {
  alpa.selection = selection;
  for (const listener of alpa.listeners) listener(selection);
};
