"use strict";
// The chat page of sorl-serve-agent: asks /v1/chat/completions with streaming, and shows the turns as they come.
(() => {
  const { element } = sorl;
  const host = document.getElementById("dialogues");
  const form = document.getElementById("ask");
  const [question, options, token] = ["question", "options", "token"].map((id) => document.getElementById(id));
  const [send, stop] = ["send", "stop"].map((id) => document.getElementById(id));
  let asking = null;

  // Server-sent events are lines "data: JSON"; a piece of the network may end anywhere, also inside a character.
  const events = async function* (body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
        else if (line === "data: [DONE]") return;
      }
    }
  };

  const drawCall = (parent, call) => {
    const line = element(parent, "p", "", call.ok ? "call" : "call failed");
    element(line, "b", call.tool);
    line.append(" ");
    element(line, "q", call.argument.trim());
    if (call.hits !== null) element(line, "span", ` ${sorl.count(call.hits, "hit")}`, "muted");
    if (!call.ok) element(line, "span", " failed", "fault");
  };

  const makeDialogue = (text) => {
    const box = element(host, "section", "", "dialogue");
    element(box, "p", text, "asked");
    const turns = element(box, "div");
    const status = element(box, "p", "thinking …", "chat-status");
    const drawn = [];
    return {
      turn: ({ index, text: said }) => {
        const place = element(turns, "div");
        const article = element(place, "article", "", "turn");
        const head = element(article, "p", "", "turn-head");
        element(head, "b", `Turn ${index + 1}`);
        element(article, "pre", said);
        drawn[index] = { place, article, head };
        status.textContent = "the environment answers …";
      },
      reply: ({ index, kind, format_error: error, observation, tool_calls: calls }) => {
        const { place, article, head } = drawn[index];
        article.classList.add(kind);
        head.append(` ${kind}`);
        if (error) element(head, "span", ` ${error}`, "fault");
        calls.forEach((call) => drawCall(place, call));
        if (observation) element(element(place, "div", "", "observation"), "pre", observation.trim()).tabIndex = 0;
        status.textContent = "thinking …";
      },
      answer: (said) => element(turns, "p", said, "said"),
      end: ({ stop_reason: reason, unknown_words: unknown }) => {
        if (!turns.querySelector(".said")) element(turns, "p", "No answer.", "said none");
        const words = unknown.length ? ` · words that this policy cannot read: ${unknown.join(", ")}` : "";
        status.textContent = `ended: ${reason}${words}`;
      },
      fail: (said) => {
        status.textContent = said;
        status.classList.add("fault");
      },
      isOpen: () => status.textContent.endsWith("…"),
    };
  };

  const readOptions = () =>
    Object.fromEntries(
      options.value.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
        const [, letter, text] = /^([A-Za-z])\s*[:.)=]\s*(.+)$/.exec(line) || [];
        if (!letter) throw new Error(`"${line}" is no choice: write a letter, a colon and a text, as A: aspirin`);
        return [letter.toUpperCase(), text];
      }),
    );

  const ask = async (text, dialogue, signal) => {
    const body = { model: sorl.data.model, stream: true, messages: [{ role: "user", content: text }] };
    if (options) body.sorl = { options: readOptions() };
    const headers = { "content-type": "application/json" };
    if (token) headers.authorization = `Bearer ${token.value}`;
    const reply = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!reply.ok) {
      const said = await reply.json().catch(() => null);
      throw new Error(said ? said.error.message : `the server answered ${reply.status}`);
    }
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      if (choice && choice.delta.content) dialogue.answer(choice.delta.content);
      if (!event.sorl) continue;
      if (event.sorl.turn) dialogue.turn(event.sorl.turn);
      else if (event.sorl.reply) dialogue.reply(event.sorl.reply);
      else dialogue.end(event.sorl);
    }
    if (dialogue.isOpen()) throw new Error("the server broke off; ask again");
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || asking) return;
    asking = new AbortController();
    [send.disabled, stop.hidden] = [true, false];
    const dialogue = makeDialogue(text);
    form.scrollIntoView({ block: "end" });
    try {
      await ask(text, dialogue, asking.signal);
      question.value = "";
    } catch (error) {
      dialogue.fail(error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      asking = null;
      [send.disabled, stop.hidden] = [false, true];
      form.scrollIntoView({ block: "end" });
      question.focus();
    }
  });
  stop.addEventListener("click", () => asking && asking.abort());
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  for (const example of sorl.data.examples) {
    const button = element(document.getElementById("examples"), "button", example.question);
    button.type = "button";
    button.addEventListener("click", () => {
      question.value = example.question;
      if (options) options.value = Object.entries(example.options || {}).map(([letter, choice]) => `${letter}: ${choice}`).join("\n");
      question.focus();
    });
  }
  question.focus();
})();
