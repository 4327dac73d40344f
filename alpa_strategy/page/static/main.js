"use strict";
// Reads the page's data and draws it.
(function () {
  const { el } = alpa;
  alpa.redraws = [];

  async function read() {
    const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const plans = JSON.parse(await new Response(stream).text());
    plans.forEach((plan, index) => (plan.number = index));
    return plans;
  }

  function themeButton() {
    const root = document.documentElement;
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
    const button = el("button", { type: "button", onclick: () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      name();
      alpa.redraws.forEach((draw) => draw());
    } });
    const name = () => (button.textContent = isDark() ? "Light" : "Dark");
    name();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      name();
      alpa.redraws.forEach((draw) => draw());
    });
    return button;
  }

  function plan(of) {
    alpa.listeners = [];
    const explore = el("section", { class: "explore", id: "explore", "aria-label": "model, details and devices" },
      alpa.tree(of), alpa.detailsPanel(of), alpa.meshPanel(of));
    const o = alpa.overview;
    const missing = of.detailed || of.eager ? null : el("p", { class: "soft" },
      "This page has the plan file alone: seconds and bytes of single ops need the details that alpa plan -o stores beside it.");
    const drawn = [o.figures(of), o.limits(of), explore, missing, ...alpa.timelines(of), alpa.measured(of), alpa.memory(of), o.stages(of), o.instead(of), o.phases(of), o.notes(of)];
    alpa.select({ kind: "stage", stage: 0 });
    return drawn.filter(Boolean);
  }

  function show(plans) {
    const page = document.getElementById("page");
    const [first] = plans;
    document.title = `Alpa plan ${first.name}`;
    const isPair = plans.length === 2;
    const title = isPair ? `${first.name} and ${plans[1].name}` : first.title;
    const top = el("header", { class: "top" }, el("div", {},
      el("div", { class: "kicker" }, isPair ? "Two Alpa plans side by side" : ["Alpa plan", first.name, first.cluster && `${first.devices} devices on ${first.cluster}`, first.precision].filter(Boolean).map(alpa.text).join(" · ")),
      el("h1", {}, alpa.text(isPair ? title : title[0].toUpperCase() + title.slice(1))),
      isPair || !first.words ? null : el("div", { class: "kicker" }, alpa.text(first.words))), themeButton());
    const body = el("div", {});
    page.replaceChildren(top);
    if (isPair) {
      page.append(alpa.compare(...plans));
      const buttons = plans.map((of, index) => el("button", { type: "button", "aria-pressed": String(index === 0), onclick: () => {
        buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === index)));
        body.replaceChildren(...plan(of));
      } }, `${"AB"[index]}: ${alpa.text(of.name)}`));
      page.append(el("section", {}, el("div", { class: "section-head" }, el("h2", {}, "Each in full"), el("div", { class: "tabs" }, buttons))));
    }
    page.append(body);
    body.replaceChildren(...plan(first));
    page.setAttribute("aria-busy", "false");
  }

  read().then(show).catch((error) => {
    document.getElementById("page").replaceChildren(el("p", {}, `The plan cannot be drawn: ${error}`));
    throw error;
  });
})();
