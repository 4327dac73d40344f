"use strict";
// Two plans side by side: their figures, and the parameters that they store differently.
(function () {
  const { el } = alpa;

  function change(before, after, format) {
    if (before === null || after === null || before === undefined || after === undefined || before === 0) return "";
    const ratio = after / before;
    if (Math.abs(ratio - 1) < 5e-4) return "the same";
    const less = ratio < 1;
    return el("span", { class: less ? "better" : "worse" }, `${less ? "▼" : "▲"} ${format(Math.abs(after - before))}, ${(100 * Math.abs(ratio - 1)).toFixed(1)} % ${less ? "less" : "more"}`);
  }

  function figures(a, b) {
    const part = (plan, name) => (plan.parts.find((entry) => entry[0] === name) || [name, 0])[1];
    const rows = [["step", a.step, b.step, alpa.seconds]];
    for (const name of ["compute", "communication", "optimizer", "host", "waiting"]) {
      if (part(a, name) || part(b, name)) rows.push([`  ${name}`, part(a, name), part(b, name), alpa.seconds]);
    }
    rows.push(["memory per device", a.peak, b.peak, alpa.bytes]);
    const plain = [["devices", String(a.devices), String(b.devices)], ["stages", String(a.stages.length), String(b.stages.length)],
      ["micro-batches", String(a.microbatches), String(b.microbatches)], ["schedule", a.schedule, b.schedule],
      ["meshes", meshes(a), meshes(b)], ["planned for", a.task, b.task], ["proof", a.proof, b.proof]];
    return alpa.table(["", `A: ${alpa.text(a.name)}`, `B: ${alpa.text(b.name)}`, "B against A"], [
      ...rows.map(([name, left, right, format]) => [name, format(left), format(right), change(left, right, format)]),
      ...plain.map(([name, left, right]) => [name, alpa.text(left), alpa.text(right), left === right ? "" : "differs"])]);
  }

  const meshes = (plan) => [...new Set(plan.stages.map((stage) => stage.mesh.join(" × ")))].join("; ");

  function layouts(plan) {
    const found = new Map();
    plan.stages.forEach((stage) => stage.parameters.forEach((of) => found.set(of.name, [`${of.modes}${of.host ? " on host" : ""}`, stage.mesh.join(" × "), stage.index])));
    return found;
  }

  function parameters(a, b) {
    const left = layouts(a);
    const right = layouts(b);
    const groups = new Map();
    for (const name of new Set([...left.keys(), ...right.keys()])) {
      const one = left.get(name);
      const other = right.get(name);
      if (one && other && one[0] === other[0] && one[1] === other[1]) continue;
      const shown = name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
      const key = JSON.stringify([shown, one && one.slice(0, 2), other && other.slice(0, 2)]);
      groups.set(key, [...(groups.get(key) || []), name]);
    }
    if (!groups.size) return el("p", {}, "Both store every parameter alike.");
    const cell = (value) => (value ? el("span", {}, el("span", { class: "badge" }, value[0]), ` on ${value[1]}`) : "not there");
    const rows = [...groups].map(([key, names]) => {
      const [shown, one, other] = JSON.parse(key);
      return [el("span", { class: "mono" }, alpa.text(names.length > 1 ? shown : names[0])), names.length > 1 ? `× ${names.length}` : "", cell(one), cell(other)];
    });
    return alpa.table(["parameters stored differently", "#", "A", "B"], rows);
  }

  alpa.compare = function (a, b) {
    const shared = { total: Math.max(...[a, b].map((plan) => (alpa.stepOf(plan) || { end: 0 }).end)), moved: () => {} };
    const lanes = [a, b].map((plan, index) => {
      const node = alpa.timeline(plan, shared);
      if (node) node.querySelector("h2").textContent = `${"AB"[index]}: the step over time, on one scale`;
      return node;
    });
    return el("div", { id: "compare" },
      el("section", { class: "card", "aria-label": "differences" }, el("div", { class: "section-head" }, el("h2", {}, "What differs")), figures(a, b)),
      el("section", { class: "card", "aria-label": "parameters" }, parameters(a, b)), ...lanes.filter(Boolean));
  };
})();
