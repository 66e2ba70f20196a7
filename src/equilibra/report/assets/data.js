"use strict";
/* The run inside the page: JSON, and arrays that are gzipped, planar and in base64 (see report/figures.py).
   Symbols as in the program: L layers, M micro-batches, R ranks, E experts. */
const Data = (() => {
  const run = JSON.parse(document.getElementById("run").textContent);
  const TYPES = {
    u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i1: Int8Array, i2: Int16Array, i4: Int32Array,
    f4: Float32Array, f8: Float64Array,
  };
  const details = new Map();

  const bytesOf = (text) => {
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
    return bytes;
  };

  /* A typed array from a packed one; planes of bytes become numbers again. */
  const unpack = async ({ dtype, shape, data }) => {
    const stream = new Blob([bytesOf(data)]).stream().pipeThrough(new DecompressionStream("gzip"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const size = Number(dtype[1]);
    const count = shape.reduce((product, length) => product * length, 1);
    const bytes = new Uint8Array(planes.length);
    for (let plane = 0; plane < size; plane += 1) {
      for (let i = 0; i < count; i += 1) bytes[i * size + plane] = planes[plane * count + i];
    }
    return new TYPES[dtype](bytes.buffer);
  };

  const unpackAll = async (packed) => {
    const names = Object.keys(packed);
    const arrays = await Promise.all(names.map((name) => unpack(packed[name])));
    return Object.fromEntries(names.map((name, i) => [name, arrays[i]]));
  };

  /* Everything about one planner's step, unpacked when it is first asked for. */
  const detail = (planner) => {
    if (!details.has(planner)) details.set(planner, makeDetail(planner));
    return details.get(planner);
  };

  const makeDetail = async (planner) => {
    const keys = run.detail[planner];
    const packed = Object.fromEntries(Object.entries(keys).map(([name, key]) => [name, run.arrays[key]]));
    const made = await unpackAll(packed);
    made.M = run.planners.find((entry) => entry.name === planner).num_micro_batches;
    made.first = new Uint32Array(made.flash_count.length + 1);
    made.flash_count.forEach((count, i) => { made.first[i + 1] = made.first[i] + count; });
    if (!made.rank_tokens) made.rank_tokens = rankTokens(made);
    made.mean = means(made);
    return made;
  };

  /* [L, M, R] loads of ranks: homes serve what copies do not. */
  const rankTokens = (d) => {
    const { num_layers: L, num_ranks: R, num_experts: E } = run;
    const loads = new Float64Array(L * d.M * R);
    for (let problem = 0; problem < L * d.M; problem += 1) {
      const layer = Math.floor(problem / d.M);
      for (let e = 0; e < E; e += 1) loads[problem * R + d.home[layer * E + e]] += d.expert_tokens[problem * E + e];
      for (let f = d.first[problem]; f < d.first[problem + 1]; f += 1) {
        loads[problem * R + d.flash_rank[f]] += d.flash_tokens[f];
        loads[problem * R + d.home[layer * E + d.flash_expert[f]]] -= d.flash_tokens[f];
      }
    }
    d.standing_layer.forEach((layer, c) => {
      const home = d.home[layer * E + d.standing_expert[c]];
      for (let m = 0; m < d.M; m += 1) {
        loads[(layer * d.M + m) * R + d.standing_rank[c]] += d.standing_tokens_CM[c * d.M + m];
        loads[(layer * d.M + m) * R + home] -= d.standing_tokens_CM[c * d.M + m];
      }
    });
    return loads;
  };

  /* [L, M] mean load of a rank. */
  const means = (d) => {
    const R = run.num_ranks;
    const mean = new Float64Array(d.rank_tokens.length / R);
    for (let i = 0; i < d.rank_tokens.length; i += 1) mean[Math.floor(i / R)] += d.rank_tokens[i] / R;
    return mean;
  };

  /* {slowest, mean, imbalance, bound} of one layer and micro-batch. */
  const cell = (d, layer, batch) => {
    const R = run.num_ranks;
    const problem = layer * d.M + batch;
    const slowest = d.rank_tokens.subarray(problem * R, (problem + 1) * R).reduce((a, b) => Math.max(a, b), 0);
    const mean = d.mean[problem];
    return { slowest, mean, imbalance: mean > 0 ? slowest / mean : 1, bound: d.bound[problem] };
  };

  /* Copies that serve tokens, or are there, in one layer and micro-batch: most tokens first. */
  const copies = (d, layer, batch) => {
    const E = run.num_experts;
    const problem = layer * d.M + batch;
    const found = [];
    for (let f = d.first[problem]; f < d.first[problem + 1]; f += 1) {
      found.push({ expert: d.flash_expert[f], from: d.flash_origin[f], to: d.flash_rank[f], tokens: d.flash_tokens[f], kind: "flash" });
    }
    d.standing_layer.forEach((at, c) => {
      if (at !== layer) return;
      const expert = d.standing_expert[c];
      found.push({ expert, from: d.home[layer * E + expert], to: d.standing_rank[c], tokens: d.standing_tokens_CM[c * d.M + batch], kind: "standing" });
    });
    return found.sort((a, b) => b.tokens - a.tokens || a.expert - b.expert || a.to - b.to);
  };

  /* Instances of experts by rank: [{rank, expert, tokens, kind}], homes first. */
  const instances = (d, layer, batch) => {
    const E = run.num_experts;
    const placed = copies(d, layer, batch);
    const served = new Map();
    placed.forEach((copy) => served.set(copy.expert, (served.get(copy.expert) || 0) + copy.tokens));
    const found = [];
    for (let e = 0; e < E; e += 1) {
      const tokens = d.expert_tokens[(layer * d.M + batch) * E + e] - (served.get(e) || 0);
      found.push({ rank: d.home[layer * E + e], expert: e, tokens, kind: "home" });
    }
    placed.forEach((copy) => found.push({ rank: copy.to, expert: copy.expert, tokens: copy.tokens, kind: copy.kind }));
    return found;
  };

  const planner = (name) => run.planners.find((entry) => entry.name === name);
  const label = (name) => (planner(name) ? planner(name).label : "");
  const withDetail = () => run.planners.map((entry) => entry.name).filter((name) => Object.hasOwn(run.detail, name));
  const ranksPerNode = () => {
    const given = run.about.cluster && run.about.cluster.ranks_per_node;
    return Number.isInteger(given) && given > 0 ? given : run.num_ranks;
  };
  /* Whether two planners pack sequences differently: then micro-batches of the same number differ. */
  const packsAnew = (before, after) =>
    before !== null && after !== null && run.detail[before].expert_tokens !== run.detail[after].expert_tokens;
  /* Ranks between two labels of an axis: whole nodes where there are many. */
  const rankStep = () => {
    const [ranks, perNode] = [run.num_ranks, ranksPerNode()];
    if (ranks <= 16) return 1;
    return ranks <= 32 ? Math.min(perNode, 4) : perNode * Math.ceil(ranks / perNode / 16);
  };
  const kind = () => (typeof run.about.kind === "string" && run.about.kind ? run.about.kind : "origin not stated");

  return { run, unpackAll, detail, cell, copies, instances, planner, label, withDetail, ranksPerNode, rankStep, packsAnew, kind };
})();
