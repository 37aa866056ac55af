//! A daemon that serves, to its end: signals, a client's `quit`, the last client.
//!
//! ```text
//!   nobody is let in ─► limits are lifted ─► what is in flight ends ─► all is flushed ─► closed
//!                                             └─ before: what users of files over FUSE keep in memory
//! ```
//!
//! Never ends before every disk is flushed or has failed to be, unless it is asked twice. A disk
//! whose file system has stopped answering fails to be flushed after ten seconds.

use std::{
    future::poll_fn,
    path::{Path, PathBuf},
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::Poll,
};

use anyhow::{Context as _, anyhow};
use block::disk::Totals;
use cluster::actor::Actor;
use console::{logging, signals::Request};
use control::{
    doors::{Entrance, Host},
    notify,
    qmp::Ending,
    registry::{End, Registry, RunningDisk},
    reload::reload,
    users::Users,
};
use policy::time::Duration;
use sd_notify::NotifyState;
use storage::rbd;

use super::{Daemon, Event};

/// How often it is looked again whether another daemon still wants to take over.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// How long the kernel may take to write what users of files over FUSE have not.
const TO_WRITE_BACK: Duration = Duration::from_secs(60);
/// Time that a reload waits until the log is opened again.
const TO_REOPEN: Duration = Duration::from_secs(2);
const LOG_DOES_NOT_ANSWER: &str =
    "the file system of the log does not answer: the log is not opened again yet";
/// How long what a stopped disk holds may take to go back to who asked, at the end.
const TO_GO_BACK: Duration = Duration::from_secs(2);

impl Daemon {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        let mut ending = false;
        loop {
            // The daemon itself holds a sender, so there is always a next event.
            match self.events.1.recv().await.context("the daemon's events ended")? {
                Event::Signal(request @ Request::Meaningless(_)) => ignore(request),
                // What is about to end is not changed any more.
                Event::Signal(Request::HangUp) if ending => {}
                Event::Signal(Request::ReopenLog) => {
                    reactor::spawn(async {
                        if reactor::blocking(logging::reopen).await {
                            // A failure has logged a warning.
                            tracing::info!("SIGUSR1: the request to open the log's file again was handled");
                        } else {
                            tracing::warn!("SIGUSR1: {LOG_DOES_NOT_ANSWER}");
                        }
                    });
                }
                Event::Signal(Request::HangUp) => {
                    let registry = Rc::clone(&self.registry);
                    reactor::spawn(async move { hang_up(&registry).await });
                }
                Event::Signal(Request::EndAtOnce(signal)) => {
                    rbd::abandon_ends();
                    return Err(anyhow!(
                        "{signal}: ended at once, as asked twice (check what was being written)"
                    ));
                }
                // It may only repeat what a client has asked for with `quit`.
                Event::Signal(Request::End(_)) | Event::End(_) if ending => {}
                Event::Signal(Request::End(signal)) => {
                    ending = true;
                    self.finish(signal, Ending::Signal);
                }
                Event::End(End::Asked) => {
                    ending = true;
                    self.finish("quit", Ending::Quit);
                }
                Event::End(End::Idle) => {
                    ending = true;
                    self.finish("idle", Ending::Quit);
                }
                Event::End(End::Broken(error)) => {
                    tracing::error!("{error:#}");
                    outcome = Err(error);
                    ending = true;
                    self.finish("broken", Ending::Failure);
                }
                Event::Finished(result) => {
                    self.sum_up();
                    tracing::info!("stopped");
                    return outcome.and(result);
                }
            }
        }
    }

    fn sum_up(&self) {
        for RunningDisk { disk, .. } in self.registry.disks.all().iter().map(AsRef::as_ref) {
            let totals = disk.totals();
            if totals == Totals::default() {
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

    /// Starts the end; `signal` is a signal's name, or another word that says why.
    fn finish(&self, signal: &str, ending: Ending) {
        tracing::info!(signal, connections = self.registry.exports.connections(), "stopping");
        self.registry.lifecycle.ending.set(true);
        notify::tell(&[NotifyState::Stopping]);
        let servers = self.registry.exports.servers();
        for serving in &servers {
            serving.close();
        }
        let entrances = self.registry.exports.entrances();
        // Of a file over FUSE nothing is left to the next daemon: what its users wrote comes first.
        let is_file = |entrance: &&Rc<Entrance>| matches!(entrance.host(), Some(Host::Fuse(_)));
        let (files, others): (Vec<_>, Vec<_>) = entrances.iter().partition(is_file);
        others.into_iter().for_each(|entrance| entrance.leave());
        let files: Vec<_> =
            files.into_iter().filter_map(|entrance| entrance.device().map(Path::to_owned)).collect();
        let disks = self.registry.disks.all();
        let mut stopped = Vec::new();
        for running in &disks {
            // A limit could hold what is in flight for hours. QEMU's drain lifts limits too.
            running.disk.throttle().lift();
            // And an error could hold it until somebody comes.
            match running.disk.failures().stopped_by() {
                Some(_) => stopped.push(Rc::clone(running)),
                None => running.disk.failures().lift(),
            }
        }
        let control = Rc::clone(&self.control);
        let control = reactor::spawn_joinable(async move { control.stop(ending).await });
        let (events, registry) = (self.events.0.clone(), Rc::clone(&self.registry));
        reactor::spawn(async move {
            // Images that were laid down for another are taken up before they are closed.
            while registry.lifecycle.leaving.get() {
                reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
            }
            let giving_up: Vec<_> = disks.iter().map(give_up_once_silent).collect();
            if !stopped.is_empty() {
                // What they hold goes back into rings and to devices, for who serves these next.
                let all_gone = async {
                    for entrance in &entrances {
                        entrance.until_unused().await;
                    }
                };
                let _ = reactor::timeout(TO_GO_BACK, all_gone).await;
                // What cannot go back is answered with the error that stopped its disk.
                stopped.iter().for_each(|running| running.disk.failures().lift());
            }
            write_back(files).await;
            for serving in servers {
                serving.stop().await;
            }
            for entrance in entrances {
                entrance.stop().await;
            }
            control.await;
            // Commands that were left may still have some.
            while registry.disks.has_unlisted() {
                reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
            }
            let result = flush_and_close(&disks).await;
            drop(giving_up);
            registry.recordings.end_all().await;
            let _ = events.try_send(Event::Finished(result));
        });
    }
}

/// Abandons a disk if a file system below it stops answering: requests that wait for the disk then
/// fail, and all other disks are flushed and closed.
fn give_up_once_silent(running: &Rc<RunningDisk>) -> reactor::JoinHandle<()> {
    let disk = Arc::clone(&running.disk);
    reactor::spawn_joinable(async move { disk.give_up_once_silent().await })
}

/// Has the kernel write what file systems on these files, or on loop devices over them, and loop
/// devices themselves have in memory: once a file is gone, that has no place to go.
async fn write_back(files: Vec<PathBuf>) {
    let used = move || {
        let users = files.into_iter().map(|file| (Users::of(&file), file));
        users.filter(|(users, _)| !users.is_empty()).collect::<Vec<_>>()
    };
    let used = reactor::blocking(used).await;
    if used.is_empty() {
        return;
    }
    for (users, file) in &used {
        tracing::warn!(
            file = %file.display(), %users,
            "ends while it is in use: what its users have written reaches the image, and what they write from now on fails"
        );
    }
    // All of the host's, as sync(2) has it: the sandbox opens no directory to name one file system
    // by, and those of containers are not seen from here.
    let written = reactor::blocking(rustix::fs::sync);
    if reactor::timeout(TO_WRITE_BACK, written).await.is_err() {
        tracing::warn!(
            patience_s = TO_WRITE_BACK.as_secs(),
            "the kernel takes too long to write what users of files have written: some of it may be lost"
        );
    }
}

/// SIGHUP: opens the log's file again, reads the config file again, and logs the result.
async fn hang_up(registry: &Rc<Registry>) {
    // First, so that all later lines are in the new file. Its file system may not answer, which
    // delays no reload for longer.
    let reopened = reactor::timeout(TO_REOPEN, reactor::blocking(logging::reopen)).await;
    if !reopened.unwrap_or(false) {
        tracing::warn!("SIGHUP: {LOG_DOES_NOT_ANSWER}");
    }
    // For `Type=notify-reload`, also where there is nothing to do: see sd_notify(3).
    let mut began = vec![NotifyState::Reloading];
    began.extend(NotifyState::monotonic_usec_now().ok());
    notify::tell(&began);
    match Actor::Signal.run(reload(registry)).await {
        Ok(changes) => {
            for change in &changes {
                tracing::info!(%change, "SIGHUP: reloaded");
            }
            tracing::info!(changes = changes.len(), "SIGHUP: the config file was read again");
        }
        Err(error) => tracing::error!("SIGHUP: nothing has changed: {error:#}"),
    }
    notify::tell(&[NotifyState::Ready]);
}

/// What `work` comes to; none where a signal ends the daemon before `what` is so.
pub(super) async fn until_ended<T>(
    work: impl Future<Output = T>,
    what: &str,
    events: &async_channel::Receiver<Event>,
) -> Option<T> {
    let mut work = pin!(work);
    let mut ended = pin!(async {
        loop {
            match events.recv().await {
                Ok(Event::Signal(Request::End(signal) | Request::EndAtOnce(signal))) => return signal,
                Ok(Event::Signal(request)) => ignore(request),
                // Nothing else happens before the daemon serves.
                Ok(_) => {}
                Err(_) => std::future::pending::<()>().await,
            }
        }
    });
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => ended.as_mut().poll(context).map(|signal| {
            tracing::info!(signal, "stopping before {what}");
            None
        }),
    })
    .await
}

fn ignore(request: Request) {
    match request {
        Request::HangUp => tracing::info!("SIGHUP ignored: weir is starting"),
        Request::ReopenLog => tracing::info!("SIGUSR1 ignored: weir is starting"),
        Request::Meaningless(signal) => tracing::info!("{signal} ignored: it means nothing to weir"),
        Request::End(_) | Request::EndAtOnce(_) => {}
    }
}

/// Also those beside one that fails; reports the first failure.
pub(super) async fn flush_and_close(disks: &[Rc<RunningDisk>]) -> anyhow::Result<()> {
    // All at once: one whose storage stands still keeps no other from being flushed.
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
    if disk.is_anothers() {
        disk.leave().await;
        return Ok(());
    }
    let name = disk.name();
    if let Err(error) = disk.flush().await {
        tracing::error!(disk = %name, %error, "the last flush failed");
        return Err(anyhow!(
            "disk {name}: the last flush failed: {error} (what was written since the one before may be lost)"
        ));
    }
    if let Err(error) = disk.close().await {
        tracing::error!(disk = %name, %error, "closing the image failed");
        return Err(anyhow!(
            "disk {name}: its image could not be closed: {error} (`weir image check` tells what is left to mend)"
        ));
    }
    Ok(())
}
