"""Event numbers never go back, whatever ends the process (I5)."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvevents_service.errors import ConfigError
from kvevents_service.service.numbering import FILE_NAME, RESERVE, SequenceStore


def crash(store: SequenceStore) -> None:
    """What is left of a process after kill -9: the file, and no lock."""
    os.close(store._lock)


def test_a_new_directory_starts_at_zero(tmp_path: Path) -> None:
    store = SequenceStore(tmp_path / "fresh")
    assert store.first_seq == 0
    store.close(0)


def test_after_a_clean_end_the_numbers_go_on_exactly(tmp_path: Path) -> None:
    store = SequenceStore(tmp_path)
    store.cover(0)
    store.close(17)
    again = SequenceStore(tmp_path)
    assert again.first_seq == 17
    again.close(17)


@pytest.mark.parametrize("used", [0, 1, RESERVE - 1, RESERVE, 3 * RESERVE + 5])
def test_after_a_crash_no_number_is_used_twice(tmp_path: Path, used: int) -> None:
    store = SequenceStore(tmp_path)
    for seq in range(used + 1):
        store.cover(seq)
    crash(store)
    again = SequenceStore(tmp_path)
    assert used < again.first_seq <= used + RESERVE
    again.close(again.first_seq)


def test_two_processes_never_number_one_stream(tmp_path: Path) -> None:
    store = SequenceStore(tmp_path)
    with pytest.raises(ConfigError, match="no other sidecar"):
        SequenceStore(tmp_path)
    store.close(0)


@pytest.mark.parametrize("text", ["", "x", "-4", "1.5", str(1 << 62), "9" * 5000, "\u00b2", "\udcff"])
def test_a_file_that_holds_no_number_is_an_error_not_a_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(os.fsencode(text))
    with pytest.raises(ConfigError, match="state_dir"):
        SequenceStore(tmp_path)


def test_a_file_that_cannot_be_written_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).with_suffix(".new").mkdir()
    with pytest.raises(ConfigError, match="state_dir: expected a directory that can be written"):
        SequenceStore(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_dir"):
        SequenceStore(tmp_path / "file")


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("5")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="of ours"):
        SequenceStore(tmp_path)


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match="regular file"):
        SequenceStore(tmp_path)


def test_a_link_in_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    store = SequenceStore(tmp_path)
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "next-seq.new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        store.cover(0)
    assert (tmp_path / "elsewhere").read_text() == "precious"
    crash(store)


@pytest.mark.parametrize("name", [".", FILE_NAME])
def test_what_all_may_write_or_another_owns_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE_NAME).write_text("5")
    (tmp_path / name).chmod(0o777)
    with pytest.raises(ConfigError, match="state_dir"):
        SequenceStore(tmp_path)
    (tmp_path / name).chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 12345, -1)
        with pytest.raises(ConfigError, match="to belong to user 0"):
            SequenceStore(tmp_path)


def test_two_threads_may_reserve_at_once(tmp_path: Path) -> None:
    """The coroutine writes ahead off the loop while a drain sends on it."""
    store = SequenceStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.cover, range(0, 60 * RESERVE, RESERVE)))
    crash(store)
    assert SequenceStore(tmp_path).first_seq > 59 * RESERVE
