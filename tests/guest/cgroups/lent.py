"""Control groups on two hosts that share one limit: two daemons and an etcd in one guest, a control
group of each, and what the kernel has of both, in io.max.

Daemons and etcd are stopped and killed. Whatever is done, the two rates in io.max are together no
more than the limit at any look; and what nobody has any more comes to the other.
"""

import streams
from commands import group, weir
from outcome import fact, least, most

RATE = 8_000_000
# Of each host, without a lease.
SAFE = RATE // 10
# What one has beside an idle other: all but that one's safe share, and some to begin with.
MOST = int(0.85 * RATE)
HALF = RATE // 2
NEARLY_HALF = int(0.95 * HALF)
# From when a lease was asked for until all is taken back (docs/cluster.md), and looking.
LEASE_SECONDS = 5
SOON_SECONDS = 1
# For an election, two leases and a busy machine; none of it takes half as long.
LONG_SECONDS = 40
HOSTS = {"one": "a", "two": "b"}
ETCD, PEER = "http://127.0.0.1:2379", "http://127.0.0.1:2380"


def limits(host):
    """Where a host keeps the limits of its control groups."""
    return f"/run/weir/{host}.json"


def qmp(host):
    """How it is controlled."""
    return f"unix:/tmp/{host}.qmp"


def config(host):
    """The lines that write its config file."""
    return f"""
        cat >/tmp/{host}.toml <<END
[daemon]
qmp = "{qmp(host)}"
state = "/tmp/{host}.state"
cgroup-limits = "{limits(host)}"
[cluster]
name = "lab"
host = "{host}"
etcd = "{ETCD}"
control-groups = ["silver"]
END
    """


# What the scripts use: `start HOST` and its process in $pid_HOST, what the kernel has of a group,
# and waiting for that.
SHELL = f"""
    ip link set lo up
    device_number DISK

    # In a control group of its own, as a service has one.
    start() {{
        mkdir -p $cgroups/host-$1
        sh -c 'echo $$ >"$0" && exec "$@"' $cgroups/host-$1/cgroup.procs \\
            weir serve --config /tmp/$1.toml >>/tmp/$1.log 2>&1 &
        eval "pid_$1=$!"
        until [ -S /tmp/$1.qmp ]; do
            pause 0.1
            kill -0 $! || {{ cat /tmp/$1.log && return 1; }}
        done
    }}

    start_etcd() {{
        etcd --data-dir /tmp/etcd --listen-client-urls {ETCD} --advertise-client-urls {ETCD} \\
            --listen-peer-urls {PEER} --initial-advertise-peer-urls {PEER} --initial-cluster default={PEER} \\
            >/tmp/etcd.log 2>&1 &
        etcd=$!
        until wget -q -O /dev/null {ETCD}/health 2>/dev/null; do
            pause 0.2
            kill -0 $etcd || {{ cat /tmp/etcd.log && return 1; }}
        done
    }}

    # guard_of HOST: sets $guard to the process that takes back what is lent there
    guard_of() {{
        guard=
        while read -r pid; do
            # Its words, without what separates them.
            read -r words <"/proc/$pid/cmdline" || :
            case "$words" in *guard--limits/run/weir/$1.json) guard=$pid ;; esac
        done <$cgroups/cgroup.procs
    }}

    # rate GROUP: sets $rate to what it may write in a second, a large number without a limit
    rate() {{
        rate=999999999999
        while read -r number nothing w nothing; do
            if [ "$number" = "$device" ] && [ "$w" != wbps=max ]; then rate=${{w#wbps=}}; fi
        done <"$cgroups/$1/io.max"
    }}

    # wait_for NAME GROUP LOW HIGH: until the rate is from one to the other; the part of that name
    # has the seconds
    wait_for() {{
        now
        begin=${{now%.*}}${{now#*.}}
        until rate $2 && [ $rate -ge $3 ] && [ $rate -le $4 ]; do
            now
            if [ "${{now%.*}}${{now#*.}}" -gt $((begin + {LONG_SECONDS} * 100)) ]; then
                echo "$1: the rate of $2 is $rate, and not from $3 to $4"
                tail -n 12 /tmp/sums /tmp/one.log /tmp/two.log
                for host in one two; do
                    timeout 2 weir cluster status --json --qmp unix:/tmp/$host.qmp || true
                done
                return 1
            fi
            pause 0.05
        done
        now
        part $1
        echo $((${{now%.*}}${{now#*.}} - begin))
    }}

    # A rate that is the same before and after the other was read was there beside it.
    look_always() {{
        while :; do
            rate a
            first=$rate
            rate b
            second=$rate
            rate a
            now
            echo "$now $first $second $rate"
            pause 0.1
        done >>/tmp/sums
    }}
"""


class Lent:
    """The cases, on one disk that is faster than the limit."""

    def __init__(self, disk):
        self.guest = None  # set when it runs
        self.disk = disk

    def cases(self):
        """Name and function of each."""
        yield "two hosts, 8 MB/s together, stopped and killed", self.shared

    def limit(self, host, *options):
        """The line that sets or removes what a host's group shares."""
        device = ("--device", f"/dev/{self.disk.name}")
        return weir("cgroup", "limit", group(HOSTS[host]), *device, "--limits", limits(host), *options)

    def begun(self):
        """The lines up to where both hosts have a control group in the cluster's."""
        throttle = ("throttle", "silver", "--cluster", "--bps-write", RATE, "--hosts", 2, "--fallback-share", "10%")
        join = "\n".join(self.limit(host, "--group", "silver", "--cluster") for host in HOSTS)
        return f"""
            {SHELL.replace("DISK", self.disk.name)}
            {"".join(map(config, HOSTS))}
            rm -rf /tmp/etcd && : >/tmp/sums
            start_etcd
            start one
            start two
            until {weir(*throttle, "--qmp", qmp("one"))} >/tmp/throttle.log 2>&1; do
                pause 0.2
                kill -0 $pid_one || {{ cat /tmp/one.log && false; }}
            done
            {join}
            wait_for first a {SAFE} {RATE}
            wait_for joined b {SAFE} {RATE}
            look_always &
            looks=$!
            sample {self.disk.name} a b
        """

    def ended(self):
        """The lines that end all of it."""
        leave = "\n".join(f"{self.limit(host, '--remove')} || true" for host in HOSTS)
        return f"""
            kill $looks 2>/dev/null
            kill -CONT $pid_one $pid_two 2>/dev/null
            kill -TERM $pid_one $pid_two 2>/dev/null
            wait $pid_one $pid_two
            kill -KILL $etcd 2>/dev/null
            {leave}
            {streams.end(self.disk)}
            rmdir $cgroups/host-one $cgroups/host-two
            rm -rf /tmp/etcd /tmp/one.* /tmp/two.*
        """

    def shared(self):
        """One after another, all that may befall them."""
        disk = self.disk
        parts = self.guest.parts(
            f"""
                part begun
                {self.begun()}
                stream {disk.name} direct a
                wait_for alone a {MOST} {RATE}
                stream {disk.name} direct b
                wait_for half a {SAFE} {int(1.05 * HALF)}
                wait_for halves b {NEARLY_HALF} {RATE}
                part window
                {streams.window(disk, 3)}
                # The one that leads, as it was there first.
                part stop
                kill -STOP $pid_one
                wait_for stopped a {SAFE} {SAFE}
                wait_for other b {MOST} {RATE}
                part continue
                kill -CONT $pid_one
                wait_for continued a {NEARLY_HALF} {RATE}
                # All of its service, as a manager would: but its guard is not in there.
                part kill
                kill_group host-two
                wait_for killed b {SAFE} {SAFE}
                wait_for rest a {MOST} {RATE}
                start two
                wait_for started b {NEARLY_HALF} {RATE}
                # The one that follows, with another guard than its first.
                part guard
                guard_of two
                kill -KILL $guard
                until grep -q "starting another" /tmp/two.log; do pause 0.1; done
                kill -STOP $pid_two
                wait_for follower b {SAFE} {SAFE}
                wait_for leader a {MOST} {RATE}
                kill -CONT $pid_two
                wait_for follows b {NEARLY_HALF} {RATE}
                # Nobody is left to take it back but who is started again.
                part both
                guard_of two
                kill -KILL $guard $pid_two
                wait $pid_two || true
                rate b
                part left
                echo $rate
                start two
                wait_for settled b {SAFE} {SAFE}
                wait_for again b {NEARLY_HALF} {RATE}
                part etcd
                kill -KILL $etcd
                wait_for etcd_a a {SAFE} {SAFE}
                wait_for etcd_b b {SAFE} {SAFE}
                start_etcd
                wait_for back_a a {NEARLY_HALF} {RATE}
                wait_for back_b b {NEARLY_HALF} {RATE}
                part end
                kill -TERM $pid_one $pid_two
                wait $pid_one $pid_two || true
                rate a
                echo $rate
                rate b
                echo $rate
                sample {disk.name} a b
                part sums
                cat /tmp/sums
            """,
            self.ended(),
        )
        return self.checks(parts)

    @staticmethod
    def checks(parts):
        """What it should have been."""
        looks = [list(map(float, line.split())) for line in parts["sums"].splitlines() if line.count(" ") == 3]
        sums = [one + other for _, one, other, again in looks if one == again]
        rates = streams.Rates.of(parts["window"]).groups
        (first,), (last,) = streams.samples(parts["joined"]), streams.samples(parts["end"])
        passed = sum(last.groups) - sum(first.groups)
        seconds = last.seconds - first.seconds
        end = parts["end"].split()[:2]

        def took(name):
            return int(parts[name]) / 100

        ended = (
            ("stopped", "a leader that is stopped"),
            ("follower", "a follower that is stopped, with a second guard"),
            ("etcd_a", "one host without etcd"),
            ("etcd_b", "the other then"),
        )
        return [
            least("looks at both rates", len(sums), 100, unit="", scale=1),
            most("both rates in io.max together, the most", max(sums, default=RATE + 1), RATE, scale=1e6),
            most("what passes of both busy ones", sum(rates), 1.05 * RATE, scale=1e6),
            least("of the one that has less", min(rates), 0.9 * HALF, scale=1e6),
            most("what passed in all", passed, 1.02 * RATE * seconds, unit="MB", scale=1e6),
            most("a daemon that is killed: its part is taken back after", took("killed"), SOON_SECONDS, unit="s"),
            *(
                most(f"{what}: its part is taken back after", took(name), LEASE_SECONDS, unit="s")
                for name, what in ended
            ),
            least("what is left where the guard is killed too", int(parts["left"]), NEARLY_HALF, scale=1e6),
            fact("io.max when both have ended", end == [str(SAFE)] * 2, str(end), f"{SAFE} each"),
        ]
