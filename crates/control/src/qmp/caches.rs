//! Cache sizes of qcow2 images as arguments and results, with the names of QEMU's `blockdev-add`.
//! A change keeps omitted values; 0 is the default.

use std::time::Duration;

use api::CacheStatus;
use image::{
    Image,
    qcow2::{CacheSettings, L2CacheSize, Qcow2Image},
};

use super::{arguments::QmpArguments, error::QmpError, json::excerpt};

const MAX_BYTES: u64 = i64::MAX as u64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Qcow2CacheChanges {
    l2: Option<Option<L2CacheSize>>,
    entry: Option<u64>,
    refcount: Option<u64>,
    total: Option<u64>,
    clean_interval: Option<Duration>,
}

impl Qcow2CacheChanges {
    pub(super) fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let mut bytes = |key: &str| arguments.number(key, 0..=MAX_BYTES);
        let (entry, refcount) = (bytes("l2-cache-entry-size")?, bytes("refcount-cache-size")?);
        let total = bytes("cache-size")?;
        let seconds = arguments.number("cache-clean-interval", 0..=u32::MAX.into())?;
        Ok(Self {
            l2: read_l2(arguments)?,
            entry,
            refcount,
            total,
            clean_interval: seconds.map(Duration::from_secs),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn apply_to(&self, settings: CacheSettings) -> CacheSettings {
        let or = |given: Option<u64>, before| given.map_or(before, |bytes| (bytes > 0).then_some(bytes));
        CacheSettings {
            l2: self.l2.unwrap_or(settings.l2),
            entry_bytes: or(self.entry, settings.entry_bytes),
            refcount_bytes: or(self.refcount, settings.refcount_bytes),
            total_bytes: or(self.total, settings.total_bytes),
            clean_interval: self.clean_interval.unwrap_or(settings.clean_interval),
        }
    }
}

fn read_l2(arguments: &mut QmpArguments) -> Result<Option<Option<L2CacheSize>>, QmpError> {
    const KEY: &str = "l2-cache-size";
    match arguments.is_text(KEY) {
        true => match arguments.required::<String>(KEY)?.as_str() {
            "full" => Ok(Some(Some(L2CacheSize::Full))),
            other => Err(QmpError::rule(
                &arguments.full_name(KEY),
                format_args!("('{}') is a number of bytes, or 'full'", excerpt(other)),
            )),
        },
        false => {
            let bytes = arguments.number(KEY, 0..=MAX_BYTES)?;
            Ok(bytes.map(|bytes| (bytes > 0).then_some(L2CacheSize::Bytes(bytes))))
        }
    }
}

pub(super) fn qcow2_image<'a>(image: &'a Image, name: &str) -> Result<&'a Qcow2Image, QmpError> {
    match image {
        Image::Qcow2(qcow2) => Ok(qcow2),
        Image::Raw(_) => {
            Err(QmpError::generic(format!("disk {name}: it is raw, and only qcow2 images have these caches")))
        }
    }
}

/// Status of the L2 cache and the refcount cache.
pub(super) fn status(qcow2: &Qcow2Image) -> (CacheStatus, CacheStatus) {
    let l2 = qcow2.cache_statistics();
    let refcounts = qcow2.refcount_statistics();
    (
        CacheStatus {
            hits: l2.hits,
            misses: l2.misses,
            evictions: Some(l2.evictions),
            bytes: l2.bytes,
            limit: Some(l2.limit_bytes),
            covered: Some(l2.covered_bytes),
        },
        CacheStatus {
            hits: refcounts.hits,
            misses: refcounts.misses,
            bytes: refcounts.bytes,
            ..CacheStatus::default()
        },
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Result<Qcow2CacheChanges, String> {
        QmpArguments::read_all(value, Qcow2CacheChanges::read)
    }

    #[test]
    fn omitted_values_are_kept() {
        let before =
            CacheSettings { refcount_bytes: Some(7), total_bytes: Some(8), ..CacheSettings::default() };
        let changes =
            read(json!({"l2-cache-size": "full", "cache-size": 0, "cache-clean-interval": 0})).unwrap();
        let after = changes.apply_to(before);
        assert_eq!(
            (after.l2, after.refcount_bytes, after.total_bytes),
            (Some(L2CacheSize::Full), Some(7), None)
        );
        assert_eq!(after.clean_interval, Duration::ZERO);
        assert!(read(json!({})).unwrap().is_empty());
        assert_eq!(
            read(json!({"l2-cache-size": 5})).unwrap().apply_to(before).l2,
            Some(L2CacheSize::Bytes(5))
        );
        assert_eq!(read(json!({"l2-cache-size": 0})).unwrap().apply_to(after).l2, None);
    }

    #[test]
    fn wrong_size_is_reported() {
        assert_eq!(
            read(json!({"l2-cache-size": "half"})).unwrap_err(),
            "Parameter 'l2-cache-size' ('half') is a number of bytes, or 'full'"
        );
        assert!(read(json!({"cache-size": "1M"})).is_err());
    }
}
