"use strict";
// The model tree: groups of equal stages, the modules of one of them, and their parameters and ops.
(function () {
  const { el } = alpa;

  // Returns the modules of a stage as nodes {name, path, children, items, seconds, bytes}.
  function modulesOf(stage) {
    const root = { name: "", path: "", children: new Map(), items: [], seconds: 0, bytes: 0 };
    const nodeAt = (path) => {
      let node = root;
      const passed = [root];
      for (const part of path ? path.split(".") : []) {
        if (!node.children.has(part)) {
          const child = { name: part, path: node.path ? `${node.path}.${part}` : part, children: new Map(), items: [], seconds: 0, bytes: 0 };
          node.children.set(part, child);
        }
        node = node.children.get(part);
        passed.push(node);
      }
      return passed;
    };
    stage.parameters.forEach((parameter, index) => {
      const cut = parameter.name.lastIndexOf(".");
      const passed = nodeAt(cut < 0 ? "" : parameter.name.slice(0, cut));
      const bytes = parameter.bytes ? alpa.sum(parameter.bytes) : 0;
      passed.forEach((node) => {
        node.bytes += bytes;
        node.seconds += parameter.step || 0;
      });
      passed[passed.length - 1].items.push({ kind: "parameter", index, name: parameter.name.slice(cut + 1), of: parameter, bytes });
    });
    stage.ops.forEach((op, index) => {
      const passed = nodeAt(op.module || "");
      const seconds = op.step || 0;
      passed.forEach((node) => (node.seconds += seconds));
      passed[passed.length - 1].items.push({ kind: "op", index, name: op.name, of: op, seconds });
    });
    return root;
  }

  function layoutBadge(text) {
    const first = text.replace(/^R /, "").startsWith("R*") ? "Rs" : text[0];
    return el("span", { class: `badge ${first}` }, text);
  }
  alpa.layoutBadge = layoutBadge;

  // A tree item whose children are made when it is opened.
  function item(row, depth, makeChildren, onselect) {
    const line = el("div", { class: "row", style: `--depth:${depth}` });
    line.append(...row);
    const node = el("li", { role: "treeitem", tabindex: "-1" }, line);
    if (makeChildren) node.setAttribute("aria-expanded", "false");
    node.toggle = (open) => {
      if (!makeChildren) return;
      const isOpen = node.getAttribute("aria-expanded") === "true";
      const wanted = open === undefined ? !isOpen : open;
      if (wanted === isOpen) return;
      node.setAttribute("aria-expanded", String(wanted));
      if (wanted) node.append(el("ul", { role: "group" }, makeChildren()));
      else node.lastChild.remove();
    };
    node.choose = onselect || (() => node.toggle());
    line.addEventListener("click", (event) => {
      if (event.target.closest("select, button")) return;
      focusOn(node);
      node.choose();
    });
    return node;
  }

  function focusOn(node) {
    const tree = node.closest(".tree");
    for (const other of tree.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    node.tabIndex = 0;
    node.focus();
  }

  const twist = () => el("span", { class: "twist", "aria-hidden": "true" }, "▶");

  function moduleItems(plan, stage, node, depth) {
    const rows = [];
    const items = [...node.items.filter((x) => x.kind === "parameter"), ...node.items.filter((x) => x.kind === "op")];
    for (const entry of items) rows.push(leaf(plan, stage, entry, depth));
    for (const child of node.children.values()) rows.push(branch(plan, stage, child, depth));
    return rows;
  }

  function branch(plan, stage, node, depth) {
    let shown = node;
    let name = node.name;
    // A module with one submodule and nothing else is one line with it.
    while (!shown.items.length && shown.children.size === 1) {
      shown = [...shown.children.values()][0];
      name += `.${shown.name}`;
    }
    const row = [twist(), el("span", { class: "label" }, alpa.text(name)),
      el("span", { class: "num" }, shown.bytes ? alpa.bytes(shown.bytes) : ""),
      el("span", { class: "num" }, shown.seconds ? alpa.seconds(shown.seconds) : "")];
    const made = item(row, depth, () => moduleItems(plan, stage, shown, depth + 1));
    made.dataset.path = shown.path;
    return made;
  }

  function leaf(plan, stage, entry, depth) {
    const isParameter = entry.kind === "parameter";
    const layout = isParameter ? entry.of.modes : null;
    const number = isParameter ? (entry.bytes ? alpa.bytes(entry.bytes) : "") : (entry.seconds ? alpa.seconds(entry.seconds) : "");
    const row = [
      el("span", { class: `kind ${entry.kind}`, title: entry.kind, "aria-hidden": "true" }, isParameter ? "■" : "○"),
      el("span", { class: "label mono" }, alpa.text(entry.name)),
      layout ? layoutBadge(layout) : el("span"),
      el("span", { class: "num" }, number)];
    const made = item(row, depth, null, () => alpa.select({ kind: entry.kind, stage, index: entry.index }));
    made.dataset.key = `${entry.kind}:${stage}:${entry.index}`;
    made.setAttribute("aria-label", `${entry.kind} ${alpa.text(entry.of.name)} ${layout || ""}`);
    return made;
  }

  function groupItem(plan, members, number) {
    let stage = members[0];
    const label = el("span", { class: "label" });
    const choose = members.length > 1 ? el("select", { "aria-label": "stage of this group", onchange: (event) => {
      stage = Number(event.target.value);
      node.toggle(false);
      node.toggle(true);
      alpa.select({ kind: "stage", stage });
    } }, members.map((index) => el("option", { value: index }, `${index}`))) : el("span");
    label.append(alpa.swatch(alpa.groupColor(number)), " ",
      members.length > 1 ? `Stages ${alpa.ranges(members)}: ${members.length} equal` : alpa.stageName(plan, stage));
    const row = [twist(), label, choose, el("span", { class: "num" }, alpa.seconds(plan.stages[stage].seconds))];
    const node = item(row, 0, () => moduleItems(plan, stage, modulesOf(plan.stages[stage]), 1), () => {
      node.toggle();
      alpa.select({ kind: "stage", stage });
    });
    node.firstChild.classList.add("stage");
    node.members = members;
    node.setStage = (wanted) => {
      if (wanted === stage) return;
      stage = wanted;
      if (choose.tagName === "SELECT") choose.value = String(wanted);
      node.toggle(false);
    };
    return node;
  }

  function keys(event, tree) {
    const current = event.target.closest('[role="treeitem"]');
    if (!current || event.target.tagName === "SELECT") return;
    const visible = [...tree.querySelectorAll('[role="treeitem"]')].filter((node) => !node.hidden);
    const at = visible.indexOf(current);
    const isOpen = current.getAttribute("aria-expanded");
    const moves = {
      ArrowDown: () => visible[at + 1] && focusOn(visible[at + 1]),
      ArrowUp: () => at > 0 && focusOn(visible[at - 1]),
      ArrowRight: () => (isOpen === "false" ? current.toggle(true) : visible[at + 1] && focusOn(visible[at + 1])),
      ArrowLeft: () => {
        if (isOpen === "true") current.toggle(false);
        else {
          const parent = current.parentElement.closest('[role="treeitem"]');
          if (parent) focusOn(parent);
        }
      },
      Home: () => focusOn(visible[0]),
      End: () => focusOn(visible[visible.length - 1]),
      Enter: () => current.choose(),
      " ": () => current.choose(),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  // Search results: parameters and ops of all stages whose name or module has the text.
  function results(plan, wanted) {
    const text = wanted.toLowerCase();
    const rows = [];
    plan.stages.forEach((stage, number) => {
      for (const kind of ["parameter", "op"]) {
        stage[`${kind}s`].forEach((of, index) => {
          if (rows.length < 200 && `${of.module || ""} ${of.name}`.toLowerCase().includes(text)) {
            const bytes = of.bytes ? alpa.sum(of.bytes) : 0;
            const name = kind === "op" && of.module ? `${of.module}: ${of.name}` : of.name;
            rows.push(leaf(plan, number, { kind, index, name, of, bytes, seconds: of.step || 0 }, 0));
          }
        });
      }
    });
    return rows.length ? rows : [el("li", { class: "empty" }, "nothing has this name")];
  }

  alpa.tree = function (plan) {
    const list = el("ul", { class: "tree", role: "tree", "aria-label": "model" });
    const groups = plan.groups.map((members, number) => groupItem(plan, members, number));
    const show = (nodes) => {
      list.replaceChildren(...nodes);
      if (list.firstChild && list.firstChild.tabIndex === -1) list.firstChild.tabIndex = 0;
    };
    show(groups);
    groups[0].toggle(true);
    list.addEventListener("keydown", (event) => keys(event, list));

    const search = el("input", { type: "search", placeholder: "Find a parameter, op or module", "aria-label": "find a parameter, op or module" });
    search.addEventListener("input", () => show(search.value.trim() ? results(plan, search.value.trim()) : groups));

    // Opens the tree down to what is selected elsewhere.
    const reveal = (selection) => {
      for (const node of list.querySelectorAll('[aria-selected="true"]')) node.removeAttribute("aria-selected");
      if (!["parameter", "op"].includes(selection.kind)) return;
      const key = `${selection.kind}:${selection.stage}:${selection.index}`;
      let node = list.querySelector(`[data-key="${key}"]`);
      if (!node && !search.value) {
        const group = groups.find((candidate) => candidate.members.includes(selection.stage));
        group.setStage(selection.stage);
        group.toggle(true);
        const of = plan.stages[selection.stage][`${selection.kind}s`][selection.index];
        const path = selection.kind === "op" ? of.module || "" : of.name.slice(0, Math.max(0, of.name.lastIndexOf(".")));
        for (let again = true; again && !(node = list.querySelector(`[data-key="${key}"]`));) {
          again = false;
          for (const inner of list.querySelectorAll('[data-path][aria-expanded="false"]')) {
            if (path === inner.dataset.path || path.startsWith(`${inner.dataset.path}.`)) {
              inner.toggle(true);
              again = true;
            }
          }
        }
      }
      if (node) {
        node.setAttribute("aria-selected", "true");
        node.scrollIntoView({ block: "nearest" });
      }
    };
    alpa.listeners.push(reveal);

    const legend = el("p", { class: "hint" },
      el("span", { class: "kind parameter" }, "■"), " parameter, bytes of a device · ",
      el("span", { class: "kind op" }, "○"), " op, seconds of a step, with collectives; modules with their updates");
    return el("div", { class: "card tree-card" }, el("h2", {}, "Model"), search, el("div", { class: "scroll" }, list), legend);
  };
})();
