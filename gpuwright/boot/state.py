"""How a node booted, what it would boot next, and what of its wishes only a reboot can bring."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, replace
from itertools import takewhile

from gpuwright.boot.asked import REPEATABLE, ModuleOption, Wishes, Word
from gpuwright.boot.words import Given, grub_words, holds, parse_line, same_key
from gpuwright.snapshot import SYSTEM, CouldNotLook, Section, Snapshot, register

STATE = "/var/lib/gpuwright/kernel"
WORDS = f"{STATE}/words"
"""Every word this node's boot menu ever got from us, one a line: one that nothing asks for any more is known by it."""
MODPROBE = "/etc/modprobe.d/gpuwright.conf"
GRUB_DROP_IN = "/etc/default/grub.d/zz-gpuwright.cfg"


@dataclass(frozen=True)
class Entry:
    """One entry of the boot menu that starts a kernel of this system."""

    name: str
    kernel: str
    words: tuple[Given, ...]

    @property
    def is_recovery(self) -> bool:
        """Made for repairs, from GRUB_CMDLINE_LINUX alone: what the node should serve with is kept out of it."""
        return "-recovery-" in self.name or "(recovery mode)" in self.name


@dataclass(frozen=True)
class Initrd:
    """One initramfs: the image's identity, and what of our modprobe.d file was last seen inside (None: not looked)."""

    kernel: str
    identity: str
    inside: str | None


@dataclass(frozen=True)
class Boot:
    """How this boot came about, what runs because of it, and what the next one would be."""

    container: bool = False
    boot_id: str = ""
    kernel: str = ""
    line: tuple[Given, ...] = ()
    loader: str = "none"  # grub, systemd-boot, none
    entries: tuple[Entry, ...] = ()
    default: str = ""  # the kernel that the boot menu starts next; empty where that cannot be told
    site: tuple[Given, ...] | None = ()  # the words that the site itself asks for; None: GRUB's settings cannot be read
    later: tuple[str, ...] = ()  # GRUB drop-ins that are read after ours
    recorded: tuple[str, ...] = ()  # words that were ever ours
    attempt: tuple[str, ...] = ()  # boot id and reasons of a reboot whose effect nobody has seen yet
    unknown: tuple[str, ...] | None = ()  # words the kernel did not know; None: its first messages are gone
    modules: tuple[tuple[str, int], ...] = ()  # loaded, with the number of their users
    options: tuple[tuple[str, str, str], ...] = ()  # module, option, value of loaded modules
    hidden_options: frozenset[tuple[str, str]] = frozenset()  # module, option: the kernel shows its value nowhere
    unknown_options: frozenset[tuple[str, str]] = frozenset()  # module, option: the module has no such parameter
    filesystems: frozenset[str] = frozenset()  # mounted, or in fstab
    kernels: tuple[str, ...] = ()  # installed
    initrds: tuple[Initrd, ...] = ()
    packages: tuple[str, ...] = ()  # for which the distribution wants a reboot
    serving: tuple[str, ...] = ()  # engines that the gateway sends users to

    @property
    def menu(self) -> tuple[Entry, ...]:
        """The entries that a node serves from."""
        return tuple(entry for entry in self.entries if not entry.is_recovery)


# One line per observation, "name base64 .", so that any content survives and a cut is seen. Every line is there on every node,
# empty where there is nothing to say, and END is the last: what is missing was lost on the way.
_SCRIPT = rf"""
put() {{ text=$(base64 -w0) || exit 1; printf '%s %s .\n' "$1" "$text"; }}
# keep NAME FILE: empty where there is no such file; one that cannot be read ends it all.
keep() {{ if [ -e "$2" ]; then put "$1" <"$2" || exit 1; else put "$1" </dev/null; fi; }}
put id </proc/sys/kernel/random/boot_id
uname -r | put kernel
ls /run/gpuwright/ready 2>/dev/null | put serving
keep attempt {STATE}/reboot
container=$(systemd-detect-virt --container)
echo "$container" | put container
if [ "$container" != none ]; then echo END; exit 0; fi
put line </proc/cmdline
awk '{{print $1, $3}}' /proc/modules | put modules
awk '!/^#/ {{print $3}}' /proc/mounts /etc/fstab 2>/dev/null | sort -u | put filesystems
for image in /boot/vmlinuz-*; do [ ! -e "$image" ] || echo "${{image#/boot/vmlinuz-}}"; done | put kernels
for image in /boot/initrd.img-*; do
  [ ! -d "/lib/modules/${{image#/boot/initrd.img-}}" ] || stat -L -c '%n %s.%Y.%i' "$image"
done | put initrds
keep initramfs {STATE}/initramfs
keep recorded {WORDS}
{{ [ ! -e /run/reboot-required ] || sort -u /run/reboot-required.pkgs 2>/dev/null; }} | put packages

# The kernel's first words; the ring buffer forgets them in time.
said() {{ grep -E 'ommand line: |Unknown kernel command line parameters|PCI: Unknown option' | head -n 20; }}
first=$(dmesg 2>/dev/null | said)
case $first in *'ommand line: '*) ;; *) first=$(journalctl --quiet --dmesg --boot --output=cat 2>/dev/null | said) ;; esac
printf '%s\n' "$first" | put said

keep nvidia /proc/driver/nvidia/params
sed -n 's/^options \([^ ]*\) \([^=]*\)=.*/\1 \2/p' {MODPROBE} 2>/dev/null | while read -r module option; do
  [ -d "/sys/module/$module" ] || continue
  # A parameter with permission 0 is in no file there; the module's own list tells it from one that does not exist.
  if value=$(cat "/sys/module/$module/parameters/$option" 2>/dev/null); then
    echo "is $module $option $value"
  elif known=$(modinfo "$module" 2>/dev/null) && ! printf '%s\n' "$known" | grep -q "^parm: *$option:"; then
    echo "unknown $module $option"
  else
    echo "hidden $module $option"
  fi
done | put options

info=$(tr -d '\0' </sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f 2>/dev/null)
case $info in
  *systemd-boot*) loader=systemd-boot ;;
  *) if [ -e /boot/grub/grub.cfg ] && command -v grub-mkconfig >/dev/null; then loader=grub; else loader=none; fi ;;
esac
echo "$loader" | put loader
if [ "$loader" = grub ]; then
  # How deep an entry lies tells which submenu it is in.
  awk '
    /^### BEGIN/ {{ours = $3 ~ /10_linux/}} /^### END/ {{ours = 0}} /^[ \t]*#/ {{next}}
    /^[ \t]*(menuentry|submenu) / {{printf "E %d %s\n", depth, $0}}
    ours && /^[ \t]*linux(efi)?[ \t]/ {{print "L " $0}}
    /^[ \t]*set default=/ {{print "D " $0}}
    {{depth += gsub(/[{{]/, "") - gsub(/[}}]/, "")}}
  ' /boot/grub/grub.cfg | put menu
  grub-editenv list 2>/dev/null | put environment
  # As grub-mkconfig reads them, without ours.
  sourced=no
  site=$(
    exec 3>&1 >&2
    set -e
    [ ! -e /etc/default/grub ] || . /etc/default/grub
    for file in /etc/default/grub.d/*.cfg; do
      if [ -e "$file" ] && [ "$file" != {GRUB_DROP_IN} ]; then . "$file"; fi
    done
    printf '%s %s' "${{GRUB_CMDLINE_LINUX:-}}" "${{GRUB_CMDLINE_LINUX_DEFAULT:-}}" >&3
  ) 2>/dev/null && sourced=yes
  echo "$sourced" | put sourced
  printf '%s' "$site" | put site
  seen=
  for file in /etc/default/grub.d/*.cfg; do
    [ -z "$seen" ] || echo "$file"
    [ "$file" != {GRUB_DROP_IN} ] || seen=yes
  done | put later
elif [ "$loader" = systemd-boot ]; then
  boot=$(bootctl --print-boot-path 2>/dev/null) || boot=/boot
  for file in "$boot"/loader/entries/*.conf; do
    [ ! -e "$file" ] || sed -n "s|^version[ \t]*|V |p; s|^options[ \t]*|O |p; 1s|^|F ${{file##*/}}\n|p" "$file" | grep '^[FVO] '
  done | put menu
  site=/usr/lib/kernel/cmdline
  [ ! -e /etc/kernel/cmdline ] || site=/etc/kernel/cmdline
  keep site "$site"
fi
echo END
"""


_EVERYWHERE = frozenset(["id", "kernel", "serving", "attempt", "container"])
_ON_A_MACHINE = frozenset(
    [
        *(
            "line",
            "modules",
            "filesystems",
            "kernels",
            "initrds",
            "initramfs",
            "recorded",
            "packages",
            "said",
            "nvidia",
        ),
        *("options", "loader"),
    ]
)
_OF_A_LOADER = {
    "grub": frozenset(["menu", "environment", "sourced", "site", "later"]),
    "systemd-boot": frozenset(["menu", "site"]),
    "none": frozenset[str](),
}


def _said(text: str) -> dict[str, str]:
    """The script's lines by name. Raises ValueError where one is missing, damaged or not the script's."""
    lines = text.splitlines()
    if not lines or lines.pop() != "END":
        raise ValueError("the answer is cut off")
    said: dict[str, str] = {}
    for line in lines:
        parts = re.fullmatch(r"(\w+) ([A-Za-z0-9+/=]*) \.", line, re.ASCII)
        if not parts or parts[1] in said:
            raise ValueError(f"{line[:40]!r} is no line of this answer")
        said[parts[1]] = base64.b64decode(parts[2], validate=True).decode(errors="replace")
    expected = _EVERYWHERE
    if said["container"].strip() == "none":
        expected = expected | _ON_A_MACHINE | _OF_A_LOADER[said["loader"].strip()]
    if wrong := expected ^ said.keys():
        raise ValueError(f"lines are missing or too many: {', '.join(sorted(wrong))}")
    return said


def _parse(text: str) -> Boot:
    said = _said(text)
    if not said["container"].strip():
        raise ValueError("systemd-detect-virt does not say whether this is a container")
    booted = Boot(
        container=said["container"].strip() != "none",
        boot_id=said["id"].strip(),
        kernel=said["kernel"].strip(),
        attempt=tuple(said["attempt"].splitlines()),
        serving=tuple(said["serving"].split()),
    )
    if booted.container:
        return booted
    loader = said["loader"].strip()
    menu = said.get("menu", "")
    places = _grub_menu(menu) if loader == "grub" else ()
    entries = tuple(place.entry for place in places if place.entry) if loader == "grub" else _loader_entries(menu)
    known = dict(line.split(" ", 1) for line in said["initramfs"].splitlines())
    options = [_option(line) for line in said["options"].splitlines()]
    nvidia = re.findall(r"^(\w+): (.*)$", said["nvidia"], re.MULTILINE)
    return replace(
        booted,
        line=parse_line(said["line"]),
        loader=loader,
        entries=entries,
        default=_default(menu, said["environment"], places) if loader == "grub" else "",
        site=_site(said),
        later=tuple(said.get("later", "").splitlines()),
        recorded=tuple(said["recorded"].splitlines()),
        unknown=_unknown(said["said"]),
        modules=tuple((name, int(users)) for name, users in (line.split() for line in said["modules"].splitlines())),
        options=(
            *((module, option, value) for kind, module, option, value in options if kind == "is"),
            # sysfs reads empty for these even when they are in force (gpu-node.md 2.3)
            *(("nvidia", f"NVreg_{name}", value.strip('"')) for name, value in nvidia),
        ),
        hidden_options=frozenset((module, option) for kind, module, option, _ in options if kind == "hidden"),
        unknown_options=frozenset((module, option) for kind, module, option, _ in options if kind == "unknown"),
        filesystems=frozenset(said["filesystems"].split()),
        kernels=tuple(said["kernels"].split()),
        initrds=tuple(
            Initrd(path.partition("initrd.img-")[2], identity, known.get(f"{path}:{identity}"))
            for path, identity in (line.rsplit(" ", 1) for line in said["initrds"].splitlines())
        ),
        packages=tuple(said["packages"].split()),
    )


def _site(said: dict[str, str]) -> tuple[Given, ...] | None:
    if "sourced" not in said:
        return parse_line(said.get("site", ""))
    return grub_words(said["site"]) if said["sourced"].strip() == "yes" else None


def _option(line: str) -> tuple[str, str, str, str]:
    kind, module, option, *value = line.split(" ", 3)
    if kind not in ("is", "hidden", "unknown"):
        raise ValueError(f"{line!r} is no option of a module")
    return kind, module, option, value[0] if value else ""


@dataclass(frozen=True)
class _Place:
    """One entry or submenu of GRUB's menu, in how many submenus it lies, and what kernel of this system it starts."""

    depth: int
    title: str
    entry: Entry | None = None


def _grub_menu(menu: str) -> tuple[_Place, ...]:
    places: list[_Place] = []
    for line in menu.splitlines():
        if parts := re.fullmatch(r"E (\d+)\s+(.*)", line):
            places.append(_Place(int(parts[1]), parts[2].strip()))
        elif parts := re.match(r"L\s*linux(?:efi)?\s+(\S+)(.*)", line):
            title = places[-1].title
            entry = Entry(title, parts[1].rpartition("vmlinuz-")[2], grub_words(parts[2]))
            places[-1] = replace(places[-1], entry=entry)
    return tuple(places)


def _joined(word: Given) -> str:
    return word[0] if word[1] is None else f"{word[0]}={word[1]}"


def _loader_entries(menu: str) -> tuple[Entry, ...]:
    entries, name, version = [], "", ""
    for line in menu.splitlines():
        tag, _, rest = line.partition(" ")
        if tag == "F":
            name, version = rest, ""
        elif tag == "V":
            version = rest
        else:
            entries.append(Entry(name, version, parse_line(rest)))
    return tuple(entries)


def _default(menu: str, environment: str, places: tuple[_Place, ...]) -> str:
    """The kernel that GRUB starts next; empty where it cannot be told (another system, no such entry)."""
    saved = dict(line.split("=", 1) for line in environment.splitlines() if "=" in line)
    chosen = [
        value for value in re.findall(r'^D \s*set default="(.*)"', menu, re.MULTILINE) if "next_entry" not in value
    ]
    wanted = saved.get("next_entry") or (chosen[-1] if chosen else "")
    if "saved_entry" in wanted:
        wanted = saved.get("saved_entry") or "0"
    return _started(places, wanted or "0")


def _started(places: tuple[_Place, ...], wanted: str) -> str:
    """What ``1>2`` starts: the submenu, then what is in it, each by position, id or title (GRUB manual, "default")."""
    part, _, rest = wanted.partition(">")
    level = [index for index, place in enumerate(places) if place.depth == places[0].depth]
    if part.isdecimal():
        chosen = level[int(part) : int(part) + 1]
    else:
        chosen = [index for index in level if f"'{part}'" in places[index].title][:1]
    if not chosen:
        return ""
    place, below = places[chosen[0]], places[chosen[0] + 1 :]
    if rest:
        return _started(tuple(takewhile(lambda other: other.depth > place.depth, below)), rest)
    return place.entry.kernel if place.entry else ""


def _unknown(said: str) -> tuple[str, ...] | None:
    """Words the kernel named; None where that cannot be told: its sentence is gone, or was cut (printk ends a line at about 1000)."""
    if "ommand line: " not in said:
        return None
    words, options = [], []
    for line in said.splitlines():
        if 'Unknown kernel command line parameters "' in line:
            quoted = re.search(r'parameters "(.*)", will be passed to user space\.', line)
            if not quoted:
                return None
            words += [
                _joined(word) for word in parse_line(quoted[1]) if word[0] != "BOOT_IMAGE"
            ]  # the boot loader's own
        elif "PCI: Unknown option" in line:
            option = re.search(r"PCI: Unknown option `(.*)'", line)
            if not option:
                return None
            options.append(f"pci={option[1]}")
    return (*words, *options)


BOOT = register(Section("boot", _SCRIPT, _parse))


# --- what only a reboot brings ----------------------------------------------------------------------------------------


def pending(seen: Snapshot, wanted: Wishes) -> tuple[str, ...]:
    """Why this node needs a reboot to be what its node file says; empty when it needs none.

    A container has its machine's kernel: there only changes count. Raises CouldNotLook.
    """
    boot = seen.read(BOOT)
    changes = changes_pending(seen, wanted)
    if boot.container:
        return changes
    return (*words_pending(boot, wanted), *drivers_pending(boot, wanted), *options_pending(seen, wanted), *changes)


def changes_pending(seen: Snapshot, wanted: Wishes) -> tuple[str, ...]:
    """What waits to be exchanged between a drain and a reboot. Raises CouldNotLook."""
    return tuple(reason for change in wanted.changes for reason in change.pending(seen))


def words_pending(boot: Boot, wanted: Wishes) -> tuple[str, ...]:
    """Words that do not run and should, and words of ours that run and should not any more."""
    reasons = []
    for word in wanted.words:
        if not holds(boot.line, word):
            others = [value for key, value in boot.line if same_key(key, word.key) and word.key not in REPEATABLE]
            instead = (
                f"the kernel runs with {_joined((word.key, others[-1]))} instead of {word.text}"
                if others
                else f"the kernel runs without {word.text}"
            )
            reasons.append(f"{instead} ({word.role}: {word.reason})")
    gone = retired(boot, wanted)
    return (*reasons, *(f"the kernel runs with {text}, which nothing asks for any more" for text in gone))


def drivers_pending(boot: Boot, wanted: Wishes) -> tuple[str, ...]:
    """Blocked drivers that are loaded."""
    loaded = dict(boot.modules)
    return tuple(
        f"module {block.module} is loaded and must not be ({block.role}: {block.reason})"
        for block in wanted.blocked
        if block.module in loaded and not block.spared_when_used
    )


def options_pending(seen: Snapshot, wanted: Wishes) -> tuple[str, ...]:
    """Loaded modules that run with another option. Raises CouldNotLook.

    Not where no reboot would show or change it: the kernel hides the parameter, or the module has none of that name.
    """
    boot = seen.read(BOOT)
    loaded = dict(boot.modules)
    silent = boot.hidden_options | boot.unknown_options
    values = {(module, option): value for module, option, value in boot.options}
    reasons: list[str] = []
    for option in wanted.options:
        if option.waits is not None:
            reasons += option.waits(seen)
            continue
        value = values.get((option.module, option.name))
        if value is None and (option.module, option.name) in silent:
            continue
        if option.module in loaded and (value is None or not _same_value(value, option.value)):
            runs = "without" if value is None else f"with {option.name}={value} instead of"
            reasons.append(f"module {option.module} runs {runs} {option.text} ({option.role}: {option.reason})")
    return tuple(reasons)


def options_hidden(boot: Boot, wanted: Wishes) -> tuple[ModuleOption, ...]:
    """Options of which nobody can tell whether they are in force: the kernel shows their values nowhere."""
    return _without_a_value(boot, wanted, boot.hidden_options)


def options_unknown(seen: Snapshot, wanted: Wishes) -> tuple[str, ...]:
    """Options that a loaded module does not have; none before a change that brings another module. Raises CouldNotLook."""
    boot = seen.read(BOOT)
    found = _without_a_value(boot, wanted, boot.unknown_options)
    if not found or changes_pending(seen, wanted):
        return ()
    return tuple(
        f"module {option.module} has no parameter {option.name}, so {option.text} has no effect ({option.role}: {option.reason}); "
        f"put the name right: modinfo -p {option.module} lists those it has"
        for option in found
    )


def _without_a_value(boot: Boot, wanted: Wishes, which: frozenset[tuple[str, str]]) -> tuple[ModuleOption, ...]:
    loaded = dict(boot.modules)
    told = {(module, name) for module, name, _ in boot.options}
    return tuple(
        option
        for option in wanted.options
        if option.waits is None and option.module in loaded and (option.module, option.name) in which - told
    )


def retired(boot: Boot, wanted: Wishes) -> tuple[str, ...]:
    """Words in force that once were ours, that no role asks for now and that the site does not ask for either."""
    asked = {word.text for word in wanted.words}
    site = {Word(key, value, "", "").text for key, value in boot.site or ()}
    running = {Word(key, value, "", "").text for key, value in boot.line}
    return tuple(text for text in boot.recorded if text in running and text not in asked | site)


def _same_value(one: str, other: str) -> bool:
    """sysfs shows a boolean option as Y or N, whatever was written (kernel/params.c)."""
    boolean = {"Y": "1", "y": "1", "N": "0", "n": "0"}
    return boolean.get(one, one) == boolean.get(other, other)


def noticed(seen: Snapshot) -> tuple[str, ...]:
    """Why somebody may want to reboot this node though its node file asks for nothing; no engine waits for these."""
    found = []
    boot = seen.read(BOOT)
    if boot.default and boot.default != boot.kernel:
        found.append(f"kernel {boot.default} starts next, {boot.kernel} runs")
    if seen.read(SYSTEM).reboot_required:
        found.append(
            ": ".join(
                [
                    "the distribution asks for it (/run/reboot-required)",
                    *([", ".join(boot.packages)] if boot.packages else []),
                ]
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class Barrier:
    """What engines wait for: everything that roles ask of the kernel and that only a reboot brings."""

    wanted: Wishes
    reboots: bool
    """Whether a run may reboot the node (kernel.reboot)."""

    def holds_back(self, seen: Snapshot, planning: bool) -> tuple[str, ...]:
        """Why nothing may be started or replaced now; empty when nothing speaks against it.

        + planning: asked before the run begins; one that reboots has nothing to wait for when the engines' turn comes
        """
        if planning and self.reboots:
            return ()
        try:
            return pending(seen, self.wanted)
        except CouldNotLook as error:
            return (f"whether it needs a reboot cannot be seen: {error}",)
