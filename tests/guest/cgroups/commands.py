"""weir's commands in the guest, as lines of the cases' scripts: limits set and removed.

Never checks what they do.
"""

import shlex


def group(name):
    """A control group's path, as it is given to weir."""
    return f"/sys/fs/cgroup/{name}"


def weir(*words):
    """The line that runs a command."""
    return shlex.join(["weir", *map(str, words)])


def limit(name, disk, *options):
    """The line that sets limits of one group on one disk."""
    return weir("cgroup", "limit", group(name), "--device", f"/dev/{disk.name}", *options)


def unlimit(disk, *names):
    """The lines that remove what was set; nothing to remove is no error."""
    return "\n".join(f"{limit(name, disk, '--remove')} || true" for name in names)
