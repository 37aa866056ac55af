# Functions for scripts about block devices of the guest: weir as their server, files on them, load
# (devices.py prepends this file).

log=/tmp/weir.log
qmp=/run/weir.qmp

# serve OPTION…: starts weir in the background and waits until it is ready; sets $weir
serve() {
    # Empty the log, so that an earlier `ready` is not found.
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

# wait_for_exit PROCESS: waits for its end; prints its status
wait_for_exit() {
    wait "$1" || return
}

# upgrade OPTION…: upgrades the running weir; sets $weir
upgrade() {
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
    wait_for_exit $before || { cat $log; return 1; }
    mv $log.next $log
}

# stop: ends weir as a service manager would
stop() {
    kill -TERM $weir
    wait_for_exit $weir || { cat $log; return 1; }
}

# kill_weir: kills weir with SIGKILL
kill_weir() {
    kill -KILL $weir
    wait_for_exit $weir || :
}

# run_qmp COMMAND: sends a command over QMP; prints the reply
run_qmp() {
    printf '{"execute":"qmp_capabilities"}\n%s\n' "$1" | socat -t 400 - UNIX-CONNECT:$qmp | sed -n 3p
}

# until_removed DEVICE: waits until the node is gone
until_removed() {
    while [ -e "$1" ]; do pause 0.02; done
}

# write_files DIRECTORY: files that stay, with their checksums, and 6 MiB that are deleted
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

# start_numbers DEVICE: starts the client that numbers its writes (machines/numbered.rs)
start_numbers() {
    rm -f /tmp/stop /tmp/reports /tmp/numbered
    : >/tmp/reports
    exec 5</tmp/reports
    numbered write "$1" 0 8 32 /tmp/reports /tmp/stop >/tmp/numbered 2>&1 5<&- &
    numbered=$!
}

# is_running PROCESS: true until it has ended; an unreaped child is a zombie (Z)
is_running() {
    read -r nothing nothing state nothing <"/proc/$1/stat" && [ "$state" != Z ]
} 2>/dev/null

# more_numbers COUNT: waits for this many further rounds; starts no program, because it may wait
# long
more_numbers() {
    while read -r nothing <&5; do :; done
    missing=$1
    while [ "$missing" -gt 0 ]; do
        if read -r nothing <&5; then
            missing=$((missing - 1))
        elif is_running $numbered; then
            pause 0.02
        else
            cat /tmp/numbered $log
            return 1
        fi
    done
}

# end_numbers: verifies everything once more; prints the result
end_numbers() {
    touch /tmp/stop
    wait_for_exit $numbered || { cat /tmp/numbered; return 1; }
    cat /tmp/numbered
}

# check_numbers FILE: verifies the file too; over a loop device, because tmpfs lacks direct I/O
# before Linux 6.6
check_numbers() {
    loop=$(losetup -f)
    losetup "$loop" "$1"
    numbered check "$loop" 0 8 32
    losetup -d "$loop"
}

# pidof_server: PID of the `weir serve` started by `weir attach`
pidof_server() {
    grep -lz '^serve$' /proc/[0-9]*/cmdline | sed 's|/proc/\([0-9]*\)/.*|\1|'
}

# until_free DEVICE: waits until no process serves it; a ublk device is then removed
until_free() {
    case $1 in
        /dev/nbd*) until ! [ -e "/sys/block/${1#/dev/}/pid" ]; do pause 0.02; done ;;
        *) until_removed "$1" ;;
    esac
}

# stuck: names programs in uninterruptible sleep for a minute
stuck() {
    tries=0
    while :; do
        found=
        # Kernel threads have no VmSize and may sleep.
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

# guards: number of processes that guard devices
guards() {
    grep -lsz '^ublk-guard$' /proc/[0-9]*/cmdline | wc -l
}

# leftovers: names remaining devices of attachments, and weir's processes that still exist after
# ten seconds: a keeper releases its device before it ends
leftovers() {
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
