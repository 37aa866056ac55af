//! Comparison of a disk of the new process with the one that the old process serves: the same
//! bytes, read and written in the same way, so that acknowledged writes and negotiated properties
//! stay valid.
//!
//! Only the new process compares, before anything is quiesced. Limits, groups, prefetch, caches and
//! emulation of slow or failing devices are not compared: they may differ.

use block::disk::Disk;
use console::figures;
use serde::{Deserialize, Serialize};

/// Properties of a disk that an upgrade must preserve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DiskIdentity {
    size_bytes: u64,
    /// Minimum size of a request.
    block_bytes: u32,
    read_only: bool,
    /// True if the image is locked only while a guest uses it.
    handover: bool,
    /// The image and its backing chain.
    layers: Vec<DiskLayerIdentity>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskLayerIdentity {
    format: String,
    /// Distinguishes internal snapshots.
    table: Option<u64>,
    /// Image file, and its data file if there is one.
    files: Vec<DiskFileIdentity>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskFileIdentity {
    /// Identity of the file, independent of its name.
    what: String,
    /// Path for messages.
    path: Option<String>,
    parts: Vec<DiskPartIdentity>,
    cache: Option<String>,
    read_only: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskPartIdentity {
    offset: u64,
    size: Option<u64>,
}

impl DiskIdentity {
    pub(super) fn of(disk: &Disk) -> Self {
        let image = disk.image();
        Self {
            size_bytes: disk.size_bytes(),
            block_bytes: image.block_size().minimum,
            read_only: image.is_read_only(),
            handover: disk.has_handover(),
            layers: image.layers().into_iter().map(DiskLayerIdentity::from).collect(),
        }
    }

    /// Files that are written to.
    pub(super) fn written_files(&self) -> impl Iterator<Item = &str> {
        let files = self.layers.iter().flat_map(|layer| &layer.files);
        files.filter(|file| !file.read_only).map(|file| file.what.as_str())
    }

    /// Difference between the old process's disk and `here`; `None` if they are the same disk,
    /// whose size may have grown.
    pub(super) fn difference(&self, here: &Self) -> Option<String> {
        let Self { size_bytes, block_bytes, read_only, handover, layers } = self;
        // The top image first: its difference explains most others.
        if let Some((one, other)) = layers.first().zip(here.layers.first())
            && let Some(difference) = one.difference(other, "image")
        {
            return Some(difference);
        }
        let backing_pairs = || layers.iter().zip(&here.layers).skip(1);
        if layers.len() != here.layers.len() {
            return Some(format!(
                "with {} behind each other, not {}",
                figures::counted(layers.len() as u64, "image"),
                here.layers.len()
            ));
        }
        if let Some(difference) =
            backing_pairs().find_map(|(one, other)| one.difference(other, "backing file"))
        {
            return Some(difference);
        }
        if *read_only != here.read_only {
            let (was, is) = (access(*read_only), access(here.read_only));
            return Some(format!("{was}, and not {is}"));
        }
        if *handover != here.handover {
            return Some(format!("{} handover", if *handover { "with" } else { "without" }));
        }
        // A larger disk is accepted: clients keep the size that they know.
        if here.size_bytes < *size_bytes {
            return Some(format!("with {size_bytes} bytes, and has only {} here", here.size_bytes));
        }
        (*block_bytes != here.block_bytes)
            .then(|| format!("with blocks of {block_bytes} bytes, not of {}", here.block_bytes))
    }
}

fn access(read_only: bool) -> &'static str {
    if read_only { "read-only" } else { "writable" }
}

impl DiskLayerIdentity {
    fn difference(&self, here: &Self, label: &str) -> Option<String> {
        let Self { format, table, files } = self;
        let names = [label, "data file"];
        if let Some((one, other)) = files.first().zip(here.files.first())
            && one.what != other.what
        {
            return Some(one.mismatch_text(other, label));
        }
        if *format != here.format {
            return Some(format!(
                "with {} {label} in the format {format}, not {}",
                article(label),
                here.format
            ));
        }
        if files.len() != here.files.len() {
            return Some("with another data file".to_owned());
        }
        let pairs = files.iter().zip(&here.files).zip(names);
        if let Some(difference) =
            pairs.into_iter().find_map(|((one, other), name)| one.difference(other, name))
        {
            return Some(difference);
        }
        (*table != here.table).then(|| "with another internal snapshot".to_owned())
    }
}

fn article(label: &str) -> &'static str {
    if label == "image" { "its" } else { "a" }
}

impl DiskFileIdentity {
    fn difference(&self, here: &Self, label: &str) -> Option<String> {
        let Self { what: identity, path: _, parts, cache, read_only } = self;
        if *identity != here.what {
            return Some(self.mismatch_text(here, label));
        }
        if *parts != here.parts {
            return Some(format!("with another part of its {label} (offset, size)"));
        }
        if *cache != here.cache {
            let shown = |cache: &Option<String>| cache.clone().unwrap_or_else(|| "none at all".to_owned());
            return Some(format!("in the cache mode {}, not {}", shown(cache), shown(&here.cache)));
        }
        (*read_only != here.read_only)
            .then(|| format!("with its {label} {}, not {}", access(*read_only), access(here.read_only)))
    }

    fn mismatch_text(&self, here: &Self, label: &str) -> String {
        let shown = |file: &Self| file.path.clone().unwrap_or_else(|| file.what.clone());
        let (was, is) = (shown(self), shown(here));
        match was == is {
            true => format!("with another {label}: {is} was replaced since"),
            false => format!("with another {label}: {was}, not {is}"),
        }
    }
}

impl From<image::LayerIdentity> for DiskLayerIdentity {
    fn from(layer: image::LayerIdentity) -> Self {
        let image::LayerIdentity { format, table, files } = layer;
        Self {
            format: format.name().to_owned(),
            table,
            files: files.into_iter().map(DiskFileIdentity::from).collect(),
        }
    }
}

impl From<storage::StorageIdentity> for DiskFileIdentity {
    fn from(file: storage::StorageIdentity) -> Self {
        let storage::StorageIdentity { key: identity, path, parts, cache, read_only } = file;
        let parts =
            parts.into_iter().map(|storage::StoragePart { offset, size }| DiskPartIdentity { offset, size });
        let cache = cache.map(|cache| cache.name().to_owned());
        Self { what: identity, path, parts: parts.collect(), cache, read_only }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, read_only: bool) -> DiskFileIdentity {
        DiskFileIdentity {
            what: format!("file {name}"),
            path: Some(format!("/{name}")),
            parts: vec![DiskPartIdentity { offset: 512, size: Some(4096) }],
            cache: Some("writeback".to_owned()),
            read_only,
        }
    }

    fn disk() -> DiskIdentity {
        let layer = |files| DiskLayerIdentity { format: "qcow2".to_owned(), table: Some(65536), files };
        DiskIdentity {
            size_bytes: 4096,
            block_bytes: 512,
            read_only: false,
            handover: false,
            layers: vec![
                layer(vec![file("vm1", false), file("data", false)]),
                layer(vec![file("base", true)]),
            ],
        }
    }

    #[test]
    fn every_difference_is_reported() {
        assert_eq!(disk().difference(&disk()), None);
        let changed = |change: fn(&mut DiskIdentity)| {
            let mut here = disk();
            change(&mut here);
            disk().difference(&here).expect("it is another one")
        };
        let top = |change: fn(&mut DiskFileIdentity)| {
            let mut here = disk();
            change(&mut here.layers[0].files[0]);
            disk().difference(&here).expect("it is another one")
        };
        let image = top(|file| *file = self::file("vm2", false));
        assert_eq!(image, "with another image: /vm1, not /vm2");
        let replaced = top(|file| file.what = "file 7".to_owned());
        assert_eq!(replaced, "with another image: /vm1 was replaced since");
        for parts in [
            top(|file| file.parts.clear()),
            top(|file| file.parts[0].offset = 0),
            top(|file| file.parts[0].size = None),
        ] {
            assert_eq!(parts, "with another part of its image (offset, size)");
        }
        let cache = top(|file| file.cache = Some("unsafe".to_owned()));
        assert_eq!(cache, "in the cache mode writeback, not unsafe");
        assert_eq!(top(|file| file.read_only = true), "with its image writable, not read-only");
        let format = changed(|disk| disk.layers[0].format = "raw".to_owned());
        assert_eq!(format, "with its image in the format qcow2, not raw");
        let snapshot = changed(|disk| disk.layers[0].table = Some(1 << 20));
        assert_eq!(snapshot, "with another internal snapshot");
        let data = changed(|disk| disk.layers[0].files[1] = file("other", false));
        assert_eq!(data, "with another data file: /data, not /other");
        assert_eq!(changed(|disk| drop(disk.layers[0].files.pop())), "with another data file");
        let base = changed(|disk| disk.layers[1].files[0] = file("other", true));
        assert_eq!(base, "with another backing file: /base, not /other");
        let base = changed(|disk| disk.layers[1].format = "raw".to_owned());
        assert_eq!(base, "with a backing file in the format qcow2, not raw");
        let chain = changed(|disk| drop(disk.layers.pop()));
        assert_eq!(chain, "with 2 images behind each other, not 1");
        assert_eq!(changed(|disk| disk.read_only = true), "writable, and not read-only");
        assert_eq!(changed(|disk| disk.handover = true), "without handover");
        assert_eq!(changed(|disk| disk.size_bytes = 4095), "with 4096 bytes, and has only 4095 here");
        assert_eq!(changed(|disk| disk.block_bytes = 4096), "with blocks of 512 bytes, not of 4096");
    }

    #[test]
    fn other_path_and_larger_size_are_accepted() {
        let mut here = disk();
        here.size_bytes = 8192;
        // The same file, by its identity, under another name.
        here.layers[0].files[0].path = Some("/elsewhere/vm1".to_owned());
        assert_eq!(disk().difference(&here), None);
    }
}
