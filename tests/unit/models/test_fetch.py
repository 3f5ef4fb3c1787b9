"""Every fault of a download ends in a verified model or one clear sentence (issue 2, proof 5)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from lab.hub import weights
from lab.hub.server import Fault, Models, Server, State
from tests.unit.models.loopback import REPO, Hub, Job, wait_until

SHARD = "model-00003-of-00005.safetensors"
SMALL = "config.json"


def last(output: str) -> str:
    return output.strip().splitlines()[-1]


# ------------------------------------------------------------------------------------------------ the good case


def test_fetches_and_verifies_every_file(job: Job, hub: Hub) -> None:
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()
    for entry in job.manifest["files"]:
        content = (job.directory / entry["path"]).read_bytes()
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    assert (job.manifest["repo"], job.manifest["revision"]) == (REPO, hub.commit())
    assert last(output).startswith(f"verified: {REPO} at {hub.commit()}, 12 files, 24.")
    assert job.status["state"] == "verified"
    assert job.status["bytes"] == job.status["bytes_total"] == sum(f["size"] for f in job.manifest["files"])


def test_nothing_is_left_beside_the_model(job: Job, hub: Hub) -> None:
    assert job.run()[0] == 0
    commit = hub.commit()
    beside = {f.name for f in job.directory.parent.iterdir()}
    assert beside == {commit, f"{commit}.manifest.json", f".{commit}.lock"}
    assert {f.name for f in job.run_directory.iterdir()} == {"llm.json"}


def test_a_complete_model_does_not_need_the_hub(job: Job, hub: Hub) -> None:
    assert job.run()[0] == 0
    hub.state.requests.clear()
    status, output = job.run()
    assert (status, hub.state.requests) == (0, [])
    assert last(output).startswith("verified: ")


def test_lists_of_several_pages(job: Job, hub: Hub) -> None:
    hub.state.page = 4
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()
    assert len([r for r in hub.state.requests if "/tree/" in r["path"]]) == 4


def test_over_tls_with_the_labs_authority(tmp_path: Path, hub_root: Path, authority: Path) -> None:
    server = Server(("127.0.0.1", 0), State(Models(hub_root)), certificate=authority / "server.pem")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        job = Job(tmp_path, Hub(server, hub_root), {"ca": authority / "ca.crt"})
        status, output = job.run()
        assert status == 0, output
        job.assert_complete()
    finally:
        server.stop()


def test_a_fifo_or_tmpfs_without_direct_io_is_said(job: Job) -> None:
    # Whatever the file system can do, the result is the same; the sentence tells why file pages grow.
    shm = Path("/dev/shm") / f"gpuwright-test-{os.getpid()}"
    shm.mkdir()
    try:
        job.settings["store"] = shm
        status, output = job.run()
        assert status == 0, output
        job.assert_complete()
    finally:
        shutil.rmtree(shm)


# ------------------------------------------------------------------------------------------------ faults that pass


FAULTS = [
    {"kind": "stall", "path": SHARD, "after": 3 * 1024**2},
    {"kind": "stall", "path": f"{SHARD:.10}1-*", "after": 0},
    {"kind": "stall", "path": SMALL, "after": 5},
    {"kind": "stall", "on": "resolve", "path": SHARD},
    {"kind": "stall", "on": "list"},
    {"kind": "cut", "path": f"{SHARD:.10}2-*", "after": 2 * 1024**2 + 77},
    {"kind": "cut", "path": "*", "after": 1000, "times": 5},
    {"kind": "cut", "on": "list"},
    {"kind": "status", "path": f"{SHARD:.10}4-*", "status": 500},
    {"kind": "status", "path": f"{SHARD:.10}5-*", "status": 403},  # the storage: a signed address that expired
    {"kind": "status", "on": "resolve", "path": "README.md", "status": 503},
    {"kind": "status", "on": "list", "status": 502},
    {"kind": "page", "on": "list"},
]


def test_all_passing_faults_at_once(job: Job, hub: Hub) -> None:
    job.settings["attempts"] = 10
    # Waits double with every try of one thing, so one fault of the list is enough here; proof has each alone.
    hub.state.faults += [Fault(**fault) for fault in FAULTS if fault.get("on") != "list" or fault["kind"] == "page"]
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()
    assert [f for f in hub.state.faults if f.times != 0] == []


@pytest.mark.proof
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_passing_faults_end_in_a_verified_model(job: Job, hub: Hub, fault: dict[str, object]) -> None:
    hub.fault(**fault)
    status, output = job.run()
    assert status == 0, output
    assert "trying again" in output
    job.assert_complete()


def test_a_stall_is_resumed_not_restarted(job: Job, hub: Hub) -> None:
    hub.fault(kind="stall", path=SHARD, after=3 * 1024**2)
    status, output = job.run()
    assert status == 0, output
    assert f"{SHARD}: no bytes for 2 s" in output
    size = (job.directory / SHARD).stat().st_size
    assert hub.data_bytes(SHARD) <= size + 1024**2  # the resume point lies at a whole MiB
    assert [r["range"] for r in hub.state.requests if r["path"].endswith(SHARD) and r["bytes"]][1] == "bytes=3145728-"


@pytest.mark.parametrize("seconds", ["3", "date"])
def test_retry_after_is_honoured(job: Job, hub: Hub, seconds: str) -> None:
    wait = seconds if seconds != "date" else time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 4))
    hub.fault(kind="status", on="resolve", path=SHARD, status=429, retry_after=wait)
    begin = time.monotonic()
    status, output = job.run()
    assert status == 0, output
    assert "asks to wait" in output
    assert time.monotonic() - begin >= 2.9
    job.assert_complete()


@pytest.mark.parametrize("kind", ["wrong", "short", "long"])
@pytest.mark.parametrize("path", [SHARD, SMALL])
def test_wrong_bytes_are_named_and_fetched_again(job: Job, hub: Hub, kind: str, path: str) -> None:
    hub.fault(kind=kind, path=path, after=20)
    status, output = job.run()
    assert status == 0, output
    if kind == "short":
        assert f"{path}: the other side ended after 20 of" in output
    else:
        line = next(line for line in output.splitlines() if line.startswith("wrong bytes: "))
        assert path in line
        assert "expected " in line
        assert "got " in line
    job.assert_complete()


def test_wrong_hash_says_expected_and_got(job: Job, hub: Hub) -> None:
    hub.fault(kind="wrong", path=SHARD, after=1024**2 + 1)
    status, output = job.run()
    assert status == 0, output
    right = (hub.root / REPO / SHARD).read_bytes()
    wrong = bytearray(right)
    wrong[1024**2 + 1] ^= 0xFF
    assert (
        f"wrong bytes: {SHARD}, expected sha256:{hashlib.sha256(right).hexdigest()}, "
        f"got sha256:{hashlib.sha256(wrong).hexdigest()}; fetching it again" in output
    )


@pytest.mark.proof
def test_slow_is_not_a_stall(job: Job, hub: Hub) -> None:
    hub.fault(kind="slow", path=SHARD, rate=1024**2)
    status, output = job.run()
    assert status == 0, output
    assert "trying again" not in output
    assert "no bytes" not in output
    assert " files verified" in output  # progress lines
    assert "/s" in output


# ------------------------------------------------------------------------------------------------ one clear sentence


def test_private_without_token(job: Job, hub: Hub) -> None:
    hub.state.private.add(REPO)
    status, output = job.run()
    assert status == 67
    assert last(output) == (
        f"failed: the hub refuses {REPO}: HTTP 401, token not given; the repository is private or does not exist, "
        "or the token is not valid for it"
    )
    assert job.status["state"] == "failed"
    assert job.status["sentence"] in output


def test_wrong_token(job: Job, hub: Hub) -> None:
    hub.state.private.add(REPO)
    job.token = "hf_wrong"
    status, output = job.run()
    assert status == 67
    assert "HTTP 401, token given" in last(output)
    assert "hf_wrong" not in output


def test_gated(job: Job, hub: Hub) -> None:
    hub.state.gated.add(REPO)
    hub.state.tokens["hf_known"] = set()
    job.token = "hf_known"
    status, output = job.run()
    assert status == 67
    assert last(output) == (
        f"failed: {REPO} is gated: accept its terms on the hub with the account of the token (HTTP 403, token given)"
    )


def test_unknown_commit(job: Job) -> None:
    job.settings["commit"] = "0" * 40
    status, output = job.run()
    assert status == 68
    assert last(output) == f"failed: {REPO} has no commit {'0' * 40} (HTTP 404); run: gpuwright pin"


def test_unknown_repository(job: Job, hub: Hub) -> None:
    hub.state.tokens["hf_known"] = {REPO}
    job.token = "hf_known"
    job.settings["repo"] = "lab/nothing"
    status, output = job.run()
    assert status == 68
    assert last(output) == f"failed: {hub.url} has no repository lab/nothing, or the token cannot see it (HTTP 404)"


@pytest.mark.parametrize(
    "kind", ["wrong", pytest.param("short", marks=pytest.mark.proof), pytest.param("long", marks=pytest.mark.proof)]
)
def test_lasting_wrong_bytes_give_up(job: Job, hub: Hub, kind: str) -> None:
    hub.fault(kind=kind, path=SMALL, after=20, times=None)
    status, output = job.run()
    assert status == (75 if kind == "short" else 65), output
    assert SMALL in last(output)
    assert not job.manifest_path.exists()
    if kind == "wrong":
        assert "came wrong 3 times, expected git:" in last(output)


def test_hub_unreachable(job: Job, hub: Hub) -> None:
    job.settings["hub"] = "http://127.0.0.1:9"
    status, output = job.run()
    assert status == 75
    assert last(output).startswith("failed: http://127.0.0.1:9 cannot be reached: ")
    assert last(output).endswith("(3 tries); the job starts again in a minute")
    assert job.status["state"] == "waiting"


def test_endless_stall_gives_up_until_the_unit_starts_it_again(job: Job, hub: Hub) -> None:
    job.settings |= {"stall_timeout": 1, "attempts": 2}
    hub.fault(kind="stall", path=SHARD, after=0, times=None)
    status, output = job.run()
    assert status == 75
    assert last(output) == "failed: no bytes for 1 s (2 tries without progress); the job starts again in a minute"


def test_certificate_of_somebody_else(tmp_path: Path, hub_root: Path, authority: Path) -> None:
    server = Server(("127.0.0.1", 0), State(Models(hub_root)), certificate=authority / "server.pem")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        status, output = Job(tmp_path, Hub(server, hub_root)).run()
    finally:
        server.stop()
    assert status == 69
    assert last(output).startswith("failed: the certificate of https://127.0.0.1:")
    assert "is not trusted" in last(output)
    assert "hub_ca" in last(output)


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a//b", "tab\there", "x.partial"])
def test_lists_that_leave_the_directory_are_refused(
    job: Job, hub: Hub, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Models.commit

    def evil(self: Models, repo: str, revision: str) -> object:
        commit, entries = real(self, repo, revision)  # type: ignore[misc]
        return commit, [*entries, type(entries[0])(**{**entries[0].__dict__, "path": path})]

    monkeypatch.setattr(Models, "commit", evil)
    status, output = job.run()
    assert status == 71, output
    assert "leaves its directory" in last(output)
    assert not list(job.directory.iterdir())


@pytest.mark.parametrize("line", ["wokers=4", "commit=main"])
def test_bad_settings(job: Job, line: str) -> None:
    key, _, value = line.partition("=")
    job.settings[key] = value
    status, output = job.run()
    assert status == 64
    assert len(output.splitlines()) == 1


# ------------------------------------------------------------------------------------------------ disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 20 MiB, where the process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=20m,mode=0755 none {disk} 2>/dev/null") != 0:
        pytest.skip("needs root and mount for a small file system")
    yield disk  # type: ignore[misc]
    os.system(f"umount -l {disk}")


def test_disk_too_small_is_refused_before_the_first_byte(job: Job, hub: Hub, small_disk: Path) -> None:
    job.settings["store"] = small_disk
    status, output = job.run()
    assert status == 70
    assert last(output).startswith(f"failed: disk full: the file system of {small_disk} has ")
    assert "24.0 MiB are still to come and 1.0 MiB must stay free" in last(output)
    assert hub.data_bytes() == 0


def test_disk_that_fills_up_on_the_way(job: Job, hub: Hub, small_disk: Path) -> None:
    weights.make(hub.root, "lab/half", size=10 * 1024**2)
    job.settings |= {"store": small_disk, "repo": "lab/half", "commit": hub.commit("lab/half"), "report_every": 30}
    hub.fault(kind="slow", path="*.safetensors", rate=128 * 1024, times=None)
    process = job.start()
    wait_until(lambda: any(job.directory.rglob("*.partial")))
    (small_disk / "somebody else").write_bytes(bytes(17 * 1024**2))
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 70, output
    assert "must stay free" in last(output)
    assert job.status["state"] == "failed"


def test_directory_that_cannot_be_written(job: Job, hub: Hub) -> None:
    if os.geteuid() == 0:
        job.directory.parent.mkdir(parents=True)
        job.directory.write_text("a file where the directory should be")
    else:
        job.store.chmod(0o500)
    status, output = job.run()
    assert status == 73
    assert last(output).startswith("failed: cannot write in ")


# ------------------------------------------------------------------------------------------------ killed and resumed


def test_sigkill_in_the_middle_resumes_without_fetching_finished_bytes_again(job: Job, hub: Hub) -> None:
    hub.state.pace = 8 * 1024**2
    process = job.start()
    wait_until(lambda: len(list(job.directory.glob("model-*.safetensors"))) >= 1)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = list(job.directory.glob("model-*.safetensors"))
    on_disk = sum(f.stat().st_size for f in job.directory.rglob("*") if f.is_file())
    assert not job.manifest_path.exists()
    hub.state.pace = None
    hub.state.requests.clear()
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()
    total = sum(f["size"] for f in job.manifest["files"])
    assert sum(hub.data_bytes(f.name) for f in finished) == 0
    # Each worker gives up at most what lay behind the last whole MiB.
    assert hub.data_bytes() <= total - on_disk + 4 * 1024**2


@pytest.mark.proof
def test_sigkill_of_the_script_alone_leaves_nothing_running(job: Job, hub: Hub) -> None:
    hub.fault(kind="slow", path="*.safetensors", rate=1024**2, times=None)
    process = job.start()
    wait_until(lambda: len(list(job.directory.rglob("*.safetensors.partial"))) >= 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    hub.state.faults.clear()
    status, output = job.run()  # waits for the orphans, which give up by themselves
    assert status == 0, output
    job.assert_complete()


def test_stopped_by_systemd_says_so_and_resumes(job: Job, hub: Hub) -> None:
    hub.state.pace = 8 * 1024**2
    process = job.start()
    wait_until(lambda: list(job.directory.rglob("*.partial")))
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM
    assert job.status["state"] == "stopped"
    wait_until(lambda: not _group(process.pid), timeout=5)
    hub.state.pace = None
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()


def _group(leader: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.proof
def test_a_server_that_cannot_resume(job: Job, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.hub.server import Handler

    serve = Handler._bytes

    def without_ranges(self: Handler, entry: object, headers: dict[str, str]) -> None:
        del self.headers["Range"]
        serve(self, entry, headers)  # type: ignore[arg-type]

    monkeypatch.setattr(Handler, "_bytes", without_ranges)
    hub.fault(kind="cut", path=SHARD, after=3 * 1024**2)
    status, output = job.run()
    assert status == 0, output
    assert "no resume at byte" in output
    job.assert_complete()


def test_two_jobs_for_one_commit(job: Job, hub: Hub) -> None:
    hub.state.pace = 16 * 1024**2
    first = job.start()
    wait_until(lambda: list(job.directory.rglob("*.partial")))
    job.settings["name"] = "same-weights"
    status, output = job.run()
    assert status == 0, output
    assert f"another job works on {REPO} at {hub.commit()}; waiting for it" in output
    assert first.communicate(timeout=20)[0]
    assert first.returncode == 0
    job.assert_complete()
    total = sum(f["size"] for f in job.manifest["files"])
    assert hub.data_bytes() == total


# ------------------------------------------------------------------------------------------------ damage


def test_damage_is_found_at_the_next_start_named_and_repaired(job: Job, hub: Hub) -> None:
    assert job.run()[0] == 0
    path = job.directory / SHARD
    right = path.read_bytes()
    path.write_bytes(right[:1000] + b"?" + right[1001:])
    os.utime(path, (1, 1))
    (job.directory / SMALL).unlink()
    hub.state.requests.clear()
    status, output = job.run()
    assert status == 0, output
    assert f"wrong bytes: {SHARD}, expected sha256:{hashlib.sha256(right).hexdigest()}, got sha256:" in output
    assert f"looking at {SMALL}: missing" in output
    job.assert_complete()
    assert hub.data_bytes() == len(right) + (job.directory / SMALL).stat().st_size


def test_a_new_time_stamp_alone_costs_one_read_and_no_download(job: Job, hub: Hub) -> None:
    assert job.run()[0] == 0
    before = job.manifest_path.read_bytes()
    os.utime(job.directory / SHARD, (1, 1))
    hub.state.requests.clear()
    status, output = job.run()
    assert status == 0, output
    assert hub.state.requests == []
    assert job.manifest_path.read_bytes() == before
    assert "changed since" not in job.run()[1]


def test_verify_reads_every_byte(job: Job, hub: Hub) -> None:
    assert job.run()[0] == 0
    assert job.run("--verify")[0] == 0
    path = job.directory / SHARD
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(1234567)
        file.write(b"????")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert job.run()[0] == 0  # size and time stamp say nothing
    status, output = job.run("--verify")
    assert status == 65
    assert f"wrong bytes: {SHARD}, expected sha256:" in output
    assert "1 of 12 files are damaged and the manifest is gone" in last(output)
    assert "systemctl restart gpuwright-model-llm.service" in last(output)
    assert not job.manifest_path.exists()
    hub.state.requests.clear()
    assert job.run()[0] == 0
    job.assert_complete()
    assert hub.data_bytes() == path.stat().st_size  # that file, nothing else


def test_check_is_one_line_of_json(job: Job, hub: Hub) -> None:
    status, output = job.run("--check")
    assert status == 0
    assert json.loads(output)["manifest"] is False
    assert json.loads(output)["status"] is None
    assert job.run()[0] == 0
    checked = json.loads(job.run("--check")[1])
    assert (checked["manifest"], checked["files"], checked["suspect"]) == (True, 12, [])
    assert checked["settings"] == checked["status"]["settings"]
    (job.directory / SMALL).write_text("{}")
    assert json.loads(job.run("--check")[1])["suspect"] == [
        f"{SMALL}: 2 bytes instead of {(hub.root / REPO / SMALL).stat().st_size}"
    ]


def test_strange_files_are_named_and_left(job: Job) -> None:
    assert job.run()[0] == 0
    strange = job.directory / "model-00009-of-00005.safetensors"
    strange.write_bytes(b"x")
    status, output = job.run()
    assert status == 0
    assert f"not part of {REPO} at {job.settings['commit']}, left alone: {strange}" in output
    assert strange.exists()


# ------------------------------------------------------------------------------------------------ token


def test_the_token_reaches_the_hub_and_nothing_else(job: Job, hub: Hub, tmp_path: Path) -> None:
    token = "hf_SEKRET0123456789"
    hub.state.private.add(REPO)
    hub.state.tokens[token] = {REPO}
    storage_state = State(Models(hub.root), key=hub.state.key)
    storage = Server(("127.0.0.1", 0), storage_state)
    threading.Thread(target=storage.serve_forever, daemon=True).start()
    hub.state.cdn = storage.url
    storage_state.pace = 12 * 1024**2
    job.token = token
    seen: set[str] = set()
    process = job.start()
    while process.poll() is None:
        for proc in Path("/proc").glob("[0-9]*"):
            for what in ("cmdline", "environ"):
                try:
                    text = (proc / what).read_bytes()
                except OSError:
                    continue
                if token.encode() in text and proc.name != str(os.getpid()):
                    seen.add(f"{what} of {text[:80]!r}")
    output = process.communicate()[0]
    storage.stop()
    assert process.returncode == 0, output
    job.assert_complete()
    assert seen == set()
    assert token not in output
    assert any(r["authorization"] for r in hub.state.requests)
    assert storage_state.requests
    assert not any(r["authorization"] for r in storage_state.requests)
    for file in [*job.store.rglob("*"), *job.run_directory.rglob("*")]:
        if file.is_file():
            assert token.encode() not in file.read_bytes()


def test_a_token_with_a_line_break_cannot_add_a_header(job: Job, hub: Hub) -> None:
    job.token = "hf_one two"
    status, output = job.run()
    assert status == 67
    assert last(output) == "failed: the hub token has spaces or control characters in it"
    assert hub.state.requests == []


# ------------------------------------------------------------------------------------------------ from a directory


def test_from_a_directory(job: Job, hub: Hub, tmp_path: Path) -> None:
    job.settings |= {"source": hub.root / REPO, "hub": ""}
    status, output = job.run()
    assert status == 0, output
    job.assert_complete()
    assert "each copy is read back" in output


def test_from_a_neighbours_store_with_its_manifest(job: Job, hub: Hub, tmp_path: Path) -> None:
    assert job.run()[0] == 0
    neighbour = job.directory
    (tmp_path / "b").mkdir()
    copy = Job(tmp_path / "b", hub, {"source": neighbour, "hub": ""})
    status, output = copy.run()
    assert status == 0, output
    copy.assert_complete()
    assert copy.manifest["files"] != []
    (neighbour / SHARD).write_bytes(bytes((neighbour / SHARD).stat().st_size))
    (tmp_path / "c").mkdir()
    damaged = Job(tmp_path / "c", hub, {"source": neighbour, "hub": ""})
    status, output = damaged.run()
    assert status == 65, output
    assert SHARD in last(output)


def test_missing_source(job: Job, tmp_path: Path) -> None:
    job.settings["source"] = tmp_path / "nowhere"
    status, output = job.run()
    assert status == 66
    assert last(output).startswith(f"failed: source directory {tmp_path}/nowhere is missing, or user ")
