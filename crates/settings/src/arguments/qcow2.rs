//! Options of qcow2 images: caches, which `weir bench` has too, and passphrases.

use std::path::PathBuf;

use clap::Args;

use crate::{CleanInterval, L2CacheSize, Place, Qcow2Draft, Said, SecretSource};

/// How large the caches are to be. Where there are config files, who takes these in excludes
/// [`CacheArgs::OPTIONS`].
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "qcow2")]
pub struct CacheArgs {
    /// Memory for the mapping, in bytes, or full: enough for the whole disk [default: what the disk
    /// needs, at most 32M]
    #[arg(long, value_name = "SIZE", value_parser = crate::read::<L2CacheSize>)]
    l2_cache_size: Option<L2CacheSize>,
    /// How much of the mapping is read at a time, from 512 to a cluster [default: a cluster, or 4K
    /// where not all of it fits]
    #[arg(long, value_name = "SIZE", value_parser = crate::size)]
    l2_cache_entry_size: Option<u64>,
    /// Memory for refcounts [default and minimum: four clusters]
    #[arg(long, value_name = "SIZE", value_parser = crate::size)]
    refcount_cache_size: Option<u64>,
    /// Memory for both together; the mapping has it first
    #[arg(long, value_name = "SIZE", value_parser = crate::size)]
    cache_size: Option<u64>,
}

impl CacheArgs {
    /// All of them, for what they cannot be used with.
    pub const OPTIONS: [&str; 4] =
        ["l2_cache_size", "l2_cache_entry_size", "refcount_cache_size", "cache_size"];

    /// What they say of an image.
    pub fn draft(&self) -> Qcow2Draft {
        Qcow2Draft {
            l2_cache_size: Said::option("l2-cache-size", self.l2_cache_size),
            l2_cache_entry_size: Said::option("l2-cache-entry-size", self.l2_cache_entry_size),
            refcount_cache_size: Said::option("refcount-cache-size", self.refcount_cache_size),
            cache_size: Said::option("cache-size", self.cache_size),
            ..Qcow2Draft::default()
        }
    }
}

#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "qcow2")]
/// The caches, and where the passphrases of encrypted images are.
pub struct Qcow2Args {
    #[command(flatten)]
    caches: CacheArgs,
    /// Free what was not used for so many seconds; 0 never does [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = crate::read::<CleanInterval>, conflicts_with = "config")]
    cache_clean_interval: Option<CleanInterval>,
    /// A file that is the passphrase of an encrypted image, whole; once for each in the chain from
    /// the top, or one for all
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    secret_file: Vec<PathBuf>,
    /// An open descriptor to read the passphrase from
    #[arg(long, value_name = "N", conflicts_with_all = ["config", "secret_file"])]
    secret_fd: Vec<u32>,
    /// Let clients see which parts this bitmap of the image marks, as qemu:dirty-bitmap:NAME;
    /// repeatable
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    bitmap: Vec<String>,
}

impl Qcow2Args {
    /// What they say of an image.
    pub fn draft(&self) -> Qcow2Draft {
        let file = |path: &PathBuf| {
            Said::new(SecretSource::File(path.clone()), Place::option("secret-file", path.display()))
        };
        let descriptor =
            |number: &u32| Said::new(SecretSource::Descriptor(*number), Place::option("secret-fd", number));
        Qcow2Draft {
            cache_clean_interval: Said::option("cache-clean-interval", self.cache_clean_interval),
            bitmaps: self
                .bitmap
                .iter()
                .map(|name| Said::new(name.clone(), Place::option("bitmap", name)))
                .collect(),
            secrets: self.secret_file.iter().map(file).chain(self.secret_fd.iter().map(descriptor)).collect(),
            ..self.caches.draft()
        }
    }
}
