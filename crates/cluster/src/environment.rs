//! Inputs from outside: clocks and random numbers.

use nix::time::{ClockId, clock_gettime};
use policy::time::{Duration, Instant};

/// Time of a clock that runs during suspend.
pub(super) fn now() -> Instant {
    read(ClockId::CLOCK_BOOTTIME)
}

/// Time that this machine was suspended since its boot. Preemption between the two readings makes
/// it smaller, never larger.
pub(super) fn suspended_time() -> Duration {
    let with_sleep = now();
    with_sleep - read(ClockId::CLOCK_MONOTONIC)
}

fn read(clock: ClockId) -> Instant {
    // Both clocks exist in every supported kernel.
    let time = clock_gettime(clock).expect("a clock of the boot");
    Instant::from_nanos(time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned())
}

/// Random number for identifiers and jitter.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // A failure is ignored, and the number may then be 0: nothing here is secret, and two equal
    // nonces matter only if a restored etcd reuses a revision or a number.
    let _ = openssl::rand::rand_bytes(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Nanoseconds since 1970 by the wall clock.
pub(super) fn wall_clock_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
