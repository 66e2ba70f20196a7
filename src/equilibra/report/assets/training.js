"use strict";
/* A training run: reward, imbalance with and without the plan, where the time of every step went, KL and entropy.
   All charts share the steps; one of them can be chosen, and is then read out in words. */
const Training = (() => {
  const { byId, table, tip, alternative } = Elements;
  const { training, answer, about } = Data.run;
  const { step: steps, columns, stages, held_out: heldOut } = training;
  const FILLS = { rollout: "attention", plan: "plan", logprob: "line-7", update: "accent", weights: "exchange", checkpoint: "optimizer", reward: "line-4", advantages: "line-3" };
  const SPARE = ["line-6", "line-5", "line-1", "line-2"];
  const FEW = 40;
  const SMALL_SHARE = 0.015;
  const SPIKE = 0.1;
  const BEYOND = 3;
  const planner = Data.label(training.planner).replace(/, measured$/, "");
  const balanced = training.planner !== "static";
  const last = steps.length - 1;
  let chosen = null;

  const stageOf = (name) => name.replace("seconds_", "");
  const at = (name, index) => columns[name]?.[index] ?? null;
  const numbers = (name) => (columns[name] || []).filter((value) => value !== null);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) / 2)];
  const share = (value) => (value === null ? "–" : value.toFixed(3));
  const small = (value) => (value === null ? "–" : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
  const seconds = (value) => (value === null ? "–" : Format.seconds(value));
  const heldOutAt = (step) => { const index = heldOut.step.indexOf(step); return index < 0 ? null : heldOut.reward[index]; };
  const nearest = (x) => steps.reduce((best, step, index) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? index : best), 0);

  /* Stages as bands: those that hardly take time, and what no stage has, are one band. */
  const bands = (() => {
    const totals = stages.map((name) => ({ name, total: numbers(name).reduce((sum, value) => sum + Math.max(0, value), 0) }));
    const whole = Math.max(numbers("seconds").reduce((sum, value) => sum + value, 0), totals.reduce((sum, { total }) => sum + total, 0));
    const shown = totals.filter(({ name, total }) => total >= SMALL_SHARE * whole || numbers(name).some((value) => value * steps.length > SPIKE * whole)).map(({ name }) => name);
    const named = shown.map((name, index) => ({ label: stageOf(name), colour: Object.hasOwn(FILLS, stageOf(name)) ? FILLS[stageOf(name)] : SPARE[index % SPARE.length],
      data: steps.map((_, i) => Math.max(0, at(name, i) ?? 0)) }));
    const rest = steps.map((_, i) => Math.max(0, (at("seconds", i) ?? 0) - named.reduce((sum, band) => sum + band.data[i], 0)));
    return rest.some((value) => value > 0) ? [...named, { label: "other", colour: "rest-soft", data: rest }] : named;
  })();
  const lengths = steps.map((_, i) => bands.reduce((sum, band) => sum + band.data[i], 0));

  /* Steps that take far longer than others (the first compiles) would flatten the rest: they go beyond the scale. */
  const usual = median(lengths);
  const inside = lengths.filter((length) => length <= BEYOND * usual);
  const top = inside.length < lengths.length && inside.length ? Math.max(...inside) * 1.08 : null;

  const stepAxis = (labelled) => {
    const end = Math.max(steps[last], heldOut.step.at(-1) ?? 0);
    const one = end === steps[0];
    return { type: "value", min: steps[0] - (one ? 1 : 0), max: end + (one ? 1 : 0), minInterval: 1,
      ...(labelled ? { name: "step", nameLocation: "middle", nameGap: 26 } : {}),
      ...Theme.axis({ splitLine: { show: false }, axisLabel: { hideOverlap: true, formatter: Format.whole } }) };
  };
  const points = (name) => steps.map((step, index) => [step, at(name, index)]);
  const missing = (entry) => entry === undefined || (Array.isArray(entry) && entry[1] === null);
  const alone = (data, i) => !missing(data[i]) && missing(data[i - 1]) && missing(data[i + 1]);
  const line = (name, data, colour, more = {}) => ({
    name, type: "line", data, symbol: "circle", symbolSize: 5, showSymbol: data.length <= FEW || data.some((_, i) => alone(data, i)), color: Theme.colour(colour), lineStyle: { color: Theme.colour(colour), width: 1.75 },
    emphasis: { disabled: true }, ...more,
  });
  const cursor = () => (chosen === null ? {} : { markLine: { silent: true, symbol: "none", label: { show: false }, animation: false,
    data: [{ xAxis: steps[chosen] }], lineStyle: { color: Theme.colour("text"), width: 1, type: "dashed" } } });
  const pen = document.createElement("canvas").getContext("2d");
  const legendHeight = (names, id, sign) => {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const width = names.reduce((sum, name) => sum + pen.measureText(name).width + sign + 20, 0);
    return 26 * Math.ceil(width / Math.max(200, byId(id).clientWidth));
  };
  const frame = (id, series, { legend = false, icon = null, labelled = true, lines, ...axis }) => {
    const names = legend ? series.map(({ name }) => name) : [];
    return {
      grid: { left: 4, right: 16, top: legend ? legendHeight(names, id, icon ? 12 : 22) + 12 : 10, bottom: labelled ? 26 : 4, containLabel: true },
      ...(legend ? { legend: Theme.legend({ data: names, selectedMode: false, itemGap: 14, ...(icon ? { icon, itemWidth: 12 } : {}) }) } : {}),
      tooltip: { trigger: "axis", formatter: ([first]) => { const index = nearest(first.axisValue); return tip(`Step ${Format.whole(steps[index])}`, ...lines(index)); } },
      xAxis: stepAxis(labelled),
      yAxis: { type: "value", ...Theme.axis({ axisLine: { show: false }, axisLabel: { formatter: (value) => String(Number(value.toPrecision(6))) } }), ...axis },
      series: [{ ...series[0], ...cursor() }, ...series.slice(1)],
    };
  };

  /* The first and the last evaluation say their value, inside the axes. */
  const heldOutPoints = () => heldOut.step.map((step, index) => {
    const [first, end] = [index === 0, index === heldOut.step.length - 1];
    return { value: [step, heldOut.reward[index]], label: { show: first || end, position: first && heldOut.reward[1] > heldOut.reward[0] ? "bottom" : "top", distance: 7, align: end && !first ? "right" : "left", offset: [first ? 2 : 6, 0],
      color: Theme.colour("accent"), fontWeight: 600, fontSize: 13, formatter: share(heldOut.reward[index]) } };
  });
  const rewardChart = () => frame("training-reward", [
    line("training problems", points("reward"), "rest", { lineStyle: { color: Theme.colour("rest"), width: 1.5 } }),
    ...(heldOut.step.length ? [line("held-out problems", heldOutPoints(), "accent",
      { symbolSize: 9, showSymbol: heldOut.step.length <= 2 * FEW, lineStyle: { color: Theme.colour("accent"), width: 3 }, z: 5 })] : []),
  ], { legend: true, lines: (i) => [`reward ${share(at("reward", i))}`, heldOutAt(steps[i]) === null ? null : `held-out reward ${share(heldOutAt(steps[i]))}`] });

  const imbalanceChart = () => frame("training-imbalance", [
    ...(balanced && numbers("imbalance_static").length ? [line("static placement (would have been)", points("imbalance_static"), "muted", { areaStyle: { color: Theme.colour("rest"), opacity: 0.22, origin: 1 } })] : []),
    line(balanced ? planner : "static placement", points("imbalance"), "accent", { lineStyle: { color: Theme.colour("accent"), width: 3 }, z: 5 }),
  ], { legend: true, min: 1, max: ({ max }) => (max < 1.05 ? 1.05 : null), lines: (i) => [balanced ? `static placement ${share(at("imbalance_static", i))}` : null, `${planner} ${share(at("imbalance", i))}`] });

  const timeChart = () => frame("training-time", bands.map((band) => line(band.label, steps.map((step, i) => [step, band.data[i]]), band.colour, {
    stack: "step", showSymbol: steps.length === 1, areaStyle: { color: Theme.colour(band.colour), opacity: 1 }, lineStyle: { color: Theme.colour("page"), width: steps.length > 200 ? 0 : 0.75 },
  })), { legend: true, icon: "roundRect", min: 0, max: top, lines: timeLines, axisLabel: { color: Theme.colour("muted"), showMaxLabel: top === null, formatter: (value) => Format.tick(Format.seconds(value)) } });
  const timeLines = (i) => [`${seconds(lengths[i])} in all`, ...bands.map((band) => `${band.label} ${seconds(band.data[i])}`)];

  const smallChart = (id, name, labelled) => () => frame(id, [line(name, points(name), "line-6")], { labelled, scale: true, splitNumber: 3, lines: (i) => [`${name === "kl" ? "KL" : name} ${small(at(name, i))}`] });

  const between = (values, show) => (values.length ? `from ${show(values[0])} to ${show(values.at(-1))}` : "not recorded");
  const CHARTS = [
    { id: "training-reward", has: numbers("reward").length || heldOut.step.length, make: rewardChart, height: 300, label: () => `Reward over ${training.num_steps} steps: ${between(numbers("reward"), share)}. On held-out problems ${between(heldOut.reward, share)}.` },
    { id: "training-imbalance", has: numbers("imbalance").length, make: imbalanceChart, height: 300, label: () => `Imbalance of every step, mean ${share(mean(numbers("imbalance")))}${balanced && numbers("imbalance_static").length ? `; with static placement it would have been ${share(mean(numbers("imbalance_static")))}` : ""}.` },
    { id: "training-time", has: bands.length, make: timeChart, height: 330, label: () => `Time of every step by stage, median ${seconds(usual)}. Means: ${bands.map((band) => `${band.label} ${seconds(mean(band.data))}`).join(", ")}.` },
    { id: "training-kl", has: numbers("kl").length, make: smallChart("training-kl", "kl", false), height: 132, label: () => `KL of every step: ${between(numbers("kl"), small)}.` },
    { id: "training-entropy", has: numbers("entropy").length, make: smallChart("training-entropy", "entropy", true), height: 152, label: () => `Entropy of every step: ${between(numbers("entropy"), small)}.` },
  ];
  const DRAWN = CHARTS.filter(({ has }) => has);
  const draw = () => DRAWN.forEach(({ id, make, height, label }) => Theme.draw(id, make, { height, label: label() }));

  const choose = (index) => {
    chosen = Math.min(last, Math.max(0, index));
    byId("training-step").value = String(chosen);
    draw();
    read(chosen);
  };
  const read = (index) => {
    const held = heldOutAt(steps[index]);
    byId("training-step").setAttribute("aria-valuetext", `step ${steps[index]}`);
    byId("training-live").textContent = `Step ${Format.whole(steps[index])}: ${[
      `reward ${share(at("reward", index))}`, held === null ? null : `held-out reward before it ${share(held)}`,
      `imbalance ${share(at("imbalance", index))}${balanced ? ` (static placement ${share(at("imbalance_static", index))})` : ""}`,
      !bands.length ? null : `${seconds(lengths[index])}, of it ${bands.map((band) => `${band.label} ${seconds(band.data[index])}`).join(", ")}`,
      `KL ${small(at("kl", index))}`, `entropy ${small(at("entropy", index))}`,
    ].filter(Boolean).join("; ")}.`;
  };

  const COLUMNS = [["reward", "Reward", share], ["imbalance_static", "Imbalance, static", share], ["imbalance", "Imbalance, now", share], ["exposed", "Exposed", (value) => (value === null ? "–" : Format.percent(value))],
    ["kl", "KL", small], ["entropy", "Entropy", small], ["loss", "Loss", small], ["mismatch_max", "Largest mismatch", small], ["tokens_per_s", "Tokens/s", (value) => (value === null ? "–" : Format.large(value))], ["seconds", "Seconds", seconds]];
  const stepsTable = () => {
    const known = [...COLUMNS.filter(([name]) => name in columns), ...stages.map((name) => [name, Format.capital(stageOf(name)), seconds])];
    const row = (step, index) => ({ cells: [{ text: Format.whole(step), value: step }, { text: share(heldOutAt(step)), value: heldOutAt(step) },
      ...known.map(([name, , show]) => ({ text: show(at(name, index)), value: at(name, index) }))] });
    const only = heldOut.step.filter((step) => !steps.includes(step));
    return table({
      caption: "Every step that is shown (measured; static placement by counting). Held-out problems are answered before the step of that number.",
      columns: [{ title: "Step" }, { title: "Held-out reward" }, ...known.map(([, title]) => ({ title }))],
      rows: [...steps.map(row), ...only.map((step) => row(step, -1))].sort((a, b) => a.cells[0].value - b.cells[0].value),
      sortable: true,
    });
  };

  const words = () => {
    const longest = lengths.indexOf(Math.max(...lengths));
    byId("kind").textContent = "training run";
    byId("training-lead").textContent = [
      `${Format.whole(training.num_steps)} step${training.num_steps === 1 ? "" : "s"}${about.settings?.algorithm ? ` of ${String(about.settings.algorithm).toUpperCase()}` : ""}; times are those of world rank 0.`,
      training.every > 1 ? ` One step in ${training.every} is shown.` : "",
      balanced ? " Static placement is counted from the same routing: the same sequences where the rollout left them, homes that never moved, no copies." : "",
    ].join("");
    byId("training-time-note").textContent = top === null ? "by stage" : `by stage; step ${steps[longest]} took ${seconds(lengths[longest])}, off the scale`;
    byId("time-title").textContent = `Time of the last step${about.step === undefined ? "" : `, number ${about.step}`}`;
    byId("time-note").textContent = `${answer.step} Here and below everything is about this one step.`;
  };

  const start = () => {
    words();
    CHARTS.forEach(({ id, has }) => { byId(id).closest("figure").hidden = !has; });
    draw();
    DRAWN.forEach(({ id }) => {
      const { chart } = Theme.charts.get(id);
      chart.getZr().on("click", ({ offsetX, offsetY }) => { if (chart.containPixel("grid", [offsetX, offsetY])) choose(nearest(chart.convertFromPixel({ xAxisIndex: 0 }, offsetX))); });
    });
    const slider = byId("training-step");
    slider.max = String(last);
    slider.value = String(last);
    slider.addEventListener("input", () => choose(Number(slider.value)));
    read(last);
    alternative("training-table", "Steps as a table", stepsTable);
  };

  return { start, bands, lengths };
})();
Training.start();
