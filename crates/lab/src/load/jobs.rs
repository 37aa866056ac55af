//! Several concurrent jobs, each on a separate thread with a reactor (and a connection or queue to
//! a server).
//!
//! They start together once all are ready, and end together if one fails. A single job runs on the
//! caller's thread, as a daemon's requests do.

use std::{
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow};
use async_channel::{Receiver, Sender};
use block::disk::Disk;
use console::NO_RING;
use export::{
    nbd::client::{HandshakeOptions, NbdClient, NbdEndpoint, connect},
    vhost_user_blk,
};
use policy::time::Duration;
use reactor::{PollingMode, ReactorWorker, guest::driver::DriverQueue};

use super::{FailedLoad, LoadJob, LoadOutcome, LoadStop, LoadTarget, run_job};

pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub(crate) enum LoadSource {
    Disk(Arc<Disk>),
    Nbd {
        server: NbdEndpoint,
        options: HandshakeOptions,
    },
    /// One queue for each job.
    VhostUser(Arc<Mutex<Vec<DriverQueue>>>),
}

#[derive(Debug)]
pub(crate) struct JobResult {
    pub(crate) outcome: LoadOutcome,
    pub(crate) failed: Option<anyhow::Error>,
}

enum JobEvent {
    Ready,
    Ended(Box<JobResult>),
}

impl LoadSource {
    pub(crate) async fn client(
        server: &NbdEndpoint,
        options: &HandshakeOptions,
    ) -> anyhow::Result<NbdClient> {
        Ok(connect(server, options, CONNECT_TIMEOUT).await?)
    }

    async fn open(self) -> anyhow::Result<LoadTarget> {
        match self {
            Self::Disk(disk) => Ok(disk.into()),
            Self::Nbd { server, options: wanted } => {
                Ok(LoadTarget::Nbd(Rc::new(Self::client(&server, &wanted).await?)))
            }
            Self::VhostUser(queues) => {
                let queue = queues.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let queue = queue.context("a job has no queue")?;
                Ok(LoadTarget::VhostUser(Rc::new(vhost_user_blk::client::VhostUserClient::start(queue)?)))
            }
        }
    }
}

/// Runs all jobs. `begin` is called once all are ready; if it fails, no request is sent.
pub(crate) async fn run_jobs(
    jobs: Vec<LoadJob>,
    source: LoadSource,
    begin: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<JobResult> {
    let count = jobs.len();
    // Each job sends two messages, so no job ever waits for the collector.
    let (sender, events) = async_channel::bounded(2 * count.max(1));
    let (opener, opened) = async_channel::bounded(1);
    let stop = jobs.first().map(|job| job.stop.clone()).unwrap_or_default();
    let mut workers = Vec::new();
    if count == 1 {
        // On this reactor: a daemon's worker also serves all its requests on one thread.
        let alone =
            jobs.into_iter().map(|job| open_and_run(job, source.clone(), sender.clone(), opened.clone()));
        alone.for_each(reactor::spawn);
    } else {
        for (number, job) in jobs.into_iter().enumerate() {
            let worker = ReactorWorker::start(&format!("job {number}"), PollingMode::Off).context(NO_RING)?;
            let (source, sender, opened) = (source.clone(), sender.clone(), opened.clone());
            worker.spawn(move || open_and_run(job, source, sender, opened));
            workers.push(worker);
        }
    }
    // Otherwise a job that panics would leave `gather` waiting for ever.
    drop((sender, opened));
    let result = gather(count, &events, &opener, begin, || _ = stop.stop()).await;
    for worker in workers {
        worker.stop().context("a job's thread ended with an error")?;
    }
    Ok(result)
}

/// Collects the results. The jobs begin to send requests once all are ready; `fail` is called if
/// one fails.
async fn gather(
    count: usize,
    events: &Receiver<JobEvent>,
    opener: &Sender<()>,
    begin: impl FnOnce() -> anyhow::Result<()>,
    fail: impl Fn(),
) -> JobResult {
    let empty = LoadOutcome { slowest: u64::MAX, ..LoadOutcome::default() };
    let mut sum = JobResult { outcome: empty, failed: None };
    let mut begin = Some(begin);
    let (mut ready, mut ended) = (0, 0);
    while ended < count {
        match events.recv().await {
            Ok(JobEvent::Ready) => ready += 1,
            Ok(JobEvent::Ended(ran)) => {
                ended += 1;
                sum.add(*ran);
            }
            Err(_) => break,
        }
        // The measurement starts only when all jobs can send: connecting takes different times.
        if ready == count
            && let Some(begin) = begin.take()
        {
            sum.failed = begin().err();
        }
        if sum.failed.is_some() {
            fail();
        }
        // Jobs that failed to start count as well; otherwise ready jobs would never begin. Closing
        // the channel wakes all jobs at once.
        if ready + ended >= count {
            opener.close();
        }
    }
    sum
}

impl JobResult {
    fn add(&mut self, other: Self) {
        self.outcome.elapsed = self.outcome.elapsed.max(other.outcome.elapsed);
        self.outcome.slowest = self.outcome.slowest.min(other.outcome.slowest);
        self.outcome.unanswered += other.outcome.unanswered;
        self.outcome.measured.add(&other.outcome.measured);
        // The first failure is the cause; later ones follow from the stop.
        self.failed = self.failed.take().or(other.failed);
    }
}

async fn open_and_run(job: LoadJob, source: LoadSource, sender: Sender<JobEvent>, opened: Receiver<()>) {
    let (writes, stop) = (job.load.write.is_some(), job.stop.clone());
    let result = match stop.unless_stopped(source.open()).await {
        Some(Ok(target)) => {
            let _ = sender.send(JobEvent::Ready).await;
            let _ = opened.recv().await;
            let result = measured(run_job(job, target.clone()).await, &target);
            flush_and_disconnect(result, target, writes, &stop).await
        }
        Some(Err(error)) => JobResult { outcome: LoadOutcome::default(), failed: Some(error) },
        None => JobResult { outcome: LoadOutcome::default(), failed: None },
    };
    let _ = sender.send(JobEvent::Ended(Box::new(result))).await;
}

fn measured(result: Result<LoadOutcome, FailedLoad>, target: &LoadTarget) -> JobResult {
    match result {
        Ok(outcome) => JobResult { outcome, failed: None },
        Err(failed) => {
            let error = match target.fault() {
                Some(fault) => anyhow!(fault),
                // Names the server, because its log may have the reason.
                None if target.is_remote() => {
                    let FailedLoad { request, error, .. } = &failed;
                    anyhow!("{request}: the server answered: {error} (its log may say why)")
                }
                None => anyhow!("{failed}"),
            };
            JobResult { outcome: *failed.outcome, failed: Some(error.context("a request failed")) }
        }
    }
}

/// Flushes after writes, except on a server that left requests unanswered.
async fn flush_and_disconnect(
    mut result: JobResult,
    target: LoadTarget,
    writes: bool,
    stop: &LoadStop,
) -> JobResult {
    if result.outcome.unanswered > 0 {
        return result;
    }
    if writes && result.failed.is_none() {
        let flush = target.flush();
        // A local disk is awaited in any case: its flush ends.
        let is_bounded = target.may_never_answer();
        let flushed = if is_bounded { stop.unless_overdue(flush).await } else { Some(flush.await) };
        match flushed {
            Some(flushed) => result.failed = flushed.context("the last flush failed").err(),
            None => {
                result.outcome.unanswered = 1;
                return result;
            }
        }
    }
    if let LoadTarget::Nbd(client) = target
        // Fails while a request still holds the client; then the connection just closes.
        && let Ok(client) = Rc::try_unwrap(client)
    {
        client.disconnect().await;
    }
    result
}
