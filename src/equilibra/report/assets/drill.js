"use strict";
/* One layer and micro-batch: tokens of every instance of an expert, and who copies what to whom. */
const Drill = (() => {
  const { byId, make, table, tip, options, keys, alternative } = Elements;
  const { run } = Data;
  const SIDES = ["before", "after"];
  const WORDS = { home: "home", flash: "flash copy", standing: "standing copy" };
  const cells = { before: null, after: null };

  const sides = () => SIDES.filter((side) => State.values[side] !== null);
  const load = async () => {
    const { layer, microBatch } = State.values;
    for (const side of SIDES) {
      const name = State.values[side];
      const d = name === null ? null : await Data.detail(name);
      cells[side] = d === null || microBatch >= d.M ? null : {
        ...Data.cell(d, layer, microBatch), instances: Data.instances(d, layer, microBatch), copies: Data.copies(d, layer, microBatch),
        layerUs: run.passes.map((_, p) => d.layer_us[(p * run.num_layers + layer) * d.M + microBatch]),
      };
    }
  };

  const summary = () => {
    const shown = sides().filter((side) => cells[side]);
    const row = (side) => {
      const { imbalance, slowest, mean, bound, copies, layerUs } = cells[side];
      return { hero: side === "after", cells: [
        { text: Data.label(State.values[side]), value: State.values[side] }, { text: imbalance.toFixed(4), value: imbalance },
        { text: Format.whole(slowest), value: slowest }, { text: Format.number(mean), value: mean }, { text: Format.whole(bound), value: bound },
        { text: Format.whole(copies.length), value: copies.length }, ...layerUs.map((us) => ({ text: us > 0 ? Format.seconds(us * 1e-6) : "–", value: us })),
      ] };
    };
    const columns = ["Planner", "Imbalance", "Slowest rank, tokens", "Mean rank", "Lower bound", "Copies", ...run.passes.map((pass) => `Time of ${pass}`)];
    byId("drill-summary").replaceChildren(table({
      caption: `Layer ${State.values.layer}, micro-batch ${State.values.microBatch} (${Data.kind()}). Tokens are (token, expert) pairs.${Data.packsAnew(State.values.before, State.values.after) ? " The two pack sequences differently: their micro-batches of one number do not hold the same ones." : ""}`,
      columns: columns.map((title, index) => ({ title, text: index === 0 })), rows: shown.map(row),
    }));
  };

  const rankAxis = () => Theme.axis({ axisLabel: { interval: (index) => index % Data.rankStep() === 0 } });
  /* {max, interval} of an axis from 0: about five steps of a round number. */
  const roundAxis = (value) => {
    const unit = 10 ** Math.floor(Math.log10(value / 5));
    const interval = unit * [1, 2, 5, 10].find((factor) => factor * unit * 6 >= value);
    return { max: Math.ceil(value / interval) * interval, interval };
  };

  /* One rectangle per instance, stacked on its rank. */
  const stacked = (instances) => {
    const height = new Float64Array(run.num_ranks);
    const order = { home: 0, standing: 1, flash: 2 };
    return [...instances].sort((a, b) => order[a.kind] - order[b.kind] || b.tokens - a.tokens).map((instance) => {
      const from = height[instance.rank];
      height[instance.rank] += instance.tokens;
      return { value: [instance.rank, from, height[instance.rank]], instance };
    });
  };

  const bars = (side, top) => {
    const cell = cells[side];
    const data = stacked(cell.instances);
    return {
      grid: { left: 8, right: 16, top: 28, bottom: 26, containLabel: true },
      tooltip: { formatter: ({ data: entry }) => entry?.instance && tip(`Expert ${entry.instance.expert}: ${Format.whole(entry.instance.tokens)} tokens`, `${WORDS[entry.instance.kind]} on rank ${entry.instance.rank}`) },
      xAxis: { type: "category", data: Array.from({ length: run.num_ranks }, (_, r) => r), name: "rank", nameLocation: "middle", nameGap: 26, ...rankAxis() },
      yAxis: { type: "value", ...roundAxis(top), name: "tokens", ...Theme.axis({ axisLine: { show: false }, axisLabel: { formatter: Format.whole } }) },
      series: [{ type: "custom", progressive: 0, encode: { x: 0, y: [1, 2] }, data, renderItem: (params, api) => {
        const [x, low] = api.coord([api.value(0), api.value(1)]);
        const [, high] = api.coord([api.value(0), api.value(2)]);
        const width = Math.max(1, Math.min(34, api.size([1, 0])[0] * 0.76));
        return { type: "rect", shape: { x: x - width / 2, y: high, width, height: Math.max(0, low - high) },
          style: { fill: Theme.colour(data[params.dataIndex].instance.kind), stroke: Theme.colour("home-edge"), lineWidth: low - high > 2 && width > 3 ? 1 : 0 } };
      }, markLine: { silent: true, symbol: "none", data: [{ yAxis: cell.mean }], lineStyle: { color: Theme.colour("text"), type: "dashed", width: 1 }, label: { formatter: "mean", position: "insideEndTop", color: Theme.colour("text") } } }],
    };
  };

  const drawBars = () => {
    const top = Math.max(1, ...sides().filter((side) => cells[side]).map((side) => cells[side].slowest));
    byId("drill-pair").classList.toggle("wide", run.num_ranks > 64);
    SIDES.forEach((side) => {
      const name = State.values[side];
      const figure = byId(`drill-${side}`).closest("figure");
      figure.hidden = name === null || !cells[side];
      if (figure.hidden) return;
      byId(`drill-${side}-title`).replaceChildren(Format.capital(Data.label(name)), make("small", {}, `imbalance ${Format.ratio(cells[side].imbalance)}`));
      Theme.draw(`drill-${side}`, () => bars(side, top), { height: 300, label: `${Data.label(name)}: tokens of every rank, stacked by instance. Slowest rank ${Format.whole(cells[side].slowest)}, mean ${Format.number(cells[side].mean)}.` });
    });
    keys("drill-keys", ["home", "standing", "flash"].map((kind) => ({ colour: `var(--${kind})`, text: kind === "home" ? "homes" : `${kind} copies` })));
    alternative("drill-instances", "Instances as a table", instancesTable);
  };

  const instancesTable = () => make("div", {}, sides().filter((side) => cells[side]).map((side) => table({
    caption: `${Format.capital(Data.label(State.values[side]))}: tokens of every instance (${Data.kind()}).`,
    columns: [{ title: "Rank" }, { title: "Expert" }, { title: "Instance", text: true }, { title: "Tokens" }],
    rows: [...cells[side].instances].sort((a, b) => a.rank - b.rank || b.tokens - a.tokens).map((instance) => ({ cells: [
      { text: String(instance.rank), value: instance.rank }, { text: String(instance.expert), value: instance.expert },
      { text: WORDS[instance.kind], value: instance.kind }, { text: Format.whole(instance.tokens), value: instance.tokens },
    ] })),
    sortable: true,
  })));

  /* Copies as arcs over the ranks: from where the weights come to where the copy is (the dot). */
  const arcs = (copies) => {
    const most = Math.max(1, ...copies.map((copy) => copy.tokens));
    const longest = Math.max(1, ...copies.map((copy) => Math.abs(copy.from - copy.to)));
    const perNode = Data.ranksPerNode();
    const nodes = Array.from({ length: Math.ceil(run.num_ranks / perNode) }, (_, n) => n);
    return {
      grid: { left: 24, right: 24, top: 8, bottom: 46 },
      tooltip: { formatter: ({ data }) => data?.copy && tip(`Expert ${data.copy.expert}: ${Format.whole(data.copy.tokens)} tokens`, `${WORDS[data.copy.kind]} from rank ${data.copy.from} on rank ${data.copy.to}`) },
      xAxis: { type: "category", data: Array.from({ length: run.num_ranks }, (_, r) => r), name: nodes.length > 1 ? "rank (bands are nodes)" : "rank", nameLocation: "middle", nameGap: 28, ...rankAxis() },
      yAxis: { type: "value", min: 0, max: 1, show: false },
      series: [
        { type: "custom", silent: true, z: 1, data: nodes.filter((n) => n % 2 === 0 && nodes.length > 1).map((n) => [n * perNode, 0]), renderItem: band(perNode) },
        { type: "custom", progressive: 0, clip: false, data: copies.map((copy) => ({ value: [copy.to, 0], copy })), renderItem: (params, api) => arc(copies[params.dataIndex], api, { most, longest }) },
      ],
    };
  };

  const band = (perNode) => (params, api) => {
    const width = api.size([1, 0])[0];
    const [x] = api.coord([api.value(0), 0]);
    const ranks = Math.min(perNode, run.num_ranks - api.value(0));
    return { type: "rect", shape: { x: x - width / 2, y: params.coordSys.y, width: width * ranks, height: params.coordSys.height }, style: { fill: Theme.colour("surface") } };
  };

  const arc = (copy, api, { most, longest }) => {
    const [x1, y] = api.coord([copy.from, 0]);
    const [x2] = api.coord([copy.to, 0]);
    const peak = y - 24 - 150 * Math.sqrt(Math.abs(copy.from - copy.to) / longest);
    const colour = Theme.colour(copy.kind);
    const weight = 1 + 5 * (copy.tokens / most);
    return { type: "group", children: [
      { type: "bezierCurve", shape: { x1, y1: y, x2, y2: y - 4, cpx1: x1, cpy1: peak, cpx2: x2, cpy2: peak }, style: { stroke: colour, fill: "none", lineWidth: weight, opacity: 0.7 } },
      { type: "circle", shape: { cx: x2, cy: y - 4, r: 2 + weight / 2 }, style: { fill: colour } },
    ] };
  };

  const drawCopies = () => {
    const cell = cells[State.values.after === null ? "before" : "after"];
    const name = State.values.after ?? State.values.before;
    const copies = cell ? cell.copies : [];
    byId("copies-chart").hidden = copies.length === 0;
    const count = (kind) => copies.filter((copy) => copy.kind === kind).length;
    byId("copies-note").textContent = !cell ? `${Format.capital(Data.label(name))} has no micro-batch ${State.values.microBatch}.`
      : copies.length === 0 ? `${Format.capital(Data.label(name))} makes no copies in this layer and micro-batch.`
      : `${Format.capital(Data.label(name))}: ${count("flash")} flash and ${count("standing")} standing copies. An arc starts where the weights come from and ends, with a dot, on the rank that holds the copy; its width is the tokens that the copy serves.`;
    const title = byId("copies-table");
    title.replaceChildren(...(copies.length ? [copiesTable(copies)] : []));
    title.hidden = copies.length === 0;
    if (copies.length) Theme.draw("copies-chart", () => arcs(copies), { height: 250, label: `${copies.length} copies between ranks, as arcs. The table below lists them.` });
  };

  const copiesTable = (copies) => table({
    columns: [{ title: "Expert" }, { title: "From rank" }, { title: "To rank" }, { title: "Tokens" }, { title: "Kind", text: true }],
    rows: copies.map((copy) => ({ cells: [
      { text: String(copy.expert), value: copy.expert }, { text: String(copy.from), value: copy.from }, { text: String(copy.to), value: copy.to },
      { text: Format.whole(copy.tokens), value: copy.tokens }, { text: WORDS[copy.kind], value: copy.kind },
    ] })),
    sortable: true,
  });

  const batches = () => Math.max(1, ...sides().map((side) => Data.planner(State.values[side]).num_micro_batches));
  const selectors = () => {
    const count = (length) => Array.from({ length }, (_, i) => [i, String(i)]);
    State.values.microBatch = Math.min(State.values.microBatch, batches() - 1);
    options(byId("drill-layer"), count(run.num_layers), State.values.layer);
    options(byId("drill-batch"), count(batches()), State.values.microBatch);
  };

  /* The layer and micro-batch in which the first planner's slowest rank is farthest from the mean. */
  const worst = async () => {
    const d = await Data.detail(State.values.before ?? State.values.after);
    let found = { imbalance: 0 };
    for (let layer = 0; layer < run.num_layers; layer += 1) {
      for (let m = 0; m < d.M; m += 1) {
        const { imbalance } = Data.cell(d, layer, m);
        if (imbalance > found.imbalance) found = { layer, microBatch: m, imbalance };
      }
    }
    const at = (found.layer * d.M + found.microBatch) * run.num_ranks;
    const rank = d.rank_tokens.subarray(at, at + run.num_ranks).reduce((best, value, r, all) => (value > all[best] ? r : best), 0);
    return { layer: found.layer, microBatch: found.microBatch, rank };
  };

  const update = async () => {
    selectors();
    await load();
    summary();
    drawBars();
    drawCopies();
  };

  const step = (event) => {
    const { step: name, by } = event.currentTarget.dataset;
    const length = name === "layer" ? run.num_layers : batches();
    State.set({ [name]: (State.values[name] + Number(by) + length) % length });
  };

  const start = async () => {
    byId("drill-layer").addEventListener("change", (event) => State.set({ layer: Number(event.target.value) }));
    byId("drill-batch").addEventListener("change", (event) => State.set({ microBatch: Number(event.target.value) }));
    document.querySelectorAll("[data-step]").forEach((button) => button.addEventListener("click", step));
    byId("drill-worst").addEventListener("click", async () => State.set(await worst()));
    State.listen(["before", "after", "layer", "microBatch"], update);
    await update();
  };

  return { start, worst };
})();
