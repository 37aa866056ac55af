//! `weir image amend`: changes features of a qcow2 image in place, with the options of `qemu-img
//! amend` that only concern its header.
//!
//! An image is checked before its version is raised, because version 3 assigns a meaning to bits
//! of the mapping that version 2 reserves: the content of a damaged image could change.

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::qcow2::{
    self, Qcow2Image,
    amend::Amendment,
    check::{Repair, check},
    header::compatible,
};
use settings::suggest::nearest;
use storage::{CacheMode, ImageFormat, Storage};

use super::{
    create, image_args::ImageArg, opening::OpenMode, options::FormatOptions, progress::ProgressArgs,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image amend -o compat=1.1 old.qcow2
      Convert an image from version 2 to version 3.
  weir image amend -f qcow2 -o lazy_refcounts=on vm1.qcow2
      Write refcounts lazily from now on.

Other options of an image cannot be changed in place: `weir image convert -o …` makes a copy with new options,
`weir image rebase` changes the backing file, and `weir image resize` changes the size.

Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

const OPTIONS: &str = "\
Options of qcow2 that can be amended:
  compat=1.1              convert to version 3
  lazy_refcounts=SWITCH   write refcounts lazily
";

/// The options of `weir image amend`.
#[derive(Debug, Args)]
pub struct AmendArgs {
    #[command(flatten)]
    image: ImageArg,
    /// Options to change, such as compat=1.1,lazy_refcounts=on; help lists all
    #[arg(short, value_name = "OPTIONS", required = true)]
    options: Vec<String>,
    /// Cache mode: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    cache: CacheMode,
    #[command(flatten)]
    progress: ProgressArgs,
}

pub(crate) fn run(arguments: AmendArgs) -> Result<(), CommandFailure> {
    if FormatOptions::ask_for_help(&arguments.options) {
        return Ok(print(OPTIONS)?);
    }
    let image = arguments.image.named()?;
    let name = image.name();
    let usage = |message: String| CommandFailure::Usage(anyhow!("{name}: {message}"));
    let options = AmendOptions::read(&arguments.options).map_err(usage)?;
    if image.format()? != ImageFormat::Qcow2 {
        return Err(usage("raw images have no options to amend".to_owned()));
    }
    let storage = image.storage(OpenMode { write: true, cache: arguments.cache, ..OpenMode::default() })?;
    on_reactor(async move { Ok(amend(storage, options).await.with_context(|| name)?) })?;
    arguments.progress.progress("amending", 1).end();
    Ok(())
}

/// The new values of options.
#[derive(Clone, Copy, Debug)]
struct AmendOptions {
    version: Option<u32>,
    lazy_refcounts: Option<bool>,
}

impl AmendOptions {
    fn read(texts: &[String]) -> Result<Self, String> {
        let mut options = FormatOptions::read(texts)?;
        let version = create::take_version(&mut options)?;
        let lazy_refcounts = options.take_switch("lazy_refcounts")?;
        if let Some(key) = options.first_unused() {
            return Err(refusal(key));
        }
        Ok(Self { version, lazy_refcounts })
    }
}

// Options of qcow2 at creation, apart from those that begin with `encrypt.`.
const CREATION_OPTIONS: [&str; 14] = [
    "backing_file",
    "backing_fmt",
    "cluster_size",
    "compat",
    "compression_type",
    "data_file",
    "data_file_raw",
    "encryption",
    "extended_l2",
    "extent_size_hint",
    "lazy_refcounts",
    "preallocation",
    "refcount_bits",
    "size",
];

/// The reason why an option cannot be amended, with the command that changes it.
fn refusal(key: &str) -> String {
    let is_known = CREATION_OPTIONS.contains(&key) || key.starts_with("encrypt.");
    let command = match key {
        "size" => "`weir image resize` changes it",
        "backing_file" | "backing_fmt" => "`weir image rebase` changes it",
        _ if is_known => {
            return format!(
                "{key}: cannot be changed in place (`weir image convert -o {key}=…` makes a copy)"
            );
        }
        _ => {
            let advice = match nearest(key, CREATION_OPTIONS) {
                Some(name) => format!("did you mean {name}?"),
                None => "-o help lists the options".to_owned(),
            };
            return format!("{key}: is not an option of qcow2 ({advice})");
        }
    };
    format!("{key}: cannot be amended ({command})")
}

async fn amend(storage: Storage, options: AmendOptions) -> anyhow::Result<()> {
    let header = qcow2::read_header(&storage).await?;
    let is_lazy = header.compatible & compatible::LAZY_REFCOUNTS != 0;
    if options.version == Some(2) && header.version > 2 {
        bail!(
            "compat=0.10: version 3 cannot become version 2 in place (`weir image convert -o \
             compat=0.10` makes a copy)"
        );
    }
    let version = header.version.max(options.version.unwrap_or(0));
    if options.lazy_refcounts == Some(true) && version < 3 {
        bail!("lazy_refcounts=on: needs version 3 (add compat=1.1)");
    }
    let amendment = Amendment {
        upgrade: version > header.version,
        lazy_refcounts: options.lazy_refcounts.filter(|is_on| *is_on != is_lazy),
    };
    if amendment == Amendment::default() {
        return Ok(());
    }
    // Reserved bits of version 2 may be zero flags of version 3: only a sound image keeps its
    // content.
    if amendment.upgrade {
        let report = check(&storage, Repair::Nothing).await?;
        if report.corruptions + report.check_errors > 0 {
            bail!(
                "compat=1.1: the image is damaged, and its content could change (`weir image \
                 check` shows the damage)"
            );
        }
    }
    let image = Qcow2Image::open_for_maintenance(storage).await?;
    // Version 3 requires extra data in snapshots, so it is written while the image still is
    // version 2.
    let done = async {
        if amendment.upgrade {
            image.complete_snapshots().await.context("its snapshot table cannot be written")?;
        }
        image.amend(amendment).await.context("its header cannot be changed")
    };
    let done = done.await;
    let closed = image.close().await;
    done?;
    Ok(closed?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_cannot_be_amended_is_named() {
        let read = |text: &str| AmendOptions::read(&[text.to_owned()]);
        let options = read("compat=v3,lazy_refcounts=on").unwrap();
        assert_eq!((options.version, options.lazy_refcounts), (Some(3), Some(true)));
        assert_eq!(read("compat=2").unwrap_err(), "compat=2: is neither 0.10 nor 1.1");
        for (option, expected) in [
            ("lazy_refcount=off", "lazy_refcount: is not an option of qcow2 (did you mean lazy_refcounts?)"),
            ("colour=red", "colour: is not an option of qcow2 (-o help lists the options)"),
            ("size=2G", "size: cannot be amended (`weir image resize` changes it)"),
            ("backing_file=a", "backing_file: cannot be amended (`weir image rebase` changes it)"),
            ("backing_fmt=raw", "backing_fmt: cannot be amended (`weir image rebase` changes it)"),
        ] {
            assert_eq!(read(option).unwrap_err(), expected);
        }
        assert!(read("cluster_size=2M").unwrap_err().starts_with("cluster_size: cannot be changed in place"));
    }
}
