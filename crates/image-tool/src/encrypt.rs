//! Encryption of a new image: QEMU's `encrypt.` options and `secret` objects. Never reads a
//! passphrase from the command line, which all users of the machine can see.

use std::{cell::RefCell, collections::BTreeSet, path::PathBuf, time::Duration};

use clap::Args;
use image::{
    Secret,
    qcow2::luks::{self, CipherKind, LuksHash, LuksOptions, NewLuks},
};

use super::{keys, options::FormatOptions};

#[derive(Debug, Args)]
pub(super) struct SecretArgs {
    /// Encrypt the image with LUKS; the file holds the passphrase
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Encrypt the image with LUKS; read the passphrase from this open file descriptor
    #[arg(long, value_name = "N", conflicts_with = "secret_file")]
    secret_fd: Option<u32>,
    /// Passphrase in the form of qemu-img: secret,id=ID,file=FILE, with -o encrypt.key-secret=ID
    #[arg(long, value_name = "OBJECT", conflicts_with_all = ["secret_file", "secret_fd"])]
    object: Vec<String>,
}

impl SecretArgs {
    pub(super) fn objects(&self) -> Result<SecretObjects, String> {
        SecretObjects::read(&self.object)
    }

    pub(super) fn is_given(&self) -> bool {
        self.secret_file.is_some() || self.secret_fd.is_some() || !self.object.is_empty()
    }

    pub(super) fn read(&self) -> anyhow::Result<Option<Secret>> {
        let keys = keys::read(self.secret_file.as_slice(), self.secret_fd.as_slice())?;
        Ok(keys.first().cloned())
    }
}

#[derive(Debug)]
pub(super) struct Encryption {
    luks: LuksOptions,
    pub(super) secret: Secret,
}

impl Encryption {
    /// Reads the encryption options; `None` if the image is not to be encrypted. The passphrase is
    /// `passphrase` or that of an object.
    pub(super) fn take(
        options: &mut FormatOptions,
        own: Option<&Secret>,
        objects: &SecretObjects,
    ) -> Result<Option<Self>, String> {
        let format = options.take("encrypt.format");
        let key = options.take("encrypt.key-secret");
        match format.as_deref() {
            Some("luks") => {}
            Some("aes") => {
                return Err("encrypt.format=aes: is insecure and not supported (use luks)".to_owned());
            }
            Some(other) => return Err(format!("encrypt.format={other}: is unknown (use luks)")),
            None if key.is_some() || objects.has_unused() => {
                return Err("a secret is given without encrypt.format=luks".to_owned());
            }
            None => return Ok(None),
        }
        let luks = luks_options(options)?;
        let secret = match (own, key) {
            (Some(own), None) => own.clone(),
            (Some(_), Some(_)) => {
                return Err(
                    "encrypt.key-secret names an --object, and there is a passphrase of another kind \
                            (give one of them)"
                        .to_owned(),
                );
            }
            (None, Some(key)) => objects.secret(&key)?,
            (None, None) => return Err("encrypt.format=luks: needs a passphrase".to_owned()),
        };
        Ok(Some(Self { luks, secret }))
    }

    /// Creates the LUKS header. Takes seconds by design, to slow down attempts with many
    /// passphrases.
    pub(super) fn area(&self) -> Result<Vec<u8>, String> {
        Ok(luks::create(&self.secret, &self.luks).map_err(|error| error.to_string())?.area)
    }
}

/// Size of the LUKS header of an image with these options, without its passphrase; `None` if the
/// image is not encrypted. A passphrase that is named must be among the objects.
pub(super) fn luks_bytes(
    options: &mut FormatOptions,
    objects: &SecretObjects,
) -> Result<Option<u64>, String> {
    let format = options.take("encrypt.format");
    let key = options.take("encrypt.key-secret");
    match format.as_deref() {
        Some("luks") => {}
        Some(other) => return Err(format!("encrypt.format={other}: is unknown (use luks)")),
        None if key.is_some() || objects.has_unused() => {
            return Err("a secret is given without encrypt.format=luks".to_owned());
        }
        None => return Ok(None),
    }
    if let Some(key) = key {
        objects.find(&key)?;
    }
    Ok(Some(NewLuks::area_bytes(luks_options(options)?.cipher)))
}

/// Secrets defined by `--object`, by id. A file is read when its secret is used.
#[derive(Debug, Default)]
pub(super) struct SecretObjects {
    files: Vec<(String, PathBuf)>,
    used: RefCell<BTreeSet<String>>,
}

impl SecretObjects {
    pub(super) fn read(texts: &[String]) -> Result<Self, String> {
        let mut objects = Self::default();
        for text in texts {
            let Some(rest) = text.strip_prefix("secret,").or_else(|| text.strip_prefix("qom-type=secret,"))
            else {
                return Err(format!("--object {text}: is not a secret (secret,id=ID,file=FILE)"));
            };
            let mut fields = FormatOptions::read(&[rest.to_owned()])?;
            let id = fields.take("id").ok_or_else(|| format!("--object {text}: id=ID is missing"))?;
            // A passphrase in `data` is visible in the process list.
            if fields.take("data").is_some() {
                return Err("--object secret,data=…: every user of this machine can read it (use file=FILE)"
                    .to_owned());
            }
            let file = fields.take("file").ok_or_else(|| format!("--object {text}: file=FILE is missing"))?;
            if let Some(format) = fields.take("format").filter(|format| format != "raw") {
                return Err(format!(
                    "--object {text}: format={format} is not supported (write the file raw)"
                ));
            }
            if let Some(key) = fields.first_unused() {
                return Err(format!("--object {text}: {key} is unknown (secret,id=ID,file=FILE)"));
            }
            if objects.files.iter().any(|(known, _)| *known == id) {
                return Err(format!("--object {text}: the id {id} is already in use (choose another id)"));
            }
            objects.files.push((id, file.into()));
        }
        Ok(objects)
    }

    /// File of the secret `id`, which then counts as used.
    pub(super) fn find(&self, id: &str) -> Result<&PathBuf, String> {
        let found = self.files.iter().find(|(known, _)| known == id);
        let (_, file) = found.ok_or_else(|| {
            format!("encrypt.key-secret={id}: no such secret (add --object secret,id={id},file=FILE)")
        })?;
        self.used.borrow_mut().insert(id.to_owned());
        Ok(file)
    }

    pub(super) fn secret(&self, id: &str) -> Result<Secret, String> {
        let file = self.find(id)?;
        let read = keys::read(std::slice::from_ref(file), &[]).map_err(|error| format!("{error:#}"))?;
        read.first().cloned().ok_or_else(|| format!("{}: is empty", file.display()))
    }

    pub(super) fn has_unused(&self) -> bool {
        self.files.len() > self.used.borrow().len()
    }

    /// Fails if one of the secrets was not used by an image.
    pub(super) fn check_used(&self) -> Result<(), String> {
        let used = self.used.borrow();
        match self.files.iter().find(|(id, _)| !used.contains(id)) {
            None => Ok(()),
            Some((id, _)) => {
                Err(format!("--object {id}: no image uses it (name it with encrypt.key-secret={id})"))
            }
        }
    }
}

fn luks_options(options: &mut FormatOptions) -> Result<LuksOptions, String> {
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
    // XTS uses two keys of the given length.
    let key_bytes = bits.unwrap_or(32) * if mode == "xts" { 2 } else { 1 };
    let cipher =
        CipherKind::parse("aes", &format!("{mode}-{iv}"), key_bytes).map_err(|error| error.to_string())?;
    let hash = options
        .take_as("encrypt.hash-alg", |value| LuksHash::parse(value).map_err(|error| error.to_string()))?;
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
