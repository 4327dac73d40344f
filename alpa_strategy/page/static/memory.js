"use strict";
// The memory of one device over the step, by parts, against the limit.
(function () {
  const { el } = alpa;
  const LEFT = 118;
  const RIGHT = 58;

  // Returns [{time, part -> bytes}] of a mesh over the step: constant parts, activations in flight, and temporary ones.
  function series(plan, step, mesh) {
    const base = Object.fromEntries(alpa.MEMORY.map(([key]) => [key, 0]));
    for (const index of step.stages[mesh]) {
      const { parts, memory } = plan.stages[index];
      for (const key of ["weights", "gradients", "state"]) base[key] += parts[key];
      base.weights += memory.per_step;
    }
    const alive = new Map(step.stages[mesh].map((stage) => [stage, 0]));
    const points = [];
    const put = (time, more) => {
      let activations = 0;
      for (const [stage, count] of alive) activations += count * plan.stages[stage].memory.activations;
      activations += more.recomputed || 0;
      points.push({ ...base, ...more, activations, time });
    };
    put(0, {});
    for (const [kind, stage, , of, start, seconds] of step.actions) {
      if (of !== mesh) continue;
      const memory = plan.stages[stage].memory;
      const end = start + seconds;
      if (kind === "U") {
        // The values that were made once are freed by then: their bytes are the update's.
        const update = { weights: base.weights - memory.per_step, temporary: memory.update + memory.per_step };
        put(start, update);
        put(end, update);
        put(end, {});
        continue;
      }
      const before = alive.get(stage);
      const isBackward = kind !== "F";
      const work = { temporary: memory.temporary, recomputed: isBackward ? memory.recomputed : 0 };
      put(start, {});
      if (kind === "F") {
        if (step.actions.length < 64) grow(plan.stages[stage], put, alive, stage, before, start, seconds, work);
        alive.set(stage, before + 1);
        put(end, work);
      } else {
        put(start, work);
        if (step.actions.length < 64) shrink(plan.stages[stage], put, alive, stage, before, start, seconds, work);
        if (kind !== "I") alive.set(stage, before - 1);
        put(end, work);
      }
      put(end, {});
    }
    put(step.end, {});
    return points;
  }

  // Activations and temporary bytes op by op, where few actions leave room for it.
  function grow(stage, put, alive, index, before, start, seconds, work) {
    byOp(stage.ops, "forward", (time, saved, op) => {
      alive.set(index, before + saved);
      put(start + seconds * time, { ...work, temporary: temporaryOf(stage, op) });
    });
  }

  function shrink(stage, put, alive, index, before, start, seconds, work) {
    byOp([...stage.ops].reverse(), "backward", (time, freed, op) => {
      put(start + seconds * time, { ...work, temporary: temporaryOf(stage, op) });
      alive.set(index, before - freed);
    });
  }

  // Calls with the share of the time and of the saved bytes up to each op.
  function byOp(ops, phase, put) {
    const times = alpa.sum(ops.map((op) => op[phase])) || 1;
    const bytes = alpa.sum(ops.map((op) => op.saved)) || 1;
    let time = 0;
    let saved = 0;
    for (const op of ops) {
      time += op[phase];
      saved += op.saved;
      put(time / times, saved / bytes, op);
    }
  }

  // The op's own, and what is gathered at the same time.
  function temporaryOf(stage, op) {
    if (stage.mostTemporary === undefined) stage.mostTemporary = Math.max(0, ...stage.ops.map((of) => of.temporary));
    return op.temporary + Math.max(0, stage.memory.temporary - stage.mostTemporary);
  }

  alpa.memory = function (plan) {
    const step = alpa.stepOf(plan);
    if (!step || !plan.stages.every((stage) => stage.memory && stage.parts.weights !== undefined)) return null;
    const chart = el("div", { class: "memory-chart", tabindex: "0", role: "img", "aria-label": "memory of a device over the step, by parts" });
    const values = el("div", {});
    let mesh = 0;
    let most = -1;
    const atPeak = step.stages.map((stages) => alpa.memoryOf(plan, stages[0]));
    atPeak.forEach(({ peak }, index) => {
      if (peak > most) [most, mesh] = [peak, index];
    });
    const height = 260;

    function draw() {
      const width = chart.clientWidth;
      if (!width) return;
      const points = series(plan, step, mesh);
      const keys = alpa.MEMORY.map(([key]) => key).filter((key) => points.some((point) => point[key] > 0));
      const totals = points.map((point) => alpa.sum(keys.map((key) => point[key] || 0)));
      const peak = Math.max(...totals);
      const top = plan.limit ? Math.max(peak, Math.min(plan.limit, peak * 2.2)) : peak;
      const x = d3.scaleLinear([0, step.end], [LEFT, width - RIGHT]);
      const y = d3.scaleLinear([0, top * 1.06], [height - 26, 8]);
      const svg = d3.create("svg").attr("class", "chart").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height);
      const stack = d3.stack().keys(keys).value((point, key) => point[key] || 0)(points);
      const area = d3.area().x((point) => x(point.data.time)).y0((point) => y(point[0])).y1((point) => y(point[1]));
      svg.append("g").selectAll("path").data(stack).join("path").attr("d", area).attr("fill", (layer) => `var(--${layer.key})`)
        .attr("stroke", "var(--card)").attr("stroke-width", 0.7);
      svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 25})`)
        .call(d3.axisBottom(x).ticks(Math.max(3, width / 150)).tickFormat((value) => alpa.tickText(value, step.end)));
      const unit = 2 ** (10 * Math.floor(Math.log2(top || 1) / 10));
      const ticks = d3.ticks(0, (top * 1.06) / unit, 5).map((tick) => tick * unit);
      svg.append("g").attr("class", "axis").attr("transform", `translate(${LEFT},0)`)
        .call(d3.axisLeft(y).tickValues(ticks).tickFormat((value) => (value ? alpa.bytes(value) : "0")));
      if (plan.limit && plan.limit <= top * 1.06) {
        svg.append("line").attr("class", "limit").attr("x1", LEFT).attr("x2", width - RIGHT).attr("y1", y(plan.limit)).attr("y2", y(plan.limit));
        svg.append("text").attr("class", "limit-label").attr("x", width - RIGHT).attr("y", y(plan.limit) - 5).attr("text-anchor", "end").text(`limit ${alpa.bytes(plan.limit)}`);
      }
      const cursor = svg.append("line").attr("class", "cursor").attr("y1", 8).attr("y2", height - 26).style("display", "none");
      svg.on("pointermove", (event) => {
        const [px] = d3.pointer(event, svg.node());
        const time = x.invert((px * width) / (chart.clientWidth || width));
        let index = d3.bisector((point) => point.time).right(points, time) - 1;
        index = Math.max(0, Math.min(points.length - 1, index));
        cursor.style("display", null).attr("x1", x(time)).attr("x2", x(time));
        alpa.tip(event, [`at ${alpa.seconds(Math.max(0, time))}: ${alpa.bytes(totals[index])}`,
          ...alpa.MEMORY.filter(([key]) => points[index][key] > 0).map(([key, label]) => `${label} ${alpa.bytes(points[index][key])}`)]);
      }).on("pointerleave", () => {
        cursor.style("display", "none");
        alpa.tip(null, null);
      });
      chart.replaceChildren(svg.node());
      const planned = atPeak[mesh];
      values.replaceChildren(alpa.legend(alpa.memoryParts(planned.parts).filter(([key, , bytes]) => bytes > 0 || keys.includes(key)).map(
        ([key, label, bytes]) => [`var(--${key})`, `${label} `, el("strong", {}, alpa.bytes(bytes))])));
      summary.textContent = alpa.peakText(planned.peak, plan.limit);
      // Drawn micro-batches may be fewer than those of the step, and the stages of a device peak at different moments.
      // Forwards and backwards are drawn with their largest temporary bytes at their ends, where few may be in use.
      const below = planned.stages.length > 1 ? ": the plan adds up the peaks of the device's stages" : "";
      const reason = peak > planned.peak ? ": the drawing adds the largest temporary bytes of all ops, the plan those of each op" : below;
      if (alpa.bytes(peak) !== alpa.bytes(planned.peak)) summary.textContent += `; drawn here at most ${alpa.bytes(peak)}${reason}`;
    }

    const summary = el("span", { class: "soft" });
    const choose = step.meshes.length > 1 ? el("label", {}, "devices of ", el("select", { "aria-label": "stage", onchange: (event) => {
      mesh = Number(event.target.value);
      draw();
    } }, step.meshes.map((name, index) => el("option", { value: index, selected: index === mesh }, `stage ${step.stages[index].join(", ")}: ${name}`)))) : null;
    new ResizeObserver(draw).observe(chart);
    alpa.redraws.push(draw);
    return el("section", { class: "card", "aria-label": "memory" },
      el("div", { class: "section-head" }, el("h2", {}, "Memory of a device"), summary, el("div", { class: "tools" }, choose)), chart, values);
  };
})();
