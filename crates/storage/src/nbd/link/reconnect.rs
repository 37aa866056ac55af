//! Reconnecting to a lost server, or to its replacement: whether it can continue the disk, and
//! which writes must be repeated.
//!
//! Tries for as long as the disk exists, with growing pauses. Never lets a request pass before
//! writes that were acknowledged and not flushed are written again.

use std::sync::{Arc, Weak, atomic::Ordering::Relaxed};

use super::{LinkStage, MAX_PAUSE, NbdLink, REPEATED_WRITES_IN_FLIGHT, UNLIMITED_LOG_LINES};
use nbd::client::{self, CONNECTION_LOST, EstablishedConnection, NbdExportInfo};
use reactor::{error::Result, now, sleep_until};

use crate::nbd::{
    connection::{self, LocalConnection},
    unflushed::ReplayedChange,
};

impl NbdLink {
    /// Checks that a disk of `size_bytes` can continue on this server; the error names the property
    /// that the server lacks.
    pub(super) fn check_compatible(
        &self,
        export: &NbdExportInfo,
        size_bytes: u64,
    ) -> std::result::Result<(), String> {
        let opened = &self.opened;
        if export.size_bytes < size_bytes {
            return Err(format!(
                "the export has {} bytes now, but the disk has {size_bytes} (restore the export's size)",
                export.size_bytes
            ));
        }
        if export.minimum_block > opened.minimum_block {
            return Err(format!(
                "its minimum block is {} bytes now, but the disk was opened with {} (start the \
                 server with that)",
                export.minimum_block, opened.minimum_block
            ));
        }
        if self.config.read_only {
            return Ok(());
        }
        if export.is_read_only() {
            return Err("the export is read-only now (make it writable at its server)".to_owned());
        }
        // FUA can replace flushes, but only if the disk was not opened with a server that flushes.
        let can_make_durable = |export: &NbdExportInfo| export.can_flush() || export.can_fua();
        let lost_durability = opened.can_flush() && !export.can_flush()
            || can_make_durable(opened) && !can_make_durable(export);
        if self.config.flushes && lost_durability {
            return Err("it no longer supports flushes, so no write could be made durable (start it \
                        with flushes, or open the disk again to do without)"
                .to_owned());
        }
        Ok(())
    }

    /// Begins a session and first writes everything again that was acknowledged and not flushed
    /// before.
    ///
    /// # Errors
    /// The reason why this server is rejected.
    async fn begin_session(
        self: &Arc<Self>,
        established: EstablishedConnection,
    ) -> std::result::Result<(), String> {
        let export = established.export().clone();
        let (session, batches) = {
            let mut state = self.lock();
            state.session += 1;
            state.began = now();
            (state.session, state.unflushed.batches(REPEATED_WRITES_IN_FLIGHT))
        };
        let jobs = connection::start_keeper(self, session, established);
        let broken_again = || "the connection broke again immediately".to_owned();
        let local = LocalConnection::of(self.id, session).ok_or_else(broken_again)?;
        for batch in batches {
            match replay_writes(local.client(), batch).await {
                Ok(()) => {}
                Err(CONNECTION_LOST) => return Err(local.client().fault().unwrap_or_else(broken_again)),
                Err(error) => {
                    return Err(format!(
                        "it rejects the replay of unflushed writes that it had acknowledged: {error} (repair \
                         the server, or open the disk again, which loses those writes)"
                    ));
                }
            }
        }
        if let Some(why) = local.client().fault() {
            return Err(why);
        }
        drop(local);
        let mut state = self.lock();
        if !export.can_flush() {
            state.unflushed.clear();
        }
        // The disk's size is unchanged; only a resize here adopts the server's size.
        state.export = export;
        state.stage = LinkStage::Open { jobs: vec![jobs], is_at_work: reactor::is_worker() };
        Ok(())
    }

    pub(super) fn log_rejection(&self, why: &str) {
        if let Some(suppressed) = self.failure_log.try_log(now()) {
            tracing::warn!(
                nbd = %self.config.name, why, suppressed,
                "cannot reconnect to the server yet"
            );
        }
    }
}

/// A reconnect in progress. If its thread ends, another thread starts over.
pub(super) struct ReconnectAttempt {
    pub(super) link: Weak<NbdLink>,
}

impl Drop for ReconnectAttempt {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            if let LinkStage::Down { is_tried, .. } = &mut link.lock().stage {
                *is_tried = false;
            }
            link.changed.notify(usize::MAX);
        }
    }
}

pub(super) async fn reconnect(attempt: ReconnectAttempt) {
    // Delayed by the pause of the session, or a server that accepts connections and never replies
    // would be retried without a pause.
    let Some((began, mut pause)) = attempt.link.upgrade().map(|link| {
        let state = link.lock();
        (state.began, state.pause)
    }) else {
        return;
    };
    sleep_until(began + pause).await;
    loop {
        let Some(link) = attempt.link.upgrade() else { return };
        match link.config.establish_again().await {
            Ok(established) => {
                let result = match link.check_compatible(established.export(), link.size_bytes()) {
                    Ok(()) => link.begin_session(established).await,
                    Err(why) => Err(why),
                };
                match result {
                    Ok(()) => {
                        link.reconnections.fetch_add(1, Relaxed);
                        if let Some(suppressed) = link.reconnect_log.try_log_burst(now(), UNLIMITED_LOG_LINES)
                        {
                            let nbd = &link.config.name;
                            tracing::info!(%nbd, suppressed, "connected to the server again");
                        }
                        return;
                    }
                    Err(why) => link.log_rejection(&why),
                }
            }
            Err(error) => link.log_rejection(&error.full_message()),
        }
        drop(link);
        sleep_until(now() + pause).await;
        pause = (2 * pause).min(MAX_PAUSE);
    }
}

async fn replay_writes(client: &client::NbdClient, batch: Vec<ReplayedChange>) -> Result<()> {
    let repeat = |change: ReplayedChange| async move {
        let written = change.change.on(client, change.force).await;
        // This write was never acknowledged to the client, so it may fail now.
        if change.is_acknowledged || written == Err(CONNECTION_LOST) { written } else { Ok(()) }
    };
    let mut writing: Vec<_> = batch.into_iter().map(|change| Box::pin(repeat(change))).collect();
    let mut result = Ok(());
    // All writes of the batch are sent before the first reply is awaited.
    std::future::poll_fn(|context| {
        writing.retain_mut(|write| match write.as_mut().poll(context) {
            std::task::Poll::Pending => true,
            std::task::Poll::Ready(write_result) => {
                result = result.and(write_result);
                false
            }
        });
        if writing.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    result
}
