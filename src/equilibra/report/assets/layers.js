"use strict";
/* Imbalance of every layer, and the distance from the bound: one line or bar per planner. */
const Layers = (() => {
  const { byId, table, tip, alternative } = Elements;
  const { run } = Data;

  const lines = () => {
    const shown = run.planners;
    const few = run.num_layers < 3;
    return {
      grid: { left: 8, right: 24, top: Theme.legendHeight(shown.map((planner) => planner.label), "layers-chart") + 18, bottom: 26, containLabel: true },
      legend: Theme.legend({ type: "plain", data: shown.map((planner) => planner.label) }),
      tooltip: { trigger: "axis", formatter: (points) => tip(`Layer ${points[0].axisValue}`, ...points.map((point) => `${point.seriesName}: ${Format.ratio(point.value)}`)) },
      xAxis: { type: "category", boundaryGap: few, data: Array.from({ length: run.num_layers }, (_, l) => l), name: "layer", nameLocation: "middle", nameGap: 26, ...Theme.axis() },
      yAxis: { type: "value", min: 1, max: ({ max }) => (max < 1.05 ? 1.05 : null), ...Theme.axis({ axisLine: { show: false }, axisLabel: { formatter: (value) => String(Number(value.toFixed(4))) } }) },
      series: shown.map((planner) => {
        const { color, dash, width } = Theme.planner(planner.name);
        return { name: planner.label, type: "line", data: planner.imbalance_L, symbol: "circle", symbolSize: few ? 9 : 5, showSymbol: run.num_layers <= 24, color, lineStyle: { color, width, type: dash }, z: planner.name === run.pair[1] ? 5 : 2 };
      }),
    };
  };

  const layersTable = () => table({
    caption: `Imbalance, ${Data.kind()}: mean over micro-batches.`,
    columns: [{ title: "Layer" }, ...run.planners.map((planner) => ({ title: planner.label }))],
    rows: Array.from({ length: run.num_layers }, (_, l) => ({ cells: [{ text: String(l), value: l }, ...run.planners.map((planner) => ({ text: Format.ratio(planner.imbalance_L[l]), value: planner.imbalance_L[l] }))] })),
  });

  const bars = (shown) => ({
    grid: { left: Theme.room(shown.map((planner) => planner.label), "bound-chart") + 12, right: 76, top: 8, bottom: 24 },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, formatter: ([first]) => {
      const { label, gap } = shown[first.dataIndex];
      return tip(Format.capital(label), `gap ${Format.percent(gap.total)} (${Data.kind()})`, `99th percentile ${Format.percent(gap.p99)}`, `worst ${Format.percent(gap.worst)}`);
    } },
    xAxis: { type: "value", min: 0, ...Theme.axis({ axisLine: { show: false }, axisLabel: { hideOverlap: true, formatter: (value) => `${Number((value * 100).toPrecision(6))} %` } }) },
    yAxis: Theme.names(shown.map((planner) => planner.label), "bound-chart"),
    series: [{ type: "bar", barMaxWidth: 22, data: shown.map((planner) => ({ value: planner.gap.total, itemStyle: { color: Theme.colour(planner.name === run.pair[1] ? "accent" : "rest") } })),
      label: { show: true, position: "right", color: Theme.colour("text"), fontSize: 13, formatter: ({ value }) => Format.percent(value) } }],
  });

  const boundTable = (shown) => table({
    caption: `Slowest ranks and lower bounds in (token, expert) pairs, added over layers and micro-batches (${Data.kind()}).`,
    columns: [{ title: "Planner", text: true }, { title: "Slowest ranks" }, { title: "Lower bounds" }, { title: "Gap" }, { title: "Gap, 99th percentile" }, { title: "Largest gap" }],
    rows: shown.map(({ name, label, gap }) => ({ hero: name === run.pair[1], cells: [
      { text: label, value: label }, { text: Format.whole(gap.slowest), value: gap.slowest }, { text: Format.whole(gap.bound), value: gap.bound },
      { text: Format.percent(gap.total), value: gap.total }, { text: Format.percent(gap.p99), value: gap.p99 }, { text: Format.percent(gap.worst), value: gap.worst },
    ] })),
    sortable: true,
  });

  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

  const start = () => {
    const label = `Imbalance of every layer. Means: ${run.planners.map((planner) => `${planner.label} ${Format.ratio(mean(planner.imbalance_L))}`).join(", ")}.`;
    Theme.draw("layers-chart", lines, { height: 380, label });
    alternative("layers-table", "Imbalance as a table", layersTable);
    const shown = run.planners.filter((planner) => planner.gap);
    byId("bound").hidden = shown.length === 0;
    if (!shown.length) return;
    Theme.draw("bound-chart", () => bars(shown), { height: 44 + 38 * shown.length, label: `Gap to the lower bound: ${shown.map((planner) => `${planner.label} ${Format.percent(planner.gap.total)}`).join(", ")}.` });
    byId("bound-table").replaceChildren(boundTable(shown));
  };

  return { start };
})();
