//! File names in an image: paths, relative to the directory of the image.
//!
//! QEMU also accepts descriptions (`json:…`) and addresses (`nbd://…`) there. They would
//! let an image make its server connect to any address, so they are rejected.

use std::path::{Path, PathBuf};

/// Path of the file that the image at `image` refers to as `name`. `image` is `None` for an image
/// in no directory of this host, such as an export of an NBD server: its names are absolute.
///
/// # Errors
/// The reason, phrased to follow the name: not a path, or an invalid one.
pub fn resolve(image: Option<&Path>, name: &str) -> Result<PathBuf, String> {
    let name = match protocol(name) {
        None => name,
        Some("file") => &name["file:".len()..],
        Some("json") => return Err("is a json: description; only paths are supported".to_owned()),
        Some(other) => {
            return Err(format!("is an address of the protocol {other:?}; only paths are supported"));
        }
    };
    if name.is_empty() {
        return Err("is an empty path".to_owned());
    }
    if name.contains('\0') {
        return Err("contains a zero byte".to_owned());
    }
    check_base(image, name)?;
    Ok(image.and_then(Path::parent).unwrap_or(Path::new("")).join(name))
}

/// Checks that a name does not depend on the working directory of the process. For
/// names that are written into an image without opening the file.
///
/// # Errors
/// The reason, phrased to follow the name: a relative path in an image that is in no
/// directory.
pub fn check_base(image: Option<&Path>, name: &str) -> Result<(), String> {
    let path = match protocol(name) {
        None => name,
        Some("file") => &name["file:".len()..],
        Some(_) => return Ok(()),
    };
    if image.is_none() && Path::new(path).is_relative() {
        let why = "is relative, but the image is not in a directory; use an absolute path";
        return Err(why.to_owned());
    }
    Ok(())
}

/// Part before the first colon, if no slash precedes it: QEMU's definition of a
/// protocol prefix.
fn protocol(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then_some(&name[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_seen_from_the_image() {
        for (name, path) in [
            ("base.raw", "/images/base.raw"),
            ("../base.raw", "/images/../base.raw"),
            ("/other/base.raw", "/other/base.raw"),
            ("file:base.raw", "/images/base.raw"),
            ("./a:b", "/images/./a:b"),
            ("sub/a:b", "/images/sub/a:b"),
        ] {
            assert_eq!(resolve(Some(Path::new("/images/vm.qcow2")), name).expect(name), Path::new(path));
        }
        assert_eq!(resolve(Some(Path::new("vm.qcow2")), "base").expect("a path"), Path::new("base"));
    }

    #[test]
    fn names_in_an_image_without_a_directory_are_absolute() {
        for name in ["base.raw", "./base.raw", "../base.raw", "file:base.raw", "sub/base.raw"] {
            for refused in [resolve(None, name).map(drop), check_base(None, name)] {
                assert!(refused.expect_err(name).contains("absolute path"), "{name}");
            }
        }
        for name in ["/images/base.raw", "file:/images/base.raw"] {
            assert_eq!(resolve(None, name).expect(name), Path::new("/images/base.raw"));
            assert_eq!(check_base(None, name), Ok(()), "{name}");
        }
        assert_eq!(check_base(None, "nbd://host/disk"), Ok(()));
    }

    #[test]
    fn names_of_other_protocols_are_rejected() {
        for (name, why) in [
            ("json:{\"driver\":\"qcow2\"}", "json:"),
            ("nbd://host/disk", "\"nbd\""),
            ("rbd:pool/image", "\"rbd\""),
            (":x", "\"\""),
            ("a:b", "\"a\""),
            ("", "empty"),
            ("file:", "empty"),
            ("a\0b", "zero byte"),
        ] {
            let message = resolve(Some(Path::new("/images/vm.qcow2")), name).expect_err(name);
            assert!(message.contains(why), "{name}: {message}");
        }
    }
}
