"""The file systems of this machine, by the kernel's list of mounts."""

import os
import re
from pathlib import Path

__all__ = ["network_file_system"]

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}) | {
    *("orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs")
}
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.portal", "fuse.gvfsd-fuse"})


def network_file_system(path: Path) -> str:
    """Return the type of the file system of a path, such as "nfs4", if other machines may have it too; else ""."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
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
