"""Files and folders that appear as a whole: what others see while they are written, and who can read them."""

import os
from pathlib import Path

import pytest

from verl_fn import atomic
from verl_fn.atomic import check_empty, move_files, replaced, replaced_folder
from verl_fn.errors import UsageError


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_files_have_the_mode_that_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with replaced_folder(tmp_path / "out") as aside:
            (aside / "model.safetensors").touch(0o600)
            (aside / "nested").mkdir()
            (aside / "nested/part").touch(0o600)
    finally:
        os.umask(before)
    written = [tmp_path / "out/model.safetensors", tmp_path / "out/nested/part"]
    assert [path.stat().st_mode & 0o777 for path in written] == [mode, mode]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "file"
    atomic.write(file, "naïve")
    assert file.read_bytes() == "naïve".encode()
    (tmp_path / ".file.writing").write_text("what a killed process left")
    atomic.write(file, b"\0")
    assert file.read_bytes() == b"\0"

    def fails(path):
        assert path.read_bytes() == b"more" and path.parent == tmp_path
        raise OSError("no room")

    monkeypatch.setattr(atomic, "sync", fails)
    with pytest.raises(OSError, match="no room"):
        atomic.write(file, "more")
    assert file.read_bytes() == b"\0" and list(tmp_path.iterdir()) == [file]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    for name in ("link", ".other.writing"):
        (tmp_path / name).symlink_to("target")
    atomic.write(tmp_path / "link", "own")
    atomic.write(tmp_path / "other", "own")
    with replaced(tmp_path / "pointer") as aside:
        aside.symlink_to("nowhere")
    assert (tmp_path / "target").read_text() == "precious" and not (tmp_path / "link").is_symlink()
    assert (tmp_path / "pointer").readlink() == Path("nowhere")


def test_the_file_that_says_that_a_folder_is_whole_goes_first_and_comes_last(tmp_path, monkeypatch):
    folder, aside = tmp_path / "out", tmp_path / "out/aside"
    (aside / "deep").mkdir(parents=True)
    for name in ("b", "stale", "kept", "index"):
        (folder / name).write_text("old")
    for name in ("a", "deep/b", "index", "z"):
        (aside / name).write_text("new")
    seen, replace = [], Path.replace

    def noted(self, target):
        seen.append((str(target.relative_to(folder)), (folder / "index").exists(), (folder / "stale").exists()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    move_files(aside, folder, last="index", stale=["stale", "missing"])
    assert seen == [(name, False, False) for name in ("a", "deep/b", "z", "index")]
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert texts == dict.fromkeys(("a", "deep/b", "index", "z"), "new") | {"b": "old", "kept": "old"}
    assert not aside.exists()


def test_a_folder_is_whole_or_as_it_was(tmp_path):
    folder = tmp_path / "out"
    (folder / ".unfinished").mkdir(parents=True)
    (folder / ".unfinished/old").write_text("what a killed process left")
    check_empty(folder)
    with pytest.raises(OSError), replaced_folder(folder) as aside:
        assert list(aside.iterdir()) == []
        (aside / "a").write_text("half")
        raise OSError
    assert list(folder.iterdir()) == [], "it was there before"
    check_empty(folder)
    with replaced_folder(folder) as aside:
        (aside / "a").write_text("all")
    assert [path.name for path in folder.iterdir()] == ["a"]
    with pytest.raises(UsageError, match="out is not empty; choose another folder"):
        check_empty(folder)
    with pytest.raises(UsageError, match="out/a is a file; choose a folder"):
        check_empty(folder / "a")
    check_empty(tmp_path / "none")
