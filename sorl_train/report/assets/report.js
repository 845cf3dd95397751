"use strict";
// Figures into their sections; the switches of runs, groups and settings; the table.
(() => {
  const { data, element, lines, plots } = sorl;
  const { state } = lines;
  const FEW = 8; // lines that the bar above the figures names one by one

  // --- switches -----------------------------------------------------------------------------------------------------
  const bar = document.getElementById("shown");
  const names = document.getElementById("shown-lines");

  const switches = () => {
    if (!bar) return;
    document.querySelectorAll("[data-mode]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.mode === state.mode)));
    document.querySelectorAll("[data-table]").forEach((table) => { table.hidden = table.dataset.table !== state.mode; });
    document.querySelectorAll("input[data-key]").forEach((box) => { box.checked = !state.hidden.has(box.dataset.key); });
    document.querySelectorAll("tr[data-group]").forEach((row) => row.classList.toggle("faded", !lines.isChosen(Number(row.dataset.group)) || state.hidden.has(`g${row.dataset.group}`)));
    const every = [...lines.all("bands"), ...lines.all("runs")];
    document.querySelectorAll(".chip[data-key]").forEach((chip) => {
      chip.className = `chip ${lines.ink(every.find(({ key }) => key === chip.dataset.key))}`;
    });
    const family = lines.family();
    document.querySelectorAll(".choice button").forEach((button) => {
      const coloured = button.closest(".choice").dataset.name === family;
      button.firstChild.className = coloured ? `chip c${data.choices[family].indexOf(button.value) % 8}` : "";
    });
    legend();
  };

  // Names with their colours: of the lines, or where these are many, of their groups.
  const legend = () => {
    const all = lines.all();
    const named = [all, lines.all("bands")].find((some) => some.length <= FEW) || [];
    names.replaceChildren();
    for (const line of named) {
      const label = element(names, "label");
      const box = element(label, "input", "", "run-toggle");
      box.type = "checkbox";
      box.checked = !state.hidden.has(line.key);
      box.dataset.key = line.key;
      element(label, "span", "", `chip ${lines.ink(line)}`);
      element(label, "span", line.label);
    }
    if (named !== all) element(names, "span", `${lines.shown().length} of ${all.length} lines shown`, "muted");
  };
  const refresh = () => {
    lines.paint();
    switches();
    plots.refresh();
  };

  document.addEventListener("change", (event) => {
    const { key, all } = event.target.dataset;
    if (key !== undefined) state.hidden[event.target.checked ? "delete" : "add"](key);
    else if (all === undefined) return;
    else if (event.target.checked) state.hidden.clear();
    else lines.all().forEach((line) => state.hidden.add(line.key));
    refresh();
  });
  document.querySelectorAll("[data-mode]").forEach((button) => button.addEventListener("click", () => {
    state.mode = button.dataset.mode;
    refresh();
  }));
  const choices = document.getElementById("choices");
  if (choices) {
    for (const [name, values] of Object.entries(data.choices)) {
      const row = element(choices, "span", "", "choice");
      row.dataset.name = name;
      element(row, "span", name, "muted");
      for (const value of values) {
        const button = element(row, "button");
        element(button, "span");
        button.append(value);
        button.value = value;
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          const chosen = state.chosen.get(name);
          if (!chosen.delete(value)) chosen.add(value);
          button.setAttribute("aria-pressed", String(chosen.has(value)));
          refresh();
        });
      }
    }
  }

  // --- figures --------------------------------------------------------------------------------------------------------
  lines.paint();
  switches();
  data.figures.forEach((figure) => plots.draw(document.getElementById(`section-${figure.section}`), figure));
  const more = document.getElementById("more");
  if (more) {
    const host = document.getElementById("more-figures");
    const fill = () => { // only once it is open: a plot needs to be on the page to know its width
      if (more.open && !host.childElementCount) data.more.forEach((figure) => plots.draw(host, figure));
    };
    more.addEventListener("toggle", fill);
    fill();
  }

  // --- table: a click on a column's name sorts by it, a second one the other way round ----------------------------------
  const sortable = (table) => table.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => {
    const head = button.closest("th");
    const column = [...head.parentElement.children].indexOf(head);
    const upwards = head.getAttribute("aria-sort") === "descending" || (!head.hasAttribute("aria-sort") && head.dataset.first === "ascending");
    table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
    const key = (row) => row.children[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is not known comes last in either order
      const order = head.dataset.text === undefined ? Number(x) - Number(y) : x < y ? -1 : Number(x > y);
      return upwards ? order : -order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(compare));
  }));
  document.querySelectorAll("[data-table]").forEach(sortable);
})();
