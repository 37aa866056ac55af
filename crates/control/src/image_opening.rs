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
/// time limit for an unresponsive NBD server, whose disk thus becomes unavailable at every start.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(8);

/// Parameters for opening the image of a disk; reusable for retries.
#[derive(Clone)]
pub(crate) struct ImageOpenRequest {
    pub(super) name: String,
    pub(super) spec: String,
    pub(super) options: ImageOptions,
    /// Origin of a key that is valid for qcow2 images only.
    pub(super) qcow2_key_origin: Option<Origin>,
}

/// Task that yields the opened image.
pub(super) type ImageOpenTask = JoinHandle<anyhow::Result<Image>>;

/// Attempt to open an image.
pub(crate) struct ImageOpenAttempt {
    request: ImageOpenRequest,
    opened: ImageOpenTask,
    began_at: Instant,
    has_no_deadline: bool,
}

/// Image whose storage does not answer, or that the lock of a dead process still protects.
pub(crate) struct UnavailableImage {
    /// For retries.
    pub(super) request: ImageOpenRequest,
    pub(super) since: Instant,
    pub(super) state: UnavailableImageState,
}

pub(super) enum UnavailableImageState {
    Opening(ImageOpenTask),
    Failed(anyhow::Error),
}

impl fmt::Display for UnavailableImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            UnavailableImageState::Opening(_) => write!(f, "no answer in {} s", OPEN_TIMEOUT.as_secs()),
            UnavailableImageState::Failed(error) => write!(f, "{error:#}"),
        }
    }
}

impl ImageOpenRequest {
    pub(crate) async fn open(self) -> anyhow::Result<Image> {
        let image = open(&self.spec, self.options).await?;
        if let (Image::Raw(_), Some(place)) = (&image, &self.qcow2_key_origin) {
            return Err(place.error("is for qcow2 images, and this one is raw (leave it out)").into());
        }
        tracing::debug!(disk = self.name, image = image.description(), "opened");
        Ok(image)
    }

    /// Drops the old process's files, which are gone by the time of a retry.
    fn without_passed_files(mut self) -> Self {
        self.options.storage.passed_files = None;
        self
    }
}

impl ImageOpenAttempt {
    /// Starts an attempt. With `is_awaited` there is no time limit, and transient errors are final.
    pub(crate) fn begin(open_request: ImageOpenRequest, is_awaited: bool) -> Self {
        let opened = reactor::spawn_joinable(open_request.clone().open());
        Self { request: open_request, opened, began_at: reactor::now(), has_no_deadline: is_awaited }
    }

    /// Image, or the error of opening it.
    ///
    /// # Errors
    /// The storage does not answer, or the error is transient.
    pub(crate) async fn outcome(mut self) -> Result<anyhow::Result<Image>, UnavailableImage> {
        // Counted from the start of the attempt, so concurrent attempts share one deadline.
        let left = OPEN_TIMEOUT.saturating_sub(reactor::now() - self.began_at);
        let state = match reactor::timeout(left, &mut self.opened).await {
            Err(_) if self.has_no_deadline => {
                tracing::warn!(
                    disk = self.request.name,
                    "its image is still being opened: its storage has not answered yet"
                );
                return Ok(self.opened.await);
            }
            // The attempt continues in the background; the retry uses its result.
            Err(_) => UnavailableImageState::Opening(self.opened),
            Ok(Err(error)) if !self.has_no_deadline && is_transient(&error) => {
                UnavailableImageState::Failed(error)
            }
            Ok(opened) => return Ok(opened),
        };
        Err(UnavailableImage { request: self.request.without_passed_files(), since: self.began_at, state })
    }
}

/// True if the error is transient: the storage does not answer, and may do so later.
pub(crate) fn is_transient(error: &anyhow::Error) -> bool {
    let may_pass = |cause: &OpenError| cause.may_pass;
    // Context may have been added at any level.
    error.chain().any(|cause| cause.downcast_ref().is_some_and(may_pass))
}
