//! Checks that an image can be an overlay over an image that is open already: the new top of a
//! disk's chain.
//!
//! The image below is not opened again, so it keeps its locks, its caches and its descriptors. The
//! overlay is opened [without its backing file](super::BackingChoice::Nothing); its header must name
//! the file of the image below, or a later start would read another one.
//!
//! Never accepts an overlay that changes the disk's content. Writes to no image.

use std::path::Path;

use super::{chain::MAX_CHAIN, names};
use crate::{
    Image, Qcow2Image,
    qcow2::header::{BackingReference, EncryptionMethod},
};
use storage::{FileIdentity, OpenError, Storage};

/// Checks that `image`, opened as `name` without its backing file, can be an overlay over `below`;
/// returns it.
///
/// # Errors
/// The reason, as a message for users: the overlay does not name the file of `below` with its
/// format, has another size, contains data, or would store data of an encrypted disk unencrypted.
pub async fn check_overlay<'a>(
    name: &str,
    image: &'a Image,
    below: &Image,
) -> Result<&'a Qcow2Image, OpenError> {
    let refused = |why: String, remedy: &str| OpenError::new(name, why, remedy);
    let Image::Qcow2(qcow2) = image else {
        return Err(refused("is raw".to_owned(), "an overlay is a qcow2 image"));
    };
    if is_encrypted(image) {
        return Err(refused("is encrypted".to_owned(), "use an overlay without encryption"));
    }
    if is_encrypted(below) {
        let why = "would store the new data of an encrypted disk unencrypted".to_owned();
        return Err(refused(why, "use an internal snapshot"));
    }
    if image.is_read_only() {
        return Err(refused("is read-only".to_owned(), "open it for writing"));
    }
    if image.backing().is_some() {
        return Err(refused("has an open backing file already".to_owned(), "use another overlay"));
    }
    let header = qcow2.header();
    let Some(BackingReference { name: file, format }) = &header.backing else {
        let remedy = "write the present image into it: qemu-img rebase -u -b IMAGE -F raw|qcow2 OVERLAY";
        return Err(refused("names no backing file".to_owned(), remedy));
    };
    let own_path = image.files().next().and_then(Storage::path).map(Path::new);
    let path = names::resolve(own_path, file)
        .map_err(|why| refused(format!("its backing file {file:?} {why}"), "use a path"))?;
    let identity = below.files().next().and_then(Storage::file_identity);
    let shown = path.display().to_string();
    let named = reactor::run_blocking(move || FileIdentity::of_path(&path)).await;
    if identity.is_none() || named != identity {
        let why = format!("has the backing file {shown}, which is not the present image");
        return Err(refused(why, "name the image of the disk"));
    }
    if format.as_deref() != Some(below.format().name()) {
        let is = below.format().name();
        let named = format.as_deref().unwrap_or("none");
        let why = format!("names the format {named} of its backing file, which is open as {is}");
        return Err(refused(why, "write it into the overlay: qemu-img rebase -u -b IMAGE -F FORMAT OVERLAY"));
    }
    if below.chain().count() >= MAX_CHAIN {
        let why = format!("the chain of backing files would be longer than {MAX_CHAIN} images");
        return Err(refused(why, "shorten it: `weir stream`"));
    }
    let (size_bytes, below_bytes) = (image.size_bytes(), below.size_bytes());
    if size_bytes != below_bytes {
        let why = format!("has {size_bytes} bytes, and the disk {below_bytes}");
        return Err(refused(why, "create it with the size of the disk, a multiple of 512 bytes"));
    }
    if !qcow2.is_empty() {
        let why = "contains data, which would replace data of the disk".to_owned();
        return Err(refused(why, "use a new overlay"));
    }
    let bitmaps = qcow2.bitmap_statuses().await;
    if !bitmaps.is_ok_and(|bitmaps| bitmaps.is_empty()) {
        let why = "contains bitmaps, which do not mark earlier changes of the disk".to_owned();
        return Err(refused(why, "use a new overlay"));
    }
    Ok(qcow2)
}

/// True if an image of the chain is encrypted.
pub fn is_encrypted(image: &Image) -> bool {
    image.chain().any(|image| match image {
        Image::Qcow2(qcow2) => qcow2.header().crypt != EncryptionMethod::None,
        Image::Raw(_) => false,
    })
}

/// Name by which the image at `overlay` refers to its backing file: relative if both are in one
/// directory, so that they can be moved together. Both paths are absolute.
pub fn backing_name(overlay: &Path, backing: &Path) -> String {
    let name = match backing.file_name() {
        Some(name) if overlay.parent() == backing.parent() => Path::new(name),
        _ => backing,
    };
    let text = name.display().to_string();
    // A colon before the first slash would make it the address of a protocol.
    match text.find([':', '/']) {
        Some(at) if text[at..].starts_with(':') => format!("./{text}"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_files_of_one_directory_are_named_relatively() {
        let name = |overlay: &str, backing: &str| backing_name(Path::new(overlay), Path::new(backing));
        assert_eq!(name("/a/top.qcow2", "/a/base.raw"), "base.raw");
        assert_eq!(name("/a/top.qcow2", "/b/base.raw"), "/b/base.raw");
        assert_eq!(name("/a/top.qcow2", "/a/nbd:x"), "./nbd:x");
    }
}
