"""Opens the file of the disk tier: private (mode 0600), without a name, and with all its space taken at once.

A file without a name is gone when the process is, however it ends. O_TMPFILE makes one; where the filesystem doesn't
know it the name is removed right after creation. O_DIRECT keeps pages out of the page cache, which would only compete
with the tiers for RAM; where the filesystem refuses it transfers are buffered.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import tempfile
from pathlib import Path

from .errors import CapacityError

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", _libc.fallocate)
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def open_private(folder: Path, size: int, direct: bool = True) -> tuple[int, bool]:
    """A descriptor of an anonymous file of `size` bytes in `folder`, and whether it bypasses the page cache.

    Raises CapacityError, naming the setting, if the folder can't be used or hasn't the room.
    """
    try:
        fd = _open_unnamed(folder)
    except OSError as error:
        raise CapacityError(
            f"ktx.disk_dir={str(folder)!r}: no file can be made there ({error.strerror}); name a folder that exists, "
            "is writable and lies on a local disk"
        ) from error
    try:
        _take_space(fd, folder, size)
        return fd, direct and _bypass_cache(fd, folder)
    except BaseException:
        os.close(fd)
        raise


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(prefix=".ktx-", dir=folder)  # mode 0600
    os.unlink(path)
    return fd


def _take_space(fd: int, folder: Path, size: int) -> None:
    status = os.fstatvfs(fd)
    free, error = status.f_bavail * status.f_frsize, errno.ENOSPC
    if free >= size:  # else the attempt would fill the disk, if only for a moment
        if _fallocate(fd, 0, 0, size) == 0:
            return
        error = ctypes.get_errno()
        if error in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(fd, size)
            return
    raise CapacityError(
        f"disk tier: {size / 2**30:.2f} GiB can't be taken in ktx.disk_dir={str(folder)!r} ({os.strerror(error)}; "
        f"{free / 2**30:.2f} GiB free): lower ktx.disk_gib, free space, or name another ktx.disk_dir"
    )


def _bypass_cache(fd: int, folder: Path) -> bool:
    """Sets O_DIRECT and tries it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(fd, [page], 0)
        return True
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        logger.warning(
            "KTX: ktx.disk_dir=%s refuses O_DIRECT (%s); pages also pass through the system's page cache, which takes "
            "RAM and time. A local ext4 or xfs doesn't need that.", folder, error.strerror,
        )  # fmt: skip
        return False
