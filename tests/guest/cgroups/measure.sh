# What every script in the guest may use (guest.py puts it in front): starting streams in a control group, and reading what passed.
#
# Everything that is called while something is measured is the shell's own: to start a program takes 30 ms of the emulated
# processor, and whole samples with the shell's `read` a few. Instants are seconds since boot, to 10 ms (/proc/uptime).

cgroups=/sys/fs/cgroup
# A pipe nobody writes to: `read -t` on it is a sleep without a program.
[ -p /tmp/never ] || mkfifo /tmp/never
exec 4<>/tmp/never

# pause SECONDS
pause() { read -r -t "$1" nothing <&4 || :; }

# now: sets $now
now() { read -r now nothing </proc/uptime; }

# written FILE DEVICE: sets $written to the bytes an io.stat says were written on a device (MAJOR:MINOR), 0 if it says nothing
written() {
    written=0
    while read -r number rbytes wbytes nothing; do
        if [ "$number" = "$2" ] && [ -n "$wbytes" ]; then written=${wbytes#wbytes=}; fi
    done <"$1"
}

# on_disk NAME: sets $on_disk to the bytes written to a disk, by its own statistics (field 7 is sectors of 512 bytes)
on_disk() {
    read -r nothing nothing nothing nothing nothing nothing sectors nothing <"/sys/block/$1/stat"
    on_disk=$((sectors * 512))
}

# sample DISK DEVICE GROUP…: one line, the instant, the bytes written to the disk, and those that each group's io.stat has
sample() {
    disk=$1 device=$2
    shift 2
    now
    on_disk "$disk"
    line="$now $on_disk"
    for group in "$@"; do
        written "$cgroups/$group/io.stat" "$device"
        line="$line $written"
    done
    echo "$line"
}

# sample_for SECONDS INTERVAL DISK DEVICE GROUP…: samples until so many seconds have passed
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
