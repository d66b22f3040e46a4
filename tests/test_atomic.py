"""Folders that are written whole: who can read what is written."""

import os

import pytest

from verl_fn.atomic import replaced_folder


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
