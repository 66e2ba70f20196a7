"use strict";
/* Light and dark, and every chart on the page: each is an id and a function that makes its options, so that all can be
   drawn again when the theme, the width or the medium changes. */
const Theme = (() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const charts = new Map();
  const listeners = [];
  let chosen = null;
  let printing = false;

  const now = () => (printing ? "light" : chosen || (dark.matches ? "dark" : "light"));
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  const apply = () => {
    root.dataset.theme = now();
    const button = document.getElementById("theme");
    button.textContent = now() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", now() === "dark" ? "Use light colours" : "Use dark colours");
    button.setAttribute("aria-pressed", String(now() === "dark"));
    redraw();
    listeners.forEach((listener) => listener());
  };
  const listen = (listener) => listeners.push(listener);

  /* Draw a chart into #id; `options` is called again whenever it must be redrawn. Returns the chart. */
  const draw = (id, options, { height, label } = {}) => {
    const box = document.getElementById(id);
    if (height) box.style.height = `${height}px`;
    if (label) describe(box, label);
    let entry = charts.get(id);
    if (!entry) {
      entry = { chart: echarts.init(box, null, { renderer: "canvas", devicePixelRatio: Math.max(2, window.devicePixelRatio || 1) }) };
      charts.set(id, entry);
    } else if (height) {
      entry.chart.resize();
    }
    entry.options = options;
    entry.chart.setOption(finish(options()), { notMerge: true });
    return entry.chart;
  };

  const describe = (box, label) => {
    if (!box.hasAttribute("role")) box.setAttribute("role", "img");
    box.setAttribute("aria-label", label);
  };

  /* What all charts share. */
  const finish = (option) => ({
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("muted"), fontSize: 12 },
    ...option,
    tooltip: { confine: true, className: "tip", backgroundColor: colour("page"), borderColor: colour("line"), borderWidth: 1,
      padding: [8, 12], textStyle: { color: colour("text"), fontSize: 13 }, transitionDuration: 0, ...option.tooltip },
  });

  const redraw = () => charts.forEach((entry) => entry.chart.setOption(finish(entry.options()), { notMerge: true }));
  const resize = () => charts.forEach((entry) => entry.chart.resize());

  const axis = (more = {}) => ({
    axisLine: { lineStyle: { color: colour("strong-line") } },
    axisTick: { show: false },
    axisLabel: { color: colour("muted"), ...more.axisLabel },
    splitLine: { lineStyle: { color: colour("line") } },
    nameTextStyle: { color: colour("muted") },
    ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "axisLabel")),
  });
  /* Room for the labels of horizontal bars, up to a share of the chart. */
  const pen = document.createElement("canvas").getContext("2d");
  const room = (labels, id) => {
    pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
    const widest = Math.max(0, ...labels.map((label) => pen.measureText(label).width));
    return Math.ceil(Math.min(widest + 4, document.getElementById(id).clientWidth * 0.36));
  };
  const names = (labels, id) => ({
    type: "category", inverse: true, data: labels,
    ...axis({ axisLabel: { color: colour("text"), fontSize: 13, interval: 0, width: room(labels, id), overflow: "break", lineHeight: 15, margin: 10 } }),
  });
  /* Height of a legend: as many rows as its labels need. */
  const legendHeight = (labels, id) => {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const width = labels.reduce((sum, label) => sum + pen.measureText(label).width + 48, 0);
    return 26 * Math.ceil((width * 1.1) / Math.max(200, document.getElementById(id).clientWidth));
  };
  const legend = (more = {}) => ({
    top: 0, left: 0, itemWidth: 22, itemHeight: 9, itemGap: 18, textStyle: { color: colour("text") },
    inactiveColor: colour("rest"), pageTextStyle: { color: colour("muted") }, ...more,
  });

  /* Equilibra has the accent, static placement and the ideal are grey, others differ in colour and dash. */
  const DASHES = ["solid", "dashed", "dotted", [8, 3, 2, 3], [4, 2], [12, 4], [2, 2]];
  const planner = (name) => {
    const { run } = Data;
    if (name === run.pair[1]) return { color: colour("accent"), dash: "solid", width: 3 };
    if (name === run.pair[0]) return { color: colour("muted"), dash: "solid", width: 2 };
    if (Data.planner(name).ideal) return { color: colour("strong-line"), dash: "dashed", width: 1.5 };
    const others = run.planners.map((entry) => entry.name).filter((entry) => !run.pair.includes(entry) && !Data.planner(entry).ideal);
    const place = others.indexOf(name);
    return { color: colour(`line-${(place % 7) + 1}`), dash: DASHES[place % DASHES.length], width: 1.75 };
  };

  const remember = (value) => { try { localStorage.setItem("equilibra-theme", value); } catch { /* not from disk */ } };
  const remembered = () => { try { return localStorage.getItem("equilibra-theme"); } catch { return null; } };

  const print = (on) => {
    printing = on;
    root.classList.toggle("printing", on);
    apply();
    resize();
  };

  const start = () => {
    chosen = ["light", "dark"].includes(remembered()) ? remembered() : null;
    document.getElementById("theme").addEventListener("click", () => {
      chosen = now() === "dark" ? "light" : "dark";
      remember(chosen);
      apply();
    });
    dark.addEventListener("change", apply);
    window.addEventListener("resize", resize);
    window.addEventListener("beforeprint", () => print(true));
    window.addEventListener("afterprint", () => print(false));
    window.matchMedia("print").addEventListener("change", (event) => print(event.matches));
    apply();
  };

  return { start, draw, colour, axis, legend, legendHeight, room, names, listen, planner, charts, now, describe };
})();
