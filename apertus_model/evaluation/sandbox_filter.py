"""The filter of system calls in the sandbox, in classic BPF (seccomp). These calls fail with EPERM, and so
does mmap of shared memory without a file; all others are allowed:

"""

import errno
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "processes and threads": {
        "fork": (57, None),
        "vfork": (58, None),
        "clone": (56, 220),
        "clone3": (435, 435),
    },
    "namespaces and mounts": {
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsmount": (432, 432),
        "mount_setattr": (442, 442),
        "open_by_handle_at": (304, 265),
    },
    "networks, also those that no namespace holds, such as that to the host of a virtual machine": {
        "socket": (41, 198),
    },
    "memory that belongs to no process": {
        "shmget": (29, 194),
        "semget": (64, 190),
        "msgget": (68, 186),
        "mq_open": (240, 180),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        "vmsplice": (278, 75),
    },
    "attributes of files": {
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "setxattrat": (463, 463),
    },
    "memory of the kernel": {
        "inotify_init": (253, None),
        "inotify_init1": (294, 26),
        "fanotify_init": (300, 262),
        "io_setup": (206, 0),
        "io_uring_setup": (425, 425),
        "landlock_create_ruleset": (444, 444),
        "setsockopt": (54, 208),
        "prctl": (157, 167),
        "seccomp": (317, 277),
        "bpf": (321, 280),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
    },
    "other processes": {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "pidfd_getfd": (438, 438),
    },
}
"""Numbers of the refused system calls on x86-64 and on aarch64; None: the architecture has no such call."""
MMAP = (9, 222)
SHARED_WITHOUT_FILE = 0x21
"""MAP_SHARED and MAP_ANONYMOUS in the flags of mmap: such memory stays while one page of it is mapped, and
RLIMIT_AS counts what is mapped."""

# Instructions are (code, jump if true, jump if false, constant).
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 40  # offsets in struct seccomp_data; the flags of mmap
_X32 = 0x40000000  # numbers from here on are those of another calling convention

__doc__ = f"{__doc__}" + "".join(f"- {reason}: {', '.join(calls)}\n" for reason, calls in REFUSED.items())


def syscall_filter(machine: str) -> bytes:
    """The filter for a machine of ARCHITECTURES."""
    column = list(ARCHITECTURES).index(machine)
    numbers = [pair[column] for calls in REFUSED.values() for pair in calls.values()]
    known = [number for number in numbers if number is not None]
    refuse = len(known) + 1  # instructions after the first comparison of the number, to the last one
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _FLAGS),
        (_AND, 0, 0, SHARED_WITHOUT_FILE),
        (_EQUAL, 0, 2, SHARED_WITHOUT_FILE),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, refuse + 2, 0, MMAP[column]),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, refuse, 0, _X32),
        *((_EQUAL, refuse - 1 - index, 0, number) for index, number in enumerate(known)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
