"use strict";
// The top of the page: what the plan is, what it costs, and what limits it.
(function () {
  const { el } = alpa;

  const figure = (label, value, ...notes) => el("div", { class: "figure" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), ...notes);
  const note = (text) => el("div", { class: "note" }, text);

  function proof(plan) {
    if (plan.eager) return "eager";
    if (plan.gap <= 1e-6) return "optimal";
    return plan.gap >= 1 ? "not known" : `≥ ${alpa.seconds(plan.step * (1 - Math.max(1e-4, plan.gap)))}`;
  }

  function figures(plan) {
    const nodes = [];
    if (!plan.eager) {
      nodes.push(figure("Step, planned", alpa.seconds(plan.step), note(alpa.text(plan.rates || "predicted")), plan.task ? note(`for ${alpa.text(plan.task)}`) : null, plan.flops ? note(alpa.text(plan.flops)) : null));
      // Profiled steps are slower: they stand here only if no other steps were measured.
      const measured = plan.measured && (plan.measured.step || plan.measured.profiled);
      if (measured) nodes.push(figure("Measured", alpa.seconds(measured), note(`${alpa.ratio(measured, plan.measured.predicted)} the prediction for the run: ${plan.measured.prediction}`), plan.measured.rates ? note(alpa.text(plan.measured.rates)) : null));
    }
    const memory = [];
    if (plan.limit) {
      const share = Math.min(1, plan.peak / plan.limit);
      memory.push(el("div", { class: "meter", "aria-hidden": "true" }, el("i", { style: `width:${100 * share}%` })), note(alpa.peakText(plan.peak, plan.limit)));
      if (plan.unusable) memory.push(note(`${alpa.bytes(plan.unusable)} more of the device are kept for the allocator and libraries`));
    } else memory.push(note("peak"));
    const fullest = plan.memory.reduce((most, of) => (of.peak > most.peak ? of : most));
    const parts = alpa.memoryParts(fullest.parts).filter(([, , bytes]) => bytes > 0).map(([, label, bytes]) => `${label} ${alpa.bytes(bytes)}`);
    if (parts.length) memory.push(note(parts.join(", ")));
    nodes.push(figure("Memory per device", alpa.bytes(plan.peak), ...memory));
    nodes.push(figure("Devices", String(plan.devices), note(plan.cluster ? alpa.text(plan.cluster) : "")));
    const parameters = new Map();
    plan.stages.forEach((stage) => stage.parameters.forEach((of) => parameters.set(of.name, alpa.elements(of.shape))));
    nodes.push(figure("Parameters", alpa.count(alpa.sum([...parameters.values()])), note(`${parameters.size} tensors`)));
    if (plan.timeline) {
      const idle = plan.timeline.idle;
      const devices = plan.timeline.stages.map(([first]) => plan.stages[first].devices.length);
      const mean = alpa.sum(idle.map((share, mesh) => share * devices[mesh])) / alpa.sum(devices);
      nodes.push(figure("Waiting", alpa.percent(mean), note("of the devices' time, on average")));
    }
    const scope = plan.eager || plan.gap >= 1 ? null : note("by the predicted costs, over layouts, stages, meshes, schedules and activation checkpointing; not over other numbers of micro-batches, host memory or another setting of compile");
    nodes.push(figure("Optimum", proof(plan), note(alpa.text(plan.proof)), scope));
    return el("div", { class: "figures" }, nodes);
  }

  function slowest(plan) {
    if (!plan.slowest.length) return null;
    const rows = plan.slowest.map(([label, source, count, seconds]) => [
      alpa.text(label), el("span", { class: "mono", title: alpa.text(source) }, alpa.text(source.split("/").pop())),
      `${count}`, alpa.seconds(seconds), alpa.percent(seconds / plan.step)]);
    return el("div", {}, el("h3", {}, "The slowest ops"), alpa.table(["op", "line", "#ops", "#a step", "#of it"], rows));
  }

  function limits(plan) {
    if (!plan.parts.length) return null;
    const bar = alpa.stack(plan.parts.map(([name, seconds]) => [alpa.PARTS[name], name, seconds]), alpa.seconds);
    const lines = plan.findings.map((text) => el("li", {}, alpa.text(text)));
    return el("section", { class: "card", "aria-label": "what limits it" },
      el("div", { class: "section-head" }, el("h2", {}, "What takes the time"), el("span", { class: "soft" }, alpa.text(plan.busiest))),
      ...bar, lines.length ? el("ul", { class: "findings" }, lines) : null,
      slowest(plan),
      plan.change ? el("p", { class: "advice" }, el("strong", {}, "What would help most: "), alpa.text(plan.change)) : null,
      plan.warning ? el("p", { class: "advice" }, el("strong", {}, "Warning: "), alpa.text(plan.warning)) : null);
  }

  function instead(plan) {
    if (!plan.baselines.length) return null;
    const known = plan.baselines.filter(([, seconds]) => seconds !== null).map(([, seconds]) => seconds);
    const longest = Math.max(plan.step, ...known);
    const bar = (seconds, color) => el("div", { class: "bar", style: "height:14px;min-width:120px" }, el("span", { style: `width:${(100 * seconds) / longest}%;background:var(--${color})` }));
    const rows = [["this plan", bar(plan.step, "forward"), alpa.seconds(plan.step), ""], ...plan.baselines.map(([name, seconds]) => [
      alpa.text(name), seconds === null ? "does not fit" : bar(seconds, "other"), seconds === null ? "" : alpa.seconds(seconds),
      seconds === null ? "" : `${(seconds / plan.step).toFixed(2)} ×`])];
    return el("section", { class: "card", "aria-label": "alternatives" }, el("div", { class: "section-head" }, el("h2", {}, "Instead of it"),
      el("span", { class: "soft" }, "by the same costs and within the same memory")), alpa.table(["plan", "step", "#seconds", "#against it"], rows));
  }

  function phases(plan) {
    if (!plan.phases.length) return null;
    return el("section", { class: "card" }, el("div", { class: "section-head" }, el("h2", {}, "Phases of an iteration")),
      alpa.table(["phase", "layout", "#times", "#together"], plan.phases.map(([name, times, seconds, layout]) => [alpa.text(name), alpa.text(layout), `${times}`, alpa.seconds(seconds)])));
  }

  function stages(plan) {
    if (plan.stages.length < 2) return null;
    const rows = plan.stages.map((stage) => [
      el("button", { class: "link", type: "button", onclick: () => alpa.select({ kind: "stage", stage: stage.index }) }, `stage ${stage.index}`),
      alpa.text(stage.layers), stage.range, stage.mesh.join(" × "), alpa.seconds(stage.forward), alpa.seconds(stage.backward),
      stage.boundary ? alpa.seconds(stage.boundary / 2) : "", stage.boundaryBytes ? alpa.bytes(stage.boundaryBytes / 2) : "", alpa.bytes(stage.peak)]);
    const isShared = plan.memory.length < plan.stages.length;
    const titles = ["stage", "layers", "devices", "mesh", "#forward", "#backward", "#messages", "#their bytes", isShared ? "#memory of it alone" : "#memory"];
    const table = alpa.table(titles, rows.slice(0, 16));
    const rest = rows.length > 16 ? el("details", { class: "more" }, el("summary", {}, `${rows.length - 16} more stages`),
      alpa.table(titles, rows.slice(16))) : null;
    return el("section", { class: "card", "aria-label": "stages" }, el("div", { class: "section-head" }, el("h2", {}, "Stages"),
      el("span", { class: "soft" }, "seconds and bytes of one micro-batch; of messages each way")), table, rest,
      plan.messages ? el("p", { class: "hint" }, plan.messages) : null);
  }

  function notes(plan) {
    if (!plan.notes.length) return null;
    const lines = plan.notes.map((text) => el("li", {}, alpa.text(text)));
    return el("section", { class: "card", "aria-label": "notes" }, el("h2", {}, "Notes"), el("ul", { class: "findings" }, lines));
  }

  alpa.overview = { figures, limits, instead, phases, stages, notes };
})();
