"""Control groups on two hosts that share one limit: two daemons and an etcd in one guest, a control
group for each daemon, and the limits of both in io.max.

Daemons and etcd are stopped and killed. In every sample the sum of both rates in io.max is at most
the limit; unused quota moves to the second host.
"""

import streams
from commands import group, weir
from outcome import fact, least, most

RATE = 8_000_000
# Fallback share of each host.
FALLBACK = RATE // 10
# Rate of a busy host beside an idle one: everything except the idle host's fallback share, with a
# tolerance.
MOST = int(0.85 * RATE)
HALF = RATE // 2
NEARLY_HALF = int(0.95 * HALF)
# Length of a lease from its request on (docs/cluster.md), and of a sampling interval.
LEASE_SECONDS = 5
SOON_SECONDS = 1
# Time limit for an election and two leases on a busy machine; none takes half as long.
ELECTION_SECONDS = 40
HOSTS = {"one": "a", "two": "b"}
ETCD, PEER = "http://127.0.0.1:2379", "http://127.0.0.1:2380"


def limits(host):
    """File with the limits of a host's control groups."""
    return f"/run/weir/{host}.json"


def qmp(host):
    """Address of a host's control socket."""
    return f"unix:/tmp/{host}.qmp"


def config(host):
    """Shell code that writes a host's config file."""
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


# Shell functions: `start HOST` sets $pid_HOST; the limit of a group in io.max, and waiting for it.
SHELL = f"""
    ip link set lo up
    device_number DISK

    # In its own control group, as a service.
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

    # guard_of HOST: sets $guard to the process that withdraws the quota of that host
    guard_of() {{
        guard=
        while read -r pid; do
            # Its arguments, without the separating zeroes.
            read -r words <"/proc/$pid/cmdline" || :
            case "$words" in *guard--limits/run/weir/$1.json) guard=$pid ;; esac
        done <$cgroups/cgroup.procs
    }}

    # rate GROUP: sets $rate to its limit of written bytes per second, a large number without one
    rate() {{
        rate=999999999999
        while read -r number nothing w nothing; do
            if [ "$number" = "$device" ] && [ "$w" != wbps=max ]; then rate=${{w#wbps=}}; fi
        done <"$cgroups/$1/io.max"
    }}

    # wait_for NAME GROUP LOW HIGH: waits until the rate is between LOW and HIGH; the part NAME
    # contains the seconds
    wait_for() {{
        now
        begin=${{now%.*}}${{now#*.}}
        until rate $2 && [ $rate -ge $3 ] && [ $rate -le $4 ]; do
            now
            if [ "${{now%.*}}${{now#*.}}" -gt $((begin + {ELECTION_SECONDS} * 100)) ]; then
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

    # A rate that is equal before and after the second was read was in force at that moment.
    record_rates() {{
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


class Quota:
    """The cases, on one disk that is faster than the limit."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
        self.disk = disk

    def cases(self):
        """Name and function of each case."""
        yield "two hosts, 8 MB/s together, stopped and killed", self.shared

    def limit(self, host, *options):
        """Shell line that sets or removes the shared limit of a host's group."""
        device = ("--device", f"/dev/{self.disk.name}")
        return weir(
            "cgroup", "limit", group(HOSTS[host]), *device, "--limits", limits(host), *options
        )

    def prologue(self):
        """Shell code until both hosts have a control group with the cluster-wide limit."""
        throttle = (
            "throttle",
            "silver",
            "--cluster",
            "--bps-write",
            RATE,
            "--hosts",
            2,
            "--fallback-share",
            "10%",
        )
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
            wait_for first a {FALLBACK} {RATE}
            wait_for joined b {FALLBACK} {RATE}
            record_rates &
            recorder=$!
            sample {self.disk.name} a b
        """

    def epilogue(self):
        """Shell code that ends all processes."""
        leave = "\n".join(f"{self.limit(host, '--remove')} || true" for host in HOSTS)
        return f"""
            kill $recorder 2>/dev/null
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
        """All faults, one after another."""
        disk = self.disk
        parts = self.guest.parts(
            f"""
                part begun
                {self.prologue()}
                stream {disk.name} direct a
                wait_for alone a {MOST} {RATE}
                stream {disk.name} direct b
                wait_for half a {FALLBACK} {int(1.05 * HALF)}
                wait_for halves b {NEARLY_HALF} {RATE}
                part window
                {streams.window(disk, 3)}
                # The leader: the host that was started first.
                part stop
                kill -STOP $pid_one
                wait_for stopped a {FALLBACK} {FALLBACK}
                wait_for other b {MOST} {RATE}
                part continue
                kill -CONT $pid_one
                wait_for continued a {NEARLY_HALF} {RATE}
                # All of its service, as a service manager would; its guard is in another control group.
                part kill
                kill_group host-two
                wait_for killed b {FALLBACK} {FALLBACK}
                wait_for rest a {MOST} {RATE}
                start two
                wait_for started b {NEARLY_HALF} {RATE}
                # The follower, with its second guard.
                part guard
                guard_of two
                kill -KILL $guard
                until grep -q "starting another" /tmp/two.log; do pause 0.1; done
                kill -STOP $pid_two
                wait_for follower b {FALLBACK} {FALLBACK}
                wait_for leader a {MOST} {RATE}
                kill -CONT $pid_two
                wait_for follows b {NEARLY_HALF} {RATE}
                # Only a restart of the daemon can withdraw it.
                part both
                guard_of two
                kill -KILL $guard $pid_two
                wait $pid_two || true
                rate b
                part left
                echo $rate
                start two
                wait_for settled b {FALLBACK} {FALLBACK}
                wait_for again b {NEARLY_HALF} {RATE}
                part etcd
                kill -KILL $etcd
                wait_for etcd_a a {FALLBACK} {FALLBACK}
                wait_for etcd_b b {FALLBACK} {FALLBACK}
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
            self.epilogue(),
        )
        return self.checks(parts)

    @staticmethod
    def checks(parts):
        """Checks of the parts."""
        readings = [
            list(map(float, line.split()))
            for line in parts["sums"].splitlines()
            if line.count(" ") == 3
        ]
        sums = [
            first_rate + second_rate
            for _, first_rate, second_rate, again in readings
            if first_rate == again
        ]
        rates = streams.Rates.of(parts["window"]).groups
        (first,), (last,) = streams.samples(parts["joined"]), streams.samples(parts["end"])
        passed = sum(last.groups) - sum(first.groups)
        seconds = last.seconds - first.seconds
        end = parts["end"].split()[:2]

        def seconds_of(name):
            return int(parts[name]) / 100

        faults = (
            ("stopped", "a stopped leader"),
            ("follower", "a stopped follower, with a second guard"),
            ("etcd_a", "one host without etcd"),
            ("etcd_b", "the second host without etcd"),
        )
        return [
            least("samples of both rates", len(sums), 100, unit="", scale=1),
            most(
                "maximum of the sum of both rates in io.max",
                max(sums, default=RATE + 1),
                RATE,
                scale=1e6,
            ),
            most("rate of both busy groups together", sum(rates), 1.05 * RATE, scale=1e6),
            least("rate of the slower group", min(rates), 0.9 * HALF, scale=1e6),
            most("work admitted in total", passed, 1.02 * RATE * seconds, unit="MB", scale=1e6),
            most(
                "a killed daemon: its quota is withdrawn after",
                seconds_of("killed"),
                SOON_SECONDS,
                unit="s",
            ),
            *(
                most(
                    f"{what}: its quota is withdrawn after",
                    seconds_of(name),
                    LEASE_SECONDS,
                    unit="s",
                )
                for name, what in faults
            ),
            least(
                "remaining quota if the guard is killed too",
                int(parts["left"]),
                NEARLY_HALF,
                scale=1e6,
            ),
            fact(
                "io.max after the end of both daemons",
                end == [str(FALLBACK)] * 2,
                str(end),
                f"{FALLBACK} each",
            ),
        ]
