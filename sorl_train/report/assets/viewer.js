"use strict";
// Filters, keyboard and address of the viewer.
(async () => {
  const byId = (id) => document.getElementById(id);
  const count = byId("count");
  if (typeof DecompressionStream === "undefined") {
    count.textContent = "This browser is too old to unpack the dialogues: use Chrome 80, Firefox 113, Safari 16.4 or later.";
    return;
  }
  const rows = await sorl.store.unpack(sorl.data.rows);
  const names = ["text", "kind", "step", "stop", "error", "min", "max", "sort"];
  const fields = Object.fromEntries(names.map((name) => [name, byId(`filter-${name}`)]));

  // --- choices, with how many dialogues each has ------------------------------------------------
  const choices = (field, values, label = String) => {
    const counts = new Map();
    values.forEach((value) => counts.set(value, (counts.get(value) || 0) + 1));
    const order = [...counts.keys()].sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));
    for (const value of order) {
      sorl.element(field, "option", `${label(value)} (${counts.get(value).toLocaleString("en")})`).value = value;
    }
  };
  choices(fields.kind, rows.map((row) => row.kind), (kind) => (kind === "eval" ? "held-out" : "training"));
  choices(fields.step, rows.map((row) => row.step), (step) => `step ${step}`);
  choices(fields.stop, rows.map((row) => row.stop));
  choices(fields.error, rows.flatMap((row) => row.errors));
  fields.sort.querySelector("[value='-clipped']").hidden = rows.every((row) => row.clipped === null);

  // --- the address: a filter and a dialogue that the report, or a bookmark, can link to ----------
  const wanted = () => Object.fromEntries(names.map((name) => [name, fields[name].value.trim()]));
  let open = "";
  const remember = () => {
    const kept = Object.entries({ ...wanted(), open }).filter(([, value]) => value !== "");
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
  };
  const recall = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    names.forEach((name) => { fields[name].value = asked.get(name) || ""; });
    open = asked.get("open") || "";
  };

  // --- list and dialogue --------------------------------------------------------------------------
  const show = sorl.makeDialogue(byId("dialogue"));
  const list = sorl.makeList(rows, async (i) => {
    open = i === null ? "" : rows[i].key;
    remember();
    await show(i, i === null ? null : rows[i]);
    performance.mark("shown"); // for the tests, and for whoever wonders what takes so long
  });
  let searches = 0;
  const apply = async (preferred) => {
    const search = (searches += 1);
    const filter = wanted();
    let left = sorl.filterRows(rows, filter);
    const text = filter.text.toLowerCase();
    if (text) {
      const hits = [];
      for (const [position, i] of left.entries()) {
        if (position % 256 === 255) count.textContent = `searching … ${position} of ${left.length}`;
        if ((await sorl.store.textOf(i, rows[i])).includes(text)) hits.push(i);
        if (search !== searches) return; // the filters changed meanwhile
      }
      left = hits;
    }
    count.textContent = `${left.length.toLocaleString("en")} of ${sorl.count(rows.length, "dialogue")}`;
    list.fill(left, preferred);
    document.body.dataset.ready = String(search);
  };
  let pause;
  for (const field of Object.values(fields)) {
    field.addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(apply, field.tagName === "SELECT" ? 0 : 120);
    });
  }
  byId("clear").addEventListener("click", () => {
    names.forEach((name) => { fields[name].value = ""; });
    apply();
  });
  const start = () => {
    recall();
    const preferred = rows.findIndex((row) => row.key === open);
    return apply(preferred < 0 ? undefined : preferred);
  };
  addEventListener("hashchange", start);

  // --- keyboard -------------------------------------------------------------------------------------
  const help = byId("help");
  const dialogue = byId("dialogue");
  const shading = byId("shading");
  const keys = {
    j: () => list.move(1),
    ArrowDown: () => list.move(1),
    k: () => list.move(-1),
    ArrowUp: () => list.move(-1),
    g: () => list.select(0),
    Home: () => list.select(0),
    G: () => list.end(),
    End: () => list.end(),
    " ": () => dialogue.scrollBy({ top: 0.85 * dialogue.clientHeight }),
    "/": () => fields.text.select(),
    s: () => {
      shading.selectedIndex = (shading.selectedIndex + 1) % shading.options.length;
      shading.dispatchEvent(new Event("change"));
    },
    "?": () => help.showModal(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape" || event.key === "Enter") event.target.blur();
      return;
    }
    if (event.key === " " && event.target.closest("button, summary, a")) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  byId("help-button").addEventListener("click", () => help.showModal());
  help.addEventListener("click", () => help.close());

  await start();
})();
