"use strict";
/* HTML from values: everything from a run goes in as text, never as markup. And what is chosen on the page. */
const Elements = (() => {
  const byId = (id) => document.getElementById(id);

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => {
      if (value === null || value === undefined || value === false) return;
      element.setAttribute(name, value === true ? "" : String(value));
    });
    children.flat().forEach((child) => element.append(child));
    return element;
  };

  /* columns: [{title, text}] ; rows: [{cells: [{text, value}], hero}]. The first cell of a row is its heading. */
  const table = ({ caption, columns, rows, sortable = false }) => {
    const head = make("tr");
    columns.forEach((column, index) => {
      const title = sortable ? make("button", { type: "button" }, column.title) : column.title;
      const cell = make("th", { scope: "col", class: column.text ? "text" : null }, title);
      if (sortable) title.addEventListener("click", () => sort(body, head, cell, index));
      head.append(cell);
    });
    const body = make("tbody");
    rows.forEach((row) => body.append(tableRow(row, columns)));
    return make("table", {}, caption ? make("caption", {}, make("span", {}, caption)) : [], make("thead", {}, head), body);
  };

  const tableRow = (row, columns) => {
    const line = make("tr", { class: row.hero ? "hero" : null });
    row.cells.forEach((cell, index) => {
      const raw = cell.value === undefined || cell.value === null ? null : cell.value;
      const attributes = { class: columns[index].text ? "text" : null, "data-value": raw };
      line.append(index === 0 ? make("th", { scope: "row", ...attributes }, cell.text) : make("td", attributes, cell.text));
    });
    return line;
  };

  const sort = (body, head, cell, index) => {
    const up = cell.getAttribute("aria-sort") !== "ascending";
    head.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[index].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      const order = Number.isNaN(Number(x)) || Number.isNaN(Number(y)) ? x.localeCompare(y) : Number(x) - Number(y);
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  };

  /* The same figures as a table, made when it is opened. */
  const alternative = (id, title, build) => {
    const box = byId(id);
    const open = box.querySelector("details")?.open || false;
    const inside = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
    const details = make("details", {}, make("summary", {}, title), inside);
    const fill = () => { if (details.open && !inside.firstChild) inside.append(build()); };
    details.addEventListener("toggle", fill);
    box.replaceChildren(details);
    details.open = open;
    fill();
  };

  const options = (select, entries, value) => {
    select.replaceChildren(...entries.map(([key, text]) => make("option", { value: key }, text)));
    select.value = String(value);
  };

  /* Content of a tooltip: a heading and lines of text. */
  const tip = (title, ...lines) => make("div", {}, make("b", {}, title), lines.filter(Boolean).map((line) => make("div", {}, line)));

  const keys = (id, entries) => {
    byId(id).replaceChildren(...entries.map(({ colour, text, style }) => {
      const sign = make("i", { class: style });
      if (colour) sign.style.background = colour;
      return make("span", {}, sign, text);
    }));
  };

  return { byId, make, table, alternative, options, tip, keys };
})();

/* What is chosen: planners, layer, micro-batch, rank. Parts of the page listen and draw themselves. */
const State = (() => {
  const values = { before: null, after: null, heatLayer: "worst", layer: 0, microBatch: 0, rank: 0 };
  const listeners = [];
  const set = (changes) => {
    Object.assign(values, changes);
    const changed = new Set(Object.keys(changes));
    return Promise.all(listeners.map(([names, listener]) => (names.some((name) => changed.has(name)) ? listener() : null)));
  };
  const listen = (names, listener) => listeners.push([names, listener]);
  return { values, set, listen };
})();
