"""Cross-checks on the engines of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwright import numa
from gpuwright.spec.names import is_ip_address
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found, sizes
from gpuwright.spec.sentence import nearest
from roles.engine.container import ENVIRONMENT
from roles.engine.spec import Engine, SglangSettings, VllmSettings

START_SLACK = 60
"""Seconds of one attempt that no deadline of ours covers: evidence, removal of the old container, systemd itself."""

OWNED_FLAGS = {
    # flag: who says it
    "--gpus": "engines.<name>.gpus says it",
    "--host": "engines are published on loopback only",
    "--port": "engines.<name>.port says it",
    "--uds": "engines.<name>.port says it",
    "--model": "engines.<name>.model says it",
    "--model-path": "engines.<name>.model says it",
    "--tokenizer-path": "engines.<name>.model says it",
    "--revision": "models.items.<name>.revision says it",
    "--download-dir": "role models downloads; engines are offline",
    "--served-model-name": "engines.<name>.served_name says it",
    "--api-key": "keys belong to the gateway",
    "--admin-api-key": "keys belong to the gateway",
    "--root-path": "paths belong to the gateway",
    "--ssl-keyfile": "TLS belongs to the gateway",
    "--ssl-certfile": "TLS belongs to the gateway",
    "--config": "a second file of settings would hide what the node file says",
    "--tp": "settings.tp_size says it",
    "--ep": "settings.ep_size says it",
    "--speculative-config": "settings.speculative says it",
    "--context-len": "settings.context_length says it",
}

OWNED_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "engines.<name>.gpus says it",
    "VLLM_SERVER_DEV_MODE": "it opens endpoints that command the engine",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "it lets clients load weights from any path",
}

_SECRET_WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"}


def _each(spec: NodeSpec) -> Iterator[tuple[str, Engine]]:
    if spec.engine is not None:
        yield from spec.engine.engines.items()


def _at(name: str, *rest: str | int) -> tuple[str | int, ...]:
    return ("engine", "engines", name, *rest)


def parallel_size(engine: Engine) -> int:
    """GPUs that the settings make one engine use: tensor x pipeline x data parallel size."""
    settings = engine.settings
    size = settings.tensor_parallel_size if isinstance(settings, VllmSettings) else settings.tp_size
    for flag in settings.extra_flags:
        if match := re.fullmatch(r"--(?:pipeline-parallel-size|pp-size|data-parallel-size|dp-size)=(\d+)", flag):
            # SGLang's data parallel attention shares the tensor parallel GPUs; its dp-size multiplies nothing
            if match[0].startswith("--dp") and isinstance(settings, SglangSettings):
                continue
            size *= int(match[1])
    return size


def gpus_exist(spec: NodeSpec) -> Iterator[Found]:
    count = spec.hardware.gpus.count
    for name, engine in _each(spec):
        for position, index in enumerate(engine.gpus):
            if not 0 <= index < count:
                allowed = f"0 to {count - 1}" if count else "none, because hardware.gpus.count is 0"
                yield Found(_at(name, "gpus", position), f"names no GPU of this machine; allowed: {allowed}")
        if count and not engine.gpus:
            yield Found(_at(name, "gpus"), f"is missing: which of this machine's {count} GPUs, as in gpus: [0]")


def gpus_are_used_once(spec: NodeSpec) -> Iterator[Found]:
    users: dict[int, str] = {}
    for name, engine in _each(spec):
        for position, index in enumerate(engine.gpus):
            if index in users:
                yield Found(_at(name, "gpus", position), f"is already used by engine {users[index]}")
            users.setdefault(index, name)


def parallelism_matches_gpus(spec: NodeSpec) -> Iterator[Found]:
    for name, engine in _each(spec):
        size = parallel_size(engine)
        flag = "tensor_parallel_size" if isinstance(engine.settings, VllmSettings) else "tp_size"
        if engine.gpus and size != len(engine.gpus):
            sentence = f"makes the engine use {size} GPUs, and gpus lists {len(engine.gpus)}; they must be equal"
            yield Found(_at(name, "settings", flag), sentence)


def weights_and_cache_fit(spec: NodeSpec) -> Iterator[Found]:
    """Weights are split over the GPUs; the latent cache is whole on every one of them (seed 3)."""
    memory = spec.hardware.gpus.memory
    for name, engine in _each(spec):
        model = spec.models.items.get(engine.model) if spec.models else None
        if memory is None or model is None or model.size is None or not engine.gpus:
            continue
        settings = engine.settings
        if isinstance(settings, VllmSettings):
            share, context, flag = settings.gpu_memory_utilization, settings.max_model_len, "gpu_memory_utilization"
        else:
            share, context, flag = settings.mem_fraction_static, settings.context_length, "mem_fraction_static"
        if share is None:
            continue
        weights = model.size / len(engine.gpus)
        room = memory * share - weights
        each = f"{sizes(memory)} per GPU x {share} = {sizes(memory * share)}"
        if room <= 0:
            sentence = f"leaves no room: {each}, weights take {sizes(weights)}; more GPUs or a smaller checkpoint"
            yield Found(_at(name, "settings", flag), sentence)
        elif model.cache_per_token and context and room < model.cache_per_token * context:
            cache = sizes(model.cache_per_token * context)
            path = "max_model_len" if isinstance(settings, VllmSettings) else "context_length"
            sentence = f"needs {cache} of cache for one full request; {each} less weights leaves {sizes(room)}"
            yield Found(_at(name, "settings", path), sentence)


def ports_are_free(spec: NodeSpec) -> Iterator[Found]:
    users = {22: "SSH"}
    if spec.gateway is not None:
        users[spec.gateway.health_port] = "the gateway (health_port)"
        for listen in spec.gateway.listen:
            if is_ip_address(listen.address) and (listen.is_any or listen.is_loopback):
                users.setdefault(listen.port, "the gateway")
    for name, engine in _each(spec):
        if engine.port in users:
            yield Found(_at(name, "port"), f"is already used by {users[engine.port]}")
        users.setdefault(engine.port, f"engine {name}")


def models_exist(spec: NodeSpec) -> Iterator[Found]:
    if spec.models is None:
        return
    for name, engine in _each(spec):
        if engine.model not in spec.models.items:
            hint = nearest(engine.model, list(spec.models.items))
            yield Found(_at(name, "model"), f"is not one of models.items{hint}")


def images_are_pinnable(spec: NodeSpec) -> Iterator[Found]:
    for name, engine in _each(spec):
        image = engine.image
        if not re.fullmatch(r"[a-z0-9][\w.-]*(:\d{1,5})?(/[a-z0-9][a-z0-9._-]*)+", image.repository):
            yield Found(_at(name, "image"), "must be registry/name@sha256:… or registry/name:tag, in lower case")
        elif "." not in (host := image.repository.split("/")[0]) and ":" not in host and host != "localhost":
            yield Found(_at(name, "image"), f"must name its registry, as in docker.io/{image.repository}")
        elif image.digest is None and image.tag is None:
            yield Found(
                _at(name, "image"), "has neither digest nor tag; write registry/name@sha256:… or registry/name:tag"
            )


def same_name_same_model(spec: NodeSpec) -> Iterator[Found]:
    """Engines that share a served name share its requests, so they must give the same answers."""
    first: dict[str, tuple[str, str]] = {}
    for name, engine in _each(spec):
        if spec.models is None or engine.model not in spec.models.items:
            continue
        other, model = first.setdefault(engine.served_name, (name, engine.model))
        if model != engine.model:
            sentence = f"is also served by engine {other} from model {model}; one name is one model"
            yield Found(_at(name, "served_name"), sentence)


def after_names_engines(spec: NodeSpec) -> Iterator[Found]:
    engines = spec.engine.engines if spec.engine else {}
    for name, engine in engines.items():
        for position, other in enumerate(engine.after):
            if other not in engines:
                hint = nearest(other, [known for known in engines if known != name])
                yield Found(_at(name, "after", position), f"is not an engine of this node{hint}")
            elif name in _before(engines, other):
                yield Found(_at(name, "after", position), f"makes {name} wait for itself; break the circle")


def _before(engines: dict[str, Engine], name: str) -> set[str]:
    """The engine itself and everything that must be ready before it."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in engines and current not in seen:
            seen.add(current)
            todo += engines[current].after
    return seen


def restarts_can_reach_their_cap(spec: NodeSpec) -> Iterator[Found]:
    """burst x (delay + longest attempt) < interval, or systemd never counts to the burst (gpu-node.md 5 and 7.17)."""
    for name, engine in _each(spec):
        attempt = engine.restart.delay + engine.readiness.deadline + engine.stop_timeout + START_SLACK
        needed = engine.restart.burst * attempt
        if needed >= engine.restart.interval:
            sum_ = f"{engine.restart.delay} + {engine.readiness.deadline} + {engine.stop_timeout} + {START_SLACK} s"
            sentence = (
                f"is {engine.restart.interval} s: a crash loop would never be stopped, because {engine.restart.burst} "
                f"starts of {sum_} (delay, deadline, stop, slack) take {needed} s; it must be more than that"
            )
            yield Found(_at(name, "restart", "interval"), sentence)


def conditions_leave_time_to_load(spec: NodeSpec) -> Iterator[Found]:
    for name, engine in _each(spec):
        ready = engine.readiness
        if ready.conditions_limit >= ready.deadline:
            sentence = f"is {ready.conditions_limit} s and must be less than the deadline of {ready.deadline} s"
            yield Found(_at(name, "readiness", "conditions_limit"), sentence)


def flags_are_ours_to_give(spec: NodeSpec) -> Iterator[Found]:
    for name, engine in _each(spec):
        settings = engine.settings
        typed = {
            "--" + field.replace("_", "-"): field for field in type(settings).model_fields if field != "extra_flags"
        }
        for position, flag in enumerate(settings.extra_flags):
            path = _at(name, "settings", "extra_flags", position)
            match = re.fullmatch(r"(--[a-z0-9][A-Za-z0-9_.-]*)(=.*)?", flag, re.DOTALL)
            if not match or not flag.isprintable():
                yield Found(path, "must be one flag as --name=value or --name")
                continue
            plain = match[1].replace("_", "-").removeprefix("--no-").removeprefix("--")
            if f"--{plain}" in OWNED_FLAGS:
                yield Found(path, f"is refused: {OWNED_FLAGS[f'--{plain}']}", show="key" not in plain)
            elif f"--{plain}" in typed:
                yield Found(path, f"is a setting of its own: settings.{typed[f'--{plain}']}")


def engines_know_their_flags(spec: NodeSpec) -> Iterator[Found]:
    """Every flag that would be rendered, typed or extra, against the table read from the engine's own package."""
    from roles.engine import container, flags  # a role may import this library, so not while it is being imported

    blamed = {found.path for found in flags_are_ours_to_give(spec)}
    for name, engine in _each(spec):
        settings = engine.settings
        extra = {re.split(r"[=\s]", flag)[0]: position for position, flag in enumerate(settings.extra_flags)}
        for flag, wrong in flags.refusals(settings.kind, container.command_line(engine)):
            field = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
            if flag in extra:
                path = _at(name, "settings", "extra_flags", extra[flag])
            elif field in type(settings).model_fields:
                path = _at(name, "settings", field)
            else:
                path = _at(name, "settings")
                wrong = f"renders {flag}, which {wrong}"
            if path not in blamed:
                yield Found(path, wrong)


def environment_holds_no_secrets(spec: NodeSpec) -> Iterator[Found]:
    for name, engine in _each(spec):
        for key in engine.environment:
            path = _at(name, "environment", key)
            if _SECRET_WORDS & set(key.upper().split("_")):
                sentence = (
                    "looks like a secret; `docker inspect` would show it, and an engine is offline and needs none"
                )
                yield Found(path, sentence, show=False)
            elif key.upper() in OWNED_ENVIRONMENT:
                yield Found(path, f"is refused: {OWNED_ENVIRONMENT[key.upper()]}")
            elif key.upper() in ENVIRONMENT:
                yield Found(path, "is refused: role engine sets it for every engine")


def cache_drop_off_has_a_reason(spec: NodeSpec) -> Iterator[Found]:
    """Seed 2: dropping the page cache before every start is what keeps the engine startable."""
    if (
        spec.engine
        and spec.engine.page_cache_drop == "off"
        and not (spec.engine.page_cache_drop_off_reason or "").strip()
    ):
        yield Found(("engine", "page_cache_drop"), "needs page_cache_drop_off_reason: why this machine can do without")


def engines_are_placed_where_they_can_run(spec: NodeSpec) -> Iterator[Found]:
    """Seed 2: an engine confined to the nodes of the CPUs fails CUDA initialisation with error 802."""
    for name, engine in _each(spec):
        path = _at(name, "numa_nodes")
        if engine.numa_nodes in ("auto", "off"):
            continue
        if spec.hardware.hbm_numa_nodes:
            sentence = (
                "would confine the engine on a machine whose GPU memory is a memory node (hardware.hbm_numa_nodes), and CUDA "
                "fails there with error 802 (seed 2); leave it out"
            )
            yield Found(path, sentence)
            continue
        try:
            wanted = numa.indices(engine.numa_nodes)
        except ValueError:
            yield Found(path, "must be auto, off, or memory nodes in ascending order, as in '0' or '0-1,4'")
            continue
        if outside := wanted - set(spec.hardware.cpu_numa_nodes):
            allowed = numa.listed(spec.hardware.cpu_numa_nodes)
            yield Found(
                path, f"names node {numa.listed(outside)}, which hardware.cpu_numa_nodes does not; allowed: '{allowed}'"
            )


RULES = (
    gpus_exist,
    gpus_are_used_once,
    engines_are_placed_where_they_can_run,
    parallelism_matches_gpus,
    weights_and_cache_fit,
    ports_are_free,
    models_exist,
    images_are_pinnable,
    same_name_same_model,
    after_names_engines,
    restarts_can_reach_their_cap,
    conditions_leave_time_to_load,
    flags_are_ours_to_give,
    engines_know_their_flags,
    environment_holds_no_secrets,
    cache_drop_off_has_a_reason,
)
