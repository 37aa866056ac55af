//! Measurements on a machine that does other work too: made one at a time, tried again where one misses, and not judged where the host that the
//! machine runs on took its processors away for nearly all of them.

use std::{
    fmt::Debug,
    fs,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// How often a test that measures tries: other work of the machine may spoil any one measurement, and a fault of weir spoils all.
pub(crate) const ATTEMPTS: usize = 10;

/// How much of the processors' time the host may take from a measurement that says something.
const MOST_STOLEN: f64 = 0.05;

/// No other test measures as long as it is there.
pub(crate) struct Alone(#[allow(dead_code, reason = "it is held")] MutexGuard<'static, ()>);

/// Keeps tests that measure from disturbing each other: each holds this while it does.
pub(crate) fn one_at_a_time() -> Alone {
    static MEASURING: Mutex<()> = Mutex::new(());
    // One that failed has nothing to leave half done.
    Alone(MEASURING.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Alone {
    /// Measures up to [`ATTEMPTS`] times until it is as expected. Panics with all that was measured if it never is, unless the processors were
    /// away for more than half of the attempts: that machine cannot judge, which is said, and the last is returned.
    ///
    /// What no machine can excuse belongs into `measure`, as an assertion.
    #[track_caller]
    #[allow(clippy::print_stderr, reason = "who runs the tests is to know what was not judged")]
    pub(crate) fn measured<T: Debug>(
        &self,
        expected: &str,
        mut measure: impl FnMut() -> T,
        is_expected: impl Fn(&T) -> bool,
    ) -> T {
        let (mut all, mut robbed) = (Vec::new(), 0);
        for _ in 0..ATTEMPTS {
            let (began, before) = (Instant::now(), stolen_seconds());
            let seen = measure();
            if is_expected(&seen) {
                return seen;
            }
            let most = MOST_STOLEN * began.elapsed().as_secs_f64() * processors();
            robbed += usize::from(stolen_seconds() - before > most);
            all.push(seen);
        }
        assert!(2 * robbed > ATTEMPTS, "{all:.1?} instead of {expected}");
        eprintln!("not judged, as the host took the processors away: {all:.1?} instead of {expected}");
        all.pop().expect("it was tried")
    }
}

/// Time that the host gave to others while this machine had work, of all processors since the start: proc_stat(5), in hundredths of a second. None
/// where the host does not say.
fn stolen_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/stat").expect("every Linux has it");
    let stolen = stat.lines().next().and_then(|all| all.split_whitespace().nth(8));
    stolen.and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or(0.0) / 100.0
}

fn processors() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64)
}
