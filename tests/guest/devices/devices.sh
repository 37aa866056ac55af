# What scripts about block devices of the guest itself may use: weir as their server, files on them,
# load (devices.py puts it in front).

log=/tmp/weir.log
qmp=/run/weir.qmp

# serve OPTION…: weir, in the background, until it is ready; sets $weir
serve() {
    # What an earlier one has said is not there any more when it is looked for.
    : >$log
    RUST_BACKTRACE=1 weir serve --qmp unix:$qmp "$@" >$log 2>&1 &
    weir=$!
    until grep -q ' ready' $log; do
        pause 0.02
        if ! kill -0 $weir 2>/dev/null; then
            cat $log
            return 1
        fi
    done
}

# gone PROCESS: waits until it is not there any more, and says its status
gone() {
    wait "$1" || return
}

# take_over OPTION…: another weir, which takes over from the one that runs; sets $weir
take_over() {
    before=$weir
    : >$log.next
    RUST_BACKTRACE=1 weir serve --qmp unix:$qmp --takeover "$@" >$log.next 2>&1 &
    weir=$!
    until grep -q ' ready' $log.next; do
        pause 0.02
        if ! kill -0 $weir 2>/dev/null; then
            cat $log $log.next
            return 1
        fi
    done
    gone $before || { cat $log; return 1; }
    mv $log.next $log
}

# stop: ends weir as a service manager would
stop() {
    kill -TERM $weir
    gone $weir || { cat $log; return 1; }
}

# killed: ends weir as nobody should
killed() {
    kill -KILL $weir
    gone $weir || :
}

# ask COMMAND: over QMP; prints the answer
ask() {
    printf '{"execute":"qmp_capabilities"}\n%s\n' "$1" | socat -t 400 - UNIX-CONNECT:$qmp | sed -n 3p
}

# until_no DEVICE: waits until there is no such node
until_no() {
    while [ -e "$1" ]; do pause 0.02; done
}

# write_files DIRECTORY: some that stay, with their sums, and 6 MiB that go
write_files() (
    cd "$1"
    mkdir kept gone
    for number in 1 2 3 4 5 6; do
        dd if=/dev/urandom of=kept/$number bs=50000 count=$((number * 2)) 2>/dev/null
        dd if=/dev/urandom of=gone/$number bs=1M count=1 oflag=direct 2>/dev/null
    done
    cp -r kept copied
    md5sum kept/* copied/* >sums
    sync
)

# numbers DEVICE: starts the client that numbers what it writes (machines/numbered.rs)
numbers() {
    rm -f /tmp/stop /tmp/reports /tmp/numbered
    : >/tmp/reports
    exec 5</tmp/reports
    numbered write "$1" 0 8 32 /tmp/reports /tmp/stop >/tmp/numbered 2>&1 5<&- &
    numbered=$!
}

# runs PROCESS: whether it has not ended; one of ours that has, and was not waited for, is a Z there
runs() {
    read -r nothing nothing state nothing <"/proc/$1/stat" && [ "$state" != Z ]
} 2>/dev/null

# more_numbers COUNT: waits until so many rounds more were reported; starts no program, as it may
# wait for long
more_numbers() {
    while read -r nothing <&5; do :; done
    missing=$1
    while [ "$missing" -gt 0 ]; do
        if read -r nothing <&5; then
            missing=$((missing - 1))
        elif runs $numbered; then
            pause 0.02
        else
            cat /tmp/numbered $log
            return 1
        fi
    done
}

# end_numbers: has all of them read once more; prints how it went
end_numbers() {
    touch /tmp/stop
    gone $numbered || { cat /tmp/numbered; return 1; }
    cat /tmp/numbered
}

# check_numbers FILE: that the file, too, has them; by a loop device, as tmpfs has no direct I/O before
# Linux 6.6
check_numbers() {
    loop=$(losetup -f)
    losetup "$loop" "$1"
    numbered check "$loop" 0 8 32
    losetup -d "$loop"
}

# pidof_server: of the `weir serve` that `weir attach` has started
pidof_server() {
    grep -lz '^serve$' /proc/[0-9]*/cmdline | sed 's|/proc/\([0-9]*\)/.*|\1|'
}

# until_free DEVICE: waits until nobody serves it, by when one of ublk has gone
until_free() {
    case $1 in
        /dev/nbd*) until ! [ -e "/sys/block/${1#/dev/}/pid" ]; do pause 0.02; done ;;
        *) until_no "$1" ;;
    esac
}

# stuck: names programs that the kernel has wait where nothing ends them, and still does after a
# minute
stuck() {
    tries=0
    while :; do
        found=
        # The kernel's own threads have no memory, and wait as they like.
        for process in /proc/[0-9]*/status; do
            if grep -qs '^VmSize' $process && grep -qs '^State:.D' $process; then
                found="$found $(tr '\0' ' ' <${process%status}cmdline)"
            fi
        done
        [ -n "$found" ] && [ $tries -lt 600 ] || break
        tries=$((tries + 1))
        pause 0.1
    done
    [ -z "$found" ] || echo "stuck:$found"
}

# guards: how many processes guard devices
guards() {
    grep -lsz '^ublk-guard$' /proc/[0-9]*/cmdline | wc -l
}

# left: names what there still is of devices that were attached, and which of weir's processes are
# still there after ten seconds: a keeper lets go before it ends
left() {
    for path in /run/weir/attached/* /dev/ublkb* /dev/ublkc[0-9]* /sys/block/nbd*/pid; do
        [ ! -e "$path" ] || echo "$path"
    done
    tries=0
    while processes=$(grep -lsz '^serve$\|^attach-keeper$\|^ublk-guard$' /proc/[0-9]*/cmdline || :) && [ -n "$processes" ]; do
        [ $tries -lt 100 ] || { echo $processes; break; }
        tries=$((tries + 1))
        pause 0.1
    done
}
