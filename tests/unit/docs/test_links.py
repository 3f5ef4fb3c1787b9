"""What README and docs name is there: links, test files, `./run` targets, `gpuwright` commands and their options."""

import re
from pathlib import Path

import click
import pytest

from gpuwright.cli import main

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def code(text: str) -> list[str]:
    """Lines of code blocks, and code spans."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += [line.strip() for line in plain.splitlines() if line.startswith("    ")]
    return lines + re.findall(r"`([^`]+)`", plain)


def wrong_command(words: list[str]) -> str | None:
    """Why ``gpuwright WORDS`` is no command, or None. Stops at the first word that is an argument."""
    command: click.Command = main
    for word in words:
        if not isinstance(command, click.Group) or word == "…":
            break
        found = [command.get_command(click.Context(command), name) for name in re.split(r"[|/]", word.rstrip(",.;:"))]
        if None in found or not found[0]:
            return f"no command {word!r}"
        command = found[0]
    if command.context_settings.get("ignore_unknown_options"):
        return None
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h", "--version"}
    options = {re.sub(r"=.*|[\])]$", "", word.strip("[")) for word in words if word.strip("[").startswith("--")}
    return f"no option {sorted(options - known)}" if options - known else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
            missing.append(f"link {target}")
    for line in code(text):
        line = line.partition("  #")[0].partition(" # ")[0]
        for words in re.findall(r"(?:^|[;&|(] ?|\s)gpuwright ((?:(?![;&]|\$\().)+)", line):
            if reason := wrong_command(words.split()):
                missing.append(f"gpuwright {words}: {reason}")
        missing += [
            f"./run {target}"
            for target in re.findall(r"(?:^|\s)\./run ([a-z]+)", line)
            if not re.search(rf"^  {target}\)$", (REPOSITORY / "run").read_text(), re.MULTILINE)
        ]
        missing += [
            path
            for path in re.findall(r"(?:^|\s)(tests/[\w./*-]+)", line)
            if not list(REPOSITORY.glob(path.rstrip("/").partition("::")[0]))
        ]
    assert missing == []


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("check inventory/prod.py --json", False),
        ("lab up --hosts 3", False),
        ("key list [--json]", False),
        ("deploy inventory/prod.py --diff", False),
        ("chek inventory/prod.py", True),
        ("lab start", True),
        ("check inventory/prod.py --jsn", True),
    ],
)
def test_a_wrong_command_is_seen(words, wrong):
    assert (wrong_command(words.split()) is not None) is wrong
