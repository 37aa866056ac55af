//! How a new image is to be encrypted, and with whose passphrase: QEMU's `encrypt.` options and its `secret` objects.
//!
//! Never takes a passphrase from the command line, where everybody on the machine can read it.

use std::{fs::File, path::PathBuf, time::Duration};

use block::image::{
    Secret,
    qcow2::luks::{self, CipherKind, Hash, LuksOptions},
};
use clap::Args;

use super::options::Options;

/// Where the passphrase comes from.
#[derive(Debug, Args)]
pub(super) struct SecretArgs {
    /// Encrypt it with LUKS, and the passphrase that this file holds
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// The same, as qemu-img has it: secret,id=ID,file=FILE, with encrypt.key-secret=ID among the options
    #[arg(long, value_name = "OBJECT", conflicts_with = "secret_file")]
    object: Vec<String>,
}

/// What was said of encryption.
#[derive(Debug)]
pub(super) struct Encryption {
    luks: LuksOptions,
    secret: PathBuf,
}

impl Encryption {
    /// Takes the options; `None` if the image is not to be encrypted.
    ///
    /// # Errors
    /// Options without a passphrase, or the other way round, and what is not supported.
    pub(super) fn take(options: &mut Options, given: &SecretArgs) -> Result<Option<Self>, String> {
        let format = options.take("encrypt.format");
        let key = options.take("encrypt.key-secret");
        match format.as_deref() {
            Some("luks") => {}
            Some("aes") => {
                return Err(
                    "encrypt.format=aes: is not safe, and weir does not make it (use luks)".to_owned()
                );
            }
            Some(other) => return Err(format!("encrypt.format={other}: is not known (use luks)")),
            None if given.secret_file.is_some() => {}
            None if key.is_some() || !given.object.is_empty() => {
                return Err(
                    "there is a secret, and encrypt.format=luks is missing among the options".to_owned()
                );
            }
            None => return Ok(None),
        }
        let luks = luks_options(options)?;
        let secret = match (&given.secret_file, key) {
            (Some(file), None) => file.clone(),
            (Some(_), Some(_)) => {
                return Err("encrypt.key-secret and --secret-file: give one of them".to_owned());
            }
            (None, Some(key)) => object(&given.object, &key)?,
            (None, None) => {
                return Err("encrypt.format=luks: needs a passphrase (--secret-file FILE)".to_owned());
            }
        };
        Ok(Some(Self { luks, secret }))
    }

    /// Makes the LUKS header. Takes a few seconds, which is what keeps others from trying many passphrases.
    ///
    /// # Errors
    /// If the passphrase cannot be read, or openssl fails.
    pub(super) fn area(&self) -> Result<Vec<u8>, String> {
        let read = File::open(&self.secret).and_then(Secret::read);
        let secret = read
            .map_err(|error| format!("{}: the passphrase cannot be read: {error}", self.secret.display()))?;
        Ok(luks::create(&secret, &self.luks).map_err(|error| error.to_string())?.area)
    }
}

/// The file of the secret object with this id.
fn object(objects: &[String], key: &str) -> Result<PathBuf, String> {
    for text in objects {
        let Some(rest) = text.strip_prefix("secret,") else {
            return Err(format!("--object {text}: is no secret (secret,id=ID,file=FILE)"));
        };
        let mut fields = Options::read(&[rest.to_owned()])?;
        if fields.take("id").as_deref() != Some(key) {
            continue;
        }
        if fields.take("data").is_some() {
            return Err(
                "--object secret,data=…: everybody on this machine can read that (use file=FILE)".to_owned()
            );
        }
        let file = fields.take("file").ok_or_else(|| format!("--object {text}: has no file=FILE"))?;
        fields.finish("a secret")?;
        return Ok(file.into());
    }
    Err(format!("encrypt.key-secret={key}: there is no such secret (--object secret,id={key},file=FILE)"))
}

fn luks_options(options: &mut Options) -> Result<LuksOptions, String> {
    let default = LuksOptions::default();
    let bits = options.take_as("encrypt.cipher-alg", |value| match value {
        "aes-128" => Ok(16),
        "aes-192" => Ok(24),
        "aes-256" => Ok(32),
        _ => Err("is none of aes-128, aes-192 and aes-256".to_owned()),
    })?;
    let mode = options.take("encrypt.cipher-mode").unwrap_or_else(|| "xts".to_owned());
    let iv = options.take("encrypt.ivgen-alg").unwrap_or_else(|| "plain64".to_owned());
    let iv_hash = options.take("encrypt.ivgen-hash-alg");
    let iv = iv_hash.map_or(iv.clone(), |hash| format!("{iv}:{hash}"));
    let key_bytes = bits.unwrap_or(32) * if mode == "xts" { 2 } else { 1 };
    let cipher =
        CipherKind::parse("aes", &format!("{mode}-{iv}"), key_bytes).map_err(|error| error.to_string())?;
    let hash =
        options.take_as("encrypt.hash-alg", |value| Hash::parse(value).map_err(|error| error.to_string()))?;
    let time = options.take_as("encrypt.iter-time", |value| match value.parse() {
        Ok(millis @ 1..=3_600_000) => Ok(Duration::from_millis(millis)),
        _ => Err("is not a number of milliseconds, from 1 to an hour".to_owned()),
    })?;
    Ok(LuksOptions {
        cipher,
        hash: hash.unwrap_or(default.hash),
        iteration_time: time.unwrap_or(default.iteration_time),
    })
}
