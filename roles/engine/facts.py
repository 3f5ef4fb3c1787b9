"""What engines and their images look like on a node."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.snapshot import Section, register


@dataclass(frozen=True)
class Attempt:
    """One kept attempt: a folder of ``/var/lib/gpuwright/evidence/<engine>``."""

    folder: str
    size_kib: int


@dataclass(frozen=True)
class EngineState:
    """One engine as it is: its unit, its container, its ready file, what is kept of it."""

    name: str
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    restarts: int = 0
    job: bool = False
    ready: bool = False
    released: str = ""
    container: str = ""
    status: str = ""
    pid: int = 0
    exit_code: int = 0
    oom_killed: bool = False
    config: str = ""
    image: str = ""
    separation: str = ""
    evidence: tuple[Attempt, ...] = ()

    @property
    def evidence_kib(self) -> int:
        """What the kept attempts take on disk."""
        return sum(attempt.size_kib for attempt in self.evidence)

    @property
    def serving(self) -> bool:
        """Users may be on it: the unit is up and the gateway sends to it."""
        return self.active == "active" and self.ready


def _parse_engines(text: str) -> dict[str, EngineState]:
    values: dict[str, dict[str, str]] = {}
    evidence: dict[str, list[Attempt]] = {}
    for line in text.splitlines():
        tag, name, *rest = line.split("|")
        found = values.setdefault(name, {})
        if tag == "U":
            key, _, value = "|".join(rest).partition("=")
            found[key] = value
        elif tag == "S":
            found["ready"], found["released"] = rest
        elif tag == "C":
            keys = ("container", "status", "pid", "exit", "oom", "config", "image", "separation")
            found.update(zip(keys, rest, strict=True))
        elif tag == "E":
            evidence.setdefault(name, []).append(Attempt(rest[1], int(rest[0])))
        else:
            raise ValueError(line)
    return {
        name: EngineState(
            name=name,
            active=found.get("ActiveState", "inactive"),
            sub=found.get("SubState", "dead"),
            result=found.get("Result", "success"),
            restarts=int(found.get("NRestarts") or 0),
            job=found.get("Job", "") not in ("", "0"),
            ready=found.get("ready") == "yes",
            released=found.get("released", ""),
            container=found.get("container", ""),
            status=found.get("status", ""),
            pid=int(found.get("pid") or 0),
            exit_code=int(found.get("exit") or 0),
            oom_killed=found.get("oom") == "true",
            config=found.get("config", ""),
            image=found.get("image", ""),
            separation=found.get("separation", ""),
            evidence=tuple(evidence.get(name, ())),
        )
        for name, found in values.items()
    }


# Engines are those with a configuration; a Docker that is away or absent has no containers to tell of, which is why
# the container's fields are separate lines. A label that a container need not have is asked for with `with`: else Docker
# 26.1 prints "<no value>".
ENGINES = register(
    Section(
        "engines",
        r"""
cd /etc/gpuwright/engines 2>/dev/null || exit 0
for file in *.conf; do
  [ -e "$file" ] || exit 0
  name=${file%.conf}
  systemctl show --property=ActiveState,SubState,Result,NRestarts,Job "gpuwright-engine-$name.service" |
    sed -n "s/^[A-Z]/U|$name|&/p"
  ready=no
  [ ! -e "/run/gpuwright/ready/$name" ] || ready=yes
  printf 'S|%s|%s|%s\n' "$name" "$ready" "$(cat "/var/lib/gpuwright/engines/$name/released" 2>/dev/null)"
  (cd "/var/lib/gpuwright/evidence/$name" 2>/dev/null && du -sk -- */ 2>/dev/null | sed "s|/$||; s/\t/|/; s/^/E|$name|/")
done
command -v docker >/dev/null || exit 0
ids=$(docker container ls --all --quiet --filter label=gpuwright.engine) || exit 0
[ -z "$ids" ] || docker container inspect --format 'C|{{index .Config.Labels "gpuwright.engine"}}|{{.Id}}|{{.State.Status}}|{{.State.Pid}}|{{.State.ExitCode}}|{{.State.OOMKilled}}|{{index .Config.Labels "gpuwright.config"}}|{{index .Config.Labels "gpuwright.image"}}|{{with index .Config.Labels "gpuwright.p2p"}}{{.}}{{end}}' $ids
exit 0
""",
        _parse_engines,
    )
)


def _parse_images(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ``repository@digest`` of everything pulled, and the ids of everything there is (an image from an archive has only that).
IMAGES = register(
    Section(
        "images",
        r"""
command -v docker >/dev/null || exit 0
docker image ls --digests --no-trunc --format '{{.Repository}}@{{.Digest}} {{.ID}}'
""",
        _parse_images,
    )
)


def image_present(images: frozenset[str], repository: str, digest: str) -> bool:
    """Whether ``repository@digest`` can run. Docker lists docker.io's images without their registry."""
    short = repository.removeprefix("docker.io/").removeprefix("library/")
    return not {f"{repository}@{digest}", f"{short}@{digest}", digest}.isdisjoint(images)
