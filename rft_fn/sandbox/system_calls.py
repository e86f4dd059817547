"""The filter by which the kernel refuses system calls that no unread program needs.

A filter is a program of the kernel's packet filter, eight bytes an instruction (linux/filter.h), over the
number of a call and the architecture that it is made for (linux/seccomp.h). `launcher` installs it.
"""

import platform
import struct
import sys

__all__ = ["REFUSED", "filter_of"]

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # the kernel's name, and the column
REFUSED = {  # numbers on (x86_64, aarch64)
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
"""Others' memory and files, keys, the kernel's code, and what holes of the kernel were found in."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in seccomp_data
_ALLOWED, _EPERM = 0x7FFF0000, 0x00050001  # what a filter returns
_X32 = 1 << 30  # from here on numbers are those of another interface of the same processor


def filter_of(machine: str = platform.machine()) -> bytes:
    """Return the filter for an architecture; empty where there is none, and on systems but Linux."""
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return b""
    name, column = _ARCHITECTURES[machine]
    tests = [(_AT_LEAST, _X32), *((_EQUAL, numbers[column]) for numbers in REFUSED.values())]
    count = len(tests)
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 0, count + 2, name), (_LOAD, 0, 0, _NUMBER)]
    code += [(kind, count - i, 0, value) for i, (kind, value) in enumerate(tests)]  # to the last instruction
    code += [(_RETURN, 0, 0, _ALLOWED), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *x) for x in code)
