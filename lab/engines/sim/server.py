"""The simulated engine: an engine's HTTP API without a model. A lab stand-in, and it says so wherever it answers.

Standard library only (Debian's python3-minimal has no asyncio; ``python3`` does). It takes vLLM's own flags, so that the
role renders one command line for real and simulated engines: known ones are used, the others are echoed in the log.

Failure modes, from the environment:

    SIM_STARTUP_SECONDS=90        /health answers after this long; the port is closed until then, as with vLLM
    SIM_CRASH_AT_START=3          ends with this status instead of becoming healthy (after SIM_STARTUP_SECONDS)
    SIM_CRASH_AFTER_REQUESTS=5    ends with status 1 when this many completions were asked for
    SIM_HANG_AT_START=1           never opens its port
    SIM_HANG_AT_STOP=1            ignores SIGTERM
    SIM_DEAD_TOOL_CALLS=1         answers tool requests in prose
    SIM_OOM=1                     kills itself with SIGKILL when healthy (the container ends with 137)
    SIM_SLOW_TOKENS=1             one token per second
    SIM_REFUSE_FLAG=--x           refuses this flag as argparse does: usage on stderr, status 2
    SIM_TOKENS_PER_SECOND=50      pace of a stream; max_tokens of the request is its length
    SIM_SEED_LOG=…                one more line for the log at start (to test what is kept of it)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

LABEL = "simulated engine"
VERSION = "0.32.0+sim"
# Routes that vLLM 0.32.0 serves without a key and that must stay shut at the gateway (security.md 2.1). Reaching one
# of them is what a test of the gateway looks for in this log.
DANGEROUS = [
    "/detokenize",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/generative_scoring",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/invocations",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/load",
    "/ping",
    "/scale_elastic_ep",
    "/tokenize",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/systemone",
    "/pause",
    "/resume",
    "/update_weights",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/server_info",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
]
WORDS = [
    "The",
    "simulated",
    "engine",
    "answers",
    "with",
    "the",
    "same",
    "words",
    "again",
    "and",
    "again",
    "and",
    "has",
    "no",
    "model",
    "at",
    "all",
    ".",
]


def log(message: str) -> None:
    """One line, at once: the lab reads the log of a container that may be killed the next moment."""
    print(f"{LABEL}: {message}", flush=True)


def number(name: str, default: float) -> float:
    """A number from the environment."""
    return float(os.environ.get(name, "") or default)


def switch(name: str) -> bool:
    """A switch from the environment."""
    return os.environ.get(name, "") not in ("", "0")


def parse(arguments: list[str]) -> dict[str, str]:
    """vLLM's and SGLang's flags as ``--name value`` or ``--name=value``; positional ones are the model, as after ``vllm serve``."""
    flags: dict[str, str] = {}
    refused = os.environ.get("SIM_REFUSE_FLAG", "")
    waiting = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, has_value, value = argument.partition("=")
            if refused and name == refused:
                print("usage: vllm serve [model_tag] [options]", file=sys.stderr)
                print(f"vllm: error: unrecognized arguments: {argument} ({LABEL})", file=sys.stderr, flush=True)
                raise SystemExit(2)
            flags[name] = value
            waiting = "" if has_value else name
        elif waiting:
            flags[waiting], waiting = argument, ""
        elif argument not in ("serve", "-m", "sglang.launch_server"):
            flags.setdefault("--model", argument)
    return flags


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """One simulated engine and what it counts."""

    def __init__(self, flags: dict[str, str]) -> None:
        self.model = flags.get("--served-model-name") or flags.get("--model") or flags.get("--model-path") or "sim"
        self.limit = int(flags.get("--max-model-len") or flags.get("--context-length") or 0)
        self.running = 0
        self.completions = 0
        self.aborted = 0
        self.tokens = 0

    # --- answers ----------------------------------------------------------------------------------------------------

    def tool_call(self, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        """A structured call of the named (or first) tool, arguments made from its schema; None where prose is asked for."""
        tools, choice = body.get("tools") or [], body.get("tool_choice", "auto")
        if not tools or choice == "none" or switch("SIM_DEAD_TOOL_CALLS"):
            return None
        tool = tools[0]["function"]
        if isinstance(choice, dict):
            named = choice["function"]["name"]
            tool = next((t["function"] for t in tools if t["function"]["name"] == named), None)
            if tool is None:
                raise Refused(400, f"tool_choice names {named!r}, which is not among the tools")
        samples = {"string": "Berlin", "number": 1, "integer": 1, "boolean": True, "array": [], "object": {}}
        arguments = {}
        for key, schema in (tool.get("parameters") or {}).get("properties", {}).items():
            arguments[key] = schema["enum"][0] if schema.get("enum") else samples.get(schema.get("type"), "Berlin")
        call = {"name": tool["name"], "arguments": json.dumps(arguments)}
        return [{"id": f"call_sim{self.completions}", "type": "function", "function": call}]

    def words(self, body: dict[str, Any]) -> list[str]:
        """As many words as the request allows tokens."""
        count = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        return [WORDS[i % len(WORDS)] + " " for i in range(count)]

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        """A word of the prompt is a token here. Raises Refused above --max-model-len, as vLLM does."""
        parts: list[str] = []
        for message in body.get("messages") or []:
            content = message.get("content") or ""
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            parts += texts
        prompt = body.get("prompt", "")
        parts += [prompt] if isinstance(prompt, str) else [str(part) for part in prompt]
        tokens = sum(len(part.split()) for part in parts)
        if self.limit and tokens > self.limit:
            raise Refused(400, f"This model's maximum context length is {self.limit} tokens, but {tokens} were given")
        return tokens

    async def pace(self) -> None:
        """One token's time."""
        self.tokens += 1
        await asyncio.sleep(1 if switch("SIM_SLOW_TOKENS") else 1 / number("SIM_TOKENS_PER_SECOND", 50))

    def envelope(self, chat: bool, chunk: bool) -> dict[str, Any]:
        """What every completion object begins with."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-sim{self.completions}"
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": LABEL,
        }

    async def complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> dict[str, Any] | None:
        """Answer a completion; None when it was streamed to `writer` already."""
        if body.get("model") not in (self.model, None):
            raise Refused(404, f"The model `{body.get('model')}` does not exist.")
        prompt_tokens = self.prompt_tokens(body)
        self.completions += 1
        limit = number("SIM_CRASH_AFTER_REQUESTS", 0)
        if limit and self.completions >= limit:
            log(f"crashes after {self.completions} requests, as SIM_CRASH_AFTER_REQUESTS says")
            os._exit(1)
        calls = self.tool_call(body) if chat else None
        words = [] if calls else self.words(body)
        reason = "tool_calls" if calls else "length"
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(words),
            "total_tokens": prompt_tokens + len(words),
        }
        if body.get("stream"):
            await self.stream(writer, chat, calls, words, reason, usage)
            return None
        for _ in words:
            await self.pace()
        text = "".join(words)
        answer = self.envelope(chat, chunk=False)
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": None if calls else text}
            if calls:
                message["tool_calls"] = calls
            answer["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        else:
            answer["choices"] = [{"index": 0, "text": text, "finish_reason": reason}]
        answer["usage"] = usage
        return answer

    async def stream(
        self,
        writer: asyncio.StreamWriter,
        chat: bool,
        calls: list[dict[str, Any]] | None,
        words: list[str],
        reason: str,
        usage: dict[str, int],
    ) -> None:
        """Server-sent events, one token each; ends early when the client has gone."""
        head(writer, 200, "text/event-stream", None)

        async def event(delta: dict[str, Any], finish: str | None) -> None:
            chunk = self.envelope(chat, chunk=True)
            choice = {"index": 0, "delta": delta} if chat else {"index": 0, "text": delta.get("content", "")}
            chunk["choices"] = [{**choice, "finish_reason": finish}]
            if finish:
                chunk["usage"] = usage
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()

        if chat:
            await event({"role": "assistant", "content": ""}, None)
        for index, call in enumerate(calls or []):
            await event({"tool_calls": [{"index": index, **call}]}, None)
        for sent, word in enumerate(words):
            if writer.transport.is_closing():
                self.aborted += 1
                log(f"client has gone, stream aborted after {sent} tokens")
                return
            await self.pace()
            await event({"content": word}, None)
        await event({}, reason)
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def metrics(self) -> str:
        """The few of vLLM's metrics that the drain and the monitoring read."""
        label = f'{{model_name="{self.model}"}}'
        rows = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": 0,
            "vllm:generation_tokens_total": self.tokens,
            "vllm:request_success_total": self.completions,
        }
        return f"# {LABEL}\n" + "".join(f"{name}{label} {float(value)}\n" for name, value in rows.items())

    # --- HTTP -------------------------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, keep-alive."""
        try:
            while await self.exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. Returns whether the connection may carry another one."""
        line = (await reader.readline()).decode("latin-1").strip()
        if not line:
            return False
        headers: dict[str, str] = {}
        while (raw := (await reader.readline()).decode("latin-1").strip()) != "":
            name, _, value = raw.partition(":")
            headers[name.lower()] = value.strip()
        method, _, rest = line.partition(" ")
        target = rest.rpartition(" ")[0]
        content = b""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readline()).split(b";")[0], 16):
                content += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        elif headers.get("content-length"):
            content = await reader.readexactly(int(headers["content-length"]))
        user = headers.get("x-gpuwright-key") or headers.get("x-key-name") or "-"
        log(f'request "{method} {target}" bytes={len(content)} key={user} authorization={"authorization" in headers}')
        started = time.monotonic()
        try:
            status = await self.route(method, target.partition("?")[0], content, writer)
        except Refused as refused:
            status = refused.status
            error = {"message": str(refused), "type": LABEL, "code": refused.status}
            reply(writer, refused.status, {"error": error})
        await writer.drain()
        log(f'answered "{method} {target}" {status} in {time.monotonic() - started:.2f} s')
        return status > 0 and headers.get("connection", "").lower() != "close"

    async def route(self, method: str, path: str, content: bytes, writer: asyncio.StreamWriter) -> int:
        """Answer one request. Returns the status; 0 where a stream ended with its connection."""
        if path == "/health":
            reply(writer, 200, {})
        elif path == "/version":
            reply(writer, 200, {"version": VERSION, "engine": LABEL})
        elif path == "/metrics":
            head(writer, 200, "text/plain; version=0.0.4", len(self.metrics().encode()))
            writer.write(self.metrics().encode())
        elif path == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": LABEL, "max_model_len": self.limit or None}
            reply(writer, 200, {"object": "list", "data": [card]})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            if method != "POST":
                raise Refused(405, "Method Not Allowed")
            try:
                body = json.loads(content)
                assert isinstance(body, dict)
            except (ValueError, AssertionError):
                raise Refused(400, "the body is not a JSON object") from None
            self.running += 1
            try:
                answer = await self.complete(body, path.startswith("/v1/chat"), writer)
            finally:
                self.running -= 1
            if answer is None:
                return 0
            reply(writer, 200, answer)
        elif path in DANGEROUS:
            log(f"DANGEROUS ROUTE REACHED: {method} {path}")
            reply(writer, 200, {"reached": path, "engine": LABEL})
        else:
            raise Refused(404, "Not Found")
        return 200


REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}


def head(writer: asyncio.StreamWriter, status: int, content_type: str, length: int | None) -> None:
    """Status line and headers; without a length the end of the connection is the end of the body."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}", f"content-type: {content_type}", f"server: {LABEL}"]
    lines.append("connection: close" if length is None else f"content-length: {length}")
    writer.write("\r\n".join([*lines, "", ""]).encode())


def reply(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    """A JSON answer."""
    data = json.dumps(body).encode()
    head(writer, status, "application/json", len(data))
    writer.write(data)


async def main(arguments: list[str]) -> None:
    """Start as an engine starts: say what was asked for, load, listen."""
    flags = parse(arguments)
    log(f"version {VERSION}, pid {os.getpid()}; this is a stand-in without a model")
    log(f"flags {json.dumps(flags, sort_keys=True)}")
    if os.environ.get("SIM_SEED_LOG"):
        log(os.environ["SIM_SEED_LOG"])
    stop = asyncio.Event()

    def asked_to_stop() -> None:
        if switch("SIM_HANG_AT_STOP"):
            log("SIGTERM ignored, as SIM_HANG_AT_STOP says")
        else:
            log("SIGTERM, shutting down")
            stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, asked_to_stop)
    loop.add_signal_handler(signal.SIGINT, asked_to_stop)
    if switch("SIM_HANG_AT_START"):
        log("hangs, as SIM_HANG_AT_START says")
        await stop.wait()
        return
    started = time.monotonic()
    wait = number("SIM_STARTUP_SECONDS", 0)
    while (left := started + wait - time.monotonic()) > 0:
        log(f"loading: {100 * (1 - left / wait):.0f} %")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), min(left, 5))
            return
    if os.environ.get("SIM_CRASH_AT_START"):
        log(f"crashes at start with status {os.environ['SIM_CRASH_AT_START']}")
        raise SystemExit(int(os.environ["SIM_CRASH_AT_START"]))
    engine = Engine(flags)
    port = int(flags.get("--port") or 8000)
    # 64 MiB is asyncio's line limit only; bodies are read by their length.
    server = await asyncio.start_server(engine.serve, flags.get("--host") or "0.0.0.0", port, limit=2**26)
    log(f"listening on port {port}, serving {engine.model}")
    if switch("SIM_OOM"):
        log("kills itself with SIGKILL, as SIM_OOM says")
        os.kill(os.getpid(), signal.SIGKILL)
    await stop.wait()
    server.close()
    log("ended")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
