# What every script in the guest may use (guest.py puts it in front): disks, streams in a control
# group, the watch, and reading what passed.
#
# Everything that is called while something is measured is the shell's own: a program that starts
# takes time from what is measured. Instants are seconds since boot, to 10 ms (/proc/uptime).

cgroups=/sys/fs/cgroup
# What `weir cgroup watch` and `weir probe` remember.
state=/run/weir/state
watch_log=/tmp/watch.log
# A pipe nobody writes to: `read -t` on it is a sleep without a program.
[ -p /tmp/never ] || mkfifo /tmp/never
exec 4<>/tmp/never

# pause SECONDS
pause() { read -r -t "$1" nothing <&4 || :; }

# now: sets $now
now() { read -r now nothing </proc/uptime; }

# load MODULE: one of those that are not there from the start, and what it needs
load() {
    for module in "/modules/$1"/*.ko; do
        name=${module##*/??-}
        [ -d "/sys/module/$(echo "${name%.ko}" | tr - _)" ] || insmod "$module"
    done
}

# part NAME: what is printed from here on belongs to this part (guest.py takes the output apart)
part() { echo "@PART $1"; }

# make_disk NAME MIB_PER_S REQUEST_KIB SIZE_MIB: /dev/NAME, a disk in memory with an empty ext4 at
# /mnt/NAME
make_disk() {
    configured=/sys/kernel/config
    [ -d $configured/nullb ] || mount -t configfs configfs $configured
    mkdir "$configured/nullb/$1"
    # Requests of a bounded size: null_blk hands out a fiftieth of a second's bytes at a time, and
    # one above that would never pass. For the same reason nothing is discarded. And a queue that
    # holds all parts of 32 larger ones: what is left outside of it waits for longer than its turn.
    for setting in memory_backed=1 mbps="$2" max_sectors=$(($3 * 2)) hw_queue_depth=1024 size="$4" power=1; do
        echo "${setting#*=}" >"$configured/nullb/$1/${setting%%=*}"
    done
    # Complete tables: to fill them later would be I/O that nobody asked for.
    mkfs.ext4 -q -N 1024 -J size=8 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 "/dev/$1"
    mkdir -p "/mnt/$1"
    mount -t ext4 "/dev/$1" "/mnt/$1"
}

# device_number DISK: sets $device to MAJOR:MINOR
device_number() { read -r device <"/sys/block/$1/dev"; }

# written FILE DEVICE: sets $written to the bytes an io.stat says were written on a device
# (MAJOR:MINOR), 0 if it says nothing
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

# sample DISK GROUP…: one line, the instant, the bytes written to the disk, and those that each
# group's io.stat has
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

# sample_for SECONDS INTERVAL DISK GROUP…: samples until so many seconds have passed
sample_for() {
    length=$1 interval=$2
    shift 2
    now
    until=$((${now%.*} + length))${now#"${now%.*}"}
    # Both have two digits behind the point: without it, they compare as numbers.
    while now && [ "${now%.*}${now#*.}" -lt "${until%.*}${until#*.}" ]; do
        sample "$@"
        pause "$interval"
    done
    sample "$@"
}

# seconds_until SECONDS FILE TEXT: prints how many passed until the first line of FILE had TEXT in
# it; SECONDS and more if it did not in that time. There may be no such file at first.
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

# kill_group GROUP…: ends all that runs there, and waits until it has
kill_group() {
    for group in "$@"; do
        echo 1 >"$cgroups/$group/cgroup.kill"
        while read -r nothing occupied <"$cgroups/$group/cgroup.events" && [ "$occupied" = 1 ]; do pause 0.02; done
    done
}

# stream DISK MODE GROUP: starts writing without an end, MODE is direct or cached, to a file of the
# group's own: what a file's pages are charged to is who wrote them first. One write is as large as
# keeps the processor idle at the disk's speed, and small beside what passes in a window.
stream() {
    rm -f "/mnt/$1/$3"
    flag=
    if [ "$2" = direct ]; then flag=oflag=direct; fi
    in_group "$3" dd if=/dev/zero of="/mnt/$1/$3" bs=256k count=100000000 $flag 2>/dev/null &
}

# end_streams DISK GROUP…: ends them, and waits until nothing of them is on its way to the disk
end_streams() {
    disk=$1
    shift
    kill_group "$@"
    for group in "$@"; do rm -f "/mnt/$disk/$group"; done
    sync
}

# watch_start [FILTER]: starts `weir cgroup watch` in a control group of its own, and waits until it
# is ready
watch_start() {
    mkdir -p $cgroups/watch
    # Not with in_group: in the background, that would leave the number of a shell.
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
            echo "the watch does not end; its state, where it is in the kernel, and its log:"
            head -n 3 /proc/$watch/status
            cat /proc/$watch/task/*/stack
            tail -n 20 $watch_log
            kill -KILL $watch
            return 1
        fi
    done
}
