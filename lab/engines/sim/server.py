"""Placeholder of the simulated engine: takes any of vLLM's flags, serves health and the model list."""

from __future__ import annotations

import asyncio
import json
import sys


def _flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
    models = {"object": "list", "data": [{"id": _flag("--served-model-name", "sim"), "object": "model"}]}
    status, body = {"/health": ("200 OK", ""), "/v1/models": ("200 OK", json.dumps(models))}.get(
        path, ("404 Not Found", "{}")
    )
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write((head + body).encode())
    await writer.drain()
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, _flag("--host", "0.0.0.0"), int(_flag("--port", "8000")))
    print("simulated engine (placeholder): Application startup complete.", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
