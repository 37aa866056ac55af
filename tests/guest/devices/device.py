"""Cases for every block device that weir makes, in the guest: a limit, kills and upgrades under
load. ublk.py and nbd.py define the devices and their differences.
"""

from pathlib import Path

from outcome import contains, near

SHELL = Path(__file__).with_name("devices.sh").read_text()
DISK = "/tmp/disk.raw"
DISK_MIB = 64
# Number of kills, and with --full.
KILLS, FULL_KILLS = 3, 20
# Number of upgrades, and with --full.
UPGRADES, FULL_UPGRADES = 3, 20
# Operations per second, and the number of requests; a tenth of a second's worth is admitted at
# once.
LIMIT, REQUESTS = 200, 400


class Device:
    """A device and the cases that are common to all. A subclass sets the attributes."""

    # Device node, and the option of `weir serve` that creates it.
    node = option = None
    # Options of the weir that is killed and of the one that continues, and the latter's log
    # message.
    killed_option = restart_option = recovery_log = None
    # Option of an upgrade, and a script that prints what other programs observe.
    upgrade_option = observe = None
    # Scripts in the guest: before a case, and after it, whatever its result.
    prologue = clean = None

    def __init__(self, full):
        self.guest = None  # set by the runner
        self._kills = FULL_KILLS if full else KILLS
        self._upgrades = FULL_UPGRADES if full else UPGRADES

    def parts(self, body):
        """Runs a script; returns the output by part."""
        make = f"mkdir -p /mnt/d; truncate -s {DISK_MIB}M {DISK}"
        return self.guest.parts(f"{SHELL}\n{self.prologue}\n{make}\n{body}", self.clean)

    def upgrade_checks(self, parts):
        """Checks of the output of `seen`."""
        raise NotImplementedError

    def nodes_checks(self, parts):
        """Checks of the remaining nodes, listed in part `nodes`."""
        raise NotImplementedError

    def limit(self):
        """A limit, measured with the guest's clock."""
        parts = self.parts(f"""
            serve {DISK} {self.option} --iops-total {LIMIT}
            pause 1
            part begin
            now; echo $now
            dd if={self.node} of=/dev/null bs=4k count={REQUESTS} iflag=direct 2>/dev/null
            part end
            now; echo $now
            stop
            free
        """)
        seconds = float(parts["end"]) - float(parts["begin"])
        return [
            near(
                "duration of throttled reads",
                seconds,
                (REQUESTS - LIMIT / 10) / LIMIT,
                0.05,
                "s",
                1,
            )
        ]

    def killed(self):
        """weir is killed while numbers are written, and restarted: the device waits, no write is
        lost or repeated.
        """
        parts = self.parts(f"""
            serve {DISK} {self.killed_option}
            start_numbers {self.node}
            more_numbers 8
            for time in $(seq {self._kills}); do
                kill_weir
                pause 0.0$((time % 7))
                serve {DISK} {self.restart_option}
                grep '{self.recovery_log}' $log
                more_numbers $((time % 5 + 1))
            done
            part ended
            end_numbers
            part rest
            stop
            free
            check_numbers {DISK}
            part nodes
            nodes
        """)
        return [contains("the client", parts["ended"], "ok "), *self.nodes_checks(parts)]

    def upgraded(self):
        """Upgrades while numbers are written, with and without a limit, and a failed upgrade
        without the device: no write is lost or repeated.
        """
        parts = self.parts(f"""
            serve {DISK} {self.upgrade_option}
            start_numbers {self.node}
            more_numbers 8
            part rejected
            ! weir serve {DISK} --qmp unix:$qmp --takeover --nbd unix:/tmp/other.sock
            grep 'the upgrade failed' $log
            part others
            more_numbers 4
            dmesg -c >/dev/null
            for time in $(seq {self._upgrades}); do
                [ $((time % 2)) = 0 ] || limit='--iops-total 500'
                upgrade {DISK} {self.upgrade_option} $limit
                limit=
                more_numbers $((time % 5 + 1))
            done
            {self.observe}
            part ended
            end_numbers
            part rest
            # The last process can still resize it, and remove it.
            stop
            free
            check_numbers {DISK}
            part nodes
            nodes
        """)
        return [
            contains(
                "error of an upgrade without the device",
                parts["rejected"],
                f"{self.node}, but this config does not",
            ),
            contains(
                "log of the old process after the failed upgrade",
                parts["rejected"],
                "this process continues",
            ),
            *self.upgrade_checks(parts),
            contains("the client", parts["ended"], "ok "),
            *self.nodes_checks(parts),
        ]
