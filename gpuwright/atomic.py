"""The one operation that writes files on a node.

A set of files is sent on standard input (never in an argument: `ps` shows those), staged in a private directory under
the final names, validated there, and renamed into place with final mode and owner. Killed at any point a file is the
old one or the new one, and a secret has its final mode before it has its final name.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import io
import shlex
import tarfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from pyinfra import logger
from pyinfra.api import OperationError, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state
from pyinfra.facts.files import FileContents

from gpuwright import snapshot, units
from gpuwright.ownership import RECORD, Owned
from gpuwright.spec.secret import Secret

UNIT_DIRECTORY = "/etc/systemd/system/"


@dataclass(frozen=True)
class File:
    """A file as it must be: absolute path, bytes, mode in octal, owner names."""

    path: str
    content: bytes | Secret
    mode: str = "0644"
    user: str = "root"
    group: str = "root"
    shared: bool = False  # others have a part in it (daemon.json): never recorded as ours, so never removed

    @property
    def data(self) -> bytes:
        """The bytes to write."""
        return self.content.reveal() if isinstance(self.content, Secret) else self.content

    @property
    def owned(self) -> Owned:
        """How the record names it: a unit by its name, anything else by its path."""
        name = self.path.removeprefix(UNIT_DIRECTORY)
        if name != self.path and "/" not in name:
            return Owned("unit", name)
        return Owned("file", self.path)

    def __str__(self) -> str:
        return f"{self.path} ({self.content})" if isinstance(self.content, Secret) else self.path


@dataclass(frozen=True)
class Validate:
    """A shell command run in the staging directory, where the files lie under ``./<full path>``. Non-zero refuses the set.

    Lines of it that begin with ``note: `` are passed on where it agrees.
    """

    command: str


# Everything below runs as root on the node, from one shell. Its arguments hold no content.
_WRITE = r"""
set -eu
umask 077
role=$1 into=$2
mkdir -p /var/lib/gpuwright/stage /var/lib/gpuwright/owned
exec 9>/var/lib/gpuwright/lock
flock -w 120 9 || { echo "gpuwright: another run has been writing to this node for two minutes; wait for it, or end it" >&2; exit 75; }
rm -rf /var/lib/gpuwright/stage/*
stage=$(mktemp -d /var/lib/gpuwright/stage/XXXXXXXX)
trap 'rm -rf "$stage"' EXIT
base64 -d | tar -x -C "$stage" --no-same-owner -f -
cd "$stage/root"

# Validation, before anything outside the staging directory changes.
if [ -s "$stage/units" ]; then
  # Only lines that name our units count: verify also reports on units of others (and exits 0 on unknown keys).
  xargs -d '\n' env SYSTEMD_UNIT_PATH="$stage/root/etc/systemd/system:" systemd-analyze verify --man=no \
    <"$stage/units" >"$stage/verify" 2>&1 || true
  while IFS= read -r unit; do grep -F "$unit" "$stage/verify" || true; done <"$stage/units" | sort -u >"$stage/faults"
  # A program that this very set installs is not missing.
  while IFS= read -r line; do
    case $line in
      *"is not executable: No such file or directory"*)
        program=${line#*Command }; program=${program%% is not executable*}
        [ ! -e "$stage/root$program" ] || continue ;;
    esac
    printf '%s\n' "$line"
  done <"$stage/faults" >"$stage/refused"
  if [ -s "$stage/refused" ]; then
    echo "gpuwright: refused by systemd-analyze verify, nothing was written:" >&2
    cat "$stage/refused" >&2
    exit 65
  fi
fi
while IFS= read -r command; do
  if ! sh -c "$command" </dev/null >"$stage/validator" 2>&1; then
    echo "gpuwright: refused by: $command; nothing was written:" >&2
    tail -n 20 "$stage/validator" >&2
    exit 65
  fi
  grep '^note: ' "$stage/validator" >&2 || true
done <"$stage/validators"

# Recorded before it exists, so that a killed run leaves nothing unrecorded.
record=/var/lib/gpuwright/owned/$role
touch "$record"
sort -u "$record" "$stage/owned" >"$stage/record"
if ! cmp -s "$stage/record" "$record"; then
  cp "$stage/record" "$record.new"
  sync "$record.new"
  mv -fT "$record.new" "$record"
fi

while IFS='	' read -r mode user group source; do
  path=$into$source
  directory=${path%/*}
  (umask 022; mkdir -p "$directory")
  # A leading dot and this ending match no drop-in glob; what a killed run left is swept here.
  rm -f "$directory"/.gpuwright.*.tmp
  temporary="$directory/.gpuwright.$$.tmp"
  cp "$stage/root$source" "$temporary"
  chown "$user:$group" "$temporary"
  chmod "$mode" "$temporary"
  sync "$temporary"
  mv -fT "$temporary" "$path"
  sync "$directory"
done <"$stage/plan"
"""


def _right(file: File, found: snapshot.Found | None) -> bool:
    return found is not None and (found.sha256, found.mode, found.user, found.group) == (
        hashlib.sha256(file.data).hexdigest(),
        file.mode.rjust(4, "0"),
        file.user,
        file.group,
    )


def write(
    role: str,
    files: Sequence[File],
    change: Sequence[File] | None = None,
    validate: Sequence[Validate] = (),
    claims: Sequence[Owned] = (),
    into: str = "",
) -> StringCommand:
    """The command that stages `files`, validates them and renames those in `change` (all by default) into place.

    `into` is a directory below which the set is put instead, for somebody on the node who puts it in place later.
    Contents travel on standard input. Raises OperationError when our own lint refuses a unit.
    """
    faults = [
        f"{file.path}: {fault}"
        for file in files
        if file.path.startswith(UNIT_DIRECTORY) and not isinstance(file.content, Secret)
        for fault in units.lint(file.path, file.data.decode())
    ]
    if faults:
        raise OperationError("unit refused, nothing was written: " + "; ".join(faults))
    to_change = files if change is None else change
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:

        def add(name: str, data: bytes, mode: int = 0o600) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))

        def lines(values: Sequence[str]) -> bytes:
            return "".join(f"{value}\n" for value in values).encode()

        root = tarfile.TarInfo("root")
        root.type, root.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(root)
        for file in files:
            add(f"root{file.path}", file.data, 0o700 if int(file.mode, 8) & 0o100 else 0o600)
        add("plan", lines([f"{file.mode}\t{file.user}\t{file.group}\t{file.path}" for file in to_change]))
        owned = [*(file.owned for file in files if not file.shared), *claims]
        add("owned", lines([f"{thing.kind}\t{thing.name}" for thing in owned]))
        add("validators", lines([check.command for check in validate]))
        add("units", lines([file.owned.name for file in files if file.owned.kind == "unit"]))
    return StringCommand(
        "sh",
        "-c",
        shlex.quote(_WRITE),
        "gpuwright-write",
        shlex.quote(role),
        shlex.quote(into),
        _stdin=base64.encodebytes(archive.getvalue()).decode(),
    )


def pending(host: object, files: Sequence[File], claims: Sequence[Owned] = ()) -> tuple[list[File], list[Owned]]:
    """Which of `files` are not on the node as they must be, and which claims are not recorded there."""
    try:
        found = snapshot.read(host).read(snapshot.OWNED)
    except snapshot.CouldNotLook:
        return list(files), list(claims)
    by_name = {(f.kind, f.name): f for f in found}
    wrong = [file for file in files if not _right(file, by_name.get((file.owned.kind, file.owned.name)))]
    return wrong, [claim for claim in claims if (claim.kind, claim.name) not in by_name]


def _show_difference(file: File) -> None:
    """What `pyinfra --diff` shows: a unified diff, or for a secret its name and fingerprint."""
    host = ctx_host.get()
    if isinstance(file.content, Secret):
        logger.info(f"{host.print_prefix}{file.path}: {file.content}")
        return
    try:
        new = file.data.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        logger.info(f"{host.print_prefix}{file.path}: {len(file.data)} bytes, not text")
        return
    old = [f"{line}\n" for line in host.get_fact(FileContents, path=file.path) or []]
    for line in difflib.unified_diff(old, new, f"{file.path} on {host.name}", f"{file.path} as it must be"):
        logger.info(f"{host.print_prefix}{line.rstrip()}")


@operation()
def files(
    role: str,
    files: Sequence[File],
    validate: Sequence[Validate] = (),
    claims: Sequence[Owned] = (),
) -> Generator[StringCommand, None, None]:
    """Write a set of files, all staged and validated together; nothing happens when all are right already.

    + role: whose record they go to
    + files: the whole set, changed or not: validators see all of it
    + validate: refusals
    + claims: further things the role is about to create (containers, networks, …), recorded with the files

    Units in the set are linted and verified. Raises OperationError for a unit that the lint refuses.
    """
    host = ctx_host.get()
    wrong, unrecorded = pending(host, files, claims)
    if not wrong and not unrecorded:
        host.noop(f"{len(files)} files of role {role} are right already")
        return
    if ctx_state.get().config.DIFF:
        for file in wrong:
            _show_difference(file)
    snapshot.forget(host)
    yield write(role, files, wrong, validate, claims)


__all__ = ["RECORD", "File", "Validate", "files", "pending", "write"]
