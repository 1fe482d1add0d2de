"""The check at start-up: each shortage is found, and its message names the setting and the number that mends it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ktx.offload import Machine, PageSpec, check_capacity
from vllm_ktx.offload.capacity import GIB, look

SPEC = PageSpec(num_blocks=1024, num_layers=16, page_bytes=65536)  # a block is 1 MiB, all are 1 GiB
PLENTY = Machine(ram=64 * GIB, ram_limited_by="free RAM", disk=500 * GIB, shm=GIB, locked=None)
DISK = Path("/somewhere")


def check(host: float, disk: float, machine: Machine = PLENTY, **options):
    return check_capacity(SPEC, host, disk, DISK, machine, **options)


@pytest.mark.parametrize("host, disk", [(1, 0), (0, 1), (0.5, 0.5), (5, 5)])
def test_enough_is_enough(host, disk) -> None:
    verdict = check(host, disk)
    assert verdict.ok and not verdict.warnings and verdict.blocks == 1024


def test_too_little_names_what_to_raise_and_the_number_is_right() -> None:
    verdict = check(0.25, 0.25)
    assert not verdict.ok and verdict.blocks == 512
    assert "hold 512 of 1024 blocks" in verdict.errors[0] and "ktx.overcommit to 0.50 of" in verdict.errors[0]
    disk, host = re.search(r"ktx.disk_gib to ([\d.]+) or ktx.host_gib to ([\d.]+)", verdict.errors[0]).groups()
    assert check(0.25, float(disk)).ok and check(float(host), 0.25).ok


def test_more_than_the_machine_has_names_how_far_to_lower() -> None:
    verdict = check(8, 0, replace(PLENTY, ram=3 * GIB, ram_limited_by="the container's memory limit"))
    assert verdict.errors == (
        "ktx.host_gib=8 is more than the 2.00 GiB that the container's memory limit leaves: lower ktx.host_gib to 2",
    )
    assert verdict.blocks == 1024, "what fits is enough"
    verdict = check(0, 8, replace(PLENTY, disk=GIB // 2))
    assert "lower ktx.disk_gib to 0.5" in verdict.errors[0] and "hold 512 of 1024 blocks" in verdict.errors[1]


def test_a_disk_needs_a_folder() -> None:
    assert "needs ktx.disk_dir" in check_capacity(SPEC, 0, 1, None, PLENTY).errors[0]


def test_what_only_costs_is_a_warning() -> None:
    small = replace(PLENTY, locked=8 << 20, shm=1 << 20)
    verdict = check(1, 0, small, pinned=True)
    assert verdict.ok and "raise `ulimit -l` to 1048576" in verdict.warnings[0]
    assert "--shm-size" in verdict.warnings[1]
    assert len(check(1, 0, small).warnings) == 1, "memory that isn't pinned needs no lock"


def fake_root(folder: Path, cgroup: str, files: dict[str, str], available: int = 64 * GIB) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "dev/shm").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V2 = {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/b/memory.max": f"{8 * GIB}\n"}
V2 |= {"a/b/memory.current": f"{5 * GIB}\n", "a/b/memory.stat": f"anon 7\ninactive_file {GIB}\n"}
V1 = {"memory/x/memory.limit_in_bytes": f"{6 * GIB}", "memory/x/memory.usage_in_bytes": f"{2 * GIB}"}
V1_UNLIMITED = {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "7"}


@pytest.mark.parametrize(
    "cgroup, files, ram, by",
    [
        ("0::/a/b\n", V2, 4 * GIB, "the container's memory limit"),
        ("0::/a/b/deeper\n", V2, 4 * GIB, "the container's memory limit"),
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", V1, 4 * GIB, "the container's memory limit"),
        ("4:memory:/not/mounted\n", V1_UNLIMITED, 64 * GIB, "free RAM"),
        ("", {}, 64 * GIB, "free RAM"),
    ],
    ids=["v2", "v2 parent", "v1", "v1 unlimited", "none"],
)
def test_limits_of_control_groups(tmp_path, cgroup, files, ram, by) -> None:
    machine = look(None, fake_root(tmp_path, cgroup, files))
    assert (machine.ram, machine.ram_limited_by, machine.disk) == (ram, by, None)
    assert machine.shm is not None


def test_a_machine_that_tells_nothing_is_trusted(tmp_path) -> None:
    machine = look(None, tmp_path)
    assert machine.ram is None and machine.shm is None
    assert check_capacity(SPEC, 1, 0, None, machine).ok


def test_this_machine_can_be_looked_at(tmp_path) -> None:
    machine = look(tmp_path)
    assert machine.ram and machine.disk
