//! Valid combinations of options, as in QEMU, and the errors for invalid ones.

use super::{CreateOptions, Preallocation};
use crate::qcow2::header::{CLUSTER_BITS, CompressionType, EXTENDED_CLUSTER_BITS};

/// An invalid option and the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {rule}")]
pub struct InvalidImageOption {
    /// Option in qemu-img's notation: `lazy_refcounts=on`.
    pub option: String,
    /// The rule, and the remedy.
    pub rule: String,
}

pub(super) fn invalid_option(option: impl Into<String>, rule: impl Into<String>) -> InvalidImageOption {
    InvalidImageOption { option: option.into(), rule: rule.into() }
}

impl CreateOptions {
    /// Returns the options as they take effect: size rounded up to sectors, implied options set.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn checked(&self) -> Result<Self, InvalidImageOption> {
        let mut options = self.clone();
        options.size_bytes = self
            .size_bytes
            .checked_next_multiple_of(512)
            .filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| {
                invalid_option(format!("size={}", self.size_bytes), "is too large (sizes are below 8E)")
            })?;
        self.check_numbers()?;
        self.check_version()?;
        self.check_files()?;
        // Readers of the raw file see zeroes where the image is unallocated, so all clusters must
        // be mapped.
        if self.data_file_raw && self.preallocation == Preallocation::Off {
            options.preallocation = Preallocation::Metadata;
        }
        Ok(options)
    }

    fn check_numbers(&self) -> Result<(), InvalidImageOption> {
        let cluster = self.cluster_bytes;
        if !cluster.is_power_of_two() || !CLUSTER_BITS.contains(&cluster.trailing_zeros()) {
            let rule = "is not a power of two from 512 to 2M";
            return Err(invalid_option(format!("cluster_size={cluster}"), rule));
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            let rule = "is not a power of two from 1 to 64";
            return Err(invalid_option(format!("refcount_bits={}", self.refcount_bits), rule));
        }
        if self.extended_l2 && cluster.trailing_zeros() < EXTENDED_CLUSTER_BITS {
            let rule = format!("needs a cluster_size of at least 16K, but it is {cluster}");
            return Err(invalid_option("extended_l2=on", rule));
        }
        Ok(())
    }

    fn check_version(&self) -> Result<(), InvalidImageOption> {
        if !matches!(self.version, 2 | 3) {
            return Err(invalid_option(format!("version {}", self.version), "is not supported; 2 and 3 are"));
        }
        let later = [
            (self.lazy_refcounts, "lazy_refcounts=on".to_owned()),
            (self.refcount_bits != 16, format!("refcount_bits={}", self.refcount_bits)),
            (self.extended_l2, "extended_l2=on".to_owned()),
            (self.compression != CompressionType::Zlib, "compression_type=zstd".to_owned()),
            (self.data_file.is_some(), "data_file".to_owned()),
        ];
        match later.into_iter().find(|(is_set, _)| *is_set && self.version < 3) {
            Some((_, option)) => Err(invalid_option(option, "needs compat=1.1, but it is 0.10")),
            None => Ok(()),
        }
    }

    fn check_files(&self) -> Result<(), InvalidImageOption> {
        if self.data_file_raw && self.data_file.is_none() {
            return Err(invalid_option("data_file_raw=on", "needs a data_file"));
        }
        if self.data_file_raw && self.backing.is_some() {
            return Err(invalid_option("data_file_raw=on", "and a backing file exclude each other"));
        }
        if self.backing.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            let rule = "and a backing file exclude each other, except with extended_l2=on";
            return Err(invalid_option("preallocation", rule));
        }
        Ok(())
    }
}
