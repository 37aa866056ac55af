"""weir's commands in the guest, as the cases call them: limits set and removed, the watch started, asked for its log, and ended.

Never checks what they do.
"""

import shlex

STATE = "/run/weir/state"
LOG = "/tmp/watch.log"
PID = "/tmp/watch.pid"


def weir(guest, *words):
    """Runs a command that must succeed; what it printed."""
    return guest.run(shlex.join(["weir", *map(str, words)]))


def group(name):
    """A control group's path, as it is given to weir."""
    return f"/sys/fs/cgroup/{name}"


def limit(guest, name, disk, *options):
    """Sets limits of one group on one disk."""
    return weir(guest, "cgroup", "limit", group(name), "--device", f"/dev/{disk.name}", *options)


def unlimit(guest, disk, *names):
    """Removes what was set; nothing to remove is no error."""
    commands = (f"weir cgroup limit {group(name)} --device /dev/{disk.name} --remove || true" for name in names)
    guest.run("\n".join(commands))


class Watch:
    """`weir cgroup watch`, running in a control group of its own. Use it in a `with` statement; it is ended as a service manager would,
    unless it was killed before.
    """

    def __init__(self, guest, log="weir=trace"):
        self.guest = guest
        self.filter = log

    def __enter__(self):
        self.guest.run(f"""
            mkdir -p $cgroups/watch
            # Not with in_group: in the background, that would leave the number of a shell.
            sh -c 'echo $$ >"$0" && exec "$@"' $cgroups/watch/cgroup.procs weir cgroup watch --state {STATE} --log {self.filter} >{LOG} 2>&1 &
            echo $! >{PID}
            tries=0
            until grep -q ready {LOG}; do
                pause 0.05
                tries=$((tries + 1))
                if [ $tries -gt 2000 ] || ! kill -0 $(cat {PID}); then cat {LOG}; exit 1; fi
            done
        """)
        return self

    def __exit__(self, *_):
        self.guest.run(f"""
            pid=$(cat {PID})
            kill -TERM $pid 2>/dev/null
            tries=0
            while kill -0 $pid 2>/dev/null; do
                pause 0.05
                tries=$((tries + 1))
                if [ $tries -gt 2000 ]; then
                    echo "the watch does not end; its state, where it is in the kernel, and its log:"
                    head -n 3 /proc/$pid/status
                    cat /proc/$pid/task/*/stack
                    tail -n 20 {LOG}
                    kill -KILL $pid
                    exit 1
                fi
            done
        """)

    def log(self):
        """What it has said so far."""
        return self.guest.run(f"cat {LOG}")

    def kill(self):
        """Ends it and all in its group, as nobody can prepare for; the instant, in seconds since boot."""
        return float(self.guest.run("now; kill_group watch; echo $now"))

    def processor_seconds(self):
        """What it has used so far, of its own and in system calls, in steps of 10 ms."""
        fields = self.guest.run(f"cat /proc/$(cat {PID})/stat").rpartition(")")[2].split()
        return int(fields[11]) / 100, int(fields[12]) / 100
