"""Shell lines that run weir's commands in the guest to set and remove limits.

Never checks their effects.
"""

import shlex


def group(name):
    """Path of a control group, as an argument of weir."""
    return f"/sys/fs/cgroup/{name}"


def weir(*words):
    """Shell line that runs a weir command."""
    return shlex.join(["weir", *map(str, words)])


def limit(name, disk, *options):
    """Shell line that sets limits of one group on one disk."""
    return weir("cgroup", "limit", group(name), "--device", f"/dev/{disk.name}", *options)


def unlimit(disk, *names):
    """Shell lines that remove limits; missing limits are not an error."""
    return "\n".join(f"{limit(name, disk, '--remove')} || true" for name in names)
