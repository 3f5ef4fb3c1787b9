"""Which paths of an engine the gateway lets through, and why the others stay shut.

Everything not listed is answered 404 by the gateway and never reaches an engine. An engine trusts whoever reaches its
port: vLLM's own `--api-key` guards only ``/v1`` (security.md 2.1), so the list here is the engine's only wall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class Open:
    """``METHOD`` and path, and the reason it is open."""

    method: str
    path: str
    reason: str

    @property
    def key(self) -> str:
        """As the gateway's map compares it."""
        return f"{self.method}:{self.path}"


_INFERENCE = (
    Open("GET", "/v1/models", "clients ask which model to name"),
    Open("POST", "/v1/chat/completions", "the API that clients use"),
    Open("POST", "/v1/completions", "plain completions; same work as chat"),
    Open("POST", "/v1/embeddings", "same client libraries; an engine that serves a chat model answers 404 itself"),
)

OPEN: Mapping[Kind, Sequence[Open]] = {"vllm": _INFERENCE, "sglang": _INFERENCE}

# What no setting opens: whoever may call these commands the engine or sees what others do. Read them on the node.
NEVER: Mapping[str, str] = {
    "/metrics": "shows what all clients do; read it on the node",
    "/docs": "a map of the engine for strangers",
    "/docs/oauth2-redirect": "part of /docs",
    "/redoc": "a map of the engine for strangers",
    "/openapi.json": "a map of the engine for strangers",
    "/health": "an engine's own health; the gateway has /healthz",
    "/health_generate": "does work without a key's name on it",
    "/ping": "health under another name",
    "/load": "shows what all clients do",
    "/version": "tells an attacker which advisories apply",
    "/server_info": "shows every setting of the engine",
    "/get_server_info": "shows every setting of the engine",
    "/get_model_info": "shows paths on the node",
    "/get_internal_state": "shows what all clients do",
    "/set_internal_state": "commands the engine",
    "/invocations": "every endpoint under one name: it would go around this list",
    "/scale_elastic_ep": "commands the engine",
    "/is_scaling_elastic_ep": "state of the engine",
    "/kv_event_sources": "shows where cached prompts can be read",
    "/inference/v1/generate": "takes token ids and sampling internals; made for other engines, not for clients",
    "/inference/v1/abort_requests": "ends requests of others",
    "/generate": "SGLang's raw interface; takes settings that the chat API does not",
    "/flush_cache": "commands the engine",
    "/abort_request": "ends requests of others",
    "/sleep": "commands the engine",
    "/wake_up": "commands the engine",
    "/is_sleeping": "state of the engine",
    "/pause": "commands the engine",
    "/resume": "commands the engine",
    "/collective_rpc": "runs a method by name in every worker: remote code execution by design",
    "/reset_prefix_cache": "commands the engine",
    "/reset_mm_cache": "commands the engine",
    "/start_profile": "writes traces with prompts in them",
    "/stop_profile": "writes traces with prompts in them",
    "/v1/load_lora_adapter": "loads weights from a path a client names",
    "/v1/unload_lora_adapter": "commands the engine",
    "/load_lora_adapter": "loads weights from a path a client names",
    "/unload_lora_adapter": "commands the engine",
    "/update_weights_from_disk": "replaces the model",
    "/update_weights_from_tensor": "replaces the model (deserialises what a client sends)",
    "/update_weights_from_distributed": "replaces the model",
    "/init_weights_update_group": "connects the engine to an address a client names",
    "/release_memory_occupation": "commands the engine",
    "/resume_memory_occupation": "commands the engine",
    "/configure_logging": "can turn on logging of prompts",
    "/v1/systemone": "not part of the OpenAI API, and its effect is not known to us",
    "/v1/responses/{response_id}": "reads the answers of others: ids are not bound to a key",
    "/v1/responses/{response_id}/cancel": "ends the answers of others: ids are not bound to a key",
}

# Shut by default; `extra_paths` may open them for clients that need them.
BY_REQUEST: Mapping[str, str] = {
    "/tokenize": "free work for whoever holds a key, and not part of the OpenAI API",
    "/detokenize": "as /tokenize",
    "/generative_scoring": "not part of the OpenAI API",
    "/v1/messages": "Anthropic's API; open it for clients that speak it",
    "/v1/messages/count_tokens": "goes with /v1/messages",
    "/v1/messages/render": "shows the chat template applied; a developer's tool",
    "/v1/responses": "stores answers in the engine, for every key alike; open it when all keys trust one another",
    "/v1/responses/render": "shows the chat template applied; a developer's tool",
    "/v1/chat/completions/batch": "many prompts behind one line of the access log",
    "/v1/chat/completions/render": "shows the chat template applied; a developer's tool",
    "/v1/chat/completions/derender": "a developer's tool",
    "/v1/completions/render": "a developer's tool",
    "/v1/completions/derender": "a developer's tool",
    "/v1/rerank": "for rerank models",
    "/v1/score": "for rerank models",
}
