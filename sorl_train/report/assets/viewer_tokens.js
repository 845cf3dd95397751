"use strict";
// A turn's text in its tokens: shaded by a figure, clipped ones marked, all figures on hover.
sorl.tokens = (() => {
  const { clip_eps: below, clip_eps_high: above } = sorl.data;
  const LEVELS = [0.1, 0.25, 0.5, 0.8]; // of the strongest shade, from which on a token has shade 1 to 4

  const largest = (turns, name) => {
    const values = turns.flatMap((turn) => (turn.tokens ? turn.tokens[name] : []));
    return values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
  };

  // How strongly to shade: 1 is the strongest, the sign says which way. For ratios the strongest is the clip range.
  const scales = {
    none: () => null,
    ratio: () => (tokens, i) => strength(tokens.ratio[i] > 0 ? Math.log(tokens.ratio[i]) : null),
    log_ratio: () => (tokens, i) => strength(tokens.log_ratio[i]),
    advantage: (turns) => relative(turns, "advantage"),
    entropy: (turns) => relative(turns, "entropy"),
  };
  const strength = (log) => (log === null ? 0 : log / (log > 0 ? Math.log1p(above ?? 0.2) : -Math.log1p(-(below ?? 0.2))));
  const relative = (turns, name) => {
    const most = largest(turns, name);
    return (tokens, i) => (most ? (tokens[name][i] ?? 0) / most : 0);
  };

  const shade = (value, oneSided) => {
    const level = LEVELS.filter((from) => Math.abs(value) >= from).length;
    return level ? `${oneSided ? "seq" : value > 0 ? "hi" : "lo"}${level}` : "";
  };

  // Spans of the turn's text, cut both where a token ends and where a piece (reasoning, tool call ...) ends.
  const render = (host, turn, kind, turns) => {
    const { tokens } = turn;
    const strengthOf = scales[kind](turns);
    const ends = [];
    tokens.text.reduce((end, text) => (ends.push(end + text.length), end + text.length), 0);
    let token = 0;
    let at = 0;
    for (const [piece, text] of turn.pieces) {
      const group = sorl.element(host, "span", "", `seg-${piece}`);
      const stop = at + text.length;
      let from = at;
      while (from < stop) {
        while (ends[token] <= from) token += 1; // a token without text has nothing to show
        const to = Math.min(ends[token], stop);
        const span = sorl.element(group, "span", text.slice(from - at, to - at), "token");
        span.dataset.token = token;
        if (strengthOf) span.className += ` ${shade(strengthOf(tokens, token), kind === "entropy")}`;
        if (tokens.clipped[token]) span.className += tokens.ratio[token] < 1 ? " clip-low" : " clip-high";
        from = to;
      }
      at = stop;
    }
  };

  const number = (value, digits = 4) => (value === null ? "not finite" : value.toFixed(digits));

  const figures = (tokens, i) => {
    const rows = [
      ["importance ratio in the loss", number(tokens.ratio[i])],
      ["log-ratio of the token", number(tokens.log_ratio[i])],
      ["advantage", number(tokens.advantage[i])],
      ["entropy", `${number(tokens.entropy[i])} nats`],
    ];
    if (tokens.weight) rows.push(["weight, for the sampler's sake", number(tokens.weight[i])]);
    if (tokens.clipped[i]) {
      rows.push(["clipped", tokens.ratio[i] < 1 ? `below 1 − ${below ?? "ε"}` : `above 1 + ${above ?? "ε"}`]);
    }
    return rows;
  };

  // One box for the whole page, filled by whatever token the pointer is on.
  const hover = (host, turnsOf) => {
    const box = sorl.element(document.body, "div", "", "token-box");
    box.hidden = true;
    box.setAttribute("role", "tooltip");
    const hide = () => { box.hidden = true; };
    host.addEventListener("pointerover", (event) => {
      const span = event.target.closest(".token");
      if (!span) return hide();
      const { tokens } = turnsOf()[Number(span.closest(".turn").dataset.turn)];
      const i = Number(span.dataset.token);
      box.replaceChildren();
      sorl.element(box, "code", JSON.stringify(tokens.text[i]));
      const list = sorl.element(box, "dl");
      for (const [name, value] of figures(tokens, i)) {
        sorl.element(list, "dt", name);
        sorl.element(list, "dd", value);
      }
      box.hidden = false;
      const place = span.getBoundingClientRect();
      const beneath = place.bottom + 8 + box.offsetHeight < innerHeight;
      box.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
      box.style.top = `${beneath ? place.bottom + 8 : place.top - box.offsetHeight - 8}px`;
    });
    host.addEventListener("pointerleave", hide);
    host.addEventListener("scroll", hide, { passive: true });
    return hide;
  };

  return { render, hover, largest };
})();
