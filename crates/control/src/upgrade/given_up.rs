//! Abandoned upgrade: the old process gives up while the new process still opens images.
//!
//! The old process gives up after a time limit, or is killed. The new process then ends. Otherwise
//! an unresponsive image would keep it waiting while all other images are open in both processes.

use std::{
    future::{pending, poll_fn},
    io,
    os::fd::OwnedFd,
    pin::{Pin, pin},
    task::Poll,
};

use anyhow::anyhow;
use reactor::operation::{self, Fd};

use super::new_process::NewProcess;

/// Observer of the channel: completes when the old process closes its end.
pub struct AbandonedUpgrade(Pin<Box<dyn Future<Output = ()>>>);

impl AbandonedUpgrade {
    /// Observer for an upgrade. For a start without an old process it never completes.
    ///
    /// # Errors
    /// Fails if the process has no free file descriptor.
    pub fn observe(old: Option<&NewProcess>) -> io::Result<Self> {
        let Some(old) = old else { return Ok(Self(Box::pin(pending()))) };
        let channel = Fd::from(OwnedFd::from(old.channel.try_clone()?));
        Ok(Self(Box::pin(async move { drop(operation::peer_shut_down(&channel).await) })))
    }

    /// Returns the result of `work`.
    ///
    /// # Errors
    /// Those of `work`; or the old process gave up first, which drops `work`.
    pub async fn run_unless_abandoned<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending => self.0.as_mut().poll(context).map(|()| {
                Err(anyhow!(
                    "the old process ended or gave up the upgrade before all images were open here \
                     (its log has the reason; check the disks that do not answer, and try again)"
                ))
            }),
            done => done,
        })
        .await
    }
}
