//! Reconnecting to a lost server, or to its replacement: whether it can continue the disk, and
//! which writes must be repeated.
//!
//! Tries for as long as the disk exists, with growing pauses. Never lets a request pass before
//! writes that were acknowledged and not flushed are written again.

use std::sync::{Arc, Weak, atomic::Ordering::Relaxed};

use super::{AGAIN_AT_ONCE, BREAKS_IN_FULL, LONGEST_PAUSE, Link, Stage};
use nbd::client::{self, About, Established, GONE};
use reactor::{error::Result, now, sleep_until};

use crate::nbd::{
    lane::{self, Own},
    unflushed::Again,
};

impl Link {
    /// Checks that a disk of `size_bytes` can continue on this server; the error names the property
    /// that the server lacks.
    pub(super) fn suits(&self, about: &About, size_bytes: u64) -> std::result::Result<(), String> {
        let opened = &self.opened;
        if about.size_bytes < size_bytes {
            return Err(format!(
                "it has {} bytes now, and the disk has {size_bytes} (make it as large again)",
                about.size_bytes
            ));
        }
        if about.minimum_block > opened.minimum_block {
            return Err(format!(
                "it wants blocks of {} bytes now, and the disk was opened with blocks of {} (start it with those)",
                about.minimum_block, opened.minimum_block
            ));
        }
        if self.terms.read_only {
            return Ok(());
        }
        if about.is_read_only() {
            return Err("it is read-only now (start it so that it can be written to)".to_owned());
        }
        // FUA can replace flushes, but only if the disk was not opened with a server that flushes.
        let can = |about: &About| about.can_flush() || about.can_force();
        let cannot_keep = opened.can_flush() && !about.can_flush() || can(opened) && !can(about);
        if self.terms.flushes && cannot_keep {
            return Err("it knows no flush any more, so nothing could be promised to be durable (start it \
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
    async fn resume(self: &Arc<Self>, established: Established) -> std::result::Result<(), String> {
        let about = established.about().clone();
        let (session, batches) = {
            let mut state = self.lock();
            state.session += 1;
            state.began = now();
            (state.session, state.unflushed.batches(AGAIN_AT_ONCE))
        };
        let jobs = lane::start(self, session, established);
        let gone = || "the connection broke again at once".to_owned();
        let own = Own::of(self.id, session).ok_or_else(gone)?;
        for batch in batches {
            match write_again(own.client(), batch).await {
                Ok(()) => {}
                Err(GONE) => return Err(own.client().fault().unwrap_or_else(gone)),
                Err(error) => {
                    return Err(format!(
                        "it does not take again what it had acknowledged before it was flushed: {error} (mend \
                         the server; or open the disk again, without what was not flushed)"
                    ));
                }
            }
        }
        if let Some(why) = own.client().fault() {
            return Err(why);
        }
        drop(own);
        let mut state = self.lock();
        if !about.can_flush() {
            state.unflushed.settled();
        }
        // The disk's size is unchanged; only a resize here adopts the server's size.
        state.about = about;
        state.stage = Stage::Open { jobs: vec![jobs], is_at_work: reactor::is_worker() };
        Ok(())
    }

    pub(super) fn complain(&self, why: &str) {
        if let Some(left_out) = self.complaints.line(now()) {
            tracing::warn!(nbd = %self.terms.name, why, left_out, "the server cannot be connected to again yet");
        }
    }
}

/// A reconnect in progress. If its thread ends, another thread starts over.
pub(super) struct Trying {
    pub(super) link: Weak<Link>,
}

impl Drop for Trying {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            if let Stage::Down { is_tried, .. } = &mut link.lock().stage {
                *is_tried = false;
            }
            link.changed.notify(usize::MAX);
        }
    }
}

pub(super) async fn reconnect(trying: Trying) {
    // Delayed by the pause of the session, or a server that accepts connections and never replies
    // would be retried without a pause.
    let Some((began, mut pause)) = trying.link.upgrade().map(|link| {
        let state = link.lock();
        (state.began, state.pause)
    }) else {
        return;
    };
    sleep_until(began + pause).await;
    loop {
        let Some(link) = trying.link.upgrade() else { return };
        match link.terms.establish_again().await {
            Ok(established) => {
                let taken = match link.suits(established.about(), link.size_bytes()) {
                    Ok(()) => link.resume(established).await,
                    Err(why) => Err(why),
                };
                match taken {
                    Ok(()) => {
                        link.reconnections.fetch_add(1, Relaxed);
                        if let Some(left_out) = link.returns_told.line_of(now(), BREAKS_IN_FULL) {
                            let nbd = &link.terms.name;
                            tracing::info!(%nbd, left_out, "connected to the server again");
                        }
                        return;
                    }
                    Err(why) => link.complain(&why),
                }
            }
            Err(error) => link.complain(&error.in_full()),
        }
        drop(link);
        sleep_until(now() + pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn write_again(client: &client::Client, batch: Vec<Again>) -> Result<()> {
    let one = |again: Again| async move {
        let written = again.change.on(client, again.force).await;
        // The client was never told that this write succeeded, so it may fail now.
        if again.is_promised || written == Err(GONE) { written } else { Ok(()) }
    };
    let mut writing: Vec<_> = batch.into_iter().map(|again| Box::pin(one(again))).collect();
    let mut result = Ok(());
    // All writes of the batch are sent before the first reply is awaited.
    std::future::poll_fn(|context| {
        writing.retain_mut(|write| match write.as_mut().poll(context) {
            std::task::Poll::Pending => true,
            std::task::Poll::Ready(ended) => {
                result = result.and(ended);
                false
            }
        });
        if writing.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    result
}
