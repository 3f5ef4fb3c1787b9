"""Boot parameters, kernel settings and modules: what roles ask for, and what only a reboot can bring.

Role `kernel` is the one owner of all of it (DESIGN section 1); every other role only says what it needs and why.
"""

from gpuwright.boot.asked import (
    REPEATABLE,
    BlockedModule,
    ModuleOption,
    Sysctl,
    Wish,
    Wishes,
    Word,
    clash,
    clashes,
    conflicts,
    in_the_way,
    together,
)
from gpuwright.boot.state import (
    BOOT,
    GRUB_DROP_IN,
    MODPROBE,
    STATE,
    WORDS,
    Barrier,
    Boot,
    Entry,
    Initrd,
    noticed,
    pending,
)
from gpuwright.boot.words import Given, grub_text, grub_words, holds, parse_line, parse_word, same_key

__all__ = [
    "BOOT",
    "GRUB_DROP_IN",
    "MODPROBE",
    "REPEATABLE",
    "STATE",
    "WORDS",
    "Barrier",
    "BlockedModule",
    "Boot",
    "Entry",
    "Given",
    "Initrd",
    "ModuleOption",
    "Sysctl",
    "Wish",
    "Wishes",
    "Word",
    "clash",
    "clashes",
    "conflicts",
    "grub_text",
    "grub_words",
    "holds",
    "in_the_way",
    "noticed",
    "parse_line",
    "parse_word",
    "pending",
    "same_key",
    "together",
]
