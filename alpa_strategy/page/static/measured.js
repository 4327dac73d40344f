"use strict";
// What a run has measured, beside what the plan predicts: seconds by part, and the step over time.
(function () {
  const { el } = alpa;
  const NAMES = {
    forward: "forward", backward: "backward", boundaries: "messages between stages", optimizer: "optimizer",
    waiting: "waiting for other devices", host: "host: Python, Trainer, loader",
  };
  const ORDER = ["forward", "backward", "", "boundaries", "optimizer", "waiting", "host"];

  // Returns how often the predicted seconds go into the measured ones, as text.
  alpa.ratio = (measured, predicted) => (predicted > 0 && measured > 0 ? `${(measured / predicted).toFixed(2)} ×` : "");

  function parts(plan) {
    const measured = plan.measured;
    const place = (name) => ORDER.indexOf(name in NAMES ? name : "");
    const least = measured.profiled / 1000;
    const shown = measured.parts.filter(([, seconds, predicted]) => Math.max(seconds, predicted || 0) > least);
    shown.sort((a, b) => place(a[0]) - place(b[0]) || a[0].localeCompare(b[0]));
    const rows = shown.map(([name, seconds, predicted]) => [NAMES[name] || alpa.text(name.replace(/_/g, "-")),
      alpa.seconds(seconds), predicted === null ? "" : alpa.seconds(predicted), alpa.ratio(seconds, predicted)]);
    rows.push([el("strong", {}, "step"), alpa.seconds(measured.profiled), alpa.seconds(measured.profilePredicted), alpa.ratio(measured.profiled, measured.profilePredicted)]);
    return alpa.table(["part of the step", "#measured", "#predicted", "#against it"], rows);
  }

  // The predicted and the measured step have one scale: returns [predicted lanes, measured lanes].
  alpa.timelines = function (plan) {
    const measured = plan.measured;
    if (!measured || !measured.timeline || !measured.timeline.actions.length) return [alpa.timeline(plan)];
    const stages = plan.stages.map((stage) => ({ ...stage, once: 0, ops: [], parameters: [] }));
    // Nothing of the prediction is beside the measured step.
    const run = { ...plan, number: `measured ${plan.number}`, detailed: false, stages, timeline: measured.timeline, step: null, parts: [] };
    const ends = [plan, run].map((of) => (alpa.stepOf(of) || { end: 0 }).end);
    const shared = { total: Math.max(...ends), moved: () => {} };
    const lanes = alpa.timeline(run, shared);
    lanes.setAttribute("aria-label", "measured schedule");
    lanes.querySelector("h2").textContent = "The same step as measured, on one scale";
    lanes.querySelector(".hint").textContent = "The last profiled step of the first device of every mesh. The trace has all devices, modules and collectives.";
    return [alpa.timeline(plan, shared), lanes];
  };

  alpa.measured = function (plan) {
    const measured = plan.measured;
    if (!measured || !measured.parts) return null;
    const [first, last] = measured.steps;
    const where = plan.busiest ? `, ${alpa.text(plan.busiest)}` : "";
    return el("section", { class: "card", "aria-label": "measured" },
      el("div", { class: "section-head" }, el("h2", {}, "Measured beside predicted"), el("span", { class: "soft" }, `steps ${first} to ${last}${where}`)),
      parts(plan),
      el("p", { class: "hint" }, `${alpa.text(measured.profileNotes)} Trace for ui.perfetto.dev: `, el("span", { class: "mono" }, alpa.text(measured.trace))));
  };
})();
