//! Why something cannot be opened, as a person is told.

/// Why an image cannot be served: which one, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image}: {why} ({remedy})")]
pub struct OpenError {
    /// The image as the user named it.
    pub image: String,
    /// What is wrong.
    pub why: String,
    /// What helps.
    pub remedy: String,
    /// The command of the process that has it locked, if that is why and can be told.
    pub holder: Option<String>,
    /// Which file it is that somebody has locked, if that is why: see
    /// [`Identity::what`](super::Identity::what).
    pub locked: Option<String>,
}

impl OpenError {
    pub(crate) fn new(image: &str, why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { image: image.to_owned(), why: why.into(), remedy: remedy.into(), holder: None, locked: None }
    }
}
