"""The host: the boot clock that all its processes share, the name of its present run, and what its file systems are.

A wall clock can be stepped and says nothing about a reboot. The boot clock is the same for every process of a host and
only ever goes forward; together with the boot id, a moment on it is a moment that no other run of the host can mistake
for one of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pglease import clock
from pglease.errors import BackendMisconfigured

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/timens_offsets")
_LOCKS = Path("/proc/locks")
_MOUNTS = Path("/proc/self/mountinfo")

# fmt: off
SHARED_BETWEEN_HOSTS = frozenset((
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "fhgfs", "gfs", "gfs2",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3",
    "smbfs", "vboxsf", "virtiofs", "vmhgfs", "webdav",
))
"""File systems that other kernels may write to. Their locks do not hold, or not always, what SQLite asks of them."""
_REMOTE_FUSE = frozenset((
    "ceph", "ceph-fuse", "davfs", "gcsfuse", "glusterfs", "goofys", "grpcfuse", "ifuse", "juicefs", "mfs",
    "moosefs", "mountpoint-s3", "osxfs", "portal", "prl_fsd", "rclone", "s3fs", "seaweedfs", "smbnetfs",
    "sshfs", "vmhgfs-fuse", "weed",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class Host:
    """This run of this host.

    Attributes:
        boot_id: differs from every other run's, and is the same for all processes of this one.
        ahead: nanoseconds by which this process's boot clock is ahead of the host's: not 0 in a time namespace.
    """

    boot_id: str
    ahead: int = 0

    def now(self) -> int:
        """Return the nanoseconds since the host was started, suspend included where the system counts it."""
        return round(clock.now() * 1e9) - self.ahead

    def wall_ahead(self) -> int:
        """Return the nanoseconds that make a moment of this run a wall time, by what the wall clock says now."""
        return time.time_ns() - self.now()


def this_host() -> Host:
    """Return the present run of this host.

    Raises:
        BackendMisconfigured: the system does not name it.
    """
    return Host(_boot_id(), _ahead())


def _boot_id() -> str:
    try:
        if sys.platform == "darwin":
            told = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=True
            ).stdout
        else:
            told = _BOOT_ID.read_text("ascii")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        told = ""
    if not told.strip():
        raise BackendMisconfigured(
            "this system does not say which boot it is in (Linux: /proc/sys/kernel/random/boot_id, macOS: sysctl "
            "kern.bootsessionuuid), so leases in a file could not be told from those before a reboot"
        )
    return told.strip().lower()


def _ahead() -> int:
    """Return how far this process's time namespace moved the boot clock."""
    try:
        offsets = _TIME_NAMESPACE.read_text("ascii")
    except OSError:
        return 0
    found = re.search(r"^boottime\s+(-?\d+)\s+(\d+)$", offsets, re.MULTILINE)
    return int(found[1]) * 1_000_000_000 + int(found[2]) if found else 0


def holders_of_locks(path: Path) -> list[tuple[int, str]]:
    """Return the processes that have a write lock on a file, by what Linux says; elsewhere none.

    Looked up without opening the file, which would cost this process its own locks.
    """
    try:
        inode, told = path.stat().st_ino, _LOCKS.read_text("ascii")
    except OSError:
        return []
    # 1: POSIX  ADVISORY  WRITE 4242 08:01:131 120 120
    found = re.findall(rf"^\d+: POSIX +\S+ +WRITE (\d+) \S+:{inode} ", told, re.MULTILINE)
    return [(int(pid), _name_of(pid)) for pid in dict.fromkeys(found)]


def _name_of(pid: str) -> str:
    try:
        name, state = re.findall(r"^\d+ \((.*)\) (\S)", Path("/proc", pid, "stat").read_text("utf-8", "replace"))[0]
    except (OSError, IndexError):
        return "unknown"
    return f"{name}, stopped" if state in "Tt" else str(name)


def shared_file_system(directory: Path) -> str | None:
    """Return the type of `directory`'s file system if other hosts may write to it, as far as can be told."""
    kind = _type_of(os.path.realpath(directory))
    if kind in SHARED_BETWEEN_HOSTS or kind.partition(".")[2] in _REMOTE_FUSE:
        return kind
    return None


def _type_of(directory: str) -> str:
    found, kind = "", ""
    for mount_point, its_kind in _mounts():
        inside = directory == mount_point or directory.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(found):  # of two on one place the later one is seen
            found, kind = mount_point, its_kind
    return kind


def _mounts() -> list[tuple[str, str]]:
    try:
        if sys.platform == "darwin":
            return mounts_of_macos(subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=True).stdout)
        return mounts_of_linux(_MOUNTS.read_text("utf-8", errors="surrogateescape"))
    except (OSError, subprocess.SubprocessError):
        return []


def mounts_of_linux(mountinfo: str) -> list[tuple[str, str]]:
    """Return mount points and their types from `/proc/self/mountinfo`."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        found.append((point, after.split(" ")[0]))
    return found


def mounts_of_macos(mount: str) -> list[tuple[str, str]]:
    """Return mount points and their types from what `mount` prints."""
    return re.findall(r"^.* on (/.*) \((\w+)[,)]", mount, re.MULTILINE)
