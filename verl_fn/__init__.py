from . import user_files  # so that a process which imports this package can unpickle objects of users' files

__all__ = ["user_files"]
__version__ = "0.1.0"
