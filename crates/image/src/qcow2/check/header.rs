//! Header fields and extensions that no request needs but that may confuse another program.
//!
//! [`Qcow2Header::parse`] rejects unusable images. This module checks reserved fields, which a
//! repair clears, and invalid file names, which a repair leaves to the user.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Header" and "Header extensions".

use super::{CheckPass, write_header};
use crate::qcow2::{
    MetadataError,
    big_endian::u32_at,
    header::{Qcow2Header, compression_padding, extension, extensions},
    metadata_io,
};

// Formats of backing files, by QEMU's names. QEMU accepts protocols as formats too.
const FORMATS: [&str; 24] = [
    "blkdebug",
    "bochs",
    "cloop",
    "copy-on-read",
    "dmg",
    "file",
    "host_device",
    "iscsi",
    "luks",
    "nbd",
    "nfs",
    "parallels",
    "qcow",
    "qcow2",
    "qed",
    "quorum",
    "raw",
    "rbd",
    "ssh",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "vvfat",
];

impl CheckPass<'_> {
    /// Reports flaws of the header, and clears reserved fields if everything is to be repaired.
    pub(super) async fn check_header(&mut self) -> Result<(), MetadataError> {
        let start = metadata_io::read_start(self.storage).await?;
        let (reserved, misread) = (reserved_fields(&start, &self.header), misread_extensions(&start));
        let may_write = misread.is_empty() && self.header.encode().is_ok();
        let is_repaired = !reserved.is_empty() && self.repairs_all() && may_write;
        if is_repaired {
            write_header(self.storage, &self.header).await?;
        }
        for fault in reserved {
            if is_repaired {
                self.report_repair(fault);
            } else {
                self.report_corruption(fault);
            }
        }
        for fault in misread.into_iter().chain(dangling_names(&self.header)) {
            self.report_corruption(fault);
        }
        Ok(())
    }
}

/// Reserved fields that are not zero.
fn reserved_fields(start: &[u8], header: &Qcow2Header) -> Vec<String> {
    let mut found = Vec::new();
    if compression_padding(start, header.version).iter().any(|byte| *byte != 0) {
        found.push("the padding behind the compression type in the header is not zero".to_owned());
    }
    for (kind, at, data) in extensions(start).flatten() {
        if kind == extension::END && u32_at(start, at + 4) != 0 {
            found.push(format!("the end of the header extensions at {at:#x} has a length"));
        }
        if kind == extension::BITMAPS && data.len() >= 8 && u32_at(data, 4) != 0 {
            found.push(format!("the bitmaps extension at {at:#x} has reserved bits"));
        }
    }
    found
}

/// Extensions of a wrong length. The start of the next extension is then unknown: later ones may
/// have been misread, and rewriting the header could lose them.
fn misread_extensions(start: &[u8]) -> Vec<String> {
    let lengths = [(extension::ENCRYPTION, "encryption", 16), (extension::BITMAPS, "bitmaps", 24)];
    let mut found = Vec::new();
    for (kind, at, data) in extensions(start).flatten() {
        for (_, name, length) in lengths
            .iter()
            .filter(|(expected_kind, _, length)| *expected_kind == kind && *length != data.len())
        {
            let actual = data.len();
            found.push(format!("the {name} extension at {at:#x} has {actual} bytes instead of {length}"));
        }
    }
    found
}

/// Invalid names of other files.
fn dangling_names(header: &Qcow2Header) -> Vec<String> {
    let mut found = Vec::new();
    let format = header.backing.as_ref().and_then(|backing| backing.format.as_deref());
    if let Some(format) = format.filter(|format| !FORMATS.contains(format)) {
        found.push(format!(
            "the backing file has the unknown format {format:?} (set it with `weir image rebase -u`)"
        ));
    }
    match (&header.data_file, header.has_data_file()) {
        (Some(name), true) if name.is_empty() || name.contains('\0') => {
            found.push(format!("the name of the external data file, {name:?}, is not a file name"));
        }
        (None, true) => found.push("the image has an external data file without a name".to_owned()),
        (Some(name), false) => {
            found.push(format!("the image names the data file {name:?}, but has no external data file"));
        }
        _ => {}
    }
    found
}
