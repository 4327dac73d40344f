"use strict";
// The devices of the job, node by node, coloured by group of equal stages.
(function () {
  const { el } = alpa;

  alpa.meshPanel = function (plan) {
    const stagesOf = new Map();
    plan.stages.forEach((stage, index) => stage.devices.forEach((rank) => stagesOf.set(rank, [...(stagesOf.get(rank) || []), index])));
    const ranks = [...stagesOf.keys()].sort((a, b) => a - b);
    // Devices of several stages are striped.
    const fill = (stages) => {
      const colors = [...new Set(stages.map((stage) => alpa.groupColor(alpa.groupOf(plan, stage))))];
      if (colors.length === 1) return colors[0];
      const stops = colors.map((color, index) => `${color} ${(100 * index) / colors.length}% ${(100 * (index + 1)) / colors.length}%`);
      return `linear-gradient(135deg, ${stops.join(", ")})`;
    };
    const buttons = new Map();
    const make = (rank) => {
      const stages = stagesOf.get(rank);
      const button = el("button", {
        class: "device", type: "button", tabindex: "-1", "data-rank": rank,
        style: `background:${fill(stages)}`,
        "aria-label": `device ${rank}, stage ${stages.join(", ")}`,
        onclick: () => alpa.select({ kind: "device", device: rank }),
        onpointermove: (event) => alpa.tip(event, [`device ${rank}`, ...stages.slice(0, 4).map((stage) => alpa.stageName(plan, stage))]),
        onpointerleave: () => alpa.tip(null, null),
      }, `${rank}`);
      buttons.set(rank, button);
      return button;
    };
    const perNode = Math.max(plan.perNode, 1);
    const nodes = [];
    for (let first = 0; first < ranks.length; first += perNode) {
      const members = ranks.slice(first, first + perNode);
      const name = ranks.length > perNode ? el("div", { class: "name" }, `node ${first / perNode}`) : null;
      const columns = Math.min(8, perNode);
      nodes.push(el("div", { class: "node" }, name, el("div", { class: "devices", style: `grid-template-columns:repeat(${columns},minmax(0,1fr))` }, members.map(make))));
    }
    const grid = el("div", { class: ranks.length > 128 ? "nodes many" : "nodes", role: "group", "aria-label": "devices; arrow keys move, Enter selects" }, nodes);
    if (ranks.length) buttons.get(ranks[0]).tabIndex = 0;
    grid.addEventListener("keydown", (event) => {
      const rank = Number(event.target.dataset.rank);
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: Math.min(8, perNode), ArrowUp: -Math.min(8, perNode) };
      const next = ranks[ranks.indexOf(rank) + (steps[event.key] || NaN)];
      if (next === undefined) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      buttons.get(next).tabIndex = 0;
      buttons.get(next).focus();
    });
    alpa.listeners.push((selection) => {
      const lit = selection.kind === "device" ? [selection.device]
        : plan.stages[selection.kind === "action" ? selection.action[1] : selection.stage].devices;
      const chosen = new Set(lit);
      for (const [rank, button] of buttons) {
        button.classList.toggle("dim", selection.kind !== "device" && !chosen.has(rank));
        button.classList.toggle("lit", selection.kind === "device" && chosen.has(rank));
      }
    });
    const groups = plan.groups.map((members, index) => [alpa.groupColor(index),
      plan.stages.length === 1 ? "one stage" : `stage${members.length > 1 ? "s" : ""} ${alpa.ranges(members)}`]);
    return el("div", { class: "card mesh-card" }, el("div", { class: "section-head" }, el("h2", {}, "Devices"),
      el("span", { class: "soft" }, `${plan.devices}${plan.cluster ? ` on ${alpa.text(plan.cluster)}` : ""}`)),
    grid, plan.stages.length > 1 ? alpa.legend(groups) : null);
  };
})();
