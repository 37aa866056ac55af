//! What decisions take from outside: the time, and numbers that nobody foresees.

use nix::time::{ClockId, clock_gettime};
use policy::time::{Duration, Instant};

/// The time by a clock that goes on while the machine sleeps.
pub(super) fn now() -> Instant {
    read(ClockId::CLOCK_BOOTTIME)
}

/// How long this machine has slept since its boot; or less, where this thread has to wait between
/// two looks, and never more.
pub(super) fn slept() -> Duration {
    let with_sleep = now();
    with_sleep - read(ClockId::CLOCK_MONOTONIC)
}

fn read(clock: ClockId) -> Instant {
    // Every kernel that weir runs on has both.
    let time = clock_gettime(clock).expect("a clock of the boot");
    Instant::from_nanos(time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned())
}

/// Drawn at random.
pub(super) fn draw() -> u64 {
    let mut bytes = [0; 8];
    // What it leaves where it fails is another number too.
    let _ = openssl::rand::rand_bytes(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Nanoseconds since 1970, by this machine's clock.
pub(super) fn clock() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
