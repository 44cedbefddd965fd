"""Code that is not trusted, in a process that can do little: no network, no files but a folder's, no other process.

By what Linux lets any process do to itself, without privileges, for ever: Landlock for files, a seccomp filter for all
else, resource limits. The standard library alone, as the process has nothing else.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
RIGHTS_OF_ABI = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF}
"""All that Landlock can refuse of files: the first version, and what later ones have added (renaming, truncating)."""
SCOPES_SINCE, SCOPES = 6, 3
"""The version with scopes, and all of them: no signal and no abstract socket of a process that is not confined, too."""
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/dev/null", "/dev/urandom", "/etc/ld.so.cache", "/proc/cpuinfo")
"""What Python and its libraries need beside where it is installed."""
O_TRUNC = 0x200
CLONE_THREAD = 0x10000
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, ABSENT = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in what follows, and the number by which seccomp knows it."""
REFUSED = {
    **{"socket": (41, 198), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "ptrace": (101, 117)},
    **{"execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "io_uring_setup": (425, 425)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "kcmp": (312, 272)},
    **{"mknod": (133, None), "mknodat": (259, 33), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"truncate": (76, 45), "chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "removexattr": (197, 14), "lremovexattr": (198, 15), "mount": (165, 40)},
    **{"umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "perf_event_open": (298, 241)},
    **{"userfaultfd": (323, 282), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)},
    **{"fchmod": (91, 52), "fchown": (93, 55), "fsetxattr": (190, 7), "fremovexattr": (199, 16)},
    **{"setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
    **{"mq_open": (240, 180), "sched_setaffinity": (203, 122), "setpriority": (141, 140)},
    **{"sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
    **{"ioprio_set": (251, 30)},
}
"""System calls by which a process reaches the network, other processes, files without opening them, or memory that is
not of its address space."""
FCNTLS = {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15}
IOCTLS = {"FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902, "FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_FSSETXATTR": 0x401C5820}
"""Commands that send signals to any process, or change a file that is open to be read."""
LOAD, JUMP_EQUAL, JUMP_FROM, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16
_libc = ctypes.CDLL(None, use_errno=True)


class Unprotected(Exception):
    """What keeps a process from being confined here."""


def confine(folder: str, *, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Let this process, which has one thread, have no more than that, for the rest of its life.

    Args:
        folder: the files that it may read and write; of all others it may read those of READABLE and of Python.
        memory_bytes: its address space.
        file_bytes: of each file that it writes.
    Raises:
        Unprotected: the kernel does not let it.
    """
    limit(memory_bytes=memory_bytes, cpu_seconds=cpu_seconds, file_bytes=file_bytes)
    if platform.machine() not in MACHINES:
        raise Unprotected(f"there is no filter for machines of {platform.machine()}")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _restrict_files(folder)
    _drop_capabilities()
    _filter_calls()


def limit(*, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """The part of `confine` that is no protection."""
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _restrict_files(folder: str) -> None:
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
    _allow(rules, "/dev/null", READ_FILE | WRITE_FILE)
    _check(_libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    beneath = struct.pack("=Qi", rights, descriptor)
    _check(_libc.syscall(LANDLOCK_ADD, rules, 1, beneath, 0), "landlock_add_rule")
    os.close(descriptor)


def _drop_capabilities() -> None:
    header, none = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6)
    _check(_libc.capset(header, none), "capset")


def _filter_calls() -> None:
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions())
    kept = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def _instructions() -> list[tuple[int, int, int, int]]:
    """A program of the kernel's packet filter: operation, instructions to skip if so, if not, operand."""
    column, machine = MACHINES[platform.machine()]
    own = {name: numbers[column] for name, numbers in REFUSED.items() if numbers[column] is not None}
    found = [(LOAD, 0, 0, MACHINE_AT), (JUMP_EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    found += [(JUMP_FROM, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]  # the same calls by other numbers
    for number in own.values():
        found += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for number in (435, 437):  # clone3, openat2: their arguments cannot be seen; the older ones are used in their place
        found += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ABSENT)]
    found += _where((56, 220)[column], 0, CLONE_THREAD, 0)  # clone: threads alone
    found += _where((257, 56)[column], 2, O_TRUNC | os.O_ACCMODE, O_TRUNC)  # openat: Landlock's first version lets it
    if column == 0:
        found += _where(2, 1, O_TRUNC | os.O_ACCMODE, O_TRUNC)  # open
    for number, commands in (((72, 25)[column], FCNTLS), ((16, 29)[column], IOCTLS)):
        for command in commands.values():
            found += _where(number, 1, 0xFFFFFFFF, command)
    found += _where((302, 261)[column], 0, 0xFFFFFFFF, 0, unless=True)  # prlimit64: its own limits alone
    return [*found, (RETURN, 0, 0, ALLOW)]


def _where(
    number: int, argument: int, mask: int, value: int, *, unless: bool = False
) -> Sequence[tuple[int, int, int, int]]:
    """Refuse a call where an argument has a value, or has not."""
    return [
        (JUMP_EQUAL, 0, 5, number),
        (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument),
        (AND, 0, 0, mask),
        (JUMP_EQUAL, int(unless), int(not unless), value),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER_AT),
    ]


def _check(result: int, call: str) -> int:
    if result < 0:
        raise Unprotected(f"{call} is refused here ({os.strerror(ctypes.get_errno())})")
    return result
