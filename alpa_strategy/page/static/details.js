"use strict";
// The panel beside the tree: everything about the selected parameter, op, stage, device or action.
(function () {
  const { el } = alpa;
  const MEANINGS = {
    "R*": "full copy on every device; gradients are summed once per step (data parallel)",
    R: "full copy on every device, which all compute the same",
    S: "sharded along dim %; used as shards (tensor parallel) or gathered at each use (ZeRO-3)",
    G: "sharded along dim %; gathered once per step (ZeRO-1)",
    P: "a partial value on every device, to be summed",
  };
  const PLACES = { before: "before it", inside: "inside it", update: "its update" };
  const PHASES = { forward: "forward", backward: "backward", step: "once per step" };

  const GATHERED = "sharded along dim %; gathered at each use (ZeRO-3)";
  const IN_SHARDS = "sharded along dim %; used as shards (tensor or expert parallel)";

  // What a placement means, and what the known collectives say of its use.
  function meaning(mode, axis, moved) {
    let known = MEANINGS[mode] || MEANINGS[mode[0]] || "";
    if (mode[0] === "S" && moved) known = moved.some((m) => m.kind === "all_gather" && m.axis === axis) ? GATHERED : IN_SHARDS;
    return known.replace("%", mode.slice(1));
  }

  // `moved`: the collectives of the parameter; undefined if they are not known.
  function axes(stage, text, moved) {
    return alpa.table(["axis", "#devices", "placement", "meaning"], text.split(" ").slice(0, stage.mesh.length).map((mode, axis) =>
      [`${axis}`, `${stage.mesh[axis]}`, el("span", { class: "badge" }, mode), meaning(mode, axis, moved)]));
  }

  function link(plan, stage, name) {
    for (const kind of ["parameter", "op"]) {
      const index = plan.stages[stage][`${kind}s`].findIndex((candidate) => candidate.name === name);
      if (index >= 0) {
        return el("button", { class: "link", type: "button", onclick: () => alpa.select({ kind, stage, index }) }, alpa.text(name));
      }
    }
    return el("span", { class: "mono" }, alpa.text(name));
  }

  const joined = (nodes) => nodes.flatMap((node, index) => (index ? [", ", node] : [node]));

  function messages(plan, stage, list) {
    return alpa.table(["collective", "axis", "when", "#bytes", "#time"], list.map((m) => [
      el("span", {}, (m.count > 1 ? `${m.count} × ` : "") + m.kind.replaceAll("_", "-"),
        m.value ? el("div", {}, "of ", link(plan, stage, m.value), ` ${m.from} → ${m.to}`) : ""), `${m.axis}`,
      `${PHASES[m.phase]}, ${PLACES[m.place]}`, alpa.bytes(m.bytes), alpa.seconds(m.seconds)]));
  }

  function command(text) {
    const copy = el("button", { type: "button", onclick: () => navigator.clipboard && navigator.clipboard.writeText(text).then(() => (copy.textContent = "copied")) }, "copy");
    return el("div", { class: "command" }, el("code", {}, text), copy);
  }

  const more = (seconds) => (Math.abs(seconds) < 1e-12 ? "the same" : `${seconds < 0 ? "−" : "+"} ${alpa.seconds(Math.abs(seconds))}`);

  function alternatives(plan, of) {
    const nodes = [el("h3", {}, "The next best choices")];
    const answer = plan.explanations[of.name];
    if (answer) {
      const [chosen] = answer.choices;
      nodes.push(alpa.table(["layout", "#step", "#more", "#stage memory", "#computation", "#collectives"], answer.choices.map((choice) => [
        el("span", {}, el("span", { class: "badge" }, choice.layout), choice === chosen ? " the plan's" : ""),
        choice.seconds === null ? el("span", { title: alpa.text(choice.problem) }, "does not fit") : alpa.seconds(choice.seconds),
        choice.seconds === null || choice === chosen ? "" : more(choice.seconds - chosen.seconds),
        ...(choice.seconds === null ? ["", "", ""] : [alpa.bytes(choice.bytes), alpa.seconds(choice.compute), alpa.seconds(choice.communication)])])),
      answer.slower ? el("p", { class: "soft" }, `and ${answer.slower} more that are no faster: alpa why --all`) : "",
      el("ul", { class: "findings" }, answer.reasons.map((reason) => el("li", {}, alpa.text(reason)))));
    } else if (!plan.explainable) {
      nodes.push(el("p", { class: "soft" }, "The planner answers this by solving the plan once more, for which it needs the model. This page knows no recipe of it: ask in the program that has the model."));
      nodes.push(command(`alpa_strategy.make_plan(module, batch, cluster).explain(${JSON.stringify(alpa.text(of.name))})`));
    } else {
      nodes.push(el("p", { class: "soft" }, "The planner answers this by solving the plan once more with each of them pinned:"));
      nodes.push(command(`alpa why ${plan.name || "plan.json"} '${alpa.text(of.name)}'`));
    }
    return nodes;
  }

  function parameter(plan, selection) {
    const stage = plan.stages[selection.stage];
    const of = stage.parameters[selection.index];
    const uses = stage.ops.filter((op) => (op.messages || []).some((m) => m.value === of.name));
    const moved = [...(of.messages || []), ...uses.flatMap((op) => op.messages.filter((m) => m.value === of.name))];
    const nodes = [
      el("div", { class: "kicker" }, `parameter of ${alpa.stageName(plan, selection.stage)}`),
      el("h2", { class: "mono" }, alpa.text(of.name)),
      alpa.facts([
        ["shape", `${alpa.shape(of.shape)}${of.dtype ? `, ${of.dtype}` : ""}, ${alpa.count(alpa.elements(of.shape))} elements`],
        of.local && ["on a device", `${alpa.shape(of.local)}, ${alpa.percent(alpa.elements(of.local) / Math.max(1, alpa.elements(of.shape)))} of it`],
        ["layout", alpa.layoutBadge(of.modes), of.host ? " in host memory" : ""],
        of.update !== undefined && ["update", alpa.seconds(of.update)],
        of.readers && ["read by", ...joined(of.readers.map((name) => link(plan, selection.stage, name)))],
      ]), axes(stage, of.modes, of.messages && moved)];
    if (of.bytes) {
      const parts = ["weights", "gradients", "state", "gathered"].map((name, index) =>
        [name, { weights: "weights", gradients: "gradient", state: "optimizer state", gathered: "gathered copy and its gradient" }[name], of.bytes[index]]);
      nodes.push(el("h3", {}, `Bytes of a device: ${alpa.bytes(alpa.sum(of.bytes))}`), ...alpa.stack(parts, alpa.bytes));
    }
    if (moved.length) nodes.push(el("h3", {}, "Collectives"), messages(plan, selection.stage, moved));
    else if (of.messages) nodes.push(el("p", { class: "soft" }, "No collective moves it or its gradient."));
    nodes.push(...alternatives(plan, of));
    return nodes;
  }

  function op(plan, selection) {
    const stage = plan.stages[selection.stage];
    const of = stage.ops[selection.index];
    const nodes = [
      el("div", { class: "kicker" }, `op of ${alpa.stageName(plan, selection.stage)}`),
      el("h2", { class: "mono" }, alpa.text(of.name))];
    if (of.source) nodes.push(el("code", { class: "source" }, alpa.text(of.source)));
    nodes.push(alpa.facts([
      of.target && ["call", el("span", { class: "mono" }, of.target)],
      of.module && ["module", el("span", { class: "mono" }, alpa.text(of.module))],
      ["strategy", ...joined(of.strategies.map((text, axis) => el("span", {}, el("span", { class: "badge" }, text), stage.mesh.length > 1 ? ` on axis ${axis}` : "")))],
      of.forward !== undefined && ["forward", `${alpa.seconds(of.forward)} ${of.once ? "once per step" : "per micro-batch"}`],
      of.backward !== undefined && ["backward", alpa.seconds(of.backward) + (of.recomputed ? ", and its forward once more" : "")],
      of.step !== undefined && ["step", `${alpa.seconds(of.step)} of a step, with its collectives`],
      of.saved !== undefined && ["saved", `${alpa.bytes(of.saved)} for the backward`],
      of.temporary !== undefined && ["temporary", alpa.bytes(of.temporary)],
      of.readers && of.readers.length && ["read by", ...joined(of.readers.map((name) => link(plan, selection.stage, name)))],
    ]));
    if (of.operands) {
      const rows = [...of.operands.map((value) => ["reads", ...value]), ...of.results.map((value) => ["gives", ...value])];
      nodes.push(alpa.table(["", "value", "shape", "layout", "on a device", "#bytes"], rows.map(([what, maker, shape, dtype, layout, local, bytes]) => [
        what, what === "reads" ? link(plan, selection.stage, maker) : `${dtype}`, alpa.shape(shape),
        el("span", { class: "badge" }, layout), alpa.shape(local), alpa.bytes(bytes)])));
      const after = [];
      stage.ops.forEach((reader) => reader.messages.forEach((m) => m.value === of.name && m.place === "before" && after.push(m)));
      const own = of.messages.filter((m) => m.value !== of.name);
      if (own.length) nodes.push(el("h3", {}, "Collectives before and inside it"), messages(plan, selection.stage, own));
      if (after.length) nodes.push(el("h3", {}, "Collectives after it, before its readers"), messages(plan, selection.stage, after));
      if (!own.length && !after.length) nodes.push(el("p", { class: "soft" }, "No collective before, inside or after it."));
    }
    nodes.push(...alternatives(plan, of));
    return nodes;
  }

  // The memory of a stage by parts, what is in them, and that of its devices if they have other stages too.
  function memoryNodes(plan, number) {
    const stage = plan.stages[number];
    const devices = alpa.memoryOf(plan, number);
    const isShared = devices.stages.length > 1;
    const title = isShared ? `Memory at the peak of stage ${number} alone` : "Memory of a device at the peak";
    const nodes = [el("h3", {}, `${title}: ${alpa.bytes(stage.peak)}`), ...alpa.stack(alpa.memoryParts(stage.parts), alpa.bytes)];
    for (const [part, items] of Object.entries(stage.within || {})) {
      nodes.push(el("p", { class: "soft" }, `${part}: ${items.map(([text, bytes]) => `${text} ${alpa.bytes(bytes)}`).join("; ")}`));
    }
    if (isShared) nodes.push(el("p", {}, `Its devices have the stages ${devices.stages.join(", ")}, with ${alpa.bytes(devices.peak)} together.`));
    return nodes;
  }

  alpa.inFlight = function (plan, stage) {
    if (!plan.timeline) return 1;
    let alive = 0;
    let most = 0;
    for (const [kind, of] of plan.timeline.actions) {
      if (of !== stage) continue;
      alive += kind === "F" ? 1 : kind === "I" ? 0 : -1;
      most = Math.max(most, alive);
    }
    return most;
  };

  function stageNodes(plan, number) {
    const stage = plan.stages[number];
    const inFlight = alpa.inFlight(plan, number);
    const nodes = [alpa.facts([
      ["devices", `${stage.devices.length}: ${stage.range}, as mesh ${stage.mesh.join(" × ")}`],
      stage.layers && ["layers", alpa.text(stage.layers)],
      ["forward", `${alpa.seconds(stage.forward)} per micro-batch`],
      ["backward", `${alpa.seconds(stage.backward)} per micro-batch`],
      stage.boundary ? ["messages", `${stage.boundaryBytes ? `${alpa.bytes(stage.boundaryBytes)} in ` : ""}${alpa.seconds(stage.boundary)} per micro-batch to the next stage and back, ${alpa.seconds(stage.boundary * plan.microbatches)} a step in ${2 * plan.microbatches} sends and receives`] : null,
      ["step", `${alpa.seconds(stage.seconds)}: compute ${alpa.seconds(stage.compute)}, communication ${alpa.seconds(stage.communication)}, optimizer ${alpa.seconds(stage.optimizer)}`],
      stage.total && ["model tree", stage.total],
      stage.recomputed && ["memory saving", stage.recomputed],
      plan.timeline && ["in flight", `${inFlight} micro-batch${inFlight === 1 ? "" : "es"} at most`],
    ])];
    if (Object.keys(stage.parts).length) nodes.push(...memoryNodes(plan, number));
    if (stage.collectives.length) {
      const rows = [...stage.collectives].sort((a, b) => b[5] - a[5]).map(([kind, axis, phase, count, bytes, seconds, largest]) =>
        [el("span", {}, kind.replaceAll("_", "-"), largest ? el("div", { class: "soft" }, `largest part: ${alpa.text(largest)}`) : ""), `${axis}`, PHASES[phase], `${count}`, alpa.bytes(bytes), alpa.seconds(seconds)]);
      nodes.push(el("h3", {}, "Collectives of a step"), alpa.table(["collective", "axis", "when", "#calls", "#bytes", "#time"], rows), el("p", { class: "soft" }, stage.sum));
    }
    return nodes;
  }

  function stagePanel(plan, selection) {
    return [el("div", { class: "kicker" }, plan.stages.length > 1 ? "stage" : "all devices"),
      el("h2", {}, alpa.stageName(plan, selection.stage)), ...stageNodes(plan, selection.stage)];
  }

  // The slice of a parameter on a device at `coordinate`: chunks are as even as possible.
  function slices(of, mesh, coordinate) {
    const ranges = of.shape.map((size) => [0, size]);
    of.modes.split(" ").slice(0, mesh.length).forEach((mode, axis) => {
      if (!"SG".includes(mode[0])) return;
      const range = ranges[Number(mode.slice(1))];
      const size = range[1] - range[0];
      const base = Math.floor(size / mesh[axis]);
      const extra = size % mesh[axis];
      const at = coordinate[axis];
      const start = range[0] + at * base + Math.min(at, extra);
      range[0] = start;
      range[1] = start + base + (at < extra ? 1 : 0);
    });
    return ranges.map(([low, high], dim) => (low === 0 && high === of.shape[dim] ? ":" : `${low}:${high}`)).join(", ");
  }

  function device(plan, selection) {
    const rank = selection.device;
    const numbers = plan.stages.map((stage, index) => index).filter((index) => plan.stages[index].devices.includes(rank));
    const nodes = [el("div", { class: "kicker" }, "device"), el("h2", {}, `Device ${rank}`)];
    if (plan.timeline) {
      const lane = plan.timeline.stages.findIndex((stages) => stages.includes(numbers[0]));
      nodes.push(el("p", {}, `It waits for ${alpa.seconds(plan.timeline.idleSeconds[lane])} of a step, ${alpa.percent(plan.timeline.idle[lane])} of it.`));
      const waits = plan.timeline.waits[lane];
      if (waits.length) {
        const seconds = alpa.sum(waits.map((wait) => wait[1]));
        const part = plan.timeline.drawn < plan.microbatches ? ` in the ${plan.timeline.drawn} micro-batches that are drawn` : "";
        nodes.push(alpa.table([`it waits${part} for`, "#time", "#share"], waits.map(([reason, time]) => [reason, alpa.seconds(time), alpa.percent(time / seconds)])));
        nodes.push(el("p", { class: "soft" }, alpa.text(plan.lessWaiting)));
      }
    }
    for (const number of numbers) {
      const stage = plan.stages[number];
      let rest = stage.devices.indexOf(rank);
      const coordinate = [];
      for (const size of [...stage.mesh].reverse()) {
        coordinate.unshift(rest % size);
        rest = Math.floor(rest / size);
      }
      nodes.push(el("h3", {}, `${alpa.stageName(plan, number)}, at [${coordinate.join(", ")}] of its mesh`), ...stageNodes(plan, number));
      nodes.push(el("h3", {}, `Stores shards of ${stage.parameters.length} parameters`));
      const rows = stage.parameters.map((of, index) => [
        el("button", { class: "link", type: "button", onclick: () => alpa.select({ kind: "parameter", stage: number, index }) }, alpa.text(of.name)),
        el("span", { class: "badge" }, of.modes), of.segments > 1 ? `a shard of each of ${of.segments} segments` : el("span", { class: "mono" }, `[${slices(of, stage.mesh, coordinate)}]`),
        of.bytes ? alpa.bytes(of.bytes[0]) : ""]);
      nodes.push(alpa.table(["parameter", "layout", "elements", "#bytes"], rows.slice(0, 400)));
    }
    return nodes;
  }

  function action(plan, selection) {
    const [kind, stage, microbatch, mesh, start, seconds] = selection.action;
    return [el("div", { class: "kicker" }, `at ${alpa.seconds(start)} on devices ${plan.timeline.meshes[mesh]}`),
      el("h2", {}, `${alpa.ACTIONS[kind][1]} of micro-batch ${microbatch}`),
      alpa.facts([["takes", alpa.seconds(seconds)], ["ends", alpa.seconds(start + seconds)],
        selection.critical ? ["critical path", "yes: the end of the step depends on it"] : ["critical path", "no"]]),
      el("h3", {}, alpa.stageName(plan, stage)), ...stageNodes(plan, stage)];
  }

  alpa.detailsPanel = function (plan) {
    const body = el("div", {});
    const panel = el("div", { class: "card details-card", tabindex: "0", role: "region", "aria-live": "polite", "aria-label": "details of what is selected", id: "details" }, body);
    const panels = { parameter, op, stage: stagePanel, device, action };
    alpa.listeners.push((selection) => {
      body.replaceChildren(...panels[selection.kind](plan, selection));
      panel.scrollTop = 0;
    });
    return panel;
  };
})();
