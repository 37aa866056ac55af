//! Location of a disk's bytes: a path, storage of a given size, or an image in a cluster.

use std::{fmt, path::Path, str::FromStr};

use anyhow::Context as _;
use nbd::uri::Uri;
use storage::{InvalidValue, StorageSpec};

/// Location of an image as a user writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageLocation(StorageSpec);

impl ImageLocation {
    /// Storage without content: reads return zeroes, writes are discarded.
    pub fn null(size_bytes: u64) -> Self {
        Self(StorageSpec::Null(size_bytes))
    }

    /// Resolves a path against `directory`.
    pub fn relative_to(self, directory: &Path) -> Self {
        match self.0 {
            StorageSpec::File(path) => Self(StorageSpec::File(directory.join(path))),
            StorageSpec::Rbd(address) => Self(StorageSpec::Rbd(Box::new(address.relative_to(directory)))),
            StorageSpec::Nbd(uri) => Self(StorageSpec::Nbd(Box::new(uri.relative_to(directory)))),
            other => Self(other),
        }
    }

    /// The path, if it is a file.
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            StorageSpec::File(path) => Some(path),
            StorageSpec::Memory(_) | StorageSpec::Null(_) | StorageSpec::Nbd(_) | StorageSpec::Rbd(_) => None,
        }
    }

    /// The URI, if it is at an NBD server.
    pub fn remote(&self) -> Option<&Uri> {
        match &self.0 {
            StorageSpec::Nbd(uri) => Some(uri),
            StorageSpec::File(_) | StorageSpec::Memory(_) | StorageSpec::Null(_) | StorageSpec::Rbd(_) => {
                None
            }
        }
    }

    /// True if the image is reached over a network: at an NBD server or in a Ceph cluster.
    pub fn is_remote(&self) -> bool {
        matches!(self.0, StorageSpec::Nbd(_) | StorageSpec::Rbd(_))
    }

    /// True if it is an image in a Ceph cluster.
    pub fn is_rbd(&self) -> bool {
        matches!(self.0, StorageSpec::Rbd(_))
    }

    /// What the image shares its performance with, as far as its address shows it: images in files
    /// may be on one device. `None` for memory, which shares nothing.
    pub(crate) fn shared_storage(&self) -> Option<String> {
        match &self.0 {
            StorageSpec::File(_) => Some("file".to_owned()),
            StorageSpec::Memory(_) | StorageSpec::Null(_) => None,
            StorageSpec::Nbd(uri) => Some(format!("NBD server {:?}", uri.server)),
            StorageSpec::Rbd(address) => Some(format!("pool {}", address.pool)),
        }
    }

    /// True if it is a snapshot in a Ceph cluster, which is read-only.
    pub fn is_snapshot(&self) -> bool {
        matches!(&self.0, StorageSpec::Rbd(address) if address.snapshot.is_some())
    }

    /// Ceph's config file and keyring, if they are given.
    pub fn ceph_files(&self) -> impl Iterator<Item = &Path> {
        let address = match &self.0 {
            StorageSpec::Rbd(address) => Some(address),
            StorageSpec::File(_) | StorageSpec::Memory(_) | StorageSpec::Nbd(_) | StorageSpec::Null(_) => {
                None
            }
        };
        address
            .into_iter()
            .flat_map(|address| [&address.config, &address.keyring])
            .flatten()
            .map(|path| &**path)
    }

    /// Adds the config file and user for a Ceph cluster, if given.
    ///
    /// # Errors
    /// Fails if the image is not in a Ceph cluster, or has them already.
    pub fn with_ceph_access(self, config: Option<&Path>, user: Option<&str>) -> Result<Self, String> {
        if config.is_none() && user.is_none() {
            return Ok(self);
        }
        let StorageSpec::Rbd(mut address) = self.0 else {
            return Err("is for images of a Ceph cluster, rbd:POOL/IMAGE (remove it)".to_owned());
        };
        let duplicate_rule = |key: &str| format!("is also in the image, as :{key}= (remove one of them)");
        if let Some(config) = config
            // `replace` returns an earlier value: the image's address had the key already.
            && address.config.replace(config.to_owned()).is_some()
        {
            return Err(duplicate_rule("conf"));
        }
        if let Some(user) = user {
            if user.is_empty() || user.contains('\0') {
                return Err("is not a Ceph user (write `admin` for client.admin)".to_owned());
            }
            if address.user.replace(user.to_owned()).is_some() {
                return Err(duplicate_rule("id"));
            }
        }
        Ok(Self(StorageSpec::Rbd(address)))
    }

    /// Size in bytes of a disk in memory.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self.0 {
            StorageSpec::Memory(bytes) => Some(bytes),
            StorageSpec::File(_) | StorageSpec::Null(_) | StorageSpec::Nbd(_) | StorageSpec::Rbd(_) => None,
        }
    }

    /// Default name of the disk: the file's without its extension, or the kind of storage.
    pub fn default_name(&self) -> String {
        match &self.0 {
            StorageSpec::File(path) => {
                path.file_stem().map_or_else(|| "disk".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
            StorageSpec::Memory(_) => "memory".to_owned(),
            StorageSpec::Null(_) => "null".to_owned(),
            // Export names may look like paths; the last part is the most specific.
            StorageSpec::Nbd(uri) => match uri.export.rsplit('/').next() {
                Some(name) if !name.is_empty() => name.to_owned(),
                _ => "disk".to_owned(),
            },
            StorageSpec::Rbd(address) => address.image.clone(),
        }
    }

    /// Text for `image::open`, with `file:` before every path, so that no path parses as another
    /// kind.
    ///
    /// # Errors
    /// Fails if the path is not UTF-8, as the directory of a config file may be.
    pub fn to_spec(&self) -> anyhow::Result<String> {
        match self.path() {
            Some(path) => {
                let text = path.to_str();
                let text =
                    text.with_context(|| format!("{}: not UTF-8 (rename its directory)", path.display()))?;
                Ok(format!("file:{text}"))
            }
            None => Ok(self.to_string()),
        }
    }
}

impl FromStr for ImageLocation {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        text.parse().map(Self)
    }
}

impl fmt::Display for ImageLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            StorageSpec::File(path) => write!(f, "{}", path.display()),
            StorageSpec::Memory(bytes) => write!(f, "memory:{bytes}"),
            StorageSpec::Null(bytes) => write!(f, "null:{bytes}"),
            StorageSpec::Nbd(uri) => uri.fmt(f),
            StorageSpec::Rbd(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> ImageLocation {
        text.parse().unwrap()
    }

    #[test]
    fn only_paths_are_relative() {
        let moved = |text: &str| image(text).relative_to(Path::new("/etc/weir")).to_string();
        assert_eq!(moved("vm1.raw"), "/etc/weir/vm1.raw");
        assert_eq!(moved("/dev/sda"), "/dev/sda");
        assert_eq!(moved("memory:4K"), "memory:4096");
    }

    #[test]
    fn default_name_comes_from_the_image() {
        let name = |text: &str| image(text).default_name();
        assert_eq!(name("/images/vm1.raw"), "vm1");
        assert_eq!(name("/dev/sda"), "sda");
        assert_eq!(name("memory:1G"), "memory");
        assert_eq!(name("/"), "disk");
        assert_eq!(name("nbd://host/tenants/vm1"), "vm1");
        assert_eq!(name("nbd+unix:///?socket=/s"), "disk");
    }

    #[test]
    fn ceph_access_is_given_once() {
        let with_access = |text: &str, config: Option<&str>, user| {
            image(text).with_ceph_access(config.map(Path::new), user).map(|image| image.to_string())
        };
        assert_eq!(with_access("rbd:p/i", Some("/c"), Some("me")), Ok("rbd:p/i:conf=/c:id=me".to_owned()));
        assert_eq!(with_access("rbd:p/i:id=me", Some("/c"), None), Ok("rbd:p/i:conf=/c:id=me".to_owned()));
        assert_eq!(with_access("vm1.raw", None, None), Ok("vm1.raw".to_owned()));
        assert!(with_access("rbd:p/i:id=me", None, Some("you")).is_err_and(|rule| rule.contains(":id=")));
        assert!(with_access("vm1.raw", Some("/c"), None).is_err_and(|rule| rule.contains("rbd:POOL/IMAGE")));
        let moved = image("rbd:p/i:conf=c").relative_to(Path::new("/etc/weir"));
        assert_eq!(moved.ceph_files().collect::<Vec<_>>(), [Path::new("/etc/weir/c")]);
    }

    #[test]
    fn a_path_stays_a_path() {
        for text in ["vm1.raw", "file:memory:1G", "memory:1G", "null:1G", "nbd://host:7/vm1"] {
            assert_eq!(image(&image(text).to_spec().unwrap()), image(text));
        }
    }
}
