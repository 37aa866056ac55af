//! Facts about an image in the form of QEMU's `ImageInfo`, for QMP and for `weir image`.

use std::path::{Path, PathBuf};

use image::qcow2::header::{
    CompressionType, EncryptionMethod, Qcow2Header, autoclear, compatible, incompatible,
};
use nbd::uri::Uri;
use serde_json::{Value, json};

/// Adds the fields of a qcow2 header, as in `ImageInfo`.
pub fn add_header_facts(header: &Qcow2Header, json: &mut Value) {
    json["virtual-size"] = header.size_bytes.into();
    json["cluster-size"] = header.cluster_bytes().into();
    json["dirty-flag"] = (header.incompatible & incompatible::DIRTY != 0).into();
    if let Some(backing) = &header.backing {
        json["backing-filename"] = backing.name.clone().into();
        if let Some(format) = &backing.format {
            json["backing-filename-format"] = format.clone().into();
        }
    }
    if header.crypt != EncryptionMethod::None {
        json["encrypted"] = true.into();
    }
    json["format-specific"] = json!({ "type": "qcow2", "data": qcow2_facts(header) });
}

fn qcow2_facts(header: &Qcow2Header) -> Value {
    let compression = match header.compression {
        CompressionType::Zlib => "zlib",
        CompressionType::Zstd => "zstd",
    };
    let mut data = json!({
        "compat": if header.version < 3 { "0.10" } else { "1.1" },
        "compression-type": compression,
        "refcount-bits": header.refcount_bits(),
    });
    // Version 2 has no feature bits.
    if header.version >= 3 {
        data["lazy-refcounts"] = (header.compatible & compatible::LAZY_REFCOUNTS != 0).into();
        data["corrupt"] = (header.incompatible & incompatible::CORRUPT != 0).into();
        data["extended-l2"] = header.has_subclusters().into();
    }
    if header.has_data_file() {
        if let Some(name) = &header.data_file {
            data["data-file"] = name.clone().into();
        }
        data["data-file-raw"] = (header.autoclear & autoclear::RAW_DATA_FILE != 0).into();
    }
    if header.crypt == EncryptionMethod::Aes {
        data["encrypt"] = json!({ "format": "aes" });
    }
    data
}

/// Path of a file that an image refers to, for messages: a relative name starts at the image's
/// directory. Rejects nothing; the image's reader resolves the path for opening.
pub fn referenced_path(image: &Path, name: &str) -> PathBuf {
    // The name may have QEMU's protocol prefix.
    let name = name.strip_prefix("file:").unwrap_or(name);
    // A remote image has no directory on this host.
    if is_remote_or_null(image) {
        return name.into();
    }
    image.parent().map_or_else(|| PathBuf::from(name), |directory| directory.join(name))
}

/// True if it names no file of this host: an image in a Ceph cluster, at an NBD server, or without
/// content (`null:SIZE`). A file of such a name is written `./rbd:…`.
pub fn is_remote_or_null(path: &Path) -> bool {
    let name = path.as_os_str().as_encoded_bytes();
    let is_storage = [&b"rbd:"[..], b"null:"].iter().any(|kind| name.starts_with(kind));
    is_storage || is_nbd_uri(path)
}

/// True if it names a disk at an NBD server.
pub fn is_nbd_uri(path: &Path) -> bool {
    path.to_str().is_some_and(Uri::looks_like_uri)
}
