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
    pub locked: Option<Box<str>>,
    /// This process itself has the file open, perhaps under another name, and holds the lock.
    pub held_here: bool,
    /// It may be otherwise soon: nobody answers where it lies, or one that has died is still seen.
    pub may_pass: bool,
}

impl OpenError {
    /// An error of opening `image`: the reason, and what the user can do about it.
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

    pub(crate) fn that_may_pass(self) -> Self {
        Self { may_pass: true, ..self }
    }
}
