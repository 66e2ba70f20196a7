"use strict";
/* Numbers and names as people read them. Units come from the ends of names: _s, _us, _bytes, _tokens_per_s, _gb_per_s, _tflops. */
const Format = (() => {
  const NAMES = {
    step_time_s: "Step time", throughput_tokens_per_s: "Throughput, tokens/s", speedup_over_static: "Speed over static",
    share_of_balanced: "Share of balanced", imbalance_mean: "Imbalance, mean", imbalance_p99: "Imbalance, p99",
    copies_per_layer: "Copies per layer", copy_bytes: "Bytes copied", migration_bytes: "Bytes of moves",
    exposed_overhead_s: "Exposed overhead", peak_memory_bytes: "Peak memory", sha256: "SHA-256", expert_ffn: "Expert width",
    hidden: "Width", top_k: "Experts per token", micro_batch: "Micro-batch", num_micro_batches: "Micro-batches",
  };
  const UNIT = /_(gb_per_s|tflops|tokens_per_s|bytes|us|s)$/;

  const scaled = (value, scales, floor) => {
    const magnitude = Math.abs(value);
    const [scale, unit] = scales.find(([scale]) => magnitude >= scale) || floor;
    return `${(value / scale).toPrecision(magnitude / scale >= 1000 ? 4 : 3)}\u00a0${unit}`;
  };
  const seconds = (value) => {
    if (value === 0) return "0\u00a0s";
    if (Math.abs(value) >= 1000) return `${whole(value)}\u00a0s`;
    return scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]], [1e-9, "ns"]);
  };
  const bytes = (value) =>
    Math.abs(value) < 1e3 ? `${whole(value)}\u00a0B` : scaled(value, [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"]], [1e3, "kB"]);
  const whole = (value) => Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");
  const ratio = (value) => value.toFixed(3);
  const percent = (value) => {
    const points = value * 100;
    return `${points.toFixed(Math.abs(points) < 0.1 && points !== 0 ? 3 : Math.abs(points) < 10 ? 2 : 1)}\u00a0%`;
  };
  const number = (value) => {
    if (Number.isInteger(value) || Math.abs(value) >= 1e5) return whole(value);
    if (Math.abs(value) >= 1000) return whole(value);
    return Math.abs(value) >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
  };
  const large = (value) =>
    Math.abs(value) < 1e4 ? whole(value) : scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"]], [1e3, "k"]);
  /* For axes: no zeros behind the point. */
  const tick = (text) => text.replace(/(\.\d*?)0+(?=\u00a0)/, "$1").replace(/\.(?=\u00a0)/, "");

  const metric = (name, value) => {
    if (value === null || value === undefined) return "–";
    if (name.endsWith("_tokens_per_s")) return large(value);
    if (name.endsWith("_gb_per_s")) return `${number(value)}\u00a0GB/s`;
    if (name.endsWith("_tflops")) return `${number(value)}\u00a0TFLOP/s`;
    if (name.endsWith("_bytes")) return bytes(value);
    if (name.endsWith("_us")) return seconds(value * 1e-6);
    if (name.endsWith("_s")) return seconds(value);
    if (name.startsWith("share_") || name.endsWith("_share")) return percent(value);
    if (name.startsWith("speedup_")) return `${value.toFixed(2)}×`;
    if (name.startsWith("imbalance_")) return value.toFixed(4);
    return number(value);
  };
  const name = (key) => {
    if (Object.hasOwn(NAMES, key)) return NAMES[key];
    const words = key.replace(UNIT, "").replace(/^num_/, "").replaceAll("_", " ");
    if (key.endsWith("_tokens_per_s")) return `${words.charAt(0).toUpperCase()}${words.slice(1)}, tokens/s`;
    return words.charAt(0).toUpperCase() + words.slice(1);
  };
  const value = (key, item) => (typeof item === "number" && UNIT.test(key) ? metric(key, item) : plain(item));
  const plain = (item) => {
    if (item === null || item === undefined) return "–";
    if (typeof item === "number") return number(item);
    if (typeof item === "boolean") return item ? "yes" : "no";
    return typeof item === "object" ? JSON.stringify(item) : String(item);
  };
  /* Known metrics in the order of the page, then the others. */
  const ORDER = ["step_time_s", "speedup_over_static", "share_of_balanced", "throughput_tokens_per_s", "exposed_overhead_s",
    "imbalance_mean", "imbalance_p99", "copies_per_layer", "copy_bytes", "migration_bytes", "peak_memory_bytes"];
  const order = (keys) => [...ORDER.filter((key) => keys.includes(key)), ...keys.filter((key) => !ORDER.includes(key))];
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  return { seconds, bytes, whole, ratio, percent, number, metric, name, value, capital, large, tick, order };
})();
