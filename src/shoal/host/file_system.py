"""The kernel's files about this machine, and the file systems by its list of mounts."""

import os
import re
from pathlib import Path

__all__ = ["kernel_lines", "network_file_system"]

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}) | {
    *("orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs")
}
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.portal", "fuse.gvfsd-fuse"})


def kernel_lines(path: Path | str) -> list[str]:
    """Return the lines of a file in /proc. Names in it can have any bytes; they are decoded as `os` decodes paths.

    Only a newline ends a line, as the kernel escapes those in names.

    Raises:
        OSError: There is no such file, as on another system than Linux.
    """
    return [os.fsdecode(line) for line in Path(path).read_bytes().removesuffix(b"\n").split(b"\n")]


def network_file_system(path: Path) -> str:
    """Return the type of the file system of a path, such as "nfs4", if other machines may have it too; else ""."""
    try:
        lines = kernel_lines(_MOUNTS)
    except OSError:  # not Linux
        return ""
    place = os.path.join(os.path.realpath(path), "")
    found = ""
    deepest = 0
    for line in lines:
        before, _, after = line.partition(" - ")
        point = os.path.join(_unescaped(before.split(" ")[4]), "")
        if place.startswith(point) and len(point) >= deepest:  # a later mount covers others
            deepest, found = len(point), after.split(" ")[0]
    return found if found in _NETWORK or (found.startswith("fuse.") and found not in _LOCAL_FUSE) else ""


def _unescaped(text: str) -> str:
    r"""Return a path of the kernel's list, where a space is "\040"."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
