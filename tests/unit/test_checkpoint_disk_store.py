"""The folder of KV blocks: private, never followed out of, cleaned up, and shared."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish_broker.errors import ConfigError
from pilotfish_checkpoint.disk_files import STALE_SECONDS
from pilotfish_checkpoint.disk_store import RESCAN_SECONDS, RESCAN_SHARE, DiskStore
from pilotfish_checkpoint.store import StoreBase
from tests.checkpoint_kit import addresses_of, items_of, make_blocks
from tests.store_kit import DiskRig

BLOCKS = make_blocks(12)
ITEMS = items_of(BLOCKS)
ADDRESSES = addresses_of(BLOCKS)
VALUES = [value for _, value in ITEMS]
SIZE = len(VALUES[0])


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "kv")


@pytest.fixture
def store(rig: DiskRig) -> StoreBase:
    return rig.open()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


# --- whose it is ---------------------------------------------------------------------------------


def test_what_it_makes_is_for_this_user_alone(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS)
    paths = [rig.folder, *rig.folder.rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in paths}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_the_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "a" / "b" / "kv", 1 << 20)
    assert store.put_many(ITEMS[:1]) == [True]


def test_a_symbolic_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        DiskStore(tmp_path / "link", 1 << 20)
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskStore(tmp_path / "nowhere", 1 << 20)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        DiskStore(tmp_path / "file", 1 << 20)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="others may write to it"):
        DiskStore(folder, 1 << 20)
    folder.chmod(0o755)
    DiskStore(folder, 1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        DiskStore(folder, 1 << 20)


# --- what is not a file of ours ------------------------------------------------------------------


def test_a_link_in_a_file_s_place_is_not_followed(
    rig: DiskRig, store: StoreBase, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(VALUES[1])
    store.put_many(ITEMS[:1])
    rig.path(ADDRESSES[0]).unlink()
    rig.path(ADDRESSES[0]).symlink_to(outside)
    assert store.get_many(ADDRESSES[:1]) == [None]
    assert store.contains_many(ADDRESSES[:1]) == [False]
    assert store.counters.errors == 1
    assert store.put_many(ITEMS[:1]) == [True]
    assert outside.read_bytes() == VALUES[1]
    assert store.get_many(ADDRESSES[:1]) == VALUES[:1]


def test_a_link_in_a_folder_s_place_is_not_followed(
    rig: DiskRig, store: StoreBase, tmp_path: Path
) -> None:
    store.put_many(ITEMS)
    leaf = rig.path(ADDRESSES[0]).parent
    leaf.rename(tmp_path / "moved")
    leaf.symlink_to(tmp_path / "moved")
    assert store.get_many(ADDRESSES[:1]) == [None]
    assert store.put_many(ITEMS[:1]) == [False]
    assert store.counters.errors == 2
    rig.pass_time(101)
    store.collect()
    moved = {path.name for path in (tmp_path / "moved").iterdir()}
    assert rig.path(ADDRESSES[0]).name in moved
    assert rig.num_values() == 0  # the others are gone: a link stops nothing else


def test_a_link_in_the_folder_s_own_place_is_not_followed(
    rig: DiskRig, store: StoreBase, tmp_path: Path
) -> None:
    store.put_many(ITEMS)
    rig.folder.rename(tmp_path / "moved")
    rig.folder.symlink_to(tmp_path / "moved")
    assert store.get_many(ADDRESSES) == [None] * 12
    assert store.put_many(ITEMS) == [False] * 12
    assert store.counters.errors == 2


def test_what_is_no_file_is_a_miss_and_holds_up_nobody(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS[:4])
    rig.path(ADDRESSES[1]).unlink()
    os.mkfifo(rig.path(ADDRESSES[1]))  # whoever opens it for reading would wait for a writer
    rig.path(ADDRESSES[2]).unlink()
    rig.path(ADDRESSES[2]).mkdir()
    assert store.get_many(ADDRESSES[:4]) == [VALUES[0], None, None, VALUES[3]]
    assert store.contains_many(ADDRESSES[:4]) == [True, False, False, True]


def test_what_is_not_ours_is_left_alone(rig: DiskRig) -> None:
    store = rig.open(max_bytes=2 * SIZE)
    name = ADDRESSES[0].hex()
    wrong_leaf = "0" if name[0] != "0" else "1"
    foreign = [
        rig.folder / "README",
        rig.folder / "tmp" / "notes.txt",
        rig.folder / name[0] / name[1] / "4f.kv",
        rig.folder / name[0] / name[1] / f"{name.upper()}.kv",
        rig.folder / wrong_leaf / wrong_leaf / f"{name}.kv",
        rig.folder / "somewhere" / "else" / f"{name}.kv",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SIZE))
    for item in ITEMS:
        assert store.put_many([item]) == [True]
    rig.pass_time(10_000)
    store.collect()
    assert rig.files() == sorted(foreign)
    assert isinstance(store, DiskStore)
    assert store.num_bytes == 0


# --- whole or not at all -------------------------------------------------------------------------


def test_a_value_is_synced_before_it_gets_its_name(
    rig: DiskRig, store: StoreBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, int]] = []

    def look(name: str, do: Callable[..., None]) -> Callable[..., None]:
        def done(*args: Any, **options: Any) -> None:
            size = sum(path.stat().st_size for path in rig.files())
            seen.append((name, rig.path(ADDRESSES[0]).exists(), size))
            do(*args, **options)

        return done

    monkeypatch.setattr(os, "fsync", look("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", look("replace", os.replace))
    assert store.put_many(ITEMS[:1]) == [True]
    assert seen == [("fsync", False, SIZE), ("replace", False, SIZE)]


# --- rests and failures --------------------------------------------------------------------------


def test_rests_of_dead_writers_are_removed_and_those_of_living_ones_are_not(
    rig: DiskRig, store: StoreBase
) -> None:
    store.put_many(ITEMS[:1])
    old, new = (rig.folder / "tmp" / f"{digit * 32}.tmp" for digit in "01")
    for path, age in ((old, STALE_SECONDS + 1), (new, STALE_SECONDS - 1)):
        path.write_bytes(b"half a bl")
        os.utime(path, (rig.clock.now - age,) * 2)
    store.collect()
    assert [path.name for path in rig.files() if path.suffix == ".tmp"] == [new.name]
    assert store.get_many(ADDRESSES[:1]) == VALUES[:1]


def test_a_folder_that_was_removed_is_an_empty_one(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS)
    shutil.rmtree(rig.folder)
    assert store.get_many(ADDRESSES) == [None] * 12
    store.collect()
    store.delete(ADDRESSES)
    assert store.put_many(ITEMS[:2]) == [True, True]
    assert store.get_many(ADDRESSES[:2]) == VALUES[:2]
    assert store.counters.errors == 0
    assert stat.S_IMODE(rig.folder.stat().st_mode) == 0o700


def test_a_store_that_cannot_write_still_reads(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS[:2])
    (rig.folder / "tmp").rmdir()
    (rig.folder / "tmp").write_bytes(b"in the way")
    for _ in range(3):
        assert store.put_many(ITEMS[2:4]) == [False, False]
        assert store.get_many(ADDRESSES[:3]) == [*VALUES[:2], None]
    assert store.counters.errors == 1
    assert store.counters.refused == 2
    (rig.folder / "tmp").unlink()
    rig.end_pause()
    assert store.put_many(ITEMS[2:4]) == [True, True]


def test_a_folder_that_nobody_may_write_to_still_gives_what_it_has(
    rig: DiskRig, store: StoreBase
) -> None:
    store.put_many(ITEMS[:2])
    folders = [rig.folder, *(path for path in rig.folder.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    if os.access(rig.folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    rig.path(ADDRESSES[0]).chmod(0o400)
    assert store.put_many(ITEMS[2:4]) == [False, False]
    assert store.get_many(ADDRESSES[:3]) == [*VALUES[:2], None]
    assert store.counters.errors == 1
    for folder in folders:
        folder.chmod(0o700)


def test_a_write_that_fails_leaves_nothing_behind(rig: DiskRig, store: StoreBase) -> None:
    (rig.folder / ADDRESSES[0].hex()[0]).write_bytes(b"in the way")
    assert store.put_many(ITEMS[:1]) == [False]
    assert list((rig.folder / "tmp").iterdir()) == []


def test_a_disk_that_is_full_costs_the_value_and_nothing_else(rig: DiskRig) -> None:
    """A limit on the size of files ends a write in its middle, as a full disk does."""
    code = f"""
import resource
from pathlib import Path
from pilotfish_checkpoint.disk_store import DiskStore
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
store = DiskStore(Path({str(rig.folder)!r}), 1 << 20)
print(store.put_many([(bytes(32), bytes(9_000)), (bytes([1]) * 32, bytes(20_000))]))
print(store.counters.errors, store.get_many([bytes(32)]) == [bytes(9_000)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[True, False]", "1 True"]
    assert [path.name for path in rig.files()] == ["00" * 32 + ".kv"]


def test_no_file_stays_open(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS)
    rig.path(ADDRESSES[0]).unlink()
    rig.path(ADDRESSES[0]).mkdir()
    before = open_files()
    for _ in range(5):
        store.put_many(ITEMS)
        store.get_many([*ADDRESSES, bytes(32)])
        store.contains_many(ADDRESSES)
        store.collect()
        rig.end_pause()
    assert store.counters.errors > 0
    assert open_files() == before


# --- use and room --------------------------------------------------------------------------------


def test_a_value_s_last_use_is_its_file_s_time(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(ITEMS[:1])
    assert rig.path(ADDRESSES[0]).stat().st_mtime == pytest.approx(rig.clock.now, abs=1e-3)
    rig.pass_time(50)
    store.contains_many(ADDRESSES[:1])
    assert rig.path(ADDRESSES[0]).stat().st_mtime == pytest.approx(rig.clock.now - 50, abs=1e-3)
    store.get_many(ADDRESSES[:1])
    assert rig.path(ADDRESSES[0]).stat().st_mtime == pytest.approx(rig.clock.now, abs=1e-3)


def test_a_new_process_keeps_to_the_bound_that_an_old_one_filled(rig: DiskRig) -> None:
    rig.open(max_bytes=8 * SIZE).put_many(ITEMS[:8])
    store = rig.open(max_bytes=8 * SIZE)
    assert store.put_many(ITEMS[8:9]) == [True]
    assert rig.num_values() <= 8


def test_several_writers_pass_the_bound_by_a_sixteenth_each(rig: DiskRig) -> None:
    bound = 32 * SIZE
    stores = [rig.open(max_bytes=bound) for _ in range(4)]
    most = 0
    for number, item in enumerate(items_of(make_blocks(100))):
        assert stores[number % 4].put_many([item]) == [True]
        most = max(most, rig.num_values() * SIZE)
    assert most <= bound + 4 * (bound // RESCAN_SHARE + SIZE)


def test_a_writer_looks_again_after_a_while(rig: DiskRig) -> None:
    store, other = (rig.open(max_bytes=32 * SIZE, ttl_seconds=1e6) for _ in range(2))
    blocks = items_of(make_blocks(64))
    store.put_many(blocks[:1])
    other.put_many(blocks[1:32])
    rig.pass_time(RESCAN_SECONDS + 1)
    store.put_many(blocks[32:33])
    assert rig.num_values() <= 32


def test_replacing_a_value_takes_no_more_room(rig: DiskRig) -> None:
    store = rig.open(max_bytes=4 * SIZE)
    store.put_many(ITEMS[:3])
    for _ in range(20):
        store.put_many(ITEMS[:1])
    assert rig.num_values() == 3
    assert store.counters.evictions == 0


def test_many_values_do_not_lie_in_one_folder(rig: DiskRig, store: StoreBase) -> None:
    store.put_many(items_of(make_blocks(100)))
    leaves = {path.parent for path in rig.files()}
    assert len(leaves) > 50
    assert {len(leaf.relative_to(rig.folder).parts) for leaf in leaves} == {2}
