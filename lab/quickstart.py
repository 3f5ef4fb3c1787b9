"""``./run lab``: a blank throwaway host, the ordinary deploy, and an answered, authenticated chat request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click
import httpx

import lab
from lab import hub, images
from lab.command import LabError
from lab.paths import state
from lab.progress import step

REPOSITORY = Path(__file__).resolve().parent.parent
HOST = "lab-1"
KEY = "lab"


def _prepare(engine: str) -> None:
    images.build(engine)
    hub.serve()


def _key() -> str:
    """The lab's API key: made once, kept next to the lab's ssh key. Deploys only ever see its hash."""
    plain = state() / "api-key"
    if not plain.exists():
        command = [sys.executable, "-m", "gpuwright", "key", "add", KEY, "--file", str(state() / "keys.yaml")]
        made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if made.returncode:
            raise LabError(made.stderr.strip())
        descriptor = os.open(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(made.stdout.strip())
    return plain.read_text().strip()


def _ask(host: lab.Host, key: str | None, path: str, question: dict[str, object] | None = None) -> httpx.Response:
    """A request through the gateway at the host's own address, under the name its certificate is for."""
    headers = {"Host": "gateway.lab"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with httpx.Client(verify=False, timeout=60) as client:
        request = client.build_request(
            "POST" if question else "GET",
            f"https://{host.address}{path}",
            headers=headers,
            json=question,
            extensions={"sni_hostname": "gateway.lab"},
        )
        return client.send(request)


@click.command()
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True, help="What answers.")
@click.option("--release", type=click.Choice(["trixie", "bookworm"]), default="trixie", show_default=True)
def main(engine: str, release: str) -> None:
    """Boot a blank throwaway host, deploy on it, and ask it a question through its gateway."""
    started = time.monotonic()
    try:
        _prepare(engine)
        [host] = lab.up([HOST], release, blank=True)
        key = _key()
    except LabError as error:
        raise click.ClickException(str(error)) from None
    environment = os.environ | {"GPUWRIGHT_LAB_ENGINE": engine}
    command = [sys.executable, "-m", "pyinfra", "-y", "--limit", HOST, "inventory/lab.py", "deploy.py"]
    click.echo(f"lab: pyinfra {' '.join(command[3:])}", err=True)
    if subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode:
        raise click.ClickException(f"the deploy failed; look around with: gpuwright lab ssh {HOST}")
    with step("Asking through the gateway, without a key and with one"):
        refused = _ask(host, None, "/v1/models")
        answer = _ask(
            host,
            key,
            "/v1/chat/completions",
            {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 16},
        )
    if (refused.status_code, answer.status_code) != (401, 200):
        raise click.ClickException(
            f"expected 401 without a key and 200 with one, got {refused.status_code} and {answer.status_code}: {answer.text[:200]}"
        )
    text = answer.json()["choices"][0]["message"]["content"]
    what = {
        "sim": "a SIMULATED engine (no model)",
        "vllm": "real vLLM on the CPU, with a tiny model whose weights were written by hand",
    }[engine]
    click.echo(f"""
Without a key: 401. With a key: 200, answered by {what}:
  {str(text).strip()[:160]!r}
{time.monotonic() - started:.0f} seconds in all.

  address   https://{host.address} (name gateway.lab, certificate of the host's own authority)
  key       {state() / "api-key"}
  ask       curl -k --resolve gateway.lab:443:{host.address} https://gateway.lab/v1/models \\
              -H "Authorization: Bearer $(cat {state() / "api-key"})"
  look      gpuwright lab ssh {HOST}
  again     pyinfra inventory/lab.py deploy.py
  audit     pytest tests/audit --inventory inventory/lab.py
  destroy   gpuwright lab down
""")


if __name__ == "__main__":
    main()
