//! Images as named on the command line: by file name with `-f FORMAT`, by `json:{…}`, or by
//! options of QEMU's block drivers with `--image-opts`.
//!
//! All three become a [`NamedImage`], which the commands open. Names inside images are not handled
//! here: they are paths ([`opening::resolve_backing`]).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use block::disk::Discards;
use clap::Args;
use console::CommandFailure;
use image::{Image, Secret};
use settings::ImageDescription;
use storage::{ImageFormat, Storage};

use super::{
    disk,
    encrypt::SecretObjects,
    keys::PassphraseSet,
    opening::{self, OpenMode},
    snapshot_selector::SnapshotSelector,
};

/// The image that a command operates on.
#[derive(Debug, Args)]
pub(super) struct ImageArg {
    /// Image
    #[arg(value_name = "FILE", value_parser = opening::image_name())]
    file: PathBuf,
    /// Format of the image [default: detected]
    #[arg(short, long, value_name = "FORMAT", value_parser = opening::format_option())]
    format: Option<ImageFormat>,
    #[command(flatten)]
    naming: NamingArgs,
}

impl ImageArg {
    /// Returns the image with the options of its description. All secrets must be used.
    pub(super) fn named(&self) -> Result<NamedImage, CommandFailure> {
        let objects = self.naming.objects()?;
        let image = self.naming.named(&self.file, self.format, &objects)?;
        objects.check_used().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
        Ok(image)
    }
}

/// Options that determine the meaning of an image's name.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct NamingArgs {
    /// Parse FILE as options of QEMU's block drivers, such as driver=qcow2,file.filename=PATH
    #[arg(long)]
    pub(super) image_opts: bool,
    /// Passphrase for encrypt.key-secret=ID: secret,id=ID,file=FILE; repeatable
    #[arg(long, value_name = "OBJECT")]
    pub(super) object: Vec<String>,
}

impl NamingArgs {
    pub(super) fn objects(&self) -> Result<SecretObjects, CommandFailure> {
        SecretObjects::read(&self.object).map_err(|message| CommandFailure::Usage(anyhow!(message)))
    }

    /// Returns the image that `file` names; `format` is the value of -f or -F.
    pub(super) fn named(
        &self,
        file: &Path,
        format: Option<ImageFormat>,
        objects: &SecretObjects,
    ) -> Result<NamedImage, CommandFailure> {
        named(file, format, self.image_opts, objects)
    }
}

/// As [`NamingArgs::named`]; `has_options` is true if `file` is a set of options.
pub(super) fn named(
    file: &Path,
    format: Option<ImageFormat>,
    has_options: bool,
    objects: &SecretObjects,
) -> Result<NamedImage, CommandFailure> {
    if has_options && format.is_some() {
        let message =
            "--image-opts cannot be combined with a format option (add driver=FORMAT to the options)";
        return Err(CommandFailure::Usage(anyhow!("{}: {message}", file.display())));
    }
    let is_json = file.as_os_str().as_encoded_bytes().starts_with(b"json:");
    if !has_options && !is_json {
        return Ok(NamedImage::plain(file.to_owned(), format));
    }
    let text = file
        .to_str()
        .with_context(|| format!("{}: the name is not UTF-8 (use another path)", file.display()));
    let text = text.map_err(CommandFailure::Usage)?;
    let description = match has_options {
        true => ImageDescription::from_options(text),
        false => ImageDescription::from_name(text),
    };
    NamedImage::described(description.map_err(CommandFailure::Usage)?, format, objects)
        .map_err(CommandFailure::Usage)
}

/// An image and the options to open it with.
#[derive(Clone, Debug)]
pub(super) struct NamedImage {
    /// Path or address.
    pub(super) path: PathBuf,
    /// Format given by the user.
    pub(super) format: Option<ImageFormat>,
    read_only: bool,
    /// True if clusters that become zeroes keep their host cluster in the file.
    pub(super) keeps_place: bool,
    mode: OpenMode,
    /// Passphrase, or the reason why it is missing, for commands that need it.
    secret: Option<Result<Secret, String>>,
}

impl NamedImage {
    /// An image at a path or an address, without further options.
    pub(super) fn plain(path: PathBuf, format: Option<ImageFormat>) -> Self {
        Self { path, format, read_only: false, keeps_place: false, mode: OpenMode::default(), secret: None }
    }

    fn described(
        description: ImageDescription,
        format: Option<ImageFormat>,
        objects: &SecretObjects,
    ) -> anyhow::Result<Self> {
        let ImageDescription {
            image,
            format: own_format,
            part,
            no_backing,
            read_only,
            force_share,
            cache,
            discard,
            discard_no_unref,
            // Commands that copy have their own options for detecting zeroes.
            detect_zeroes: _,
            key_secret,
            caches,
            cache_options: _,
            reconnect_delay,
            open_timeout,
        } = description;
        let path = image.path().map_or_else(|| PathBuf::from(image.to_string()), opening::local);
        if let (Some(given), Some(own)) = (format, own_format)
            && given != own
        {
            bail!(
                "{}: the format is {}, and {} was given (leave one out)",
                path.display(),
                own.name(),
                given.name()
            );
        }
        let mode = OpenMode {
            force_share,
            without_backing: no_backing,
            described: opening::DescribedOptions { part, cache, caches, reconnect_delay, open_timeout },
            ..OpenMode::default()
        };
        let secret = match key_secret {
            None => None,
            // A missing secret is an error only for commands that decrypt.
            Some(id) => Some(match objects.find(&id) {
                Ok(_) => Ok(objects.secret(&id).map_err(|message| anyhow!(message))?),
                Err(missing) => Err(missing),
            }),
        };
        let keeps_place = discard_no_unref || discard == Some(Discards::Ignore);
        Ok(Self { path, format: own_format.or(format), read_only, keeps_place, mode, secret })
    }

    /// Name of the image for messages.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Offset of the disk's first byte in the file.
    pub(super) fn offset(&self) -> u64 {
        self.mode.described.part.map_or(0, |part| part.offset)
    }

    /// Format given by the user, or else that of the signature.
    pub(super) fn format(&self) -> anyhow::Result<ImageFormat> {
        opening::format(&self.path, self.format)
    }

    /// Combines the command's options for opening with those of the image's description.
    ///
    /// # Errors
    /// Fails if the command writes and `read-only=on` was given.
    pub(super) fn open_mode(&self, mode: OpenMode) -> anyhow::Result<OpenMode> {
        if mode.write && self.read_only {
            bail!("{}: read-only=on, and this command writes to the image (leave it out)", self.name());
        }
        Ok(OpenMode {
            force_share: mode.force_share || self.mode.force_share,
            without_backing: mode.without_backing || self.mode.without_backing,
            described: self.mode.described,
            ..mode
        })
    }

    /// Format for a command that also opens the image's backing and data files. If it was probed,
    /// the header must not name other files: a guest could have written it into its raw disk.
    pub(super) async fn format_of_chain(&self) -> anyhow::Result<ImageFormat> {
        let format = self.format()?;
        if self.format.is_none() && format == ImageFormat::Qcow2 {
            let header = opening::header_of(&self.path).await?;
            if header.backing.is_some() || header.has_data_file() {
                bail!(
                    "{}: looks like qcow2 and names other files, so its format must be given (-f \
                     qcow2, if it is one: a guest may have written the header into a raw disk)",
                    self.name()
                );
            }
        }
        Ok(format)
    }

    /// Fails if the image is to be opened without its backing file, which the command needs.
    pub(super) fn check_backing(&self) -> Result<(), CommandFailure> {
        match self.mode.without_backing {
            true => {
                let message = "backing: is empty, but this command needs the backing file (leave it out)";
                Err(CommandFailure::Usage(anyhow!("{}: {message}", self.name())))
            }
            false => Ok(()),
        }
    }

    /// Opens the file of the image as storage.
    pub(super) fn storage(&self, mode: OpenMode) -> anyhow::Result<Storage> {
        opening::storage(&self.path, self.open_mode(mode)?)
    }

    /// Opens the disk inside the image.
    pub(super) async fn open(&self, mode: OpenMode, keys: &mut PassphraseSet) -> anyhow::Result<Arc<Image>> {
        self.open_at(mode, keys, None).await
    }

    /// Opens the disk inside the image, or one of its internal snapshots.
    pub(super) async fn open_at(
        &self,
        mode: OpenMode,
        keys: &mut PassphraseSet,
        selector: Option<&SnapshotSelector>,
    ) -> anyhow::Result<Arc<Image>> {
        disk::open_at(&self.path, self.format, self.open_mode(mode)?, keys, selector).await
    }
}

/// The passphrases of `keys`, followed by those of the images' descriptions, in their order.
pub(super) fn with_secrets(mut keys: PassphraseSet, images: &[&NamedImage]) -> anyhow::Result<PassphraseSet> {
    for secret in images.iter().filter_map(|image| image.secret.as_ref()) {
        keys.add(secret.clone().map_err(|message| anyhow!(message))?)?;
    }
    Ok(keys)
}
