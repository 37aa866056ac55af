#!/bin/busybox sh
# In the guest: attaches an NBD export with the kernel's client and uses it as a disk.
#
# Usage: client.sh SERVER PORT EXPORT CONNECTIONS
#
# Every step that writes reads back past the guest's page cache, and prints that it is done. Exit
# status 0 after the last one; otherwise 1, and the reason. Never relies on the previous content of
# the export, which must be 32 MiB at least.
SERVER=$1 PORT=$2 EXPORT=$3 CONNECTIONS=$4

fail() { dmesg | tail -n 15; echo "$*"; exit 1; }

# QEMU's user-mode network: its addresses are fixed, so no DHCP client is needed.
ip link set lo up
ip link set eth0 up || fail "no network card"
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2

disk=/dev/nbd0
attach() {
    nbd-client "$SERVER" "$PORT" $disk -N "$EXPORT" -C "$CONNECTIONS" </dev/null || fail "nbd-client could not attach"
    # The size becomes visible before the first read of the partition table.
    size=$(cat /sys/block/nbd0/size)
    [ "$size" -ge 65536 ] || fail "the disk has $size sectors, at least 65536 are needed"
}
sum() { dd if=$disk bs=4096 skip="$1" count="$2" iflag=direct 2>/dev/null | md5sum | cut -d' ' -f1; }
expect() { [ "$2" = "$3" ] || fail "$1: read $3 where $2 was written"; }

# Write 2 MiB at 4 MiB, flush, read back bypassing the page cache.
attach
dd if=/dev/urandom of=/tmp/pattern bs=4096 count=512 2>/dev/null
pattern=$(md5sum /tmp/pattern | cut -d' ' -f1)
dd if=/tmp/pattern of=$disk bs=1M seek=4 conv=notrunc oflag=direct 2>/dev/null || fail "direct write"
sync
expect "direct write" "$pattern" "$(sum 1024 512)"
echo "step direct write: ok"

# The same through the page cache: many requests in flight at write-back, then a flush.
dd if=/tmp/pattern of=$disk bs=4096 seek=4096 conv=notrunc,fsync 2>/dev/null || fail "buffered write"
expect "buffered write" "$pattern" "$(sum 4096 512)"
echo "step buffered write: ok"

# A discard must not affect its neighbours. The content of the discarded range is undefined.
[ "$(cat /sys/block/nbd0/queue/discard_max_bytes)" -gt 0 ] || fail "the export offers no discard"
dd if=/tmp/pattern of=$disk bs=1M seek=24 conv=notrunc oflag=direct 2>/dev/null
blkdiscard -o $((24 * 1048576 + 524288)) -l 1048576 $disk || fail "blkdiscard"
before=$(dd if=/tmp/pattern bs=4096 count=128 2>/dev/null | md5sum | cut -d' ' -f1)
after=$(dd if=/tmp/pattern bs=4096 skip=384 2>/dev/null | md5sum | cut -d' ' -f1)
expect "before the discard" "$before" "$(sum 6144 128)"
expect "after the discard" "$after" "$(sum 6528 128)"
echo "step discard: ok"

# Detach and attach again: flushed data is still present.
nbd-client -d $disk || fail "nbd-client could not detach"
for wait in 1 2 3 4 5 6 7 8 9 10; do
    [ -e /sys/block/nbd0/pid ] || break
    usleep 100000
done
attach
expect "after attaching again" "$pattern" "$(sum 1024 512)"
nbd-client -d $disk || fail "nbd-client could not detach"
echo "step attached again: ok"
