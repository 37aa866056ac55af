//! The error of opening an image.

/// Reason why an image cannot be served: which image, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image}: {why} ({remedy})")]
pub struct OpenError {
    /// The image, as the user named it.
    pub image: String,
    /// Reason.
    pub why: String,
    /// Advice to the user.
    pub remedy: String,
    /// Command name of the process that holds the lock, if that is the reason and it is known.
    pub holder: Option<String>,
    /// Identity of the locked file, if that is the reason: see
    /// [`StorageIdentity::key`](super::StorageIdentity::key).
    pub locked: Option<Box<str>>,
    /// True if this process has the file open, perhaps under another name, and holds the lock.
    pub held_here: bool,
    /// True for a transient error: the server does not answer, or the lock of a dead client has not
    /// expired.
    pub may_pass: bool,
}

impl OpenError {
    /// Creates an error of opening `image` with its reason and its advice.
    pub fn new(image: &str, why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            image: image.to_owned(),
            why: why.into(),
            remedy: remedy.into(),
            holder: None,
            locked: None,
            held_here: false,
            may_pass: false,
        }
    }

    pub(crate) fn transient(self) -> Self {
        Self { may_pass: true, ..self }
    }
}
