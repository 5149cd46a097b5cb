"""One copy in shared memory of what several processes read from the same files.

The copy is a file in shared memory, named by what it holds. A process that uses it holds a shared lock on one byte of a
common lock file; whoever gets an exclusive lock on that byte is alone, and builds the copy or removes it. Locks go with
their process, however it ends, so what a killed process leaves behind is removed by the next one that comes.

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
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from .sizes import format_bytes

FOLDER = Path("/dev/shm")
_PAGE = mmap.PAGESIZE
_MARK = b"samovar, complete\n"
_TRIES = 100
_here: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()
"""The copies that this process uses, by name."""
_users: Counter[str] = Counter()
"""By name, how many of them there are, with those that are about to go."""
_one_at_a_time = threading.RLock()
"""Locks on files are a process' own, not a thread's."""


def shared_copy(identity: object, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> mmap.mmap | None:
    """Memory that holds some bytes of files, as identified, which `fill` has filled here or elsewhere. None if it
    cannot be shared.

    It is removed when the last process lets go of it.
    """
    print_ = hashlib.blake2b(repr((num_bytes, identity)).encode(), digest_size=32).digest()
    name = f"samovar-{os.getuid()}-{int.from_bytes(print_[:8], 'big') >> 2:016x}"
    with _one_at_a_time:
        known = _here.get(name)
        if known is not None:
            return known
        try:
            _sweep(os.getpid())
            memory = _joined(name, print_, num_bytes, fill)
        except OSError as error:  # No such folder, no room in it, no locks.
            warnings.warn(
                f"{format_bytes(num_bytes)} of weights cannot be shared with other processes, each of which needs its "
                f"own copy: {FOLDER}: {error.strerror or error}. Give it more room, which containers have little of: "
                "docker run --shm-size=64g.",
                stacklevel=2,
            )
            return None
        _here[name] = memory
        _users[name] += 1
        weakref.finalize(memory, _leave, name, os.getpid())
        return memory


def _joined(name: str, print_: bytes, num_bytes: int, fill: Callable[[torch.Tensor], None]) -> mmap.mmap:
    """Map the copy of that name with a shared lock on it, and build it first if nobody has."""
    end = _MARK + print_
    size = -(-num_bytes // _PAGE) * _PAGE + _PAGE
    for _ in range(_TRIES):
        is_alone = _lock(name, exclusive=True)
        if not is_alone:
            _lock(name, exclusive=False)  # Waits while another process builds it.
        with contextlib.ExitStack() as undo:
            undo.callback(_unlock, name)
            descriptor = _opened(name)
            undo.callback(os.close, descriptor)
            is_built = os.fstat(descriptor).st_size == size and os.pread(descriptor, len(end), size - _PAGE) == end
            if is_alone and not is_built:
                undo.callback(os.unlink, FOLDER / name)
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)  # This says if there is too little room; writing would kill us.
                fill(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)[:num_bytes])
                os.pwrite(descriptor, end, size - _PAGE)
            if is_alone or is_built:
                memory = mmap.mmap(descriptor, size)
                _lock(name, exclusive=False)
                undo.pop_all()
                os.close(descriptor)
                return memory
        time.sleep(random.uniform(0.001, 0.01))  # Its builder died. Whoever comes back first builds it.
    raise TimeoutError(f"{name} was removed while somebody uses it.")


def _opened(name: str) -> int:
    """A file in the folder that nobody else can have written to."""
    descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{name} is somebody else's.")
    return descriptor


def _leave(name: str, pid: int) -> None:
    """Let go of a copy, and remove it if nobody else uses it."""
    if os.getpid() != pid:
        return  # A fork has the memory, but not the lock.
    with _one_at_a_time:
        _users[name] -= 1
        if not _users[name]:
            _remove_unused(name)
            _unlock(name)


def _remove_unused(name: str) -> None:
    if _lock(name, exclusive=True):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FOLDER / name)


@functools.cache
def _sweep(pid: int) -> None:
    """Remove what killed processes have left."""
    for file in FOLDER.glob(f"samovar-{os.getuid()}-*"):
        if not _users[file.name]:
            _remove_unused(file.name)
            _unlock(file.name)


# ---------------------------------------------------------------------------------------------------- locks


@functools.cache
def _locks(pid: int) -> int:
    """The common lock file. It is never closed: that would give up all locks."""
    return _opened(f"samovar-{os.getuid()}.lock")


def _lock(name: str, *, exclusive: bool) -> bool:
    """Lock a name; False if somebody else has it and `exclusive` is asked for."""
    import fcntl

    try:
        how = fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH
        fcntl.lockf(_locks(os.getpid()), how, 1, _byte_of(name))
    except BlockingIOError:
        return False
    return True


def _unlock(name: str) -> None:
    import fcntl

    fcntl.lockf(_locks(os.getpid()), fcntl.LOCK_UN, 1, _byte_of(name))


def _byte_of(name: str) -> int:
    return int(name.rpartition("-")[2], 16)
