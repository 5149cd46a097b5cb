"""One copy in shared memory of what several processes read from the same files.

The copy is a file in shared memory, named by what it holds. Who uses it holds a shared lock on it; whoever gets an
exclusive lock is alone, and builds the copy or removes it. Locks go with their process, however it ends, so what a
killed process leaves behind is removed by the next one that comes.

Nobody writes to a copy once it is built: weights never point at it. A process whose weights change makes its own copy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import random
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from .sizes import format_bytes

FOLDER = Path("/dev/shm")
_PAGE = mmap.PAGESIZE
_MARK = b"samovar, complete\n"
_here: weakref.WeakValueDictionary[Path, mmap.mmap] = weakref.WeakValueDictionary()
"""The copies that this process uses."""
_one_at_a_time = threading.Lock()


def shared_copy(identity: object, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> mmap.mmap | None:
    """Memory that holds some bytes of files, as identified, which `fill` has filled here or elsewhere. None if it
    cannot be shared.

    It is removed when the last process lets go of it.
    """
    key = hashlib.blake2b(repr((num_bytes, identity)).encode(), digest_size=32).digest()
    file = FOLDER / f"samovar-{os.getuid()}-{key[:8].hex()}"
    with _one_at_a_time:
        memory = _here.get(file)
        if memory is not None:
            return memory
        try:
            _sweep(os.getpid())
            while memory is None:
                memory = _joined(file, _MARK + key, num_bytes, fill)
        except OSError as error:  # No such folder, no room in it, no locks.
            warnings.warn(
                f"{format_bytes(num_bytes)} of weights cannot be shared with other processes, each of which needs its "
                f"own copy: {FOLDER}: {error.strerror or error}. Give it more room, which containers have little of: "
                "docker run --shm-size=64g.",
                stacklevel=2,
            )
            return None
        _here[file] = memory
        return memory


def _joined(file: Path, end: bytes, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> mmap.mmap | None:
    """Map a copy with a shared lock on it, and build it first if nobody has. None if it was removed meanwhile."""
    size = -(-num_bytes // _PAGE) * _PAGE + _PAGE
    descriptor = _opened(file)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        is_alone = _lock(descriptor, exclusive=True)
        if not is_alone:
            _lock(descriptor, exclusive=False)  # Waits while another process builds it.
        is_built = os.fstat(descriptor).st_size == size and os.pread(descriptor, len(end), size - _PAGE) == end
        if is_alone and not is_built and _is_at(file, descriptor):
            try:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)  # This says if there is too little room; writing would kill us.
                fill(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)[:num_bytes])
                os.pwrite(descriptor, end, size - _PAGE)
            except BaseException:
                file.unlink()
                raise
            is_built = True
        _lock(descriptor, exclusive=False)
        if is_built and _is_at(file, descriptor):  # Else its builder died, or its last user has removed it.
            memory = mmap.mmap(descriptor, size)
            weakref.finalize(memory, _leave, file, descriptor, os.getpid())
            undo.pop_all()
            return memory
    time.sleep(random.uniform(0.001, 0.01))
    return None


def _opened(file: Path) -> int:
    """A file that nobody else can have written to."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{file.name} is somebody else's.")
    return descriptor


def _is_at(file: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    return False


def _leave(file: Path, descriptor: int, pid: int) -> None:
    """Let go of a copy, and remove it if nobody else uses it."""
    if os.getpid() == pid:  # A fork has the memory, and leaves the lock to its parent.
        if _lock(descriptor, exclusive=True) and _is_at(file, descriptor):
            file.unlink()
        os.close(descriptor)


@functools.cache
def _sweep(pid: int) -> None:
    """Remove what killed processes have left."""
    for file in FOLDER.glob(f"samovar-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # It is gone by now, or somebody else's.
            _leave(file, _opened(file), pid)


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock a file in place of the lock that it had; False if others hold it and `exclusive` is asked for."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    return True
