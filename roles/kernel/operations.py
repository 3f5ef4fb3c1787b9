"""What this role can change: the boot menu, sysctl values, modules, the initramfs. The one reboot is `barrier`'s."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Generator
from typing import Any

from pyinfra import logger
from pyinfra.api import operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.context import ctx_host, ctx_state

from gpuwright import atomic, boot, snapshot
from gpuwright.boot import Boot, Wishes
from gpuwright.refusal import refusal
from gpuwright.snapshot import CouldNotLook, Snapshot
from gpuwright.watched import Watched
from roles.kernel.facts import VALUES, of_each, same
from roles.kernel.files import ROLE, SCRIPTS, boot_files, in_use, modprobe_file, sysctl_file
from roles.kernel.weakening import PRETENDED_ISOLATION, WHAT_IT_PRETENDS, inert

# --- boot menu ------------------------------------------------------------------------------------------------------------


def menu_is_stale(seen: Boot, wanted: Wishes) -> bool:
    """Whether the boot menu would start a kernel without a wanted word, with one that nothing asks for any more, or with one
    that makes a wanted one void.

    The menu itself is asked, not whether a file changed: a run killed between the two is healed by the next one.
    """
    site = {boot.Word(key, value, "", "").text for key, value in seen.site or ()}
    texts = {word.text for word in wanted.words}
    gone = {text for text in seen.recorded if text not in texts | site}
    if not wanted.words and not gone:
        return False
    if not seen.menu:
        return True
    unwanted = gone | set(boot.in_the_way(wanted))
    return any(
        not all(boot.holds(entry.words, word) for word in wanted.words)
        or any(boot.Word(key, value, "", "").text in unwanted for key, value in entry.words)
        for entry in seen.menu
    )


def overridden(seen: Boot, wanted: Wishes) -> list[str]:
    """One sentence for every word of the site's own that gives way to a role's."""
    void = boot.in_the_way(wanted)
    found = []
    for key, value in seen.site or ():
        text = boot.Word(key, value, "", "").text
        for word in wanted.words:
            other_value = boot.same_key(key, word.key) and word.key not in boot.REPEATABLE and value != word.value
            if other_value or (text in void and text in boot.in_the_way(Wishes(words=(word,)))):
                found.append(
                    f"{text} of the boot loader's own settings gives way to {word.text} ({word.role}: {word.reason}); "
                    "the file it stands in is left as it is"
                )
    return found


def menu_fault(seen: Boot, wanted: Wishes) -> str | None:
    """Why the command line cannot be written here; None where it can, or need not be."""
    missing = [word.text for word in wanted.words if not boot.holds(seen.line, word)]
    if seen.loader == "none" and missing:
        return (
            f"{', '.join(missing)} cannot be put on the kernel's command line: there is neither GRUB "
            "(/boot/grub/grub.cfg and grub-mkconfig) nor systemd-boot; put it there with this machine's own means"
        )
    if seen.loader == "grub" and seen.site is None:
        return (
            "/etc/default/grub or a file of /etc/default/grub.d cannot be read by sh, so grub-mkconfig fails too; "
            "look with: sh -e /etc/default/grub"
        )
    # Without a /etc/kernel/cmdline kernel-install takes the running line.
    site = seen.site or (seen.line if seen.loader == "systemd-boot" else ())
    if seen.loader != "none" and wanted.words and boot.END in site:
        where = (
            "/etc/default/grub and the files of /etc/default/grub.d" if seen.loader == "grub" else "/etc/kernel/cmdline"
        )
        return (
            f"the boot loader's own settings have '--' on the kernel's command line: what comes after it goes to init, and "
            f"{', '.join(word.text for word in wanted.words)} would; take it out (look into {where})"
        )
    return None


@operation()
def command_line(wanted: Wishes) -> Generator[PyinfraCommand, None, None]:
    """Put the wanted words on the command line of every kernel that the node serves with.

    + wanted: what all roles ask for

    The boot menu is made anew only when it says something else than it should, and read before it replaces the old one.
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(boot.BOOT)
    if fault := menu_fault(seen, wanted):
        yield refusal(fault)
        return
    files = boot_files(seen, wanted)
    wrong, _ = atomic.pending(host, files)
    stale = seen.loader != "none" and menu_is_stale(seen, wanted)
    if not wrong and not stale:
        host.noop("the boot menu has every word it should")
        return
    snapshot.forget(host)
    if wrong:
        checks = [atomic.Validate(f"sh -n .{file.path}") for file in files if file.path == boot.GRUB_DROP_IN]
        yield atomic.write(ROLE, files, wrong, checks)
    if stale:
        texts = [boot.grub_text(word) for word in wanted.words]
        yield Watched(f"{SCRIPTS}/boot-menu", seen.loader, *(shlex.quote(text) for text in texts))


# --- sysctl -----------------------------------------------------------------------------------------------------------------

_SET = r"""
set -u
status=0
asked=$(cat)
# '*' is every interface there is that has no line of its own, as systemd-sysctl reads it (sysctl.d(5)).
of_each() {
  printf '%s\n' "$asked" | while IFS='	' read -r key value; do
    case $key in
      *\**)
        for path in /proc/sys/$(echo "$key" | tr ./ /.); do
          [ -e "$path" ] || continue
          one=$(echo "${path#/proc/sys/}" | tr ./ /.)
          printf '%s\n' "$asked" | cut -f 1 | grep -qxF "$one" || printf '%s\t%s\n' "$one" "$value"
        done
        ;;
      *) printf '%s\t%s\n' "$key" "$value" ;;
    esac
  done
}
while IFS='	' read -r key value; do
  now=$(sysctl -n --ignore "$key" 2>/dev/null)
  if [ -z "$now" ] && ! sysctl -n "$key" >/dev/null 2>&1; then
    echo "sysctl $key: this kernel does not have it"
    continue
  fi
  # shellcheck disable=SC2086  # the kernel puts tabs between several numbers
  now=$(echo $now)
  [ "$now" != "$value" ] || continue
  said=$(sysctl -q -w "$key=$value" 2>&1)
  # shellcheck disable=SC2046
  after=$(echo $(sysctl -n "$key"))
  if [ "$after" = "$value" ]; then
    echo "sysctl $key: $value (was $now)"
  else
    echo "sysctl $key: still $after instead of $value; the kernel says: ${said:-nothing}" >&2
    status=1
  fi
done <<END
$(of_each)
END
exit $status
"""


@operation()
def sysctls(wanted: Wishes) -> Generator[PyinfraCommand, None, None]:
    """Write the drop-in that sorts last, and give the running kernel every value that it does not have.

    + wanted: what all roles ask for
    """
    host = ctx_host.get()
    file = sysctl_file(wanted)
    if file is None:
        host.noop("no sysctl value is asked for")
        return
    wrong, _ = atomic.pending(host, [file])
    try:
        values = snapshot.read(host).read(VALUES)
    except CouldNotLook:
        values = {}
    asked = list(of_each(wanted.sysctls, values))
    different = [
        sysctl for sysctl in asked if sysctl.key not in values or values[sysctl.key] not in (None, same(sysctl.value))
    ]
    if not wrong and not different:
        unknown = [sysctl.key for sysctl in asked if values[sysctl.key] is None]
        also = f"; unknown to this kernel: {', '.join(unknown)}" if unknown else ""
        host.noop(f"{len(asked) - len(unknown)} sysctl values hold{also}")
        return
    snapshot.forget(host)
    if wrong:
        yield atomic.write(ROLE, [file], wrong)
    lines = "".join(f"{sysctl.key}\t{same(sysctl.value)}\n" for sysctl in wanted.sysctls)
    yield Watched("sh", "-c", shlex.quote(_SET), _stdin=lines)


# modprobe passes over a line that it cannot read, and only says so.
MODPROBE_READS_IT = f"! modprobe --config=.{boot.MODPROBE} --showconfig 2>&1 >/dev/null | grep ."

# --- modules ----------------------------------------------------------------------------------------------------------------


def spared(seen: Boot, wanted: Wishes) -> list[boot.BlockedModule]:
    """What would be blocked and is in use: it is left alone, and said."""
    return [block for block in wanted.blocked if block.spared_when_used and in_use(seen, block.module)]


def to_unload(seen: Boot, wanted: Wishes) -> list[str]:
    """Blocked file systems and protocols that are loaded and that nobody uses. Never a driver: a network card's has no
    users while it carries the connection that this comes over."""
    loaded = dict(seen.modules)
    return [
        block.module
        for block in wanted.blocked
        if block.spared_when_used and block.module in loaded and not in_use(seen, block.module)
    ]


@operation()
def modules(wanted: Wishes) -> Generator[PyinfraCommand, None, None]:
    """Write blocked modules and module options, and unload the file systems and protocols that nobody uses.

    + wanted: what all roles ask for
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(boot.BOOT)
    file = modprobe_file(seen, wanted)
    wrong, _ = atomic.pending(host, [file] if file else [])
    unload = to_unload(seen, wanted)
    if not wrong and not unload:
        host.noop("modules are blocked and have their options as they should")
        return
    snapshot.forget(host)
    if wrong:
        yield atomic.write(ROLE, wrong, validate=[atomic.Validate(MODPROBE_READS_IT)])
    if unload:
        steps = [
            f'modprobe -r {shlex.quote(module)} && echo "module {module}: unloaded" || '
            f'echo "module {module}: is loaded and does not go; it will not be there after the next boot"'
            for module in unload
        ]
        yield Watched("sh", "-c", shlex.quote("\n".join([*steps, "true"])))


def modprobe_sum(file: atomic.File | None) -> str:
    """What an initramfs must hold of our modprobe.d file."""
    return hashlib.sha256(file.data).hexdigest() if file else "none"


@operation()
def initramfs(wanted: Wishes) -> Generator[PyinfraCommand, None, None]:
    """Make every initramfs hold the modprobe.d file as it is: modules in it are loaded before the root is mounted.

    + wanted: what all roles ask for

    What is inside is compared, not whether a file changed; an image made since (by a new kernel) is looked into once.
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(boot.BOOT)
    right = modprobe_sum(modprobe_file(seen, wanted))
    # Where nothing is asked for and nothing was ever put there, there is nothing to look for.
    stale = [image for image in seen.initrds if image.inside != right and (right, image.inside) != ("none", None)]
    if not stale:
        host.noop(f"{len(seen.initrds)} initramfs images hold the modprobe.d file as it is")
        return
    snapshot.forget(host)
    yield Watched(f"{SCRIPTS}/initramfs-modprobe", right)


# --- what became of it ------------------------------------------------------------------------------------------------------


@operation()
def verified(wanted: Wishes, may_wait: bool) -> Generator[PyinfraCommand, None, None]:
    """Read back what the kernel became; fail where it is not what was asked and no reboot is left to bring it.

    + wanted: what all roles ask for
    + may_wait: what only a reboot brings may wait for one (``reboot: never``)
    """
    host = ctx_host.get()
    if not ctx_state.get().is_executing:
        host.noop("what the kernel becomes is read back at the end")
        return
    seen = snapshot.read(host)
    if faults := shortfalls(seen, wanted, may_wait):
        yield refusal(f"the kernel is not what was asked: {'; '.join(faults)}")
        return
    host.noop("the kernel is what was asked")


def shortfalls(seen: Snapshot, wanted: Wishes, may_wait: bool) -> list[str]:
    """What is missing after everything was done."""
    now = seen.read(boot.BOOT)
    faults = [] if may_wait else list(boot.pending(seen, wanted))
    if now.loader != "none" and menu_is_stale(now, wanted):
        faults.append("the boot menu does not have the words it should")
    faults += boot.options_unknown(seen, wanted)
    values = seen.read(VALUES)
    faults += [
        f"sysctl {sysctl.key} is {values.get(sysctl.key)} instead of {sysctl.value}"
        for sysctl in of_each(wanted.sysctls, values)
        if values.get(sysctl.key) not in (None, same(sysctl.value))
    ]
    return faults


def unknown_words(seen: Boot, wanted: Wishes) -> list[str]:
    """Wanted words that the running kernel said it does not know; words for systemd and modules have a dot and are not its."""
    unknown = set(seen.unknown or ())
    return [text for word in wanted.words for text in _named(word) if text in unknown]


def unknown_to_it(seen: Boot, wanted: Wishes) -> list[str]:
    """Words of the site's own that the running kernel said it does not know."""
    ours = _ours(seen, wanted)
    return [text for text in seen.unknown or () if text not in ours]


def of_the_site(seen: Boot, wanted: Wishes) -> list[str]:
    """What is known of words of the site's own that do not do what they are there for; they stay as they are."""
    found, ours = [], _ours(seen, wanted)
    if unknown := unknown_to_it(seen, wanted):
        found.append(
            f"this kernel does not know {', '.join(unknown)} of the boot loader's own settings; unless a program reads that, it "
            "has no effect; it stays as it is"
        )
    for key, value in seen.line:
        text = boot.Word(key, value, "", "").text
        if text in ours:
            continue
        if why := inert(key, value):
            found.append(f"{text} of the boot loader's own settings has no effect: it {why}; it stays as it is")
        if boot.same_key(key, PRETENDED_ISOLATION):
            found.append(f"{text} of the boot loader's own settings {WHAT_IT_PRETENDS}; it stays as it is")
    return found


def report_words(host: Any, seen: Boot, wanted: Wishes) -> None:
    """Say which words on the running line have no effect: a warning for ours, a note for the site's."""
    for word in unknown_words(seen, wanted):
        logger.warning(f"{host.print_prefix}kernel: this kernel does not know {word}; it has no effect")
    for sentence in of_the_site(seen, wanted):
        logger.info(f"{host.print_prefix}kernel: {sentence}")


def _named(word: boot.Word) -> list[str]:
    """A word as the kernel names it when it does not know it: of ``pci=`` each option by itself."""
    return [f"pci={part}" for part in (word.value or "").split(",")] if word.key == "pci" else [word.text]


def _ours(seen: Boot, wanted: Wishes) -> set[str]:
    """Words that roles ask for, and those that once were ours and go with the next boot."""
    once = [boot.Word(*word, "", "") for text in seen.recorded for word in boot.parse_line(text)]
    return {text for word in (*wanted.words, *once) for text in (word.text, *_named(word))}
