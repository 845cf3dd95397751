"use strict";
// One dialogue: its facts, its turns, what the tools said.
sorl.makeDialogue = (host) => {
  const { element } = sorl;
  const shading = document.getElementById("shading");
  const legend = document.getElementById("shading-legend");
  let turns = [];
  let asked = 0; // dialogues are unpacked meanwhile: only the last one asked for is shown

  const drawText = (turn, pre) => {
    pre.replaceChildren();
    const shaded = turn.tokens && shading.value !== "none";
    pre.classList.toggle("shaded", Boolean(shaded));
    if (turn.tokens) sorl.tokens.render(pre, turn, shading.value, turns);
    else turn.pieces.forEach(([kind, text]) => element(pre, "span", text, `seg-${kind}`));
  };

  const drawCall = (parent, call) => {
    const line = element(parent, "p", "", call.ok ? "call" : "call failed");
    element(line, "b", call.tool);
    line.append(" ");
    element(line, "q", call.argument.trim());
    const facts = [
      call.hits === null ? "" : sorl.count(call.hits, "hit"),
      call.latency_s === null ? "" : sorl.seconds(call.latency_s),
      call.attempts > 1 ? `${call.attempts} attempts` : "",
      call.cached ? "replayed" : "",
      call.cut_from ? `reply cut from ${sorl.count(call.cut_from, "character")}` : "",
    ];
    element(line, "span", ` ${facts.filter(Boolean).join(" · ")}`, "muted");
    if (call.error) element(line, "span", ` ${call.error}`, "fault");
  };

  const drawTurn = (turn, i) => {
    const box = element(host, "article", "", `turn ${turn.kind}`);
    box.dataset.turn = i;
    const head = element(box, "p", "", "turn-head");
    element(head, "b", `Turn ${i + 1}`);
    head.append(` ${turn.kind}`);
    if (turn.error) element(head, "span", ` ${turn.error}`, "fault");
    const facts = [sorl.count(turn.length, "token")];
    if (turn.generate_s) facts.push(sorl.seconds(turn.generate_s));
    facts.push(`policy version ${turn.version}`);
    if (turn.tokens) facts.push(`${turn.tokens.clipped.filter(Boolean).length} clipped`);
    element(head, "span", ` ${facts.join(" · ")}`, "muted");
    drawText(turn, element(box, "pre"));
    turn.calls.forEach((call) => drawCall(host, call));
    if (turn.observation) {
      const observation = element(host, "div", "", "observation");
      element(observation, "pre", turn.observation).tabIndex = 0;
    }
  };

  const drawHead = (row, dialogue) => {
    const head = element(host, "header", "", "dialogue-head");
    element(head, "h2", row.question);
    const line = element(head, "p", "", "dialogue-line");
    element(line, "span", sorl.reward(row.reward), `reward ${row.excluded ? "excluded" : row.reward > 0 ? "good" : "bad"}`);
    element(line, "span", `${row.kind === "eval" ? "held-out, after step" : "training step"} ${row.step}`);
    element(line, "span", `stopped: ${row.stop}`);
    if (row.mark) element(line, "span", `${row.mark} reward of its step`, "mark");
    if (row.excluded) element(line, "span", "excluded from the loss", "fault");
    if (dialogue.error) element(head, "p", `error: ${dialogue.error}`, "fault");
    const facts = element(head, "dl", "", "facts");
    for (const [name, value] of dialogue.facts) {
      const pair = element(facts, "div");
      element(pair, "dt", name);
      element(pair, "dd", value);
    }
    if (dialogue.note) element(head, "p", dialogue.note, "note").id = "token-note";
    const prompt = element(head, "details", "", "prompt");
    element(prompt, "summary", "Prompt");
    element(prompt, "pre", dialogue.prompt);
  };

  const drawLegend = () => {
    const known = turns.some((turn) => turn.tokens);
    shading.closest("label").hidden = !known;
    legend.hidden = !known || shading.value === "none";
    if (legend.hidden) return;
    const { clip_eps: below, clip_eps_high: above } = sorl.data;
    const kind = shading.value;
    const most = kind === "advantage" || kind === "entropy" ? sorl.format(sorl.tokens.largest(turns, kind)) : "";
    const range = `${kind.includes("ratio") ? `1 − ${below ?? "ε"}` : `−${most}`}`;
    legend.querySelector(".low").textContent = kind === "entropy" ? "0" : range;
    legend.querySelector(".high").textContent = kind.includes("ratio") ? `1 + ${above ?? "ε"}` : most;
    legend.querySelector(".scale").dataset.kind = kind === "entropy" ? "entropy" : "signed";
  };

  const hideBox = sorl.tokens.hover(host, () => turns);
  shading.addEventListener("change", () => {
    host.querySelectorAll(".turn").forEach((box, i) => drawText(turns[i], box.querySelector("pre")));
    drawLegend();
    hideBox();
  });

  return async (i, row) => {
    const ticket = (asked += 1);
    const dialogue = i === null ? null : await sorl.store.dialogue(i);
    if (ticket !== asked) return;
    hideBox();
    host.replaceChildren();
    host.scrollTop = 0;
    turns = dialogue ? dialogue.turns : [];
    if (dialogue) {
      drawHead(row, dialogue);
      turns.forEach(drawTurn);
    } else element(host, "p", "No dialogue matches these filters.", "empty");
    host.dataset.key = row ? row.key : "";
    drawLegend();
  };
};
