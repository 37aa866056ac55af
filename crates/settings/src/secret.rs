//! Passphrases of encrypted images. Each source is read once, because a pipe can be read only once.

use std::{collections::HashMap, fs::File, path::PathBuf};

use anyhow::Context as _;
use image::Secret;

use crate::SecretSource;

/// Passphrases that were read so far.
#[derive(Debug, Default)]
pub struct SecretReader(HashMap<SecretSource, Secret>);

impl SecretReader {
    /// Reads the passphrase. Blocks; for a pipe, until its other end is closed.
    ///
    /// # Errors
    /// Fails if the source is unreadable.
    pub fn get(&mut self, source: &SecretSource) -> anyhow::Result<Secret> {
        if let Some(secret) = self.0.get(source) {
            return Ok(secret.clone());
        }
        let path = match source {
            SecretSource::File(path) => path.clone(),
            // Opening /dev/fd/N of a pipe shares its data; of a file it starts at offset 0.
            SecretSource::Descriptor(number) => PathBuf::from(format!("/dev/fd/{number}")),
        };
        let secret = File::open(path).and_then(Secret::read);
        let secret = secret.with_context(|| format!("the secret in {source} cannot be read"))?;
        self.0.insert(source.clone(), secret.clone());
        Ok(secret)
    }
}
