"""A client's view of a weir that is away for a second, ten seconds or a minute: the kernel's part
of the table in docs/recipes.md.

weir is killed while a client writes numbers, and restarted after the pause. The guest's own clock
makes a minute of waiting free.
"""

from pathlib import Path

from outcome import contains, fact

SHELL = Path(__file__).with_name("devices.sh").read_text()
DISK = "/tmp/disk.raw"
DISK_MIB = 64
# The longest pause covers the shorter ones, which run with --full.
PAUSES_S, FULL_PAUSES_S = (60,), (1, 10, 60)
PORT = 10809
# As in docs/recipes.md, except for the names and the options of systemd, which busybox does not
# ignore. tests/packaging.rs parses the line with systemd.
FSTAB = "/dev/nbd5 /mnt/d ext4 _netdev 0 2"
NBDTAB = "nbd5 127.0.0.1 disk"
CLEAN = f"""
    touch /tmp/stop
    umount /mnt/d 2>/dev/null
    kill -KILL $weir 2>/dev/null
    nbd-client -d /dev/nbd5 >/dev/null 2>&1
    [ ! -e /dev/ublkb0 ] || {{ serve {DISK} --ublk && kill -TERM $weir; }}
    weir detach --all --force 2>/dev/null
    wait
    rm -f {DISK} $log
"""


class Pauses:
    """The cases."""

    def __init__(self, full):
        self.guest = None  # set by the runner
        self._pauses_s = FULL_PAUSES_S if full else PAUSES_S

    def cases(self):
        """Name and function of each case."""
        for seconds in self._pauses_s:
            yield f"pause of {seconds} s: ublk", lambda seconds=seconds: self.waits("--ublk=0", "/dev/ublkb0", seconds)
            yield (
                f"pause of {seconds} s: the kernel's NBD",
                lambda seconds=seconds: self.waits("--nbd-device /dev/nbd5", "/dev/nbd5", seconds),
            )
            yield f"pause of {seconds} s: nbd-client", lambda seconds=seconds: self.client(seconds)
        yield "nbd-client and ext4, as in fstab", self.fstab

    def _parts(self, body):
        load = "[ -e /dev/ublk-control ] || load ublk_drv; ip link set lo up"
        make = f"mkdir -p /mnt/d; truncate -s {DISK_MIB}M {DISK}"
        free = "free() { until ! [ -e /sys/block/nbd5/pid ]; do pause 0.02; done; }"
        return self.guest.parts(f"{SHELL}\n{free}\n{load}\n{make}\n{body}", CLEAN)

    def waits(self, option, node, seconds):
        """Requests wait, and continue after the pause."""
        # The kernel's NBD client waits at most for its dead-timeout.
        option = f"{option},dead-timeout={seconds + 30}" if "nbd" in option else option
        parts = self._parts(f"""
            serve {DISK} {option}
            start_numbers {node}
            more_numbers 8
            kill_weir
            part during
            lines=$(wc -l </tmp/reports)
            now; began=$now
            pause {seconds}
            now; echo $began $now
            kill -0 $numbered && echo it waits
            echo $(($(wc -l </tmp/reports) - lines)) rounds
            part others
            serve {DISK} {option}
            more_numbers 8
            part ended
            end_numbers
            part rest
            stop
            check_numbers {DISK}
        """)
        began, ended = parts["during"].splitlines()[0].split()
        # One round may have been reported that had ended before the pause.
        rounds = int(parts["during"].split()[-2])
        return [
            fact(
                "length of the pause",
                float(ended) - float(began) >= seconds,
                parts["during"],
                f"{seconds} s",
            ),
            contains("the client during the pause", parts["during"], "it waits"),
            fact("rounds during the pause", rounds <= 1, rounds, "none"),
            contains("the client at its end", parts["ended"], "ok "),
        ]

    def client(self, seconds):
        """Requests of nbd-client fail, with -persist too, and it has to be reconnected."""
        parts = self._parts(f"""
            serve {DISK} --nbd 127.0.0.1:{PORT}
            nbd-client 127.0.0.1 /dev/nbd5 -N disk -persist >/tmp/client.log 2>&1 </dev/null || {{ cat /tmp/client.log; exit 1; }}
            dd if=/dev/urandom of=/tmp/pattern bs=4k count=16 2>/dev/null
            dd if=/tmp/pattern of=/dev/nbd5 oflag=direct bs=4k 2>/dev/null
            kill_weir
            part during
            pause {seconds}
            ! dd if=/dev/nbd5 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && echo it fails
            serve {DISK} --nbd 127.0.0.1:{PORT}
            part back
            pause 5
            ! dd if=/dev/nbd5 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && echo it fails
            part again
            nbd-client -d /dev/nbd5 >/dev/null 2>&1 || :
            free
            nbd-client 127.0.0.1 /dev/nbd5 -N disk </dev/null 2>&1
            dd if=/dev/nbd5 bs=4k count=16 iflag=direct 2>/dev/null | cmp - /tmp/pattern && echo all is there
            nbd-client -d /dev/nbd5
            free
            stop
        """)
        return [
            contains("a request during the pause", parts["during"], "it fails"),
            contains("a request after the pause", parts["back"], "it fails"),
            contains("data after a reconnection", parts["again"], "all is there"),
        ]

    def fstab(self):
        """The recipe without systemd: connected by name through nbdtab, mounted through fstab."""
        parts = self._parts(f"""
            mkfs.ext4 -q {DISK}
            serve {DISK} --nbd 127.0.0.1:{PORT}
            mkdir -p /etc
            echo '{NBDTAB}' >/etc/nbdtab
            echo '{FSTAB}' >/etc/fstab
            nbd-client nbd5 </dev/null
            part mounted
            mount /mnt/d
            grep /mnt/d /proc/mounts
            part others
            write_files /mnt/d
            umount /mnt/d
            mount /mnt/d
            (cd /mnt/d && md5sum -c sums)
            umount /mnt/d
            nbd-client -d /dev/nbd5
            free
            stop
            e2fsck -fn {DISK}
        """)
        return [contains("the mount", parts["mounted"], "/dev/nbd5 /mnt/d ext4")]
