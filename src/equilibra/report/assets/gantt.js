"use strict";
/* The timeline: one lane per rank and resource; what is hidden under compute, what is exposed, who waits. */
const Gantt = (() => {
  const { byId, table, tip, options, keys, alternative } = Elements;
  const { run } = Data;
  const { kinds, resources, stages, directions, ranks } = run.timeline;
  const COLOURS = {
    attention: "attention", experts: "experts", dispatch: "exchange", combine: "exchange", counts: "plan", plan: "plan",
    "flash copy": "flash", "flash gradient": "flash", "standing copy": "standing", "standing gradient": "standing",
    migration: "move", reduce: "move", optimizer: "optimizer",
  };
  const OVERHEAD = ["counts", "plan", "flash copy", "flash gradient", "standing copy", "standing gradient", "migration"];
  const LIMIT = 400;
  const view = { events: null, shown: [], lanes: [], from: 0, to: 1 };
  const loaded = new Map();

  const events = (name) => {
    if (!loaded.has(name)) loaded.set(name, unpacked(run.timeline.planners[name]));
    return loaded.get(name);
  };
  const unpacked = async ({ arrays, tick_us: tick }) => {
    const columns = await Data.unpackAll(arrays);
    let start = 0;
    return Array.from(columns.kind, (_, i) => {
      start += columns.start[i];
      const length = columns.length[i] * tick;
      return { kind: kinds[columns.kind[i]], resource: columns.resource[i], stage: columns.stage[i], direction: columns.direction[i],
        layer: columns.layer[i], batch: columns.micro_batch[i], rank: columns.rank[i], peer: columns.peer[i], expert: columns.expert[i],
        tokens: columns.tokens[i], bytes: columns.bytes[i], start: start * tick, end: start * tick + length, hidden: columns.hidden[i] * tick };
    });
  };

  /* Passes in the order they run; recomputed activations belong to the backward pass. */
  const passOf = (event) => (event.batch < 0 || event.layer < 0 ? "once" : `${stages[event.stage]} ${event.direction === 0 ? "forward" : "backward"}`);
  const exposed = (event) => OVERHEAD.includes(event.kind) && event.resource !== 0 && event.end - event.start - event.hidden > 0.02 * (event.end - event.start);

  const choose = () => {
    const pass = byId("gantt-pass").value;
    const [first, count] = [Number(byId("gantt-layer").value), Number(byId("gantt-count").value)];
    const inside = view.events.filter((event) => passOf(event) === pass && (pass === "once" || (event.layer >= first && event.layer < first + count)));
    const spans = inside.some((event) => event.resource === 0) ? inside.filter((event) => event.resource === 0 || event.kind === "dispatch" || event.kind === "combine") : inside;
    view.from = spans.reduce((least, event) => Math.min(least, event.start), Infinity);
    view.to = spans.reduce((most, event) => Math.max(most, event.end), 0);
    view.shown = view.events.filter((event) => event.end > view.from && event.start < view.to && (pass === "once") === (passOf(event) === "once"));
    const used = [...new Set(view.shown.map((event) => event.resource))].sort((a, b) => a - b);
    view.lanes = ranks.flatMap((rank) => used.map((resource) => ({ rank, resource, first: resource === used[0] })));
  };

  const hatch = () => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.strokeStyle = Theme.colour("alarm");
    pen.globalAlpha = 0.75;
    pen.lineWidth = 1.3;
    [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]].forEach(([a, b, c, d]) => { pen.beginPath(); pen.moveTo(a, b); pen.lineTo(c, d); pen.stroke(); });
    return { image: tile, repeat: "repeat" };
  };

  const bar = (data, pattern, colourOf) => (params, api) => {
    const { event } = data[params.dataIndex];
    const [x, y] = api.coord([api.value(1), api.value(0)]);
    const [end] = api.coord([api.value(2), api.value(0)]);
    const tall = api.size([0, 1])[1] * 0.78;
    const box = params.coordSys;
    const [left, right] = [Math.max(box.x, x), Math.min(box.x + box.width, Math.max(end, x + 0.7))];
    if (right <= left) return null;
    const waits = event.kind === "wait";
    return { type: "rect", shape: { x: left, y: y - tall / 2, width: right - left, height: tall },
      style: waits ? { fill: pattern, stroke: colourOf.alarm, lineWidth: right - left > 4 ? 0.6 : 0 }
        : { fill: colourOf[event.kind], stroke: exposed(event) ? colourOf.alarm : colourOf.page, lineWidth: exposed(event) ? 2 : right - left > 4 ? 0.6 : 0 } };
  };

  /* Every other rank has a shaded band. */
  const band = (perRank) => (params, api) => {
    const tall = api.size([0, 1])[1];
    const [, y] = api.coord([0, api.value(0)]);
    return { type: "rect", shape: { x: 0, y: y - tall / 2, width: params.coordSys.x + params.coordSys.width, height: tall * perRank }, style: { fill: Theme.colour("surface") } };
  };

  const chartOptions = () => {
    const perRank = view.lanes.length / ranks.length;
    const lane = new Map(view.lanes.map(({ rank, resource }, i) => [`${rank} ${resource}`, i]));
    const data = view.shown.map((event) => ({ value: [lane.get(`${event.rank} ${event.resource}`), event.start - view.from, event.end - view.from], event }));
    const colourOf = { ...Object.fromEntries(kinds.map((kind) => [kind, Theme.colour(COLOURS[kind] || "rest")])), alarm: Theme.colour("alarm"), page: Theme.colour("page") };
    const narrow = byId("gantt-chart").clientWidth < 520;
    return {
      grid: { left: narrow ? 92 : 128, right: 12, top: 26, bottom: 66 },
      tooltip: { formatter: ({ data: entry }) => entry && eventTip(entry.event) },
      xAxis: { type: "value", min: 0, max: view.to - view.from, position: "top", ...Theme.axis({ axisLabel: { hideOverlap: true, formatter: (value) => Format.tick(Format.seconds(value * 1e-6)) } }) },
      yAxis: { type: "category", inverse: true, data: view.lanes.map(({ rank, resource, first }) => (first ? `rank ${rank}  ${resources[resource]}` : resources[resource])),
        ...Theme.axis({ axisLine: { show: false }, splitLine: { show: false }, axisLabel: { interval: 0, fontSize: 11 } }) },
      dataZoom: [
        { type: "slider", xAxisIndex: 0, height: 22, bottom: 14, filterMode: "none", labelFormatter: (value) => Format.seconds(value * 1e-6), borderColor: Theme.colour("line"), fillerColor: Theme.colour("accent-soft"), backgroundColor: Theme.colour("surface"), handleStyle: { color: Theme.colour("accent"), borderColor: Theme.colour("accent") }, moveHandleStyle: { color: Theme.colour("rest") }, textStyle: { color: Theme.colour("muted") }, showDataShadow: false, brushSelect: false },
        { type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, preventDefaultMouseMove: false },
      ],
      series: [
        { type: "custom", silent: true, z: 0, data: ranks.map((_, i) => [i * perRank, 0]).filter((_, i) => i % 2 === 0), encode: { x: 1, y: 0 }, renderItem: band(perRank) },
        { type: "custom", clip: true, encode: { x: [1, 2], y: 0 }, data, renderItem: bar(data, hatch(), colourOf), progressive: 0 },
      ],
    };
  };

  const eventTip = (event) => tip(
    `${Format.capital(event.kind)}: ${Format.seconds((event.end - event.start) * 1e-6)}`,
    `rank ${event.rank}, ${resources[event.resource]}${event.layer >= 0 ? `, layer ${event.layer}` : ""}, ${stages[event.stage]} ${directions[event.direction]}`,
    event.expert >= 0 ? `expert ${event.expert}${event.peer >= 0 ? `, other end rank ${event.peer}` : ""}` : null,
    event.tokens > 0 ? `${Format.whole(event.tokens)} tokens` : null,
    event.bytes > 0 ? Format.bytes(event.bytes) : null,
    event.resource !== 0 && event.kind !== "wait" ? `hidden ${Format.seconds(event.hidden * 1e-6)}, exposed ${Format.seconds((event.end - event.start - event.hidden) * 1e-6)}` : null,
    `from ${Format.seconds(event.start * 1e-6)} of the step (${Data.kind()})`,
  );

  const eventsTable = () => table({
    caption: `Events in view, ${Data.kind()}${view.shown.length > LIMIT ? `; the first ${LIMIT} of ${view.shown.length}` : ""}.`,
    columns: ["Kind", "Rank", "Resource", "Layer", "Expert", "Other rank", "Start", "Length", "Hidden"].map((title, i) => ({ title, text: i === 0 || i === 2 })),
    rows: view.shown.slice(0, LIMIT).map((event) => ({ cells: [
      { text: event.kind, value: event.kind }, ...[event.rank].map((n) => ({ text: String(n), value: n })), { text: resources[event.resource], value: resources[event.resource] },
      ...[event.layer, event.expert, event.peer].map((n) => ({ text: n >= 0 ? String(n) : "–", value: n })),
      ...[event.start, event.end - event.start, event.hidden].map((us) => ({ text: Format.seconds(us * 1e-6), value: us })),
    ] })),
    sortable: true,
  });

  const totals = (name) => {
    const rows = run.timeline.planners[name].totals;
    byId("hidden-note").textContent = `${Format.capital(Data.label(name))}, all passes and layers of this micro-batch and what happens once a step, mean over all ranks. Hidden: the compute stream of the rank was busy meanwhile.`;
    byId("gantt-totals").replaceChildren(table({
      columns: ["What", "Events", "Time per rank", "Of it hidden", "Of it exposed"].map((title, i) => ({ title, text: i === 0 })),
      rows: rows.map(({ kind, events: count, us_per_rank: us, hidden_us_per_rank: hidden }) => ({ cells: [
        { text: kinds[kind], value: kinds[kind] }, { text: Format.whole(count), value: count }, { text: Format.seconds(us * 1e-6), value: us },
        { text: hidden === null ? "–" : Format.seconds(hidden * 1e-6), value: hidden },
        { text: hidden !== null ? Format.seconds((us - hidden) * 1e-6) : kinds[kind] === "wait" ? Format.seconds(us * 1e-6) : "–", value: hidden === null ? null : us - hidden },
      ] })),
      sortable: true,
    }));
  };

  const drawKeys = () => {
    const used = kinds.filter((kind) => view.shown.some((event) => event.kind === kind));
    const texts = new Map();
    used.filter((kind) => kind !== "wait").forEach((kind) => { const c = COLOURS[kind]; texts.set(c, [...(texts.get(c) || []), kind]); });
    keys("gantt-keys", [...[...texts].map(([colour, names]) => ({ colour: `var(--${colour})`, text: names.join(", ") })),
      ...(used.includes("wait") ? [{ style: "hatched", text: "wait" }] : []),
      ...(view.shown.some(exposed) ? [{ style: "exposed", text: "overhead that is not hidden" }] : [])]);
  };

  const draw = () => {
    choose();
    const lane = view.lanes.length > 30 ? 13 : 17;
    const waits = view.shown.filter((event) => event.kind === "wait").length;
    byId("gantt-chart").hidden = view.shown.length === 0;
    if (view.shown.length) Theme.draw("gantt-chart", chartOptions, { height: view.lanes.length * lane + 94, label: `Timeline of ${view.shown.length} events on ${ranks.length} ranks, ${waits} of them waits, ${Format.seconds((view.to - view.from) * 1e-6)} long. The tables below have the figures.` });
    drawKeys();
    alternative("gantt-table", "Events in view as a table", eventsTable);
  };

  const zoom = (event) => {
    const chart = Theme.charts.get("gantt-chart")?.chart;
    if (!chart) return;
    let { start, end } = chart.getOption().dataZoom[0];
    const width = end - start;
    const how = event.currentTarget.dataset.zoom;
    if (how === "all") [start, end] = [0, 100];
    if (how === "in") [start, end] = [start + width / 4, end - width / 4];
    if (how === "out") [start, end] = [start - width / 2, end + width / 2];
    const shift = how === "left" ? -Math.min(start, width / 2) : how === "right" ? Math.min(100 - end, width / 2) : 0;
    chart.dispatchAction({ type: "dataZoom", start: Math.max(0, start + shift), end: Math.min(100, end + shift) });
  };

  const pick = async () => {
    const name = byId("gantt-planner").value;
    view.events = await events(name);
    const passes = [...new Set(view.events.map(passOf))].filter((pass) => pass !== "once");
    if (view.events.some((event) => passOf(event) === "once")) passes.push("once");
    const wanted = byId("gantt-pass").value;
    options(byId("gantt-pass"), passes.map((pass) => [pass, pass === "once" ? "once a step" : pass]), passes.includes(wanted) ? wanted : passes.find((pass) => pass === "update forward") ?? passes[0]);
    const batch = view.events.find((event) => event.batch >= 0)?.batch;
    byId("timeline-note").textContent = `${batch === undefined ? "" : `Micro-batch ${batch} of ${Data.label(name)}. `}${ranks.length < run.num_ranks ? `${ranks.length} of ${run.num_ranks} ranks are shown, the busiest and the idlest among them; the Perfetto trace has all.` : ""}`;
    totals(name);
    draw();
  };

  const start = async () => {
    const names = run.planners.map((planner) => planner.name).filter((name) => Object.hasOwn(run.timeline.planners, name));
    byId("timeline").hidden = names.length === 0;
    if (!names.length) return;
    options(byId("gantt-planner"), names.map((name) => [name, Data.label(name)]), names.includes(run.pair[1]) ? run.pair[1] : names[0]);
    options(byId("gantt-layer"), Array.from({ length: run.num_layers }, (_, l) => [l, String(l)]), 0);
    const counts = [1, 2, 4, 8].filter((count) => count < run.num_layers);
    options(byId("gantt-count"), [...counts.map((count) => [count, String(count)]), [run.num_layers, "all"]], counts.includes(2) ? 2 : run.num_layers);
    byId("gantt-planner").addEventListener("change", pick);
    ["gantt-pass", "gantt-layer", "gantt-count"].forEach((id) => byId(id).addEventListener("change", draw));
    document.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", zoom));
    await pick();
  };

  return { start, view, drawKeys };
})();
