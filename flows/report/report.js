"use strict";
// Draws the figures in the colours of the page, again when its width or colour scheme changes, and on white for printing.
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { displaylogo: false, displayModeBar: touch ? false : "hover", typesetMath: false, modeBarButtons: [["toImage", "resetScale2d"]] };
  const hidden = {};

  function themed(figure, width) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const layout = {
      ...figure.layout, width, height: figure.height, dragmode: touch ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: colour("--muted") },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" },
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis/.test(name)) {
        layout[name] = { gridcolor: colour("--grid"), zerolinecolor: colour("--muted"), zeroline: false, ...layout[name] };
        if (width < 500 && layout[name].type !== "category") layout[name].nticks = Math.min(layout[name].nticks || 6, 6);
      }
    }
    if (layout.annotations) layout.annotations = layout.annotations.map((one) => ({ ...one, font: { ...one.font, color: colour("--ink") } }));
    return layout;
  }

  function draw(id) {
    const place = document.getElementById(id);
    const data = figures[id].data.map((trace) => ({ ...trace, visible: !hidden[id]?.has(trace.legendgroup) }));
    Plotly.react(place, data, themed(figures[id], place.clientWidth), config);
  }
  const drawAll = () => Object.keys(figures).forEach(draw);

  document.querySelectorAll("button[data-group]").forEach((button) => {
    button.addEventListener("click", () => {
      const groups = (hidden[button.dataset.chart] ??= new Set());
      const shown = groups.delete(button.dataset.group) || !groups.add(button.dataset.group);
      button.setAttribute("aria-pressed", String(shown));
      draw(button.dataset.chart);
    });
  });

  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width || root.classList.contains("paper")) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const stages = document.querySelector(".graph");
  const graph = stages.querySelector("svg");
  function cut() {
    // A picture goes to the next page as a whole; the stage graph is printed as one per layer, so that it begins where there is room.
    const { width, height } = graph.viewBox.baseVal;
    const ends = [...graph.dataset.cuts.split(" ").filter(Boolean).map(Number), height];
    const bands = ends.map((end, index) => {
      const band = graph.cloneNode(true);
      const begin = ends[index - 1] ?? 0;
      band.setAttribute("viewBox", `0 ${begin} ${width} ${end - begin}`);
      return band;
    });
    stages.replaceChildren(...bands);
  }
  addEventListener("beforeprint", () => { root.classList.add("paper"); cut(); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); stages.replaceChildren(graph); drawAll(); });

  function open() {
    const target = location.hash.startsWith("#stage-") && document.getElementById(location.hash.slice(1));
    if (target) target.querySelectorAll("details.part").forEach((part) => { part.open = true; });
  }
  addEventListener("hashchange", open);
  open();
  drawAll();
})();
