//! End of an upgrade while the new process still prepares.
//!
//! The old process gives up after a time, or is killed. The new one then has nothing to wait for:
//! an image that does not answer must not keep the other images open beside the old process.

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

/// Observes whether the old process closes its end of the channel.
pub struct GivenUp(Pin<Box<dyn Future<Output = ()>>>);

impl GivenUp {
    /// Of an upgrade, or of a start, where nothing is given up.
    ///
    /// # Errors
    /// The process may open no more descriptors.
    pub fn of(old: Option<&NewProcess>) -> io::Result<Self> {
        let Some(old) = old else { return Ok(Self(Box::pin(pending()))) };
        let channel = Fd::from(OwnedFd::from(old.channel.try_clone()?));
        Ok(Self(Box::pin(async move { drop(operation::peer_shut_down(&channel).await) })))
    }

    /// The result of `work`.
    ///
    /// # Errors
    /// Those of `work`; the old process gives up first, and `work` is dropped.
    pub async fn unless<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending => self.0.as_mut().poll(context).map(|()| {
                Err(anyhow!(
                    "the old weir has ended or waits no longer, before all images were open here (its log says why; see to the disks that do not answer, and try again)"
                ))
            }),
            done => done,
        })
        .await
    }
}
