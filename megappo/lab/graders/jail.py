"""A jail for code that is not trusted: a process without network, other processes, and files outside of one folder.

Linux lets any process confine itself for ever, without privileges: Landlock for files, a seccomp filter for all else,
resource limits. Uses the standard library alone, as the process has nothing else.
"""

import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
NOTIF_RECV = 0xC0502100
NOTIF_SEND = 0xC0182101
CONTINUE = 1
NOTIFICATION, RESPONSE = struct.Struct("=QIIi60x"), struct.Struct("=QqiI")
"""Linux's seccomp_notif (id, the thread's pid, flags, the call's number, the rest skipped) and seccomp_notif_resp."""
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
RIGHTS_OF_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF}
"""Version of Landlock -> bits of all file accesses that it can refuse; later versions add renaming, then truncating."""
SCOPES_SINCE, SCOPES = 6, 3
"""First version with scopes, and the bits of both: they refuse signals and abstract sockets to unconfined processes."""
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/dev/null", "/dev/urandom", "/etc/ld.so.cache", "/proc/cpuinfo")
"""Paths that Python and its libraries read outside Python's own folders."""
MAX_OPEN_FILES = 64
"""Open files of a process: the limit also bounds the kernel's memory in socket pairs, pipes and the like."""
MAX_THREADS = 64
MAX_CREATED = 64
"""Files and folders that a process may create in its life."""
ALLOW = 0x7FFF0000
KILL = 0x80000000
ASK = 0x7FC00000
REFUSE = 0x50000 | errno.EPERM
ABSENT = 0x50000 | errno.ENOSYS
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in what follows, and the number by which seccomp knows it."""
SECCOMP = (317, 277)
CLONE = (56, 220)
REFUSED = """
    socket 41 198, kill 62 129, tkill 200 130, tgkill 234 131, ptrace 101 117, execve 59 221, execveat 322 281,
    fork 57 -, vfork 58 -, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438,
    pidfd_send_signal 424 424, pidfd_open 434 434, io_uring_setup 425 425, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, kcmp 312 272, mknod 133 -, mknodat 259 33, memfd_create 319 279, memfd_secret 447 447,
    truncate 76 45, chmod 90 -, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchownat 260 54,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, removexattr 197 14,
    lremovexattr 198 15, mount 165 40, umount2 166 39, unshare 272 97, setns 308 268, bpf 321 280, add_key 248 217,
    request_key 249 218, keyctl 250 219, perf_event_open 298 241, userfaultfd 323 282, shmget 29 194, msgget 68 186,
    semget 64 190, fchmod 91 52, fchown 93 55, fsetxattr 190 7, fremovexattr 199 16, setxattrat 463 463,
    removexattrat 466 466, file_setattr 469 469, mq_open 240 180, sched_setaffinity 203 122, setpriority 141 140,
    sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274, ioprio_set 251 30, inotify_init 253 -,
    inotify_init1 294 26, fanotify_init 300 262, flock 73 32, bind 49 200, sendmsg 46 211, sendmmsg 307 269,
    sync 162 81, creat 85 -, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, syslog 103 116, syncfs 306 267,
    clone 56 220 0 0x10000 == 0, openat 257 56 2 0x203 == 0x200, open 2 - 1 0x203 == 0x200, prctl 157 167 0 -1 == 1,
    mkdir 83 - 1 0o700 != 0o700, mkdirat 258 34 2 0o700 != 0o700, umask 95 166 0 0o700 != 0,
    prlimit64 302 261 0 -1 != 0, fcntl 72 25 1 -1 == 6, fcntl 72 25 1 -1 == 7, fcntl 72 25 1 -1 == 8,
    fcntl 72 25 1 -1 == 10, fcntl 72 25 1 -1 == 15, fcntl 72 25 1 -1 == 37, fcntl 72 25 1 -1 == 38,
    fcntl 72 25 1 -1 == 1024, fcntl 72 25 1 -1 == 1026, fcntl 72 25 1 -1 == 1031, ioctl 16 29 1 -1 == 0x8901,
    ioctl 16 29 1 -1 == 0x8902, ioctl 16 29 1 -1 == 0x40086602, ioctl 16 29 1 -1 == 0x401c5820
"""
"""System calls, each with its numbers on both machines, by which a process reaches the network, other processes, files
without opening them, or memory outside of its address space, or creates uncounted things.

Some are refused by an argument alone: its number, a mask, and the value that it has, or has not. clone without
CLONE_THREAD; open with O_TRUNC alone, which Landlock's first version lets; PR_SET_PDEATHSIG, as it ends with what runs
it; folders that their owner could not list; limits of others. F_SETLK, F_SETLKW, F_SETOWN, F_SETSIG, F_SETOWN_EX,
F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, FIOSETOWN, SIOCSPGRP, FS_IOC_SETFLAGS and
FS_IOC_FSSETXATTR send signals, lock, watch or change a file that is open to be read, or take memory."""
HIDDEN = "clone3 435 435, openat2 437 437"
"""Calls whose arguments cannot be seen: they fail as missing, so that programs use the older calls."""
ASKED = """
    clone 56 220 0 0x10000 != 0, open 2 - 1 0x400040 != 0, openat 257 56 2 0x400040 != 0, mkdir 83 -, mkdirat 258 34
"""
"""Calls that `answer` decides: they start a thread, create a file (O_CREAT, O_TMPFILE) or a folder."""
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_FROM = 0x35
AND = 0x54
RETURN = 0x06
NUMBER_AT = 0
MACHINE_AT = 4
ARGUMENTS_AT = 16
ALWAYS = ("0", "0", "==", "0")
OTHER_NUMBERS = ((JUMP_FROM, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE))
"""Refuse the other numbers that the same calls have (x32)."""
_libc = ctypes.CDLL(None, use_errno=True)


class Unprotected(Exception):
    """A process cannot be confined here; the message is the reason."""


def confine(
    folder: str,
    *,
    memory_bytes: int,
    cpu_seconds: int,
    file_bytes: int,
    refused: str = REFUSED,
    files: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Confine this process, which has one thread, for the rest of its life.

    Args:
        folder: the files that it may read and write; of other files it may only read READABLE's and Python's.
        memory_bytes: its address space.
        file_bytes: size of each file that it writes.
        refused: system calls that fail, in the form of REFUSED.
        files: further paths -> what it may do with them: READ_FILE, READ_DIR, EXECUTE.
    Raises:
        Unprotected: the kernel does not let it.
    """
    limit(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, file_bytes=file_bytes)
    _machine()
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _restrict_files(folder, files)
    _drop_capabilities()
    _filter_calls([*OTHER_NUMBERS, *_rules(refused, REFUSE), *_rules(HIDDEN, ABSENT)], 0)


def supervise() -> int:
    """Make every process that this one starts from now on wait for `answer` before it starts a thread, or creates a
    file or folder. This process must do neither.

    Returns:
        a descriptor that can be read when one waits.
    Raises:
        Unprotected: the kernel does not let it.
    """
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    return _filter_calls(list(_rules(ASKED, ASK)), SECCOMP_FILTER_FLAG_NEW_LISTENER)


def answer(listener: int, num_created: int) -> int:
    """Answer a process that waits, unless it has ended: it may have MAX_THREADS and create MAX_CREATED files.

    Returns:
        1 if it is to create a file, else 0.
    """
    is_thread = False
    with suppress(OSError):
        asked = fcntl.ioctl(listener, NOTIF_RECV, bytes(NOTIFICATION.size))
        question, pid, _, call = NOTIFICATION.unpack(asked)
        is_thread = call == CLONE[_machine()[0]]
        count, most = (len(os.listdir(f"/proc/{pid}/task")), MAX_THREADS) if is_thread else (num_created, MAX_CREATED)
        refusal = 0 if count < most else -(errno.EAGAIN if is_thread else errno.ENOSPC)
        fcntl.ioctl(listener, NOTIF_SEND, RESPONSE.pack(question, 0, refusal, 0 if refusal else CONTINUE))
    return int(not is_thread)


def _machine() -> tuple[int, int]:
    if platform.machine() not in MACHINES:
        raise Unprotected(f"there is no filter for machines of {platform.machine()}")
    return MACHINES[platform.machine()]


def limit(*, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Set the resource limits of `confine`, which alone do not confine."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: MAX_OPEN_FILES,  # timers, too
    }
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _restrict_files(folder: str, files: Mapping[str, int]) -> None:
    version = _libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Unprotected("the kernel has no Landlock (Linux 5.13 has it, where it is not switched off)")
    rights = RIGHTS_OF_ABI[min(version, 3)]
    handled = struct.pack("=3Q", rights, 0, SCOPES) if version >= SCOPES_SINCE else struct.pack("=Q", rights)
    rules = _check(_libc.syscall(LANDLOCK_CREATE, handled, len(handled), 0), "landlock_create_ruleset")
    _allow(rules, folder, rights & ~EXECUTE)
    for path in (*READABLE, sys.prefix, sys.base_prefix):
        if os.path.exists(path):
            _allow(rules, path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0))
    for path, allowed in {"/dev/null": READ_FILE | WRITE_FILE, **files}.items():
        _allow(rules, path, allowed)
    _check(_libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    beneath = struct.pack("=Qi", rights, descriptor)
    _check(_libc.syscall(LANDLOCK_ADD, rules, 1, beneath, 0), "landlock_add_rule")
    os.close(descriptor)


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    none = struct.pack("=6I", *[0] * 6)
    _check(_libc.capset(header, none), "capset")


def _filter_calls(instructions: Sequence[tuple[int, int, int, int]], flags: int) -> int:
    """Run a program of the kernel's packet filter before each call from now on: operation, instructions to skip if so,
    if not, operand. Return the descriptor that the flags request."""
    column, machine = _machine()
    whole = [
        (LOAD, 0, 0, MACHINE_AT),
        (JUMP_EQUAL, 1, 0, machine),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        *instructions,
        (RETURN, 0, 0, ALLOW),
    ]
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in whole)
    kept = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(whole), ctypes.addressof(kept))
    descriptor = _libc.syscall(SECCOMP[column], SECCOMP_SET_MODE_FILTER, flags, described)
    return _check(descriptor, "seccomp")


def _rules(table: str, verdict: int) -> Iterator[tuple[int, int, int, int]]:
    column, _ = _machine()
    for rule in table.split(","):
        _, *numbers, argument, mask, sign, value = rule.split() if "=" in rule else [*rule.split(), *ALWAYS]
        if numbers[column] != "-":
            is_equal = sign == "=="
            yield JUMP_EQUAL, 0, 5, int(numbers[column])
            yield LOAD, 0, 0, ARGUMENTS_AT + 8 * int(argument)
            yield AND, 0, 0, int(mask, 0) & 0xFFFFFFFF
            yield JUMP_EQUAL, int(not is_equal), int(is_equal), int(value, 0)
            yield RETURN, 0, 0, verdict
            yield LOAD, 0, 0, NUMBER_AT


def _check(result: int, call: str) -> int:
    if result < 0:
        raise Unprotected(f"{call} is refused here ({os.strerror(ctypes.get_errno())})")
    return result
