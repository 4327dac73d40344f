"use strict";
// The step over time: a lane per mesh, zoomable, in real proportions. d3 has the scale and the zoom.
(function () {
  const { el } = alpa;
  const LABELS = 118;
  // A box from this width on shows the ops inside it.
  const OPEN_WIDTH = 240;

  // Returns a step's lanes: those of a pipeline, or of one stage from its micro-batches.
  alpa.stepOf = function (plan) {
    const step = plan.timeline ? { ...plan.timeline, actions: [...plan.timeline.actions] } : oneStage(plan);
    if (!step) return null;
    step.firstUpdate = step.actions.length;
    step.stages.forEach((stages, mesh) => {
      const once = alpa.sum(stages.map((stage) => plan.stages[stage].once || 0));
      if (!once) return;
      let end = 0;
      for (const action of step.actions) if (action[3] === mesh) end = Math.max(end, action[4] + action[5]);
      step.actions.push(["U", stages[0], 0, mesh, end, once]);
    });
    step.end = step.actions.reduce((last, action) => Math.max(last, action[4] + action[5]), 0);
    step.isCritical = new Set(step.critical);
    return step;
  };

  function oneStage(plan) {
    const stage = plan.stages[0];
    if (plan.stages.length !== 1 || !(stage.forward > 0)) return null;
    const actions = [];
    let now = 0;
    for (let microbatch = 0; microbatch < Math.min(plan.microbatches, 2000); microbatch += 1) {
      for (const [kind, seconds] of [["F", stage.forward], ["B", stage.backward]]) {
        actions.push([kind, 0, microbatch, 0, now, seconds]);
        now += seconds;
      }
    }
    const drawn = Math.min(plan.microbatches, 2000);
    return { meshes: [stage.range], stages: [[0]], actions, messages: [], critical: [], idle: [0], drawn, seconds: now };
  }

  // Returns what a stage does in a forward, a backward or once per step: [op or parameter name, colour, seconds].
  const programs = new Map();
  function program(plan, stageIndex, kind) {
    const key = `${plan.number}:${stageIndex}:${kind}`;
    if (programs.has(key)) return programs.get(key);
    const stage = plan.stages[stageIndex];
    const pieces = [];
    const add = (name, color, seconds, selection) => seconds > 0 && pieces.push({ name, color, seconds, selection });
    const phase = { F: "forward", B: "backward", U: "step" }[kind];
    const order = stage.ops.map((op, index) => index);
    if (kind === "B") order.reverse();
    if (phase && plan.detailed) {
      for (const index of order) {
        const op = stage.ops[index];
        const of = { kind: "op", stage: stageIndex, index };
        const moved = (place) => op.messages.filter((m) => m.phase === phase && m.place === place)
          .forEach((m) => add(`${m.kind.replaceAll("_", "-")} for ${op.name}`, "message", m.seconds, of));
        if (kind === "F") moved("before");
        if (kind === "F" && !op.once) add(op.name, "forward", op.forward, of);
        if (kind === "B") {
          if (op.recomputed) add(`${op.name} recomputed`, "gathered", op.forward, of);
          add(op.name, "backward", op.backward, of);
        }
        if (kind === "U" && op.once) add(op.name, "forward", op.forward, of);
        moved("inside");
        if (kind !== "F") moved("before");
      }
      if (kind === "U") {
        stage.parameters.forEach((parameter, index) => {
          const of = { kind: "parameter", stage: stageIndex, index };
          parameter.messages.forEach((m) => add(`${m.kind.replaceAll("_", "-")} of ${parameter.name}`, "message", m.seconds, of));
          add(`update of ${parameter.name}`, "update", parameter.update, of);
        });
      }
    }
    const total = alpa.sum(pieces.map((piece) => piece.seconds));
    let at = 0;
    for (const piece of pieces) {
      piece.start = at / total;
      piece.share = piece.seconds / total;
      at += piece.seconds;
    }
    programs.set(key, pieces);
    return pieces;
  }

  alpa.timeline = function (plan, shared) {
    const step = alpa.stepOf(plan);
    if (!step) return null;
    const count = step.meshes.length;
    const lane = count === 1 ? 64 : Math.max(18, Math.min(44, 420 / count));
    const box = step.messages.length ? lane * 0.66 : lane - 4;
    const height = lane * count + 4;
    const canvas = el("canvas", { tabindex: "0", role: "img", class: "timeline",
      "aria-label": `schedule of ${count} lanes. Plus and minus zoom, arrow keys move, brackets step through the actions` });
    canvas.style.height = `${height}px`;
    const axis = el("div", { class: "time-axis" });
    let width = 800;
    let view = d3.zoomIdentity;
    let current = -1;
    const total = Math.max(step.end, shared ? shared.total : 0);
    const base = () => d3.scaleLinear([0, total], [LABELS, width - 58]);
    const scale = () => view.rescaleX(base());

    function draw() {
      const ratio = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      const color = {};
      for (const name of ["card", "ink", "soft", "line", "wash", "forward", "backward", "message", "update", "gradients", "gathered", "waiting", "on-action", "shade"]) color[name] = alpa.color(name);
      context.fillStyle = color.card;
      context.fillRect(0, 0, width, height);
      const x = scale();
      context.save();
      context.beginPath();
      context.rect(LABELS, 0, width - LABELS - 56, height);
      context.clip();
      drawWaiting(context, x, color);
      drawActions(context, x, color);
      drawMessages(context, x, color);
      context.restore();
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
      step.meshes.forEach((name, mesh) => {
        const middle = mesh * lane + 3 + box / 2;
        context.fillStyle = color.ink;
        context.textAlign = "left";
        const label = `${count > 1 ? "" : "devices "}${step.stages[mesh].length > 0 && count > 1 ? `stage ${step.stages[mesh].join(", ")}` : name}`;
        context.fillText(clipped(context, label, LABELS - 10), 0, middle);
        if (lane >= 34 && count > 1) {
          context.fillStyle = color.soft;
          context.fillText(clipped(context, `devices ${name}`, LABELS - 10), 0, middle + 15);
        }
        if (count > 1) {
          context.fillStyle = color.soft;
          context.textAlign = "right";
          context.fillText(alpa.percent(step.idle[mesh]), width - 4, middle);
        }
      });
      drawAxis(x);
    }

    function clipped(context, text, most) {
      if (context.measureText(text).width <= most) return text;
      let short = text;
      while (short.length > 2 && context.measureText(`${short}…`).width > most) short = short.slice(0, -1);
      return `${short}…`;
    }

    function drawWaiting(context, x, color) {
      const pattern = document.createElement("canvas");
      pattern.width = pattern.height = 6;
      const strokes = pattern.getContext("2d");
      strokes.strokeStyle = color.waiting;
      strokes.globalAlpha = 0.55;
      strokes.beginPath();
      strokes.moveTo(0, 6);
      strokes.lineTo(6, 0);
      strokes.stroke();
      context.fillStyle = context.createPattern(pattern, "repeat");
      for (let mesh = 0; mesh < count; mesh += 1) context.fillRect(x(0), mesh * lane + 3, x(step.end) - x(0), box);
    }

    function drawActions(context, x, color) {
      context.textBaseline = "middle";
      step.actions.forEach((action, index) => {
        const [kind, stage, microbatch, mesh, start, seconds] = action;
        const left = x(start);
        const right = x(start + seconds);
        if (right < LABELS || left > width) return;
        const top = mesh * lane + 3;
        context.fillStyle = color[alpa.ACTIONS[kind][0]];
        const gap = right - left > 6 ? 1 : 0;
        context.fillRect(left, top, Math.max(0.7, right - left - gap), box);
        const second = step.stages[mesh].indexOf(stage) % 2;
        if (second) {
          context.fillStyle = color.shade;
          context.fillRect(left, top, Math.max(0.7, right - left - gap), box);
        }
        if (right - left > OPEN_WIDTH) drawInside(context, plan, action, left, right, top, color);
        else if (right - left > 16 && box > 12) {
          context.fillStyle = color["on-action"];
          context.font = "600 11px system-ui, sans-serif";
          context.textAlign = "center";
          if (kind !== "U") context.fillText(`${microbatch}`, (Math.max(left, LABELS) + right) / 2, top + box / 2);
        }
        if (step.isCritical.has(index)) {
          context.fillStyle = color.ink;
          context.fillRect(left, top + box - 3, Math.max(0.7, right - left - gap), 3);
        }
        if (index === current) {
          context.strokeStyle = color.ink;
          context.lineWidth = 2.5;
          context.strokeRect(left, top - 1, right - left, box + 2);
        }
      });
    }

    function drawInside(context, plan, action, left, right, top, color) {
      const pieces = program(plan, action[1], action[0] === "I" ? "B" : action[0]);
      if (!pieces.length) return;
      context.fillStyle = color.card;
      context.fillRect(left, top + 14, right - left - 1, box - 14);
      context.fillStyle = color["on-action"];
      context.font = "600 11px system-ui, sans-serif";
      context.textAlign = "left";
      const title = action[0] === "U" ? "once per step" : `${alpa.ACTIONS[action[0]][1]} ${action[2]}`;
      context.fillText(title, Math.max(left, LABELS) + 5, top + 7.5);
      for (const piece of pieces) {
        const from = left + piece.start * (right - left);
        const to = from + piece.share * (right - left - 1);
        if (to < LABELS || from > width) continue;
        context.fillStyle = color[piece.color];
        context.fillRect(from, top + 15, Math.max(0.5, to - from - (to - from > 4 ? 1 : 0)), box - 15);
        if (to - from > 34 && box - 15 > 11) {
          context.fillStyle = color["on-action"];
          context.font = "11px system-ui, sans-serif";
          context.fillText(clipped(context, alpa.text(piece.name), to - from - 6), from + 3, top + 15 + (box - 15) / 2);
        }
      }
    }

    function drawMessages(context, x, color) {
      context.fillStyle = color.message;
      for (const [source, target, , start, seconds] of step.messages) {
        const mesh = step.stages.findIndex((stages) => stages.includes(source));
        const left = x(start);
        const right = x(start + seconds);
        if (right < LABELS || left > width) continue;
        const strip = (lane - box - 5) / 2;
        const top = mesh * lane + 3 + box + 1 + (target > source ? 0 : strip);
        context.fillRect(left, top, Math.max(0.7, right - left), Math.max(1.5, strip - 0.5));
      }
    }

    function drawAxis(x) {
      const svg = d3.create("svg").attr("class", "chart axis").attr("viewBox", `0 0 ${width} 26`).attr("height", 26).attr("aria-hidden", "true");
      const span = x.invert(width - 58) - x.invert(LABELS);
      const ticks = d3.axisBottom(x).ticks(Math.max(3, width / 150)).tickFormat((value) => tickText(value, span));
      svg.append("g").attr("transform", "translate(0,1)").call(ticks);
      axis.replaceChildren(svg.node());
    }

    // The action, message or piece at a point of the canvas.
    function at(px, py) {
      const mesh = Math.floor((py - 3) / lane);
      const time = scale().invert(px);
      if (px < LABELS || mesh < 0 || mesh >= count) return null;
      const offset = py - 3 - mesh * lane;
      if (offset > box) {
        const message = step.messages.find((m) => step.stages[mesh].includes(m[0]) && m[3] <= time && time <= m[3] + m[4]);
        return message ? { message } : null;
      }
      const index = step.actions.findIndex((a) => a[3] === mesh && a[4] <= time && time <= a[4] + a[5]);
      if (index < 0) return { waiting: true, mesh };
      const action = step.actions[index];
      const wide = scale()(action[4] + action[5]) - scale()(action[4]);
      let piece = null;
      if (wide > OPEN_WIDTH && offset > 14) {
        const share = (time - action[4]) / action[5];
        piece = program(plan, action[1], action[0] === "I" ? "B" : action[0]).find((p) => p.start <= share && share <= p.start + p.share);
      }
      return { index, action, piece };
    }

    function hover(event) {
      const bounds = canvas.getBoundingClientRect();
      const what = at(event.clientX - bounds.left, event.clientY - bounds.top);
      if (!what) return alpa.tip(null, null);
      if (what.waiting) return alpa.tip(event, [`devices ${step.meshes[what.mesh]} wait`]);
      if (what.message) {
        const [source, target, microbatch, , seconds] = what.message;
        const kind = target > source ? "values" : "gradients";
        return alpa.tip(event, [`${kind} of micro-batch ${microbatch}: stage ${source} to ${target}`, alpa.seconds(seconds)]);
      }
      if (what.piece) return alpa.tip(event, [alpa.text(what.piece.name), alpa.seconds(what.piece.seconds)]);
      const [kind, stage, microbatch, , start, seconds] = what.action;
      const title = kind === "U" ? alpa.ACTIONS.U[1] : `${alpa.ACTIONS[kind][1]} of micro-batch ${microbatch}`;
      return alpa.tip(event, [title, plan.stages.length > 1 ? `stage ${stage}` : "all devices", `${alpa.seconds(seconds)}, from ${alpa.seconds(start)}`,
        ...(step.isCritical.has(what.index) ? ["on the critical path"] : [])]);
    }

    function choose(index) {
      current = index;
      const action = step.actions[index];
      if (action[0] === "U") alpa.select({ kind: "stage", stage: action[1] });
      else if (plan.timeline) alpa.select({ kind: "action", action, critical: step.isCritical.has(index) });
      else alpa.select({ kind: "stage", stage: 0 });
      draw();
    }

    const zoom = d3.zoom().scaleExtent([1, 1e5])
      .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey || event.shiftKey : !event.button))
      .on("zoom", (event) => {
        view = event.transform;
        window.requestAnimationFrame(draw);
        if (shared && event.sourceEvent !== null) shared.moved(view);
        canvas.dataset.zoom = view.k.toFixed(2);
      });
    const selection = d3.select(canvas);
    const pan = (share) => selection.call(zoom.translateBy, (share * (width - LABELS)) / view.k, 0);

    canvas.addEventListener("pointermove", hover);
    canvas.addEventListener("pointerleave", () => alpa.tip(null, null));
    canvas.addEventListener("click", (event) => {
      const bounds = canvas.getBoundingClientRect();
      const what = at(event.clientX - bounds.left, event.clientY - bounds.top);
      if (!what || what.waiting || what.message) return;
      if (what.piece && what.piece.selection) alpa.select(what.piece.selection);
      else choose(what.index);
    });
    canvas.addEventListener("keydown", (event) => {
      const moves = {
        "+": () => selection.call(zoom.scaleBy, 1.5), "=": () => selection.call(zoom.scaleBy, 1.5),
        "-": () => selection.call(zoom.scaleBy, 1 / 1.5), "0": () => selection.call(zoom.transform, d3.zoomIdentity),
        ArrowLeft: () => pan(0.2), ArrowRight: () => pan(-0.2),
        "]": () => choose(Math.min(step.actions.length - 1, current + 1)), "[": () => choose(Math.max(0, current - 1)),
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moves[event.key]();
    });

    const resize = () => {
      const now = canvas.clientWidth;
      if (!now) return;
      width = now;
      zoom.extent([[LABELS, 0], [width - 58, height]]).translateExtent([[LABELS, 0], [width - 58, height]]);
      draw();
    };
    selection.call(zoom).on("dblclick.zoom", null);
    new ResizeObserver(resize).observe(canvas);
    alpa.redraws.push(draw);

    const button = (text, label, run) => el("button", { type: "button", "aria-label": label, title: label, onclick: run }, text);
    const tools = el("div", { class: "tools" },
      button("−", "zoom out", () => selection.call(zoom.scaleBy, 1 / 2)),
      button("+", "zoom in", () => selection.call(zoom.scaleBy, 2)),
      button("whole step", "show the whole step", () => selection.call(zoom.transform, d3.zoomIdentity)));
    const kinds = [...new Set(step.actions.map((action) => action[0]))];
    const legend = alpa.legend(kinds.map((kind) => [`var(--${alpa.ACTIONS[kind][0]})`, alpa.ACTIONS[kind][1]]));
    const more = (swatch, text) => legend.append(el("li", {}, swatch, el("span", {}, text)));
    if (step.messages.length) more(alpa.swatch("var(--message)"), "messages between stages (below a lane)");
    else more(alpa.swatch("var(--message)"), "communication (zoomed in)");
    if (count > 1) {
      more(el("span", { class: "swatch", style: "background:repeating-linear-gradient(135deg,var(--waiting) 0 2px,transparent 2px 5px)" }), "waiting, its share at the right");
      more(el("span", { class: "swatch line" }), "critical path");
    }
    const host = alpa.sum(plan.parts.filter(([name]) => name === "host").map(([, seconds]) => seconds));
    const drawn = step.drawn < plan.microbatches ? `drawn with ${step.drawn} of ${plan.microbatches} micro-batches` : `${alpa.seconds(step.end)}`;
    // The predicted step is that of the devices and what of the host's work they do not hide.
    let note = drawn;
    if (host > 0) note += ` on the devices; not drawn: the host adds ${alpa.seconds(host)}, so a step takes ${alpa.seconds(plan.step)}`;
    else if (plan.step && drawn === alpa.seconds(step.end) && drawn !== alpa.seconds(plan.step)) {
      note += `; not drawn: the runtime's own time for each micro-batch (a part of waiting, above), so a step takes ${alpa.seconds(plan.step)}`;
    }
    return el("section", { class: "card", "aria-label": "schedule" },
      el("div", { class: "section-head" }, el("h2", {}, "The step over time"), el("span", { class: "soft" }, note), tools),
      el("div", { class: "lanes" }, el("div", { class: count > 12 ? "lanes-scroll" : "" }, canvas), axis), legend,
      el("p", { class: "hint" }, "Zoom with ", el("kbd", {}, "Ctrl"), " and the wheel, or ", el("kbd", {}, "+"), " ", el("kbd", {}, "−"),
        "; drag or arrow keys move. Zoomed in, an action shows its ops and collectives. Click one for its details."));
  };

  function tickText(value, span) {
    if (value === 0) return "0";
    const [factor, unit] = span > 2 ? [1, "s"] : span > 2e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(span * factor))));
    return `${(value * factor).toFixed(digits)} ${unit}`;
  }
  alpa.tickText = tickText;
})();
