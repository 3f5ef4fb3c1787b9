# Owned by gpuwright, role pcie. Changes here are overwritten.
"""Do the GPUs of one engine write each other's memory with the right bytes, and do their all-reduces end?

It runs inside the pinned engine image, whose torch and NCCL are the ones that serve later, and needs nothing else. Every
ordered pair of GPUs gets copies of several sizes and patterns, compared word for word on the destination; then bandwidth;
then all-reduces with checked sums, one process per GPU, for every group size. Drivers report peer access as OK on hosts
that hang or silently return other bytes, so nothing but the bytes counts (gpu-node.md 0.4, 2.5).

Everything that touches a GPU is a process of its own with a bound: a hang is a finding, not a hang of the probe.
Standard output is one JSON document. Exit status 0: judged, good or bad; 69: not judged, the document says why.
NVLink multicast stays off throughout: what a test leaves behind there can outlive it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SCHEMA = 1
CANNOT_JUDGE = 69
KIB, MIB = 1024, 1024**2

# No multicast, no network: the container has none, and NCCL meets its peers over loopback.
QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


class CannotJudge(Exception):
    """Nothing can be said about these GPUs; the message is the one sentence why."""


def say(text: str) -> None:
    """Progress, for the journal."""
    print(text, file=sys.stderr, flush=True)


# --- bytes: what is sent, and what is made of what arrived ------------------------------------------------------------

# "address": no two words alike, so a shift shows; "zeros" over other content, so a lost write shows even there.
PATTERNS = ("address", "ones", "zeros", "alternating")
# Around every destination; nothing may be written there.
GUARD_WORDS = 1024


def words(torch: Any, pattern: str, count: int, seed: int, device: Any) -> Any:
    """`count` 32-bit words of a pattern, made on `device` itself: what is expected never travels."""
    if pattern == "ones":
        return torch.full((count,), -1, dtype=torch.int32, device=device)
    if pattern == "zeros":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.arange(count, dtype=torch.int32, device=device)
    if pattern == "alternating":
        return torch.where(index % 2 == 0, 0x55555555, -0x55555556).to(torch.int32)
    # An odd factor is a bijection on 32-bit words.
    return (index * -1640531535) ^ seed


def compare(torch: Any, expected: Any, got: Any, before: Any) -> dict[str, Any] | None:
    """None when every byte is right, else how much is wrong, from where, and what it looks like.

    `before` is what the destination held before the copy.
    """
    if torch.equal(expected, got):
        return None
    wrong = expected != got
    places = wrong.nonzero().flatten()
    first, middle = int(places[0]), int(places[len(places) // 2])
    wrong_bytes = int((expected.view(torch.uint8) != got.view(torch.uint8)).sum())
    values = got[wrong]
    looks = "other bytes"
    if bool((values == before[wrong]).all()):
        looks = "stale: what was there before"
    elif bool((values == 0).all()):
        looks = "zeros"
    else:
        for place in (expected == got[middle]).nonzero().flatten()[:8].tolist():
            offset = place - middle
            source = expected[max(offset, 0) : len(expected) + min(offset, 0)]
            moved = got[max(-offset, 0) : len(got) - max(offset, 0)]
            if offset and torch.equal(source, moved):
                looks = f"shifted by {-offset * 4} bytes"
                break
    return {"wrong_bytes": wrong_bytes, "bytes": len(expected) * 4, "first_wrong": first * 4, "looks": looks}


def copy_faults(
    torch: Any, sizes: list[int], source: Any, destination: Any, copy: Callable[[Any, Any], None]
) -> Iterator[dict[str, Any]]:
    """Copies of every size and pattern from one device to another; yields what arrived wrong.

    `copy(destination tensor, source tensor)` returns when the bytes must be there.
    """
    seed = 1
    for size in sizes:
        count = size // 4
        inside = slice(GUARD_WORDS, GUARD_WORDS + count)
        for pattern in PATTERNS:
            seed = (seed * 1103515245 + 12345) % 2**31
            before = words(torch, "address", count + 2 * GUARD_WORDS, ~seed, destination)
            target = before.clone()
            expected = words(torch, pattern, count, seed, destination)
            copy(target[inside], words(torch, pattern, count, seed, source))
            fault = compare(torch, expected, target[inside], before[inside])
            if fault:
                yield {"size": size, "pattern": pattern, **fault}
            target[inside] = before[inside]
            if not torch.equal(target, before):
                yield {"size": size, "pattern": pattern, "looks": "written outside of the destination"}


# --- processes that touch GPUs ----------------------------------------------------------------------------------------


def report(**values: Any) -> None:
    """One line of a worker for the probe."""
    print(json.dumps(values), flush=True)


def one_line(error: object) -> str:
    """An error as one short line."""
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A worker's own failures become its report."""
    try:
        yield
    except ImportError as error:
        report(cannot=f"the image has no usable torch ({one_line(error)}); the probe needs the engine's own")
    except Exception as error:
        if "out of memory" in str(error).lower():
            report(cannot=f"a GPU is out of memory ({one_line(error)}); the probe needs idle GPUs")
        else:
            report(failed=f"{type(error).__name__}: {one_line(error)}")


def copies_worker(options: argparse.Namespace) -> None:
    """Reports what there is, then each ordered pair's faults, then bandwidth."""
    import torch

    if not torch.cuda.is_available():
        report(
            cannot="torch finds no usable GPU in this container; look at the driver and at CDI (nvidia-ctk cdi list)"
        )
        return
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    report(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(str(part) for part in torch.cuda.nccl.version()),
        gpus=[
            {"index": index, "uuid": f"GPU-{uuid}" if (uuid := getattr(p, "uuid", None)) else None, "name": p.name}
            for index, p in enumerate(properties)
        ],
    )
    if count < 2 or (options.gpus and count != options.gpus):
        return

    def copy(target: Any, sent: Any) -> None:
        # The source may still be written on its own stream; the destination is compared on its own.
        torch.cuda.synchronize(sent.device)
        torch.cuda.synchronize(target.device)
        target.copy_(sent, non_blocking=True)
        torch.cuda.synchronize(sent.device)
        torch.cuda.synchronize(target.device)

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    for a, b in pairs:
        report(stage=f"copies from GPU {a} to GPU {b}")
        access = torch.cuda.can_device_access_peer(b, a)
        faults = list(copy_faults(torch, options.sizes, f"cuda:{a}", f"cuda:{b}", copy))
        report(pair={"from": a, "to": b, "peer_access": access, "faults": faults})
        torch.cuda.empty_cache()

    for a, b in pairs:
        report(stage=f"bandwidth from GPU {a} to GPU {b}")
        entry: dict[str, Any] = {"from": a, "to": b, "gb_per_s": bandwidth(torch, options.sizes[-1], [(a, b)])}
        if a < b:
            entry["both_ways_gb_per_s"] = bandwidth(torch, options.sizes[-1], [(a, b), (b, a)])
        report(bandwidth=entry)
    report(done=True)


def bandwidth(torch: Any, size: int, directions: list[tuple[int, int]], rounds: int = 16) -> float:
    """10^9 bytes per second of copies in all `directions` at once. Raises ValueError when the bytes are wrong then."""
    sent = {a: words(torch, "address", size // 4, a, f"cuda:{a}") for a, _ in directions}
    arrived = {b: torch.zeros(size // 4, dtype=torch.int32, device=f"cuda:{b}") for _, b in directions}
    # A copy occupies a stream of both GPUs; two directions on the same ones would wait for each other.
    streams = {pair: [torch.cuda.Stream(device) for device in pair] for pair in directions}

    def everywhere(times: int) -> float:
        for i in arrived | sent:
            torch.cuda.synchronize(i)
        began = time.perf_counter()
        for _ in range(times):
            for (a, b), (ours, theirs) in streams.items():
                with torch.cuda.stream(ours), torch.cuda.stream(theirs):
                    arrived[b].copy_(sent[a], non_blocking=True)
        for i in arrived | sent:
            torch.cuda.synchronize(i)
        return time.perf_counter() - began

    everywhere(1)
    seconds = everywhere(rounds)
    for a, b in directions:
        if not torch.equal(arrived[b], words(torch, "address", size // 4, a, f"cuda:{b}")):
            raise ValueError(
                f"wrong bytes from GPU {a} to GPU {b} in {rounds} copies on end{', both ways' if len(directions) > 1 else ''}"
            )
    return round(size * rounds * len(directions) / seconds / 1e9, 1)


# 512 KiB and more is where NCCL 2.26.2 faults on RTX PRO 6000 (nccl#2418); the small ones take NCCL's other protocols.
REDUCED_SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 8 * MIB, 64 * MIB)
REDUCED_TURNS = 8


def rank_worker(options: argparse.Namespace) -> None:
    """One rank of an all-reduce; reports whether every sum was right, and how fast the largest was."""
    import torch
    import torch.distributed

    torch.cuda.set_device(options.device)
    torch.ones(1, device="cuda")
    report(ready=True)
    report(stage="meeting the other ranks")
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{options.meet}", rank=options.rank, world_size=options.ranks
    )
    faults, speed = [], 0.0
    for kind in ("float32", "bfloat16"):
        dtype = getattr(torch, kind)
        for size in REDUCED_SIZES:
            report(stage=f"all-reduce of {size // KIB} KiB of {kind}")
            index = torch.arange(size // dtype.itemsize, device="cuda")
            for turn in range(REDUCED_TURNS):
                # Small whole numbers: their sums are exact in bfloat16 too; another one each turn, so stale data shows.
                parts = [((index + turn) % 7 + other * 3) % 15 for other in range(options.ranks)]
                data = parts[options.rank].to(dtype)
                expected = sum(parts[1:], parts[0]).to(dtype)
                torch.cuda.synchronize()
                began = time.perf_counter()
                torch.distributed.all_reduce(data)
                torch.cuda.synchronize()
                speed = size / (time.perf_counter() - began) / 1e9
                wrong = int((data != expected).sum())
                if wrong:
                    faults.append({"size": size, "type": kind, "turn": turn, "wrong": wrong, "of": len(data)})
    report(outcome="wrong" if faults else "right", faults=faults[:20], gb_per_s=round(speed, 1))
    # A rank that leaves early takes its buffers from those that still read them.
    sys.stdin.read()


WORKERS: dict[str, Callable[[argparse.Namespace], None]] = {"copies": copies_worker, "rank": rank_worker}


class Worker:
    """A process of this file. What it reports arrives as dictionaries; None is its end."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env={**os.environ, **QUIET, **(environment or {})},
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stage = "starting"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                if isinstance(entry := json.loads(line), dict):
                    self.lines.put(entry)
        self.lines.put(None)

    def next(self, until: float) -> dict[str, Any] | None:
        """The next report, stages noted on the way; None at the worker's end. Raises TimeoutError at `until`."""
        while True:
            try:
                entry = self.lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(self.stage) from None
            if entry is None or "stage" not in entry:
                return entry
            self.stage = entry["stage"]

    def ended(self) -> str:
        """How a worker ended that should not have. Raises CannotJudge when somebody killed it: that says nothing of P2P."""
        try:
            status = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "it closed its output and goes on"
        self.said.seek(0)
        last = one_line(self.said.read()[-300:])
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            raise CannotJudge(f"a process of the probe was killed (signal {-status}): out of memory, or by hand")
        return f"{'signal' if status < 0 else 'status'} {abs(status)}{', ' + last if last else ''}"

    def kill(self) -> None:
        """Ends it. A process that a driver holds cannot be killed; it is left behind, the container's end takes it."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)


# --- the probe --------------------------------------------------------------------------------------------------------


def rounds_of_pairs(count: int) -> list[list[list[int]]]:
    """Every pair of `count` GPUs once, in rounds of pairs that share no GPU (circle method)."""
    ring: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        matched = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        rounds.append([sorted([a, b]) for a, b in matched if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def rounds_of(size: int, count: int) -> list[list[list[int]]]:
    """The groups of one size to try: every pair, or neighbours for a larger size."""
    if size == 2:
        return rounds_of_pairs(count)
    return [[list(range(start, start + size)) for start in range(0, count - size + 1, size)]]


def all_reduce(groups: list[list[int]], options: argparse.Namespace, p2p: bool = True) -> list[dict[str, Any]]:
    """All-reduces of groups of GPUs that share none, at once. Outcomes: right, wrong, hangs, failed. Raises CannotJudge."""
    environment = {} if p2p else dict(pair.split("=", 1) for pair in options.without_p2p)
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            [
                Worker(
                    "--worker=rank",
                    f"--device={gpu}",
                    f"--rank={rank}",
                    f"--ranks={len(gpus)}",
                    f"--meet={directory}/{number}",
                    environment=environment,
                )
                for rank, gpu in enumerate(gpus)
            ]
            for number, gpus in enumerate(groups)
        ]
        everyone = [worker for ranks in workers for worker in ranks]
        try:
            for _, worker, entry in answers(list(enumerate(everyone)), options.start_limit):
                if entry is None:
                    raise CannotJudge(f"a process of the all-reduce did not start: {worker.ended()}")
                if "ready" not in entry:
                    raise CannotJudge(
                        entry.get("cannot") or f"a process of the all-reduce did not start: {entry['failed']}"
                    )
            begun = time.monotonic()
            results = []
            for gpus, ranks in zip(groups, workers, strict=True):
                left = begun + options.hang_limit - time.monotonic()
                result = {"gpus": gpus, "p2p": p2p, **outcome(list(enumerate(ranks)), left, options.hang_limit)}
                results.append(result | {"seconds": round(time.monotonic() - begun, 1)})
        except TimeoutError:
            raise CannotJudge(f"a process of the all-reduce did not start within {options.start_limit} s") from None
        finally:
            for worker in everyone:
                worker.kill()
    return results


def answers(workers: list[tuple[int, Worker]], limit: float) -> Iterator[tuple[int, Worker, dict[str, Any] | None]]:
    """The next report of each of several numbered workers, as they come. Raises TimeoutError after `limit` seconds."""
    until = time.monotonic() + limit
    while workers:
        for number, worker in list(workers):
            try:
                entry = worker.next(time.monotonic() + 0.02)
            except TimeoutError:
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {number}, {worker.stage}") from None
                continue
            workers.remove((number, worker))
            yield number, worker, entry


def outcome(ranks: list[tuple[int, Worker]], limit: float, hang_limit: int) -> dict[str, Any]:
    """How the all-reduces of one group ended; one rank that fails or hangs is the whole group's end."""
    result: dict[str, Any] = {"outcome": "right"}
    try:
        for rank, worker, entry in answers(ranks, limit):
            if entry is None or "failed" in entry:
                detail = worker.ended() if entry is None else entry["failed"]
                return {"outcome": "failed", "detail": f"rank {rank}, {worker.stage}: {detail}"}
            if "cannot" in entry:
                raise CannotJudge(entry["cannot"])
            if entry["outcome"] == "wrong":
                result.update(outcome="wrong", detail=f"rank {rank}, {entry['faults'][0]}", faults=entry["faults"])
            result["gb_per_s"] = entry["gb_per_s"]
    except TimeoutError as stage:
        return {"outcome": "hangs", "detail": f"no end after {hang_limit} s at {stage}"}
    return result


def copies(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Fills in what there is, the pairs and their bandwidth. Raises CannotJudge."""
    worker = Worker("--worker=copies", f"--gpus={options.gpus}", f"--sizes={','.join(map(str, options.sizes))}")
    limit = options.start_limit
    try:
        while True:
            try:
                entry = worker.next(time.monotonic() + limit)
            except TimeoutError as stage:
                if not document["gpus"]:
                    raise CannotJudge(f"torch did not start within {limit} s") from None
                document["hung_at"] = f"{stage}: no end after {limit} s"
                return
            if entry is None:
                ended = worker.ended()
                if not document["gpus"]:
                    raise CannotJudge(f"torch does not start: {ended}")
                document["failed_at"] = f"{worker.stage}: {ended}"
                return
            if "cannot" in entry:
                raise CannotJudge(entry["cannot"])
            if "failed" in entry:
                if not document["gpus"]:
                    raise CannotJudge(f"the GPUs cannot be used: {entry['failed']}")
                document["failed_at"] = f"{worker.stage}: {entry['failed']}"
                return
            if "gpus" in entry:
                document.update(entry)
                found = len(entry["gpus"])
                if options.gpus and found != options.gpus:
                    raise CannotJudge(f"{found} GPUs are visible in the container; expected: {options.gpus}")
                if found < 2:
                    raise CannotJudge(
                        f"{found} GPU is visible; P2P is judged between two or more, so no pair is judged"
                    )
                say(f"copies between {found} GPUs, {len(options.sizes)} sizes, {len(PATTERNS)} patterns")
                limit = options.hang_limit
            elif "pair" in entry:
                document["copies"].append(entry["pair"])
            elif "bandwidth" in entry:
                document["bandwidth"].append(entry["bandwidth"])
            elif "done" in entry:
                return
    finally:
        worker.kill()


def judge(document: dict[str, Any]) -> tuple[str, list[str]]:
    """``good`` or ``bad``, and one sentence per reason."""
    reasons = []
    for pair in document["copies"]:
        for fault in pair["faults"][:1]:
            amount = f"{fault['wrong_bytes']} of {fault['bytes']} bytes" if "wrong_bytes" in fault else "bytes"
            reasons.append(
                f"GPU {pair['from']} to GPU {pair['to']}: {amount} wrong in a copy of {fault['size']} bytes "
                f"(pattern {fault['pattern']}, {fault['looks']})"
            )
    if "hung_at" in document:
        reasons.append(f"hangs in {document['hung_at']}")
    if "failed_at" in document:
        reasons.append(f"failed in {document['failed_at']}")
    for result in document["collectives"]:
        if result["p2p"] and result["outcome"] != "right":
            what = {"wrong": "returned wrong sums", "hangs": "hangs", "failed": "failed"}[result["outcome"]]
            gpus = ", ".join(map(str, result["gpus"]))
            reasons.append(f"all-reduce of {len(result['gpus'])} GPUs ({gpus}) {what}: {result['detail']}")
    return ("bad" if reasons else "good"), reasons


def probe(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Fills in `document`. Raises CannotJudge."""
    copies(options, document)
    count = len(document["gpus"])
    sizes = sorted({2, count} | {size for size in options.groups if 2 <= size <= count})
    for size in sizes:
        for groups in rounds_of(size, count):
            say(f"all-reduce of {' and of '.join(str(gpus) for gpus in groups)}")
            results = all_reduce(groups, options)
            document["collectives"] += results
            if any(result["outcome"] == "hangs" for result in results):
                break  # one is enough, and each costs the whole limit
    say(f"all-reduce of {count} GPUs without P2P")
    document["collectives"] += all_reduce([list(range(count))], options, p2p=False)


def arguments() -> argparse.ArgumentParser:
    """What the probe can be told; `--worker` and what follows it are its own."""
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",") if part]  # noqa: E731
    parser = argparse.ArgumentParser(description="Judge peer-to-peer copies and all-reduces between the visible GPUs.")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs have to be visible")
    parser.add_argument("--groups", type=numbers, default=[], help="sizes of all-reduce groups besides 2 and all GPUs")
    parser.add_argument(
        "--sizes", type=numbers, default=[4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB], help="bytes, a,b,c"
    )
    parser.add_argument("--start-limit", type=int, default=240, help="seconds for torch and CUDA to start")
    parser.add_argument("--hang-limit", type=int, default=60, help="seconds without an end that count as a hang")
    parser.add_argument(
        "--without-p2p", action="append", default=[], metavar="NAME=VALUE", help="environment without P2P"
    )
    for name, kind in (("worker", str), ("device", int), ("rank", int), ("ranks", int), ("meet", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    options = arguments().parse_args()
    if options.worker:
        with reported():
            WORKERS[options.worker](options)
        return 0
    began = time.monotonic()
    document: dict[str, Any] = {"schema": SCHEMA, "gpus": [], "copies": [], "bandwidth": [], "collectives": []}
    document["sizes"] = options.sizes
    try:
        probe(options, document)
        document["verdict"], document["reasons"] = judge(document)
    except CannotJudge as reason:
        document["verdict"], document["reasons"] = "none", [str(reason)]
    document["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(document))
    return CANNOT_JUDGE if document["verdict"] == "none" else 0


if __name__ == "__main__":
    sys.exit(main())
