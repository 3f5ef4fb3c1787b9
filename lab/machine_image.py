"""The disk a lab machine starts from: Debian with kernel and GRUB on a GPT disk, built natively and cached until its recipe changes.

Nothing is booted and no partition is mounted to build it, because a build machine may have neither loop devices nor vfat.
What it boots with is what an installed server boots with: firmware, ``EFI/BOOT/BOOTX64.EFI``, and the /boot/grub/grub.cfg that
``update-grub`` writes.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from lab import blank
from lab.command import LabError, run
from lab.debian import RELEASES
from lab.network import Segment
from lab.paths import CACHE, locked
from lab.progress import step

# What a server that boots by itself has over a container.
_BOOT = (
    "linux-image-amd64",
    "initramfs-tools",
    "busybox",  # tar in the initramfs, for the seed
    "zstd",
    "grub-efi-amd64",
    "e2fsprogs",
    "pciutils",
    "numactl",
    "udev",
)
# What the roles would install: apt under emulation takes minutes for what takes seconds here. The steps of the roles
# that install it find it there and change nothing.
_PROVISIONED = (
    "apparmor",
    "auditd",
    "curl",
    "docker-cli",
    "docker.io",
    "jq",
    "nftables",
    "openssl",
    "systemd-timesyncd",
    "unattended-upgrades",
)
VARIANTS = {"blank": (), "provisioned": _PROVISIONED}
_SINCE_TRIXIE = {"docker-cli"}  # before, docker.io brings it

_FILES = Path(__file__).with_name("machine_files")
_MIB = 1 << 20
_ESP_START, _ESP_SIZE = 1, 64  # MiB
_ROOT_START, _ROOT_SIZE = 65, 12 * 1024  # MiB; the file is sparse
_ROOT_UUID = "67707577-0000-4000-8000-000000000001"
_ESP_SERIAL = "67707577"
_VERSION = 5  # raise when build() changes what it makes
# What grub-install puts into its core image, and what grub.cfg of a plain server uses before it can load more.
_GRUB_MODULES = ("part_gpt", "fat", "ext2", "normal", "search", "search_fs_uuid", "linux", "echo", "test", "configfile")


def check(release: str, variant: str) -> None:
    """Raise LabError for a release or a variant that the lab does not make."""
    if release not in RELEASES:
        raise LabError(f"machines run {', '.join(RELEASES)}, not {release!r}")
    if variant not in VARIANTS:
        raise LabError(f"image {variant!r} is not one the lab makes; allowed: {', '.join(VARIANTS)}")


def packages(release: str, variant: str) -> list[str]:
    """What is installed on a blank server beyond the hosts' own packages."""
    absent = set() if release == "trixie" else _SINCE_TRIXIE
    return [package for package in (*_BOOT, *VARIANTS[variant]) if package not in absent]


def recipe(release: str, variant: str) -> str:
    """Hash of everything that decides what the disk holds, apart from the archive's state on the day."""
    files = {
        path.relative_to(_FILES).as_posix(): path.read_text() for path in sorted(_FILES.rglob("*")) if path.is_file()
    }
    layout = [_ESP_START, _ESP_SIZE, _ROOT_START, _ROOT_SIZE, _ROOT_UUID, _ESP_SERIAL]
    return blank.recipe(release, _VERSION, packages(release, variant), layout, _GRUB_MODULES, files)


def image(release: str, variant: str, segment: Segment) -> Path:
    """The raw disk image, built if it is not cached (about two minutes). Raises LabError for an unknown release or variant."""
    check(release, variant)
    target = CACHE / "machines" / f"{release}-{variant}-{recipe(release, variant)}.raw"
    with locked(CACHE / "machines" / f"{release}-{variant}.lock"):
        if not target.is_file():
            # Images of former recipes stay: a machine of another lab may have one below its disk.
            with step(f"Building the {variant} {release} disk of machines (once)"):
                build(release, variant, segment, target)
    return target


def build(release: str, variant: str, segment: Segment, target: Path) -> None:
    """Make the disk image ``target``; nothing is left there when it fails."""
    draft = Path(tempfile.mkdtemp(prefix=f".{release}-{variant}-", dir=target.parent))
    try:
        root = draft / "root"
        blank.install(release, segment, root, packages(release, variant))
        _settle(root)
        disk = draft / "disk.raw"
        _partition(disk)
        _esp(disk, _loader(root))
        size = f"{_ROOT_SIZE * 1024}k"
        where = f"offset={_ROOT_START * _MIB},lazy_itable_init=0,lazy_journal_init=0"
        options = ["-t", "ext4", "-q", "-F", "-m", "1", "-N", "262144", "-L", "root", "-U", _ROOT_UUID, "-E", where]
        run(["mke2fs", *options, "-d", str(root), str(disk), size], timeout=600)
        disk.rename(target)
    finally:
        run(["rm", "-rf", "--one-file-system", str(draft)], timeout=300)


def _settle(root: Path) -> None:
    """Configure boot loader and initramfs as the installer does, with this image's own programs."""
    shutil.copytree(_FILES, root, dirs_exist_ok=True)
    (root / "etc/fstab").write_text(
        f"UUID={_ROOT_UUID} / ext4 errors=remount-ro 0 1\n"
        f"UUID={_ESP_SERIAL[:4]}-{_ESP_SERIAL[4:]} /boot/efi vfat umask=0077,nofail 0 1\n"
    )
    defaults = root / "etc/default/grub"
    # What boots is printed: the console's last lines are all there is when a machine does not come up.
    defaults.write_text(defaults.read_text().replace('_DEFAULT="quiet"', '_DEFAULT=""'))
    (root / "boot/efi").mkdir(exist_ok=True)
    _unpack_modules(root)
    _disable_profiles(root)
    _chroot(root, "update-initramfs", "-u", "-k", "all")
    modules = root / "boot/grub/x86_64-efi"
    shutil.rmtree(modules, ignore_errors=True)
    shutil.copytree(root / "usr/lib/grub/x86_64-efi", modules)
    # grub-mkconfig asks grub-probe about the disk that / is on, and here that is a directory of the build machine's disk.
    probe, real = root / "usr/sbin/grub-probe", root / "usr/sbin/grub-probe.real"
    by_uuid = root / "dev/disk/by-uuid" / _ROOT_UUID
    by_uuid.parent.mkdir(parents=True)
    by_uuid.touch()
    probe.rename(real)
    try:
        probe.write_text(_PROBE)
        probe.chmod(0o755)
        _chroot(root, "grub-mkconfig", "-o", "/boot/grub/grub.cfg")
    finally:
        real.replace(probe)
        shutil.rmtree(root / "dev/disk")


def _unpack_modules(root: Path) -> None:
    """Kernel modules as plain files: Debian 13 compresses them with xz, and an emulated processor unpacked one for eleven seconds."""
    packed = [str(path) for path in (root / "usr/lib/modules").rglob("*.ko.xz")]
    if packed:
        run(["xz", "--decompress", "--threads=0", *packed], timeout=300)
    for release in (root / "usr/lib/modules").iterdir():
        _chroot(root, "depmod", release.name)


def _disable_profiles(root: Path) -> None:
    """Leave out the AppArmor profiles of programs that are not here: Debian brings a hundred, and each boot would load them all."""
    folder = root / "etc/apparmor.d"
    for profile in folder.glob("*"):
        programs = (
            re.findall(r"^\s*profile\s+\S+\s+(/\S+)", profile.read_text(), re.MULTILINE) if profile.is_file() else []
        )
        if programs and not any((root / program.lstrip("/")).exists() for program in programs):
            (folder / "disable").mkdir(exist_ok=True)
            (folder / "disable" / profile.name).symlink_to(f"../{profile.name}")


_PROBE = f"""#!/bin/sh
# Answers for the disk that this image will be.
target=
while [ $# -gt 0 ]; do
  case $1 in
    --target=*) target=${{1#*=}} ;;
    --target | -t) target=$2; shift ;;
  esac
  shift
done
case $target in
  device) echo /dev/vda2 ;;
  fs) echo ext2 ;;
  fs_uuid) echo {_ROOT_UUID} ;;
  partmap) echo gpt ;;
  *) : ;;
esac
"""


def _loader(root: Path) -> Path:
    """GRUB's core image as grub-install makes it: it finds the root file system and reads the grub.cfg there."""
    config = root / "tmp/load.cfg"
    config.write_text(f"search.fs_uuid {_ROOT_UUID} root\nset prefix=($root)/boot/grub\n")
    made = root / "tmp/grub.efi"
    options = ["-O", "x86_64-efi", "-p", "/boot/grub", "-c", "/tmp/load.cfg", "-o", "/tmp/grub.efi"]
    _chroot(root, "grub-mkimage", *options, *_GRUB_MODULES)
    loader = root.with_name("BOOTX64.EFI")
    shutil.move(made, loader)
    config.unlink()
    return loader


def _partition(disk: Path) -> None:
    with disk.open("wb") as file:
        file.truncate((_ROOT_START + _ROOT_SIZE + 1) * _MIB)
    layout = f"label: gpt\nstart={_ESP_START}MiB, size={_ESP_SIZE}MiB, type=uefi, name=ESP\nstart={_ROOT_START}MiB, size={_ROOT_SIZE}MiB, type=linux, name=root\n"
    run(["sfdisk", "--quiet", str(disk)], stdin=layout)


def _esp(disk: Path, loader: Path) -> None:
    volume = f"{disk}@@{_ESP_START}M"
    sectors = _ESP_SIZE * _MIB // 512
    run(
        [
            "mformat",
            "-i",
            volume,
            "-F",
            "-T",
            str(sectors),
            "-h",
            "64",
            "-s",
            "32",
            "-N",
            _ESP_SERIAL,
            "-v",
            "ESP",
            "::",
        ]
    )
    # mformat writes a partition table into the volume's boot sector, and GRUB sees partitions within the partition.
    with disk.open("r+b") as file:
        file.seek(_ESP_START * _MIB + 446)
        file.write(bytes(64))
    run(["mmd", "-i", volume, "::/EFI", "::/EFI/BOOT"])
    run(["mcopy", "-i", volume, str(loader), "::/EFI/BOOT/BOOTX64.EFI"])


def _chroot(root: Path, *argv: str) -> None:
    run(["chroot", str(root), *argv], timeout=300)
