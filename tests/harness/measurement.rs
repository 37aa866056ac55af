//! Measurements on a machine that does other work too: made one at a time, tried again where one misses, and not judged where the machine stood
//! still in most of them.
//!
//! A thread beside each measurement sees whether it did. What the kernel tells of time that the host took (`steal` of proc_stat(5)) says less: it has
//! been seen at 57 % while every rate was within 4 %.

use std::{
    fmt::Debug,
    io::{Write as _, stderr},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

/// How often a test that measures tries: other work of the machine may spoil any one measurement, and a fault of weir spoils all.
pub(crate) const ATTEMPTS: usize = 10;

/// A thread that wants to run again after this long is late by less than [`STILL`] on a machine that is merely busy.
const WINK: Duration = Duration::from_millis(1);
/// What a limit makes up for: its bucket holds a tenth of a second's worth, and a client's requests in flight some 30 ms.
const STILL: Duration = Duration::from_millis(20);
/// The part of a measurement in which the machine may stand still, if the measurement is to say something.
const MOST_STILL: f64 = 0.03;

/// No other test measures as long as it is there.
pub(crate) struct Alone(#[allow(dead_code, reason = "it is held")] MutexGuard<'static, ()>);

/// Keeps tests that measure from disturbing each other: each holds this while it does.
pub(crate) fn one_at_a_time() -> Alone {
    static MEASURING: Mutex<()> = Mutex::new(());
    // One that failed has nothing to leave half done.
    Alone(MEASURING.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Alone {
    /// Measures up to [`ATTEMPTS`] times until it is as expected. Panics with all that was measured if it never is, unless the machine stood
    /// still in more than half of the attempts: that one cannot judge, which is said, and the last is returned.
    ///
    /// What no machine can excuse belongs into `measure`, as an assertion.
    #[track_caller]
    pub(crate) fn measured<T: Debug>(
        &self,
        expected: &str,
        mut measure: impl FnMut() -> T,
        is_expected: impl Fn(&T) -> bool,
    ) -> T {
        let (mut all, mut spoilt) = (Vec::new(), 0);
        for _ in 0..ATTEMPTS {
            let (seen, still) = watched(&mut measure);
            if is_expected(&seen) {
                return seen;
            }
            spoilt += usize::from(still > MOST_STILL);
            all.push(seen);
        }
        assert!(2 * spoilt > ATTEMPTS, "{all:.1?} instead of {expected}");
        // Not by a macro: the test framework keeps what a test that passes prints, and who runs it is to know.
        let _ = writeln!(
            stderr(),
            "{}: not judged, as the machine stood still: {all:.1?} instead of {expected}",
            thread::current().name().unwrap_or("a test")
        );
        all.pop().expect("it was tried")
    }
}

/// What is measured, and the part of that time in which the machine stood still.
fn watched<T>(measure: impl FnOnce() -> T) -> (T, f64) {
    let (over, is_over) = mpsc::channel();
    thread::scope(|scope| {
        let watch = scope.spawn(move || part_still(&is_over));
        let seen = measure();
        // Also where it panics.
        drop(over);
        (seen, watch.join().expect("it only looks at the clock"))
    })
}

/// The part of the time, until the other end is gone, in which this thread could not run.
fn part_still(is_over: &Receiver<()>) -> f64 {
    let began = Instant::now();
    let mut still = Duration::ZERO;
    loop {
        let before = Instant::now();
        if is_over.recv_timeout(WINK) != Err(RecvTimeoutError::Timeout) {
            return still.as_secs_f64() / began.elapsed().as_secs_f64();
        }
        let late = before.elapsed().saturating_sub(WINK);
        still += if late > STILL { late } else { Duration::ZERO };
    }
}
