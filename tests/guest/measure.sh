# Functions for every script in the guest (guest.py prepends this file): disks, streams in a control
# group, the watch, and samples.
#
# Everything that is called during a measurement is a builtin of the shell: starting a program would
# take time from it. Instants are seconds since boot, to 10 ms (/proc/uptime).

cgroups=/sys/fs/cgroup
# State of `weir cgroup watch` and `weir probe`.
state=/run/weir/state
watch_log=/tmp/watch.log
# A pipe without a writer: `read -t` on it sleeps without a program.
[ -p /tmp/never ] || mkfifo /tmp/never
exec 4<>/tmp/never

# pause SECONDS
pause() { read -r -t "$1" nothing <&4 || :; }

# now: sets $now
now() { read -r now nothing </proc/uptime; }

# load MODULE: loads a module that is not loaded from the start, and its dependencies
load() {
    for module in "/modules/$1"/*.ko; do
        name=${module##*/??-}
        [ -d "/sys/module/$(echo "${name%.ko}" | tr - _)" ] || insmod "$module"
    done
}

# part NAME: later output belongs to this part (guest.py splits the output)
part() { echo "@PART $1"; }

# make_disk NAME MIB_PER_S REQUEST_KIB SIZE_MIB: /dev/NAME, a disk in memory with an empty ext4 at
# /mnt/NAME
make_disk() {
    configured=/sys/kernel/config
    [ -d $configured/nullb ] || mount -t configfs configfs $configured
    mkdir "$configured/nullb/$1"
    # Requests of a bounded size: null_blk hands out a fiftieth of a second's bytes at a time, and a
    # larger request would never pass. For the same reason nothing is discarded. The queue must hold
    # all parts of 32 larger requests: those outside of it wait for longer than their turn.
    for setting in memory_backed=1 mbps="$2" max_sectors=$(($3 * 2)) hw_queue_depth=1024 size="$4" power=1; do
        echo "${setting#*=}" >"$configured/nullb/$1/${setting%%=*}"
    done
    # Complete tables: lazy initialization would cause additional I/O.
    mkfs.ext4 -q -N 1024 -J size=8 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 "/dev/$1"
    mkdir -p "/mnt/$1"
    mount -t ext4 "/dev/$1" "/mnt/$1"
}

# device_number DISK: sets $device to MAJOR:MINOR
device_number() { read -r device <"/sys/block/$1/dev"; }

# written FILE DEVICE: sets $written to the bytes written to a device (MAJOR:MINOR) according to an
# io.stat, 0 without an entry
written() {
    written=0
    while read -r number rbytes wbytes nothing; do
        if [ "$number" = "$2" ] && [ -n "$wbytes" ]; then written=${wbytes#wbytes=}; fi
    done <"$1"
}

# on_disk NAME: sets $on_disk to the bytes written to a disk, by its own statistics (field 7 is
# sectors of 512 bytes)
on_disk() {
    read -r nothing nothing nothing nothing nothing nothing sectors nothing <"/sys/block/$1/stat"
    on_disk=$((sectors * 512))
}

# sample DISK GROUP…: prints one line: the instant, the bytes written to the disk, and those of each
# group's io.stat
sample() {
    now
    on_disk "$1"
    device_number "$1"
    line="$now $on_disk"
    shift
    for group in "$@"; do
        written "$cgroups/$group/io.stat" "$device"
        line="$line $written"
    done
    echo "$line"
}

# sample_for SECONDS INTERVAL DISK GROUP…: samples for this time
sample_for() {
    length=$1 interval=$2
    shift 2
    now
    until=$((${now%.*} + length))${now#"${now%.*}"}
    # Both have two decimals: without the point, they compare as integers.
    while now && [ "${now%.*}${now#*.}" -lt "${until%.*}${until#*.}" ]; do
        sample "$@"
        pause "$interval"
    done
    sample "$@"
}

# seconds_until SECONDS FILE TEXT: prints the seconds until the first line of FILE contained TEXT;
# SECONDS or more if it did not in that time. The file may not exist at first.
seconds_until() {
    now
    begin=${now%.*}${now#*.}
    until { read -r line <"$2"; } 2>/dev/null && [ "${line#*"$3"}" != "$line" ]; do
        now
        [ "${now%.*}${now#*.}" -lt $((begin + $1 * 100)) ] || break
        pause 0.02
    done
    now
    echo "$((${now%.*}${now#*.} - begin))" | sed 's/^\(.\)$/0\1/; s/\(.*\)\(..\)$/0\1.\2/'
}

# in_group GROUP COMMAND…: runs it as a member of that group from its first instruction on
in_group() {
    where=$cgroups/$1/cgroup.procs
    shift
    sh -c 'echo $$ >"$0" && exec "$@"' "$where" "$@"
}

# kill_group GROUP…: kills all processes of the groups, and waits for their end
kill_group() {
    for group in "$@"; do
        echo 1 >"$cgroups/$group/cgroup.kill"
        while read -r nothing occupied <"$cgroups/$group/cgroup.events" && [ "$occupied" = 1 ]; do pause 0.02; done
    done
}

# stream DISK MODE GROUP: starts an endless writer, MODE is direct or cached, to the group's own
# file: the pages of a file are charged to its first writer. The size of a write keeps the processor
# idle at the disk's speed, and is small relative to the bytes of a window.
stream() {
    rm -f "/mnt/$1/$3"
    flag=
    if [ "$2" = direct ]; then flag=oflag=direct; fi
    in_group "$3" dd if=/dev/zero of="/mnt/$1/$3" bs=256k count=100000000 $flag 2>/dev/null &
}

# end_streams DISK GROUP…: ends them, and waits until all their data is on the disk
end_streams() {
    disk=$1
    shift
    kill_group "$@"
    for group in "$@"; do rm -f "/mnt/$disk/$group"; done
    sync
}

# watch_start [FILTER]: starts `weir cgroup watch` in its own control group, and waits until it is
# ready
watch_start() {
    mkdir -p $cgroups/watch
    # Not with in_group: in the background, $! would be the PID of a shell.
    sh -c 'echo $$ >"$0" && exec "$@"' $cgroups/watch/cgroup.procs \
        weir cgroup watch --state $state --log "${1:-cgroup=trace}" >$watch_log 2>&1 &
    watch=$!
    until grep -q ready $watch_log; do
        pause 0.05
        if ! kill -0 $watch; then
            cat $watch_log
            return 1
        fi
    done
}

# watch_stop: ends it as a service manager would
watch_stop() {
    kill -TERM $watch
    tries=0
    while kill -0 $watch 2>/dev/null; do
        pause 0.05
        tries=$((tries + 1))
        if [ $tries -gt 2000 ]; then
            echo "the watch does not end; its state, its kernel stack, and its log:"
            head -n 3 /proc/$watch/status
            cat /proc/$watch/task/*/stack
            tail -n 20 $watch_log
            kill -KILL $watch
            return 1
        fi
    done
}
