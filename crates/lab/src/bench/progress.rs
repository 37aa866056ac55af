//! A progress bar with the current rate, on standard error if that is a terminal.
//!
//! Drawn by a separate thread: a busy load keeps its reactor occupied.

use std::{
    io::{IsTerminal as _, stderr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use console::{figures, progress::bar};

use crate::load::{CompletedCount, LoadJob};

const TICK: Duration = Duration::from_millis(250);
const OF_REQUESTS: &str = "{msg:>14} {wide_bar} {pos}/{len}";
const OF_TIME: &str = "{msg:>14} {wide_bar} {elapsed}";

#[derive(Debug, Default)]
pub(super) struct BenchProgress(Option<(Arc<AtomicBool>, JoinHandle<()>)>);

impl BenchProgress {
    /// `counts` are the counters of the jobs that share the requests of the load.
    pub(super) fn begin(silent: bool, job: &LoadJob, counts: &[CompletedCount]) -> Self {
        if silent || !stderr().is_terminal() {
            return Self::default();
        }
        let counts = counts.to_vec();
        let time = job.runtime.map(|runtime| job.ramp + runtime);
        let requests = job.load.count;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let draw = move || draw(&counts, requests, time, &seen);
        let thread = thread::Builder::new().name("progress".to_owned()).spawn(draw);
        Self(thread.ok().map(|thread| (stop, thread)))
    }
}

impl Drop for BenchProgress {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            stop.store(true, Ordering::Relaxed);
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn draw(counts: &[CompletedCount], requests: u64, time: Option<Duration>, stop: &AtomicBool) {
    let length = time.map_or(requests, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let bar = bar(if time.is_some() { OF_TIME } else { OF_REQUESTS }, length);
    let began = Instant::now();
    let (mut at, mut before) = (began, 0);
    while !stop.load(Ordering::Relaxed) {
        let answered: u64 = counts.iter().map(CompletedCount::get).sum();
        let rate = (answered - before) as f64 / at.elapsed().as_secs_f64().max(1e-9);
        (at, before) = (Instant::now(), answered);
        bar.set_message(format!("{} IOPS", figures::count(rate)));
        let elapsed = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        bar.set_position(if time.is_some() { elapsed.min(length) } else { answered });
        thread::park_timeout(TICK);
    }
    bar.finish_and_clear();
}
