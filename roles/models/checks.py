"""What role `models` promises: the weights of the pinned commit, whole, unchanged, and the hub's token nowhere but in its job."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from gpuwright import numa
from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.audit.systemd import blocks, mask
from gpuwright.snapshot import NUMA, CouldNotLook, Section, Snapshot, hbm_nodes
from gpuwright.spec.node import NodeSpec
from roles.models.spec import Model, ModelsSpec

# The engines' user (roles/engine/container.py): it must never own or write weights.
_ENGINE_USER = "10001"

# --- observations ---------------------------------------------------------------------------------------------------


@dataclass
class Stored:
    """One model as it lies in the store."""

    directory: str = ""
    manifest: dict[str, tuple[int, str]] | None = None  # path to size and sha256
    repo: str = ""
    revision: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)  # of small files
    loose: list[str] = field(default_factory=list)  # what others than its owner can write, or the engine's user owns


def _parse_stored(text: str) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for line in text.splitlines():
        tag, name, rest = line.split(" ", 2)
        model = found.setdefault(name, Stored())
        if tag == "model":
            model.directory = rest
        elif tag == "manifest":
            said = json.loads(rest)
            model.repo, model.revision = said["repo"], said["revision"]
            model.manifest = {path: (size, sha256) for path, size, sha256 in said["files"]}
        elif tag == "file":
            size, path = rest.split(" ", 1)
            model.sizes[path] = int(size)
        elif tag == "sum":
            sha256, path = rest.split("  ", 1)
            model.sums[path.removeprefix("./")] = sha256
        elif tag == "loose":
            model.loose.append(rest)
    return found


# Every file's size, and the sha256 of small ones: configuration, tokenizer and chat template are where a change of a
# few bytes does most, and hashing all weights takes minutes (gpuwright-model-verify@NAME.service does that).
STORE = Section(
    "audit-models-store",
    r"""
for file in /etc/gpuwright/models/*.conf; do
  [ -e "$file" ] || exit 0
  value() { sed -n "s/^$1=//p" "$file" | head -n 1; }
  name=$(value name) repo=$(value repo) store=$(value store) commit=$(value commit)
  directory=$store/$repo/$commit
  echo "model $name $directory"
  find "$store" "$store/${repo%%/*}" "$store/$repo" -maxdepth 0 \( -perm /022 -o -user 10001 \) -printf "loose $name %m %u %p\n" 2>/dev/null
  find "$directory" "$directory.manifest.json" ! -type l \( -perm /022 -o -user 10001 \) -printf "loose $name %m %u %p\n" 2>/dev/null
  (cd "$directory" 2>/dev/null && find -L . -type f -printf "file $name %s %P\n" &&
    find -L . -type f -size -1024k -exec sha256sum {} + | sed "s/^/sum $name /")
  [ ! -r "$directory.manifest.json" ] || printf 'manifest %s %s\n' "$name" \
    "$(jq -c '{repo, revision, files: [.files[] | [.path, .size, .sha256]]}' "$directory.manifest.json")"
done
exit 0
""",
    _parse_stored,
)

JOBS = Section(
    "audit-models-jobs",
    "systemctl show --property=Id,LoadState,NUMAPolicy,NUMAMask,User,DynamicUser,NoNewPrivileges,LoadCredential,"
    "LoadCredentialEncrypted,SetCredential 'gpuwright-model-*'",
    blocks,
)

# Names only: which processes and units have something in the shape of the hub's token.
TOKENS = Section(
    "audit-models-tokens",
    r"""
shape='hf_[A-Za-z0-9]{30,}'
for kind in environ cmdline; do
  for file in $(grep -slE "$shape" /proc/[0-9]*/$kind 2>/dev/null); do
    pid=${file#/proc/} pid=${pid%%/*}
    echo "process $(cat "/proc/$pid/comm" 2>/dev/null) $pid $kind"
  done
done
grep -rlsE "$shape" /etc/systemd/system /etc/gpuwright /run/systemd/transient 2>/dev/null | sed 's/^/file /'
systemctl show --property=Id,Environment,ExecStart 'gpuwright-*' | awk -v shape="$shape" '
  /^Id=/ {id = substr($0, 4)} $0 ~ shape {print "unit " id}'
exit 0
""",
    str.splitlines,
)

# --- predicates -----------------------------------------------------------------------------------------------------


def _models(spec: NodeSpec) -> ModelsSpec:
    assert spec.models
    return spec.models


def _each(seen: Snapshot, spec: NodeSpec) -> list[tuple[str, Model, Stored]]:
    stored = seen.read(STORE)
    return [(name, model, stored.get(name, Stored())) for name, model in _models(spec).items.items()]


def _manifests(seen: Snapshot, spec: NodeSpec) -> dict[str, tuple[Stored, dict[str, tuple[int, str]]]]:
    """Models with their manifest. One that is missing is the first control's; here it must not look like a pass."""
    found = {name: (stored, stored.manifest) for name, _, stored in _each(seen, spec) if stored.manifest}
    missing = [name for name, _, stored in _each(seen, spec) if not stored.manifest]
    if missing:
        raise CouldNotLook(f"no manifest of {', '.join(missing)} to compare with")
    return found


def _complete(seen: Snapshot, spec: NodeSpec) -> Verdict:
    faults, fine = [], []
    for name, model, stored in _each(seen, spec):
        wanted = f"{_models(spec).store}/{model.repo}/{model.commit}"
        if stored.directory != wanted:
            faults.append(f"{name}: the job's directory is {stored.directory or 'unknown'}, wanted {wanted}")
        elif not stored.manifest:
            faults.append(f"{name}: no manifest {wanted}.manifest.json")
        elif (stored.repo, stored.revision) != (model.repo, model.commit):
            faults.append(f"{name}: the manifest is of {stored.repo} at {stored.revision}")
        else:
            fine.append(f"{name}: {len(stored.manifest)} files at {stored.revision[:12]}")
    return without(faults, "a manifest of the pinned commit for every model", "; ".join(fine))


def _sizes(seen: Snapshot, spec: NodeSpec) -> Verdict:
    faults, fine = [], []
    for name, (stored, manifest) in _manifests(seen, spec).items():
        wrong = [path for path, (size, _) in manifest.items() if stored.sizes.get(path) != size]
        faults += [
            f"{name}: {path} has {stored.sizes.get(path, 'no')} bytes, the manifest says {manifest[path][0]}"
            for path in wrong
        ]
        fine.append(f"{name}: {sum(size for size, _ in manifest.values())} bytes in {len(manifest)} files")
    return without(faults, "every file of the manifest, with its size", "; ".join(fine))


def _contents(seen: Snapshot, spec: NodeSpec) -> Verdict:
    faults, count = [], 0
    for name, (stored, manifest) in _manifests(seen, spec).items():
        for path, (size, sha256) in manifest.items():
            # A file of another size is the control above's.
            if path in stored.sums and stored.sizes.get(path) == size:
                count += 1
                if stored.sums[path] != sha256:
                    has = stored.sums[path]
                    faults.append(f"{name}: {path} has sha256 {has[:12]}…, the manifest says {sha256[:12]}…")
    return without(faults, "the manifest's sha256 for every small file", f"{count} files")


def _nothing_else(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _manifests(seen, spec)
    faults = [
        f"{name}: {path} is not in the manifest"
        for name, (stored, manifest) in found.items()
        for path in sorted(stored.sizes.keys() - manifest.keys())
    ]
    return without(faults, "no file beside the manifest's", f"models: {', '.join(found)}")


_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def _no_pickle(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _manifests(seen, spec)
    faults = [
        f"{name}: {path}" for name, (_, manifest) in found.items() for path in manifest if path.endswith(_PICKLES)
    ]
    return without(faults, "no file that is unpickled when it is loaded", f"models: {', '.join(found)}")


def _not_writable(seen: Snapshot, spec: NodeSpec) -> Verdict:
    faults = [f"{name}: {entry}" for name, _, stored in _each(seen, spec) for entry in stored.loose]
    return without(faults, f"store and weights written by their owner alone, who is not uid {_ENGINE_USER}", "so it is")


def _no_token(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = seen.read(TOKENS)
    return without(
        [f"a hub token in {entry}" for entry in found], "no hub token in any process, unit or setting", "none"
    )


def _job(name: str) -> str:
    return f"gpuwright-model-{name}.service"


def _jobs(seen: Snapshot, spec: NodeSpec, expected: str, wrong: dict[str, str]) -> Verdict:
    return without(
        [f"{name}: {said}" for name, said in wrong.items() if said], expected, f"jobs: {', '.join(_models(spec).items)}"
    )


def _bound(seen: Snapshot, spec: NodeSpec) -> Verdict:
    wanted = numa.io_nodes(_models(spec).numa_nodes, spec.hardware)
    if wanted is None:
        hbm = numa.listed(hbm_nodes(seen.read(NUMA)))
        if not hbm:
            return not_applicable("the node file names no memory nodes and this machine has none without CPUs")
        return judged(
            False,
            "jobs bound to the memory of CPU nodes",
            f"memory nodes {hbm} are HBM, the node file says nothing",
        )
    units = seen.read(JOBS)
    wrong = {}
    for name in _models(spec).items:
        unit = units.get(_job(name), {})
        has = (unit.get("NUMAPolicy", "absent"), mask(unit.get("NUMAMask", "")))
        right = has == ("bind", numa.indices(wanted))
        wrong[name] = "" if right else f"NUMAPolicy={has[0]} NUMAMask={unit.get('NUMAMask', '')}"
    return _jobs(seen, spec, f"every job bound to memory nodes {wanted}", wrong)


def _not_root(seen: Snapshot, spec: NodeSpec) -> Verdict:
    units = seen.read(JOBS)
    wrong = {}
    for name in _models(spec).items:
        unit = units.get(_job(name), {})
        user = unit.get("User") or ("a dynamic user" if unit.get("DynamicUser") == "yes" else "root")
        wrong[name] = f"runs as {user}" if user in ("root", "0") else ""
    return _jobs(seen, spec, "every job with an unprivileged user", wrong)


def _no_new_privileges(seen: Snapshot, spec: NodeSpec) -> Verdict:
    units = seen.read(JOBS)
    wrong = {
        name: ""
        if (value := units.get(_job(name), {}).get("NoNewPrivileges", "absent")) == "yes"
        else f"NoNewPrivileges={value}"
        for name in _models(spec).items
    }
    return _jobs(seen, spec, "NoNewPrivileges=yes for every job", wrong)


_CONVERGE = "pyinfra INVENTORY deploy.py"
_AGAIN = "systemctl start gpuwright-model-NAME (the deploy does): what is wrong is named and fetched again"

CONTROLS = (
    Control(
        id="GPW-MODL-001",
        title="The weights of every model are the pinned commit, and were verified.",
        reason="A manifest is written only when every file had its sha256.",
        severity="high",
        observed=(STORE,),
        predicate=_complete,
        remedy=_AGAIN,
        risk="none",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-MODL-002",
        title="Every file of the weights is there with its size.",
        reason="A cut file loads for minutes and fails then.",
        severity="high",
        observed=(STORE,),
        predicate=_sizes,
        remedy=_AGAIN,
        risk="none",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-MODL-003",
        title="Configuration, tokenizer and chat template are unchanged.",
        reason="A few bytes there change what every user gets.",
        severity="critical",
        observed=(STORE,),
        predicate=_contents,
        remedy="systemctl start gpuwright-model-verify@NAME, then the job",
        risk="none",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-MODL-004",
        title="Nothing lies among the weights that the commit does not have.",
        reason="Engines load what they find by name, code included.",
        severity="high",
        observed=(STORE,),
        predicate=_nothing_else,
        remedy="look where it came from, then remove it",
        risk="none",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-MODL-005",
        title="No weights are unpickled when they are loaded.",
        reason="A pickle is a program (CVE-2026-24747); safetensors are data.",
        severity="high",
        observed=(STORE,),
        predicate=_no_pickle,
        remedy="use the model's safetensors revision",
        risk="another revision is another model to qualify",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-MODL-006",
        title="Only their owner can write the weights, and that is not the engines' user.",
        reason="Whoever gets into one engine must not own the model of the next.",
        severity="critical",
        observed=(STORE,),
        predicate=_not_writable,
        remedy="chmod go-w PATH; chown as the rest of the store",
        risk="none",
        references=ref.WEIGHTS_READ_ONLY,
    ),
    Control(
        id="GPW-MODL-007",
        title="The hub's token is in no environment, command line, unit or setting.",
        reason="ps, systemctl show and docker inspect show those.",
        severity="critical",
        observed=(TOKENS,),
        predicate=_no_token,
        remedy="models.token reaches the job as a credential; replace the token: it has been seen",
        risk="none",
        references=ref.HUB_TOKEN,
    ),
    Control(
        id="GPW-MODL-008",
        title="Downloads keep to the memory of CPU nodes.",
        reason="File pages on HBM count as used GPU memory and stop the next start (seed 2).",
        severity="high",
        observed=(JOBS, NUMA),
        predicate=_bound,
        remedy=f"{_CONVERGE} (models.numa_nodes)",
        risk="none",
    ),
    Control(
        id="GPW-MODL-009",
        title="Downloads do not run as root.",
        reason="They parse what a hub answers.",
        severity="medium",
        observed=(JOBS,),
        predicate=_not_root,
        remedy=_CONVERGE,
        risk="none",
        references=ref.CONTAINER_USER,
    ),
    Control(
        id="GPW-MODL-010",
        title="Downloads cannot gain privileges.",
        reason="Without no_new_privs a set-uid program makes the unprivileged user root.",
        severity="medium",
        observed=(JOBS,),
        predicate=_no_new_privileges,
        remedy=_CONVERGE,
        risk="none",
        references=ref.CONTAINER_PRIVILEGE,
    ),
)
