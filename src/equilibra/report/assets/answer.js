"use strict";
/* The answer first: one sentence, a few facts, a bar per planner, and all metrics. */
const Answer = (() => {
  const { byId, make, table, tip } = Elements;
  const { run } = Data;

  const subject = () => {
    const { model = {}, hardware = {}, cluster = {}, tokens, sequences } = run.about;
    const nodes = cluster.num_nodes && cluster.ranks_per_node ? `${cluster.num_nodes} × ${cluster.ranks_per_node} ranks` : `${run.num_ranks} ranks`;
    return [
      model.name, `${run.num_layers} layer${run.num_layers === 1 ? "" : "s"}`, `${run.num_experts} experts${model.top_k ? `, top ${model.top_k}` : ""}`, nodes,
      hardware.name, sequences ? `${Format.whole(sequences)} sequences` : null, tokens ? `${Format.whole(tokens)} tokens` : null,
    ].filter(Boolean).join(" · ");
  };

  const words = () => {
    const kind = Data.kind();
    byId("kind").textContent = kind;
    document.querySelectorAll(".how").forEach((place) => { place.textContent = ` (${kind})`; });
    byId("subject").textContent = subject();
    byId("sentence").textContent = run.answer.sentence;
    document.title = `${run.about.model?.name ? `${run.about.model.name}: ` : ""}Equilibra report`;
    byId("facts").replaceChildren(...run.answer.facts.map((fact) => make("li", {}, make("b", { "data-metric": fact.metric }, fact.value), make("span", {}, fact.label))));
    const warnings = Array.isArray(run.about.warnings) ? run.about.warnings : [];
    byId("warnings").replaceChildren(...warnings.map((text) => make("p", { class: "warning" }, String(text))));
  };

  const parts = (planner) => {
    const total = planner.metrics.step_time_s ?? 0;
    const overhead = Math.min(total, Math.max(0, planner.metrics.exposed_overhead_s ?? 0));
    return { total, overhead, work: total - overhead };
  };

  const chartOptions = (shown) => {
    const labels = shown.map((planner) => planner.label);
    const bar = (planner) => ({ color: planner.name === run.pair[1] ? Theme.colour("accent") : planner.ideal ? Theme.colour("rest-soft") : Theme.colour("rest") });
    return {
      grid: { left: Theme.room(labels, "time-chart") + 12, right: 76, top: 36, bottom: 24 },
      legend: Theme.legend({ selectedMode: false, data: ["work and waiting", "exposed overhead"] }),
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, formatter: ([first]) => {
        const planner = shown[first.dataIndex];
        const { total, overhead } = parts(planner);
        return tip(Format.capital(planner.label), `step ${Format.seconds(total)} (${Data.kind()})`, `of it exposed overhead ${Format.seconds(overhead)}`);
      } },
      xAxis: { type: "value", ...Theme.axis({ axisLabel: { hideOverlap: true, formatter: (value) => Format.tick(Format.seconds(value)) } }), axisLine: { show: false } },
      yAxis: Theme.names(labels, "time-chart"),
      series: [
        { name: "work and waiting", type: "bar", stack: "step", barMaxWidth: 26, color: Theme.colour("rest"),
          data: shown.map((planner) => ({ value: parts(planner).work, itemStyle: bar(planner) })) },
        { name: "exposed overhead", type: "bar", stack: "step", color: Theme.colour("overhead"),
          data: shown.map((planner) => parts(planner).overhead),
          label: { show: true, position: "right", color: Theme.colour("text"), fontSize: 13, formatter: ({ dataIndex }) => Format.seconds(parts(shown[dataIndex]).total) } },
      ],
    };
  };

  const chart = () => {
    const shown = run.planners.filter((planner) => planner.metrics.step_time_s !== null && planner.metrics.step_time_s !== undefined);
    byId("time-chart").hidden = shown.length === 0;
    if (!shown.length) return;
    const label = `Step time of each planner: ${shown.map((planner) => `${planner.label} ${Format.seconds(planner.metrics.step_time_s)}`).join(", ")}.`;
    Theme.draw("time-chart", () => chartOptions(shown), { height: 56 + 42 * shown.length, label });
    if (shown.some((planner) => planner.ideal)) {
      const packed = run.planners.some((planner) => planner.metrics.share_of_balanced > 1.0005);
      byId("time-note").textContent = `Perfectly balanced is an ideal, not a plan: every rank has the mean load of the given micro-batches, and nothing moves.${packed ? " A planner that packs sequences into other micro-batches can be faster than that." : ""}`;
    }
  };

  const metricsTable = () => {
    const known = Format.order([...new Set(run.planners.flatMap((planner) => Object.keys(planner.metrics)))]);
    const columns = [{ title: "Planner", text: true }, ...known.map((key) => ({ title: Format.name(key) }))];
    const rows = run.planners.map((planner) => ({
      hero: planner.name === run.pair[1],
      cells: [{ text: planner.label, value: planner.label }, ...known.map((key) => ({ text: Format.metric(key, planner.metrics[key]), value: planner.metrics[key] }))],
    }));
    byId("metrics").replaceChildren(table({ caption: `All metrics, ${Data.kind()}.`, columns, rows, sortable: true }));
  };

  const start = () => { words(); chart(); metricsTable(); };
  return { start };
})();
