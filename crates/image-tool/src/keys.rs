//! Passphrases of existing encrypted images, and their assignment to images.
//!
//! Either one for each encrypted image, in the order of the command's images and within each from
//! the top of its chain, or one for all. Never on the command line, which all users of the machine
//! can see.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use image::{
    Secret,
    open::MAX_CHAIN,
    qcow2::header::{EncryptionMethod, Qcow2Header},
};
use settings::{SecretSource, secret::SecretReader};
use storage::ImageFormat;

use super::opening;

#[derive(Debug, Args)]
pub(super) struct PassphraseArgs {
    /// File whose whole content is the passphrase of an encrypted image; one for each image of the
    /// chain from the top, or one for all
    #[arg(long, value_name = "FILE")]
    secret_file: Vec<PathBuf>,
    /// Open file descriptor to read the passphrase from
    #[arg(long, value_name = "N", conflicts_with = "secret_file")]
    secret_fd: Vec<u32>,
}

impl PassphraseArgs {
    pub(super) fn read(&self) -> anyhow::Result<PassphraseSet> {
        read(&self.secret_file, &self.secret_fd)
    }
}

pub(super) fn read(files: &[PathBuf], descriptors: &[u32]) -> anyhow::Result<PassphraseSet> {
    let mut secrets = SecretReader::default();
    let files = files.iter().cloned().map(SecretSource::File);
    let sources = files.chain(descriptors.iter().copied().map(SecretSource::Descriptor));
    let given = sources.map(|source| secrets.get(&source)).collect::<Result<_, _>>()?;
    Ok(PassphraseSet { given, ..PassphraseSet::default() })
}

#[derive(Clone, Debug, Default)]
pub(super) struct PassphraseSet {
    given: Vec<Secret>,
    next: usize,
    /// Number of `given` secrets that belong to descriptions of images.
    described: usize,
}

impl PassphraseSet {
    pub(super) fn one(secret: Secret) -> Self {
        Self { given: vec![secret], ..Self::default() }
    }

    /// Adds the passphrase of an image's description.
    ///
    /// # Errors
    /// Fails if there are passphrases of another kind.
    pub(super) fn add(&mut self, secret: Secret) -> anyhow::Result<()> {
        if self.given.len() > self.described {
            bail!(
                "encrypt.key-secret cannot be combined with --secret-file or --secret-fd (use one of them)"
            );
        }
        self.given.push(secret);
        self.described += 1;
        Ok(())
    }

    pub(super) fn first(&self) -> Option<&Secret> {
        self.given.first()
    }

    /// Passphrases of the image at `path`, and of its backing chain unless `without_backing`.
    pub(super) async fn assign_to(
        &mut self,
        path: &Path,
        format: Option<ImageFormat>,
        without_backing: bool,
    ) -> anyhow::Result<Vec<Secret>> {
        if self.given.is_empty() {
            // Opening the image reports a missing passphrase.
            return Ok(Vec::new());
        }
        let count = encrypted(path, format, without_backing).await?;
        let first = self.next;
        self.next += count;
        if let [single] = &self.given[..] {
            return Ok(if count > 0 { vec![single.clone()] } else { Vec::new() });
        }
        match self.given.get(first..self.next) {
            Some(secrets) => Ok(secrets.to_vec()),
            None => bail!(
                "{}: there are {} passphrases, and more encrypted images (give one for each in the \
                 order of the images and from the top of each chain, or one for all)",
                path.display(),
                self.given.len()
            ),
        }
    }

    pub(super) fn backing_passphrases(&self, header: &Qcow2Header) -> Self {
        // The image's own passphrase comes first; those of its backing chain follow.
        let next = usize::from(header.crypt == EncryptionMethod::Luks);
        Self { next, ..self.clone() }
    }

    pub(super) fn check_used(&self) -> anyhow::Result<()> {
        match (self.given.len(), self.next) {
            (0, _) | (1, 1..) => Ok(()),
            (1, 0) => bail!("a passphrase was given, but no image is encrypted (leave it out)"),
            (given, used) if given <= used => Ok(()),
            (given, used) => {
                bail!("passphrases given: {given}, encrypted images: {used} (give one for each)")
            }
        }
    }
}

async fn encrypted(path: &Path, format: Option<ImageFormat>, without_backing: bool) -> anyhow::Result<usize> {
    let mut count = 0;
    let mut next = Some((path.to_owned(), opening::format(path, format)?));
    for _ in 0..MAX_CHAIN {
        let Some((path, ImageFormat::Qcow2)) = next else { break };
        let header = opening::header_of(&path).await?;
        count += usize::from(header.crypt == EncryptionMethod::Luks);
        next = if without_backing { None } else { opening::backing_in(&path, &header)? };
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(given: usize, next: usize) -> PassphraseSet {
        let given = (0..given).map(|number| Secret::new(vec![number as u8 + 1])).collect();
        PassphraseSet { given, next, ..PassphraseSet::default() }
    }

    #[test]
    fn unused_passphrase_is_rejected() {
        for (given, used, right) in
            [(0, 0, true), (0, 2, true), (1, 0, false), (1, 3, true), (2, 1, false), (2, 2, true)]
        {
            assert_eq!(keys(given, used).check_used().is_ok(), right, "{given} given, {used} used");
        }
    }
}
