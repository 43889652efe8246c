"""Locks on open files, released when the process that holds them ends."""

import errno

NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""The errors of file systems without locks."""


def lock(descriptor: int) -> bool:
    """Lock an open file until it is closed.

    Args:
        descriptor: The file.

    Returns:
        Whether the file is locked; `False` if the system or the file system does not support locks.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
