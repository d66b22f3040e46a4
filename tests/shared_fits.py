"""How the models of a config are run, found once for all processes of a session.

The product finds it once in each process, in a few tenths of a second for each config and head. Here a process that a
warm Python forks reads what another has found, and waits while another looks for it.
"""

import fcntl
import functools
import hashlib
import os
import pickle
import sys
from pathlib import Path

FOLDER = "TESTS_FITS"


class Fits(dict):
    """A table whose entries are files, too."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def file(self, config):
        return self.folder / hashlib.sha256(config.encode()).hexdigest()

    def __contains__(self, config):
        if not super().__contains__(config) and self.file(config).is_file():
            super().__setitem__(config, pickle.loads(self.file(config).read_bytes()))
        return super().__contains__(config)

    def __setitem__(self, config, fit):
        super().__setitem__(config, fit)
        partial = self.file(config).with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(fit))
        partial.replace(self.file(config))


def share_fits(folder):
    """Makes this process read and write the fits of ``folder``; one that was forked from such a process does already.

    Workers of pytest keep their own, since tests look for fits themselves.
    """
    from verl_fn.backends.hf import attention, checks
    from verl_fn.backends.hf import folder as models

    if "pytest" in sys.modules or isinstance(checks._fits, Fits):
        return
    checks._fits, alone = Fits(folder), models.fit_of

    @functools.wraps(alone)
    def fit_of(*args):
        with open(Path(folder) / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            attention.register()
            return alone(*args)

    models.fit_of = fit_of
