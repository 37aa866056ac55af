//! Images that are being opened, several at once; those that cannot be had now, and may be soon.

use std::fmt;

use image::{
    Image,
    open::{ImageOptions, open},
};
use policy::time::{Duration, Instant};
use reactor::JoinHandle;
use settings::Origin;
use storage::OpenError;

/// After this an image that is still being opened is one that nobody answers for. Less than an NBD
/// server has that lets weir connect and says nothing: whether such a one fails a start is no
/// matter of chance.
pub(crate) const PATIENCE: Duration = Duration::from_secs(8);

/// All that it takes to open the image of a disk, as often as it is tried.
#[derive(Clone)]
pub(crate) struct Opening {
    pub(super) name: String,
    pub(super) spec: String,
    pub(super) options: ImageOptions,
    /// Where something was said that is for qcow2 images.
    pub(super) said: Option<Origin>,
}

/// An image, once it is open.
pub(super) type Opened = JoinHandle<anyhow::Result<Image>>;

/// One that is under way.
pub(crate) struct Trial {
    opening: Opening,
    opened: Opened,
    began: Instant,
    is_awaited: bool,
}

/// An image that nobody answers for, or that one that has died still has.
pub(crate) struct Silent {
    /// To try it again.
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

    /// The same, now that the daemon that was taken over from has ended.
    fn without_files(mut self) -> Self {
        self.options.storage.passed_files = None;
        self
    }
}

impl Trial {
    /// `is_awaited`: it is waited for, however long it takes, and fails where nobody is there.
    pub(crate) fn begin(opening: Opening, is_awaited: bool) -> Self {
        let opened = reactor::spawn_joinable(opening.clone().open());
        Self { opening, opened, began: reactor::now(), is_awaited }
    }

    /// The image, or what is wrong with it.
    ///
    /// # Errors
    /// Nobody answers for it.
    pub(crate) async fn outcome(mut self) -> Result<anyhow::Result<Image>, Silent> {
        let left = PATIENCE.saturating_sub(reactor::now() - self.began);
        let state = match reactor::timeout(left, &mut self.opened).await {
            Err(_) if self.is_awaited => {
                tracing::warn!(
                    disk = self.opening.name,
                    "it is still being opened, and waited for: what it lies on has not answered yet"
                );
                return Ok(self.opened.await);
            }
            Err(_) => State::Trying(self.opened),
            Ok(Err(error)) if !self.is_awaited && may_pass(&error) => State::Failed(error),
            Ok(opened) => return Ok(opened),
        };
        Err(Silent { opening: self.opening.without_files(), since: self.began, state })
    }
}

/// Whether an image cannot be opened because nobody answers where it lies, who may later.
pub(crate) fn may_pass(error: &anyhow::Error) -> bool {
    let may_pass = |cause: &OpenError| cause.may_pass;
    error.chain().any(|cause| cause.downcast_ref().is_some_and(may_pass))
}
