//! Passphrases of encrypted images. Each place is read once: a pipe gives what it has only once.

use std::{collections::HashMap, fs::File, path::PathBuf};

use anyhow::Context as _;
use image::Secret;

use crate::SecretSource;

/// What was read so far.
#[derive(Debug, Default)]
pub struct Secrets(HashMap<SecretSource, Secret>);

impl Secrets {
    /// The passphrase that is there. Blocks, for a pipe until its other end is closed.
    ///
    /// # Errors
    /// If there is none that can be read.
    pub fn get(&mut self, source: &SecretSource) -> anyhow::Result<Secret> {
        if let Some(secret) = self.0.get(source) {
            return Ok(secret.clone());
        }
        let path = match source {
            SecretSource::File(path) => path.clone(),
            SecretSource::Descriptor(number) => PathBuf::from(format!("/dev/fd/{number}")),
        };
        let secret = File::open(path).and_then(Secret::read);
        let secret = secret.with_context(|| format!("the secret in {source} cannot be read"))?;
        self.0.insert(source.clone(), secret.clone());
        Ok(secret)
    }
}
