"use strict";
// The packed dialogues: unpacked when they are first needed, and kept.
sorl.store = (() => {
  const { data } = sorl;
  const chunks = data.chunks.map(() => null); // promises
  const texts = []; // of dialogue i, in lower case, once searched

  const unpack = async (packed) => {
    const binary = atob(packed);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const chunk = (number) => (chunks[number] ||= unpack(data.chunks[number]));

  const dialogue = async (i) => (await chunk(Math.floor(i / data.chunk)))[i % data.chunk];

  // All text of a dialogue: what a person would search for. Parts are kept apart by a character that nobody types.
  const textOf = async (i, row) => {
    if (texts[i] === undefined) {
      const found = await dialogue(i);
      const turns = found.turns.flatMap((turn) => [
        turn.pieces.map((piece) => piece[1]).join(""),
        turn.observation,
        turn.error,
        ...turn.calls.map((call) => `${call.tool} ${call.argument} ${call.error}`),
      ]);
      const facts = found.facts.map((fact) => fact.join(" "));
      texts[i] = [row.question, found.prompt, found.error, ...turns, ...facts].join("\u0000").toLowerCase();
    }
    return texts[i];
  };

  return { unpack, dialogue, textOf };
})();
