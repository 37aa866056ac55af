//! Assigns passphrases to the encrypted images of a chain and unlocks them.

use super::chain::ChainLevel;
use storage::OpenError;

use crate::{
    Secret,
    qcow2::luks::{self, SectorCipher, UnlockError},
};

/// Cipher of each level; `None` for a level that is not encrypted.
///
/// Runs after the whole chain was found, so that missing files are reported before keys
/// are derived, which takes seconds.
pub(super) async fn unlock(
    levels: &[ChainLevel],
    secrets: &[Secret],
) -> Result<Vec<Option<SectorCipher>>, OpenError> {
    let encrypted = levels.iter().filter(|level| level.luks().is_some()).count();
    let top = &levels[0].name;
    if encrypted == 0 && !secrets.is_empty() {
        let remedy = "leave the secret out";
        return Err(OpenError::new(top, "is not encrypted, but a secret was given", remedy));
    }
    if secrets.len() > 1 && secrets.len() != encrypted {
        let why = format!("{} secrets for {encrypted} encrypted images", secrets.len());
        let remedy = "give one for each image from the top of the chain, or one for all";
        return Err(OpenError::new(top, why, remedy));
    }
    let mut next = secrets.iter();
    let mut ciphers = Vec::with_capacity(levels.len());
    for level in levels {
        ciphers.push(match level.luks() {
            None => None,
            Some(place) => {
                let secret = if secrets.len() == 1 { secrets.first() } else { next.next() };
                let secret = secret.ok_or_else(|| {
                    OpenError::new(
                        &level.name,
                        "is encrypted with LUKS",
                        "give its passphrase with --secret-file",
                    )
                })?;
                let opened = luks::unlock(&level.storage, place, secret).await;
                Some(opened.map_err(|error| unlock_error(&level.name, &error, secret))?)
            }
        });
    }
    Ok(ciphers)
}

fn unlock_error(name: &str, error: &UnlockError, secret: &Secret) -> OpenError {
    let remedy = match error {
        // The most common mistake. The hint depends on the given secret only and reveals
        // nothing about the correct one.
        UnlockError::WrongPassphrase { .. } if secret.expose().ends_with(b"\n") => {
            "a line break at the end of the file is part of the secret: use printf instead of echo"
        }
        UnlockError::WrongPassphrase { .. } => "is it the passphrase of this image?",
        UnlockError::Invalid(_) => "check which program created the image",
        UnlockError::Io(_) => "check the device",
    };
    OpenError::new(name, error.to_string(), remedy)
}
