"use strict";
/* Memory of the fullest rank by planner, against what the device has. And how the run was made. */
const Memory = (() => {
  const { byId, make, table, tip, alternative } = Elements;
  const { run } = Data;
  const FILLS = ["rest", "line-7", "line-2", "line-4", "line-1", "line-3", "line-6", "line-5"];
  const device = () => {
    const given = run.about.hardware?.memory_bytes;
    return typeof given === "number" && given > 0 ? given : null;
  };

  const parts = () => [...new Set(run.planners.flatMap((planner) => Object.keys(planner.memory)))];
  const total = (planner) => Object.values(planner.memory).reduce((sum, value) => sum + (value || 0), 0);

  const bars = (shown) => {
    const limit = device();
    const most = Math.max(limit || 0, ...shown.map(total));
    const labels = shown.map((planner) => planner.label);
    return {
      grid: { left: Theme.room(labels, "memory-chart") + 12, right: 24, top: Theme.legendHeight(parts().map(Format.name), "memory-chart") + 34, bottom: 24 },
      legend: Theme.legend({ data: parts().map(Format.name) }),
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, formatter: ([first]) => {
        const planner = shown[first.dataIndex];
        return tip(`${Format.capital(planner.label)}: ${Format.bytes(total(planner))}`, ...Object.entries(planner.memory).map(([key, value]) => `${Format.name(key)} ${value === null ? "–" : Format.bytes(value)}`), Data.kind());
      } },
      xAxis: { type: "value", max: Math.ceil(most * 1.04 / 1e9) * 1e9, ...Theme.axis({ axisLine: { show: false }, axisLabel: { hideOverlap: true, formatter: (value) => (value === 0 ? "0" : Format.tick(Format.bytes(value))), showMaxLabel: false } }) },
      yAxis: Theme.names(labels, "memory-chart"),
      series: parts().map((key, index) => ({
        name: Format.name(key), type: "bar", stack: "memory", barMaxWidth: 22, color: Theme.colour(FILLS[index % FILLS.length]), itemStyle: { borderColor: Theme.colour("page"), borderWidth: 1 },
        data: shown.map((planner) => planner.memory[key] ?? 0),
        ...(index === 0 && limit ? { markLine: { silent: true, symbol: "none", data: [{ xAxis: limit }], lineStyle: { color: Theme.colour("text"), width: 1.5, type: "solid" }, label: { formatter: `device ${Format.bytes(limit)}`, position: "start", align: "right", color: Theme.colour("text"), distance: 6 } } } : {}),
      })),
    };
  };

  const memoryTable = (shown) => table({
    caption: `Bytes on the rank that needs most, ${Data.kind()}.`,
    columns: [{ title: "Planner", text: true }, ...parts().map((key) => ({ title: Format.name(key) })), { title: "Together" }],
    rows: shown.map((planner) => ({ hero: planner.name === run.pair[1], cells: [{ text: planner.label, value: planner.label },
      ...parts().map((key) => ({ text: planner.memory[key] === undefined || planner.memory[key] === null ? "–" : Format.bytes(planner.memory[key]), value: planner.memory[key] })),
      { text: Format.bytes(total(planner)), value: total(planner) }] })),
    sortable: true,
  });

  const start = () => {
    const shown = run.planners.filter((planner) => Object.keys(planner.memory).length && !planner.ideal);
    byId("memory").hidden = shown.length === 0;
    made();
    if (!shown.length) return;
    const limit = device();
    byId("memory-note").textContent = limit ? `The line is the memory of the device, ${Format.bytes(limit)}.` : "";
    Theme.draw("memory-chart", () => bars(shown), { height: 120 + 38 * shown.length, label: `Memory: ${shown.map((planner) => `${planner.label} ${Format.bytes(total(planner))}`).join(", ")}${limit ? `; the device has ${Format.bytes(limit)}` : ""}.` });
    alternative("memory-table", "Memory as a table", () => memoryTable(shown));
  };

  const list = (values) => make("dl", {}, Object.entries(values).flatMap(([key, value]) => [make("dt", {}, Format.name(key)), make("dd", {}, Format.value(key, value))]));
  const block = (title, values) => {
    if (values === null || values === undefined) return null;
    const entries = Array.isArray(values) ? values : [values];
    if (!entries.length) return null;
    return make("div", {}, make("h3", {}, title), entries.map((entry) => (entry !== null && typeof entry === "object" ? list(entry) : make("p", {}, String(entry)))));
  };

  const made = () => {
    const { command, version, kind, format, inputs, warnings, ...others } = run.about;
    byId("made-note").textContent = `The command and inputs behind every figure above. The figures are ${Data.kind()}.`;
    byId("command").textContent = command ?? "not recorded";
    byId("version").textContent = version === undefined ? "" : String(version);
    const groups = Object.entries(others).filter(([, value]) => value !== null && typeof value === "object");
    const single = Object.fromEntries(Object.entries(others).filter(([, value]) => value === null || typeof value !== "object"));
    byId("about").replaceChildren(...[
      block("Run", { kind: Data.kind(), ...(version === undefined ? {} : { version }), ...single }),
      ...groups.map(([key, value]) => block(Format.name(key), value)),
      block("Inputs", inputs), block("Warnings", Array.isArray(warnings) && warnings.length ? warnings : null),
    ].filter(Boolean));
  };

  return { start };
})();
