"""What the benchmark compares sorl-serve with: a retrieval server as one writes it in an afternoon.

One synchronous handler behind uvicorn searches one query at a time with bm25s (its numpy scorer), without batching,
with the corpus in memory. It has a single thread: the forty that FastAPI gives a synchronous endpoint would compete
for Python's global lock and be slower together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import bm25s
import Stemmer
import uvicorn

from sorl_tools.corpus import read_corpus

Message = MutableMapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    stemmer = Stemmer.Stemmer("english")
    documents = [
        {"id": p.id, "contents": f'"{p.title}"\n{p.text}' if p.title else p.text}
        for p in read_corpus(args.corpus)
    ]
    index = bm25s.BM25()
    contents = [document["contents"] for document in documents]
    index.index(
        bm25s.tokenize(contents, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False
    )

    def retrieve(body: bytes) -> bytes:
        request = json.loads(body)
        result = []
        for query in request["queries"]:
            words = bm25s.tokenize(query, stopwords="en", stemmer=stemmer, show_progress=False)
            ids, scores = index.retrieve(words, k=request["topk"], show_progress=False)
            hits = zip(ids[0].tolist(), scores[0].tolist(), strict=True)
            result.append([{"document": documents[number], "score": score} for number, score in hits])
        return json.dumps({"result": result}).encode()

    limiter: list[anyio.CapacityLimiter] = []

    async def app(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if not limiter:
            limiter.append(anyio.CapacityLimiter(1))
        body = b""
        more = scope["path"] == "/retrieve"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = bool(message.get("more_body"))
        answer = await anyio.to_thread.run_sync(retrieve, body, limiter=limiter[0]) if body else b"{}"
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, port=args.port, lifespan="off", log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
