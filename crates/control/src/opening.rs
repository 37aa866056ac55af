//! Opening of images, several concurrently, with a time limit; images whose storage does not answer
//! may be retried.

use std::fmt;

use image::{
    Image,
    open::{ImageOptions, open},
};
use policy::time::{Duration, Instant};
use reactor::JoinHandle;
use settings::Origin;
use storage::OpenError;

/// Time after which an image that is still being opened counts as unavailable. Shorter than the
/// time limit for a silent NBD server, so that such a server gives the same result at every start.
pub(crate) const PATIENCE: Duration = Duration::from_secs(8);

/// Parameters for opening the image of a disk; reusable for retries.
#[derive(Clone)]
pub(crate) struct Opening {
    pub(super) name: String,
    pub(super) spec: String,
    pub(super) options: ImageOptions,
    /// Origin of a key that is valid for qcow2 images only.
    pub(super) said: Option<Origin>,
}

/// Task that yields the opened image.
pub(super) type Opened = JoinHandle<anyhow::Result<Image>>;

/// Attempt to open an image.
pub(crate) struct Trial {
    opening: Opening,
    opened: Opened,
    began: Instant,
    is_awaited: bool,
}

/// Image whose storage does not answer, or that the lock of a dead process still protects.
pub(crate) struct Silent {
    /// For retries.
    pub(super) opening: Opening,
    pub(super) since: Instant,
    pub(super) state: State,
}

pub(super) enum State {
    Trying(Opened),
    Failed(anyhow::Error),
}

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Trying(_) => write!(f, "no answer in {} s", PATIENCE.as_secs()),
            State::Failed(error) => write!(f, "{error:#}"),
        }
    }
}

impl Opening {
    pub(crate) async fn open(self) -> anyhow::Result<Image> {
        let image = open(&self.spec, self.options).await?;
        if let (Image::Raw(_), Some(place)) = (&image, &self.said) {
            return Err(place.error("is for qcow2 images, and this one is raw (leave it out)").into());
        }
        tracing::debug!(disk = self.name, image = image.description(), "opened");
        Ok(image)
    }

    /// Drops the old process's files, which are gone by the time of a retry.
    fn without_files(mut self) -> Self {
        self.options.storage.passed_files = None;
        self
    }
}

impl Trial {
    /// Starts an attempt. With `is_awaited` there is no time limit, and transient errors are final.
    pub(crate) fn begin(opening: Opening, is_awaited: bool) -> Self {
        let opened = reactor::spawn_joinable(opening.clone().open());
        Self { opening, opened, began: reactor::now(), is_awaited }
    }

    /// The image, or the error that opening it met.
    ///
    /// # Errors
    /// The storage does not answer, or the error is transient.
    pub(crate) async fn outcome(mut self) -> Result<anyhow::Result<Image>, Silent> {
        // Counted from the start of the attempt, so concurrent attempts share one deadline.
        let left = PATIENCE.saturating_sub(reactor::now() - self.began);
        let state = match reactor::timeout(left, &mut self.opened).await {
            Err(_) if self.is_awaited => {
                tracing::warn!(
                    disk = self.opening.name,
                    "its image is still being opened: its storage has not answered yet"
                );
                return Ok(self.opened.await);
            }
            // The attempt continues in the background; the retry uses its result.
            Err(_) => State::Trying(self.opened),
            Ok(Err(error)) if !self.is_awaited && may_pass(&error) => State::Failed(error),
            Ok(opened) => return Ok(opened),
        };
        Err(Silent { opening: self.opening.without_files(), since: self.began, state })
    }
}

/// True if the error is transient: the storage does not answer, and may do so later.
pub(crate) fn may_pass(error: &anyhow::Error) -> bool {
    let may_pass = |cause: &OpenError| cause.may_pass;
    // Context may have been added at any level.
    error.chain().any(|cause| cause.downcast_ref().is_some_and(may_pass))
}
