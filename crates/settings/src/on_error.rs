//! What is done about a disk's errors, as it was said. Words and their meaning are the disk's own.

use block::disk::{ErrorPolicies, OnError};

use super::{Said, Wrong};

/// The option about reads.
pub const READ: &str = "on-read-error";
/// The option about writes, flushes and discards.
pub const WRITE: &str = "on-write-error";

/// The two as they were said.
#[derive(Clone, Debug, Default)]
pub struct OnErrorDraft {
    pub read: Option<Said<OnError>>,
    pub write: Option<Said<OnError>>,
}

impl OnErrorDraft {
    /// What they come to.
    ///
    /// # Errors
    /// A policy that reads cannot have.
    pub fn check(&self) -> Result<ErrorPolicies, Wrong> {
        let value = |said: &Option<Said<OnError>>| said.as_ref().map(|said| said.value).unwrap_or_default();
        match &self.read {
            Some(said) if !OnError::OF_READS.contains(&said.value) => {
                Err(said.wrong("is for writes alone: reads need no room (use report or stop)"))
            }
            _ => Ok(ErrorPolicies { read: value(&self.read), write: value(&self.write) }),
        }
    }
}
