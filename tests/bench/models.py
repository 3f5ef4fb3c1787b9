"""The download job against plain curl on the same files, from the hub stand-in on loopback; ratio and memory.

    python tests/bench/models.py [--size MiB] [--pace MiB/s]

Both fetch with four connections to the same file system and end with everything on disk (`sync`). ``--pace`` makes the
hub share that rate between all connections, as a line would; without it the processors are what limits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.hub import weights
from lab.hub.server import Models, Server, State
from tests.unit.models.loopback import REPO, Hub, Job

MIB = 1024**2


def plain(job: Job) -> float:
    """Seconds that four plain curls take for all files (xargs hands them out)."""
    target = job.tmp / "plain"
    target.mkdir()
    base = f"{job.hub.url}/{REPO}/resolve/{job.settings['commit']}"
    files = sorted((f for f in (job.hub.root / REPO).rglob("*.safetensors")), key=lambda f: -f.stat().st_size)
    lines = "".join(f"{base}/{f.name}\n" for f in files)
    began = time.monotonic()
    subprocess.run(
        ["xargs", "-P", "4", "-n", "1", "curl", "-sSL", "--remote-name", "--output-dir", str(target)],
        input=lines,
        text=True,
        check=True,
    )
    os.sync()
    return time.monotonic() - began


def memory(leader: int) -> int:
    """Bytes that the processes of a group have for themselves (proportional set size)."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == leader:
                for line in (process / "smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        except (OSError, ValueError):
            continue
    return total


def fetched(job: Job) -> tuple[float, int]:
    """Seconds and peak memory of the job."""
    began = time.monotonic()
    process = job.start()
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory(process.pid))
        time.sleep(0.25)
    took = time.monotonic() - began
    assert process.returncode == 0, process.stdout and process.stdout.read()
    return took, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="MiB of weights")
    parser.add_argument("--pace", type=int, help="MiB/s of all connections together")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the file system to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        root = Path(scratch) / "hub"
        weights.make(root, REPO, size=options.size * MIB, shards=max(8, options.size // 128))
        server = Server(("127.0.0.1", 0), State(Models(root), pace=options.pace * MIB if options.pace else None))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub = Hub(server, root)
        hub.commit()  # hashed once, before anything is timed
        ratios = []
        for number in range(options.runs):
            times = {}
            for kind in ("plain", "job") if number % 2 else ("job", "plain"):
                with tempfile.TemporaryDirectory(dir=scratch) as place:
                    job = Job(Path(place), hub, {"stall_timeout": 60, "report_every": 15})
                    if kind == "plain":
                        times[kind] = plain(job)
                    else:
                        times[kind], peak = fetched(job)
            ratios.append(times["plain"] / times["job"])
            rate = {kind: options.size / seconds for kind, seconds in times.items()}
            print(
                f"plain curl {times['plain']:.1f} s ({rate['plain']:.0f} MiB/s), job with verification {times['job']:.1f} s "
                f"({rate['job']:.0f} MiB/s), ratio {ratios[-1]:.3f}, memory of the job {peak / MIB:.0f} MiB",
                flush=True,
            )
        print(f"median ratio {statistics.median(ratios):.3f}")
        server.stop()


if __name__ == "__main__":
    main()
