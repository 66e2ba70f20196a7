"use strict";
/* Heat maps rank x micro-batch: load over the mean of the micro-batch, before and after, on one colour scale. */
const Heat = (() => {
  const { byId, make, table, tip, options, alternative } = Elements;
  const { run } = Data;
  const STEPS = 128;
  const SIDES = ["before", "after"];
  const maps = { before: null, after: null };
  let top = 1.5;

  /* {M, values [M * R], layer [M * R]}: the ratio shown in every cell and the layer it comes from (-1: all). */
  const ratios = (d, mode) => {
    const { num_layers: L, num_ranks: R } = run;
    const values = new Float64Array(d.M * R);
    const layers = new Int32Array(d.M * R).fill(mode === "sum" ? -1 : Number(mode) || 0);
    const total = new Float64Array(d.M);
    for (let l = mode === "sum" || mode === "worst" ? 0 : Number(mode), last = mode === "sum" || mode === "worst" ? L : l + 1; l < last; l += 1) {
      for (let m = 0; m < d.M; m += 1) {
        const mean = d.mean[l * d.M + m];
        total[m] += mean;
        for (let r = 0; r < R; r += 1) {
          const tokens = d.rank_tokens[(l * d.M + m) * R + r];
          const at = m * R + r;
          if (mode === "sum") values[at] += tokens;
          else if (mean > 0 ? tokens / mean >= values[at] : l === 0) { values[at] = mean > 0 ? tokens / mean : 1; layers[at] = l; }
        }
      }
    }
    if (mode === "sum") values.forEach((value, at) => { values[at] = total[Math.floor(at / R)] > 0 ? value / total[Math.floor(at / R)] : 1; });
    return { M: d.M, values, layers };
  };

  const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const blend = (a, b, share) => `rgb(${channels(a).map((x, i) => Math.round(x + (channels(b)[i] - x) * share)).join(",")})`;

  /* Colours from 0 to `top`: blue below an even share, none at 1, orange to red above. */
  const colours = () => {
    const [low, even, mid, high] = ["low", "even", "mid", "high"].map(Theme.colour);
    return Array.from({ length: STEPS }, (_, i) => {
      const value = (i / (STEPS - 1)) * top;
      if (value <= 1) return blend(even, low, (1 - value) ** 1.2);
      const share = (value - 1) / (top - 1);
      return share < 0.5 ? blend(even, mid, share * 2) : blend(mid, high, share * 2 - 1);
    });
  };

  const rowHeight = (ranks) => Math.max(2, Math.min(24, Math.round(520 / ranks)));
  const height = () => run.num_ranks * rowHeight(run.num_ranks) + 58;

  /* Drawn as a custom series: ECharts 6.1 always paints its heat map series in pieces, and printing catches it halfway. */
  const cellShape = (shades) => (params, api) => {
    const [x, y] = api.coord([api.value(0), api.value(1)]);
    const [width, tall] = api.size([1, 1]);
    const shade = shades[Math.round((Math.min(top, api.value(2)) / top) * (STEPS - 1))];
    return { type: "rect", shape: { x: x - width / 2, y: y - tall / 2, width: width + 0.5, height: tall + 0.5 }, style: { fill: shade } };
  };

  const overlay = (side) => (params, api) => {
    const map = maps[side];
    const [width, tall] = api.size([1, 1]);
    const corner = (m, r) => { const [x, y] = api.coord([m, r]); return [x - width / 2, y - tall / 2]; };
    const perNode = Data.ranksPerNode();
    const children = [];
    const between = run.num_ranks > 64 ? Math.max(perNode, Data.rankStep()) : perNode;
    for (let r = between; r < run.num_ranks; r += between) {
      const [x, y] = corner(0, r);
      children.push({ type: "line", shape: { x1: x, y1: y, x2: x + width * map.M, y2: y }, style: { stroke: Theme.colour("strong-line"), lineWidth: 1, opacity: 0.55 } });
    }
    if (State.values.microBatch < map.M) {
      const [x, y] = corner(State.values.microBatch, State.values.rank);
      const grow = Math.max(0, 6 - tall) / 2;
      children.push({ type: "rect", shape: { x, y: y - grow, width, height: tall + 2 * grow }, style: { fill: "none", stroke: Theme.colour("text"), lineWidth: 2 } });
    }
    return { type: "group", silent: true, children };
  };

  const mapOptions = (side) => {
    const map = maps[side];
    const R = run.num_ranks;
    return {
      grid: { left: 46, right: 4, top: 6, bottom: 46 },
      tooltip: { formatter: ({ value }) => cellTip(side, value[0], value[1]) },
      xAxis: { type: "category", data: Array.from({ length: map.M }, (_, m) => m), name: "micro-batch", nameLocation: "middle", nameGap: 26, ...Theme.axis({ splitLine: { show: false } }) },
      yAxis: { type: "category", inverse: true, data: Array.from({ length: R }, (_, r) => r), name: "rank", nameLocation: "middle", nameGap: 34,
        ...Theme.axis({ splitLine: { show: false }, axisLabel: { interval: (index) => index % Data.rankStep() === 0 } }) },
      series: [
        { id: "cells", type: "custom", progressive: 0, data: Array.from(map.values, (value, at) => [Math.floor(at / R), at % R, value]), renderItem: cellShape(colours()) },
        { type: "custom", data: [[0, 0]], renderItem: overlay(side), z: 10, silent: true },
      ],
    };
  };

  const cellText = (side, m, r) => {
    const map = maps[side];
    const at = m * run.num_ranks + r;
    const layer = map.layers[at] >= 0 ? `layer ${map.layers[at]}` : "all layers";
    return `${Format.ratio(map.values[at])} of the mean in ${layer}`;
  };
  const cellTip = (side, m, r) => tip(`${Format.ratio(maps[side].values[m * run.num_ranks + r])} × the mean`, `rank ${r}, micro-batch ${m}`, cellText(side, m, r).split(" in ")[1], `${Data.label(State.values[side])}, ${Data.kind()}`);

  const scale = () => {
    const bar = make("span", { class: "scale-bar" });
    bar.style.background = `linear-gradient(to right, ${colours().join(",")})`;
    const one = make("span", { class: "scale-one" });
    one.style.left = `${(1 / top) * 100}%`;
    bar.append(one);
    byId("heat-scale").replaceChildren("0", bar, `${top.toFixed(2)} × the mean; the mark is 1`);
  };

  const title = (side) => {
    const map = maps[side];
    const largest = map.values.reduce((a, b) => Math.max(a, b), 0);
    byId(`heat-${side}-title`).replaceChildren(Format.capital(Data.label(State.values[side])), make("small", {}, `largest ${Format.ratio(largest)}`));
    return largest;
  };

  const drawMap = (side) => {
    const chart = Theme.draw(`heat-${side}`, () => mapOptions(side), { height: height(), label: `${Data.label(State.values[side])}: heat map of ${run.num_ranks} ranks by ${maps[side].M} micro-batches. Largest load ${Format.ratio(title(side))} of the mean. Move with the arrow keys.` });
    chart.off("click");
    chart.on("click", ({ value, seriesId }) => { if (seriesId === "cells") choose(side, value[0], value[1]); });
  };

  const choose = (side, microBatch, rank) => {
    const layer = maps[side].layers[microBatch * run.num_ranks + rank];
    State.set({ microBatch, rank, ...(layer >= 0 ? { layer } : {}) });
  };

  const update = async () => {
    const { heatLayer } = State.values;
    for (const side of SIDES) {
      const name = State.values[side];
      byId(`heat-${side}`).closest("figure").hidden = name === null;
      if (name !== null) maps[side] = ratios(await Data.detail(name), heatLayer);
    }
    const shown = SIDES.filter((side) => State.values[side] !== null);
    top = Math.max(1.05, ...shown.flatMap((side) => maps[side].values.reduce((a, b) => Math.max(a, b), 0)));
    scale();
    shown.forEach(drawMap);
    announce();
    alternative("heat-table", "Loads as a table", () => loadsTable(shown));
  };

  const loadsTable = (shown) => make("div", {}, shown.map((side) => table({
    caption: `${Format.capital(Data.label(State.values[side]))}, ${Data.kind()}: load over the mean; one row per rank, one column per micro-batch.`,
    columns: [{ title: "Rank" }, ...Array.from({ length: maps[side].M }, (_, m) => ({ title: String(m) }))],
    rows: Array.from({ length: run.num_ranks }, (_, r) => ({ cells: [{ text: String(r), value: r }, ...Array.from({ length: maps[side].M }, (_, m) => ({ text: Format.ratio(maps[side].values[m * run.num_ranks + r]), value: maps[side].values[m * run.num_ranks + r] }))] })),
  })));

  const announce = () => {
    const { microBatch: m, rank: r } = State.values;
    const seen = SIDES.filter((side) => maps[side] && State.values[side] !== null && m < maps[side].M);
    byId("heat-live").textContent = `Rank ${r}, micro-batch ${m}: ${seen.map((side) => `${Data.label(State.values[side])} ${cellText(side, m, r)}`).join("; ")}.`;
  };

  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const onKey = (side) => (event) => {
    if (event.key === "Enter") {
      byId("drill").scrollIntoView();
      byId("drill").focus({ preventScroll: true });
      event.preventDefault();
    }
    const move = MOVES[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const within = (value, length) => Math.min(length - 1, Math.max(0, value));
    choose(side, within(State.values.microBatch + move[0], maps[side].M), within(State.values.rank + move[1], run.num_ranks));
  };

  const start = () => {
    const names = Data.withDetail().map((name) => [name, Data.label(name)]);
    const layers = [["worst", "worst layer of each cell"], ["sum", "all layers added up"], ...Array.from({ length: run.num_layers }, (_, l) => [l, `layer ${l}`])];
    options(byId("heat-layer"), layers, State.values.heatLayer);
    byId("heat-layer").addEventListener("change", (event) => {
      const { value } = event.target;
      State.set({ heatLayer: value, ...(value === "worst" || value === "sum" ? {} : { layer: Number(value) }) });
    });
    SIDES.forEach((side) => {
      const select = byId(`pick-${side}`);
      options(select, names, State.values[side]);
      select.closest("label").hidden = State.values[side] === null;
      select.addEventListener("change", () => State.set({ [side]: select.value }));
      const box = byId(`heat-${side}`);
      Object.entries({ tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-describedby": "heat-help" }).forEach(([key, value]) => box.setAttribute(key, value));
      box.addEventListener("keydown", onKey(side));
    });
    const missing = run.planners.filter((planner) => !planner.ideal && !Object.hasOwn(run.detail, planner.name));
    if (missing.length) byId("heat-note").textContent = ` To keep this file small it holds no loads of ${missing.map((planner) => planner.label).join(", ")}.`;
    Theme.listen(scale);
    State.listen(["before", "after", "heatLayer"], update);
    State.listen(["microBatch", "rank"], () => { SIDES.filter((side) => State.values[side] !== null).forEach(drawMap); announce(); });
    return update();
  };

  return { start, maps };
})();
