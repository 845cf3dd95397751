"use strict";
// What the plots show: lines of single runs, or of groups of runs that differ in the seed alone, with their bands.
sorl.lines = (() => {
  const { runs, groups, choices } = sorl.data;
  const COLOURS = 8;
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((a, b) => a - b);
  const position = new Map(steps.map((step, i) => [step, i]));
  const grouped = groups.some((group) => group.members.length > 1);

  const state = {
    mode: grouped ? "bands" : "runs",
    hidden: new Set(), // keys of lines that are switched off
    chosen: new Map(Object.entries(choices).map(([name, values]) => [name, new Set(values)])),
  };

  // One line each: a group, or a run.
  const all = (mode = state.mode) => groups.flatMap((group, g) => (mode === "bands"
    ? [{ key: `g${g}`, label: group.label, group: g, members: group.members }]
    : group.members.map((r) => ({ key: `r${r}`, label: runs[r].label, group: g, members: [r] }))));

  const isChosen = (g) => [...state.chosen].every(([name, values]) => values.has(groups[g].settings[name]));
  const isShown = (line) => !state.hidden.has(line.key) && !state.hidden.has(`g${line.group}`) && isChosen(line.group);
  const shown = () => all().filter(isShown);

  // --- colours: a group keeps its own as long as there are enough, else those of one setting share one -----------
  const slots = new Map();
  const paint = () => {
    const visible = [...new Set(shown().map((line) => line.group))];
    if (groups.length <= COLOURS) groups.forEach((_, g) => slots.set(g, g));
    else if (visible.length > COLOURS) {
      slots.clear();
      const [name, values] = Object.entries(choices)[0] || [null, []];
      groups.forEach((group, g) => slots.set(g, name ? values.indexOf(group.settings[name]) : g));
    } else {
      const kept = new Map();
      visible.forEach((g) => { if (![...kept.values()].includes(slots.get(g))) kept.set(g, slots.get(g)); });
      const free = [...Array(COLOURS).keys()].filter((slot) => ![...kept.values()].includes(slot));
      visible.forEach((g) => slots.set(g, kept.has(g) && kept.get(g) !== undefined ? kept.get(g) : free.shift()));
    }
  };
  // The setting by whose values lines are coloured, where there are too many groups for a colour each.
  const family = () => {
    const visible = new Set(shown().map((line) => line.group));
    return groups.length > COLOURS && visible.size > COLOURS ? Object.keys(choices)[0] ?? null : null;
  };
  const ink = (line) => {
    const ofGroup = groups.length > 1 || state.mode === "bands";
    return `c${(ofGroup ? slots.get(line.group) : line.members[0]) % COLOURS}`;
  };

  // --- values on the common steps ---------------------------------------------------------------------------------
  const ofRun = (r, name) => {
    const values = new Array(steps.length).fill(null);
    const column = runs[r].values[name] || [];
    column.forEach((value, i) => { values[position.get(runs[r].steps[i])] = value; });
    return values;
  };

  const median = (sorted) => {
    const half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  };

  // A finished run that ended before the others of its line goes on as it was last, at the steps that the others have.
  const hold = (line, columns) => columns.forEach((column, c) => {
    if (!runs[line.members[c]].finished) return;
    let last = column.length - 1;
    while (last >= 0 && column[last] === null) last -= 1;
    if (last < 0) return;
    for (let i = last + 1; i < column.length; i += 1) {
      if (columns.some((other, o) => o !== c && other.real[i])) column[i] = column[last];
    }
  });

  const logged = runs.map((run) => new Set(run.steps));

  // Median, lowest and highest over the line's runs at each step; null unless more than half of them have a value. On a
  // log axis a value that is not positive counts as the lowest of all, and is not drawn (``off``). The line is broken
  // there, and at a step that has none of a figure of each step: of a turn that no trajectory came to, say.
  const values = (line, figure, name) => {
    const drawn = (value) => (figure.axis === "log" && value <= 0 ? null : value);
    const now = /^(eval|time)\//.test(name) ? () => false : (r, i) => logged[r].has(steps[i]);
    const columns = line.members.map((r) => ofRun(r, name));
    columns.forEach((column) => { column.real = column.map((value) => value !== null); });
    if (figure.section === "outcome") hold(line, columns);
    const middle = [], low = [], high = [], off = [], broken = [];
    steps.forEach((_, i) => {
      const present = columns.map((column) => column[i]).filter((value) => value !== null).sort((a, b) => a - b);
      const enough = present.length > columns.length / 2;
      const most = enough ? drawn(present[present.length - 1]) : null;
      middle.push(enough ? drawn(median(present)) : null);
      off.push(enough && middle[i] === null);
      broken.push(off[i] || (!enough && line.members.filter((r) => now(r, i)).length > columns.length / 2));
      low.push(most === null ? null : present.find((value) => drawn(value) !== null));
      high.push(most);
    });
    return columns.length === 1 ? { middle, off, broken, low: null, high: null } : { middle, off, broken, low, high };
  };

  return { steps, grouped, state, all, shown, isShown, isChosen, paint, family, ink, values };
})();
