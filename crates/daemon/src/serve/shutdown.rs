//! Events of a running daemon until its end: signals, a client's `quit`, the last client.
//!
//! ```text
//!   stop accepting ─► lift limits ─► requests in flight complete ─► flush everything ─► close
//!                                    └─ before: dirty page cache of files over FUSE
//! ```
//!
//! Never ends before every disk is flushed or its flush has failed, except after a second signal.
//! The flush of a disk whose file system has stopped answering fails after ten seconds.

use std::{
    future::poll_fn,
    path::{Path, PathBuf},
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::Poll,
};

use anyhow::{Context as _, anyhow};
use block::disk::DiskTotals;
use cluster::actor::ChangeOrigin;
use console::{logging, signals::SignalRequest};
use control::{
    endpoints::{ExportEndpoint, HostEndpoint},
    notify,
    openers::DeviceOpeners,
    qmp::ShutdownCause,
    registry::{DaemonEnd, Registry, RunningDisk, await_ends},
    reload::reload,
};
use policy::time::Duration;
use sd_notify::NotifyState;
use storage::rbd;

use super::{Daemon, DaemonEvent};

/// Interval of checking whether an upgrade is still in progress.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum time for the kernel to write back the page cache of files over FUSE.
const WRITE_BACK_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time that a reload waits for the log to be reopened.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(2);
const LOG_DOES_NOT_ANSWER: &str = "the log's file system does not answer: the log file is not reopened yet";
/// Maximum time, at the end, for requests of a stopped disk to return to their clients.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);

impl Daemon {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ending = false;
        loop {
            // The daemon itself holds a sender, so there is always a next event.
            match self.events.1.recv().await.context("the daemon's events ended")? {
                DaemonEvent::Signal(request @ SignalRequest::Meaningless(_)) => ignore(request),
                // No reload while the daemon ends.
                DaemonEvent::Signal(SignalRequest::HangUp) if ending => {}
                DaemonEvent::Signal(SignalRequest::ReopenLog) => {
                    reactor::spawn(async {
                        if reactor::run_blocking(logging::reopen).await {
                            // A failure has logged a warning.
                            tracing::info!("SIGUSR1: the request to reopen the log file was handled");
                        } else {
                            tracing::warn!("SIGUSR1: {LOG_DOES_NOT_ANSWER}");
                        }
                    });
                }
                DaemonEvent::Signal(SignalRequest::HangUp) => {
                    let registry = Rc::clone(&self.registry);
                    reactor::spawn(async move { reload_on_hangup(&registry).await });
                }
                DaemonEvent::Signal(SignalRequest::EndAtOnce(signal)) => {
                    // The only exit without a flush. It does not wait for images in a Ceph cluster
                    // that are being closed.
                    rbd::abandon_closing();
                    return Err(anyhow!(
                        "{signal}: ended at once after a second request (check the data that was \
                         being written)"
                    ));
                }
                // May repeat the request of a client's `quit`.
                DaemonEvent::Signal(SignalRequest::End(_)) | DaemonEvent::End(_) if ending => {}
                DaemonEvent::Signal(SignalRequest::End(signal)) => {
                    ending = true;
                    self.begin_end(signal, ShutdownCause::Signal);
                }
                DaemonEvent::End(DaemonEnd::Quit) => {
                    ending = true;
                    self.begin_end("quit", ShutdownCause::Quit);
                }
                DaemonEvent::End(DaemonEnd::Idle) => {
                    ending = true;
                    self.begin_end("idle", ShutdownCause::Quit);
                }
                DaemonEvent::End(DaemonEnd::Broken(error)) => {
                    tracing::error!("{error:#}");
                    outcome = Err(error);
                    ending = true;
                    self.begin_end("broken", ShutdownCause::Failure);
                }
                DaemonEvent::Finished(result) => {
                    self.log_totals();
                    tracing::info!("stopped");
                    return outcome.and(result);
                }
            }
        }
    }

    fn log_totals(&self) {
        for RunningDisk { disk, .. } in self.registry.disks.all().iter().map(AsRef::as_ref) {
            let totals = disk.totals();
            if totals == DiskTotals::default() {
                continue;
            }
            tracing::info!(
                disk = %disk.name(),
                reads = totals.reads,
                read_bytes = totals.read_bytes,
                writes = totals.writes,
                written_bytes = totals.written_bytes,
                merged_requests = totals.merged_requests,
                "served"
            );
        }
    }

    /// Begins the shutdown; `signal` is the name of a signal, or another reason for the log.
    fn begin_end(&self, signal: &str, ending: ShutdownCause) {
        tracing::info!(signal, connections = self.registry.exports.connections(), "stopping");
        self.registry.lifecycle.is_ending.set(true);
        // Before anything is closed, so that the service manager sees an orderly end.
        notify::send(&[NotifyState::Stopping]);
        let jobs = self.registry.jobs.cancel_all();
        let servers = self.registry.exports.servers();
        for serving in &servers {
            serving.close();
        }
        let endpoints = self.registry.exports.own_endpoints();
        // Files over FUSE end with this process, so their users' dirty pages are written first.
        let is_file =
            |endpoint: &&Rc<ExportEndpoint>| matches!(endpoint.host_endpoint(), Some(HostEndpoint::Fuse(_)));
        let (files, others): (Vec<_>, Vec<_>) = endpoints.iter().partition(is_file);
        others.into_iter().for_each(|endpoint| endpoint.close_or_hand_over());
        let files: Vec<_> =
            files.into_iter().filter_map(|endpoint| endpoint.device().map(Path::to_owned)).collect();
        let disks = self.registry.disks.all();
        let mut stopped = Vec::new();
        for running in &disks {
            // Limits could delay requests in flight for hours. QEMU's drain lifts limits too.
            running.disk.throttle().lift_limits();
            // A disk with the stop policy could hold requests until an operator resumes it.
            match running.disk.failures().stopped_by() {
                Some(_) => stopped.push(Rc::clone(running)),
                None => running.disk.failures().stop_waiting(),
            }
        }
        let control = Rc::clone(&self.control);
        let control = reactor::spawn_joinable(async move { control.stop(ending).await });
        let (events, registry) = (self.events.0.clone(), Rc::clone(&self.registry));
        reactor::spawn(async move {
            // During an upgrade images are suspended; they are resumed before they are closed.
            while registry.lifecycle.is_upgrading.get() {
                reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
            }
            let abandon_tasks: Vec<_> = disks.iter().map(abandon_when_unresponsive).collect();
            if !stopped.is_empty() {
                // Held requests return to their rings and devices, for the next process that serves
                // them.
                let all_gone = async {
                    for endpoint in &endpoints {
                        endpoint.until_unused().await;
                    }
                };
                let _ = reactor::timeout(RETURN_TIMEOUT, all_gone).await;
                // Requests that cannot return fail with the error that stopped their disk.
                stopped.iter().for_each(|running| running.disk.failures().stop_waiting());
            }
            write_back(files).await;
            for serving in servers {
                serving.stop().await;
            }
            for endpoint in endpoints {
                endpoint.stop().await;
            }
            control.await;
            // Abandoned commands may still use a disk.
            while registry.disks.has_unlisted() {
                reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
            }
            await_ends(&jobs).await;
            let result = flush_and_close(&disks).await;
            registry.store_quotas().await;
            drop(abandon_tasks);
            registry.recordings.end_all().await;
            let _ = events.try_send(DaemonEvent::Finished(result));
        });
    }
}

/// Abandons a disk if a file system below it stops answering: requests that wait for the disk then
/// fail, and all other disks are flushed and closed.
fn abandon_when_unresponsive(running: &Rc<RunningDisk>) -> reactor::JoinHandle<()> {
    let disk = Arc::clone(&running.disk);
    reactor::spawn_joinable(async move { disk.abandon_when_unresponsive().await })
}

/// Makes the kernel write back dirty pages of file systems on these files, on loop devices over
/// them, and of the loop devices: once a file is unmounted, they cannot be written.
async fn write_back(files: Vec<PathBuf>) {
    let used = move || {
        let users = files.into_iter().map(|file| (DeviceOpeners::of_device(&file), file));
        users.filter(|(users, _)| !users.is_empty()).collect::<Vec<_>>()
    };
    let used = reactor::run_blocking(used).await;
    if used.is_empty() {
        return;
    }
    for (users, file) in &used {
        tracing::warn!(
            file = %file.display(), %users,
            "in use while weir ends: data written so far reaches the image, later writes fail"
        );
    }
    // sync(2) covers the whole host. The sandbox opens no directory for syncfs(2), and mounts in
    // containers are not visible here.
    let written = reactor::run_blocking(rustix::fs::sync);
    if reactor::timeout(WRITE_BACK_TIMEOUT, written).await.is_err() {
        tracing::warn!(
            patience_s = WRITE_BACK_TIMEOUT.as_secs(),
            "the kernel takes too long to write back data of files over FUSE: some of it may be lost"
        );
    }
}

/// SIGHUP: opens the log's file again, reads the config file again, and logs the result.
async fn reload_on_hangup(registry: &Rc<Registry>) {
    // First, so that all later lines are in the new file. If its file system does not answer, the
    // reload is delayed by at most this time.
    let reopened = reactor::timeout(REOPEN_TIMEOUT, reactor::run_blocking(logging::reopen)).await;
    if !reopened.unwrap_or(false) {
        tracing::warn!("SIGHUP: {LOG_DOES_NOT_ANSWER}");
    }
    // For `Type=notify-reload`, also if nothing changes: see sd_notify(3).
    let mut began = vec![NotifyState::Reloading];
    began.extend(NotifyState::monotonic_usec_now().ok());
    notify::send(&began);
    match ChangeOrigin::Signal.attribute(reload(registry)).await {
        Ok(changes) => {
            for change in &changes {
                let change = serde_json::to_string(change).expect("all keys are strings");
                tracing::info!(%change, "SIGHUP: reloaded");
            }
            tracing::info!(changes = changes.len(), "SIGHUP: the config file was read again");
        }
        Err(error) => tracing::error!("SIGHUP: nothing has changed: {error:#}"),
    }
    notify::send(&[NotifyState::Ready]);
}

/// Result of `work`; `None` if a signal ends the daemon before. The text names the goal of the work
/// in the log.
pub(super) async fn until_signal<T>(
    work: impl Future<Output = T>,
    stage: &str,
    events: &async_channel::Receiver<DaemonEvent>,
) -> Option<T> {
    let mut work = pin!(work);
    let mut signalled = pin!(async {
        loop {
            match events.recv().await {
                Ok(DaemonEvent::Signal(SignalRequest::End(signal) | SignalRequest::EndAtOnce(signal))) => {
                    return signal;
                }
                Ok(DaemonEvent::Signal(request)) => ignore(request),
                // Other events do not occur before the daemon serves.
                Ok(_) => {}
                Err(_) => std::future::pending::<()>().await,
            }
        }
    });
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => signalled.as_mut().poll(context).map(|signal| {
            tracing::info!(signal, "stopping before {stage}");
            None
        }),
    })
    .await
}

fn ignore(request: SignalRequest) {
    match request {
        SignalRequest::HangUp => tracing::info!("SIGHUP ignored: weir is starting"),
        SignalRequest::ReopenLog => tracing::info!("SIGUSR1 ignored: weir is starting"),
        SignalRequest::Meaningless(signal) => tracing::info!("{signal} ignored: weir does not use it"),
        SignalRequest::End(_) | SignalRequest::EndAtOnce(_) => {}
    }
}

/// Flushes and closes all disks, even if one fails; returns the first failure.
pub(super) async fn flush_and_close(disks: &[Rc<RunningDisk>]) -> anyhow::Result<()> {
    // All at once, so that a disk whose storage does not answer does not delay the flush of others.
    let tasks: Vec<_> =
        disks.iter().cloned().map(|disk| reactor::spawn_joinable(flush_and_close_one(disk))).collect();
    let mut outcome = Ok(());
    for task in tasks {
        outcome = outcome.and(task.await);
    }
    outcome
}

async fn flush_and_close_one(running: Rc<RunningDisk>) -> anyhow::Result<()> {
    let RunningDisk { disk, .. } = &*running;
    if disk.may_be_resumed_elsewhere() {
        disk.close_own().await;
        return Ok(());
    }
    let name = disk.name();
    if let Err(error) = disk.flush().await {
        tracing::error!(disk = %name, %error, "the last flush failed");
        return Err(anyhow!(
            "disk {name}: the last flush failed: {error} (data written since the previous flush may be lost)"
        ));
    }
    if let Err(error) = disk.close().await {
        tracing::error!(disk = %name, %error, "closing the image failed");
        return Err(anyhow!(
            "disk {name}: its image could not be closed: {error} (`weir image check` shows the damage)"
        ));
    }
    Ok(())
}
