//! Where a disk's bytes are: a path that may be seen from somewhere, or storage of a size.

use std::{fmt, path::Path, str::FromStr};

use anyhow::Context as _;
use block::{
    nbd::uri::Uri,
    storage::{InvalidValue, Spec},
};

/// An image as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image(Spec);

impl Image {
    /// The same image with a path seen from `directory`.
    pub fn relative_to(self, directory: &Path) -> Self {
        match self.0 {
            Spec::File(path) => Self(Spec::File(directory.join(path))),
            other => Self(other),
        }
    }

    /// The path, where it is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            Spec::File(path) => Some(path),
            Spec::Memory(_) | Spec::Null(_) | Spec::Nbd(_) => None,
        }
    }

    /// Where it is at another server, if it is.
    pub fn remote(&self) -> Option<&Uri> {
        match &self.0 {
            Spec::Nbd(uri) => Some(uri),
            Spec::File(_) | Spec::Memory(_) | Spec::Null(_) => None,
        }
    }

    /// The size in bytes, where it is a disk in memory.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self.0 {
            Spec::Memory(bytes) => Some(bytes),
            Spec::File(_) | Spec::Null(_) | Spec::Nbd(_) => None,
        }
    }

    /// A disk's default name: the file's without its extension, or the kind of storage.
    pub fn default_name(&self) -> String {
        match &self.0 {
            Spec::File(path) => {
                path.file_stem().map_or_else(|| "disk".to_owned(), |stem| stem.to_string_lossy().into_owned())
            }
            Spec::Memory(_) => "memory".to_owned(),
            Spec::Null(_) => "null".to_owned(),
            Spec::Nbd(uri) => match uri.export.rsplit('/').next() {
                Some(name) if !name.is_empty() => name.to_owned(),
                _ => "disk".to_owned(),
            },
        }
    }

    /// As `block::image::open` takes it, a path being one whatever it begins with.
    ///
    /// # Errors
    /// If the path is not UTF-8, as the directory of a config file may be.
    pub fn spec(&self) -> anyhow::Result<String> {
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

impl FromStr for Image {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        text.parse().map(Self)
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Spec::File(path) => write!(f, "{}", path.display()),
            Spec::Memory(bytes) => write!(f, "memory:{bytes}"),
            Spec::Null(bytes) => write!(f, "null:{bytes}"),
            Spec::Nbd(uri) => uri.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> Image {
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
    fn a_disk_is_named_after_its_image() {
        let name = |text: &str| image(text).default_name();
        assert_eq!(name("/images/vm1.raw"), "vm1");
        assert_eq!(name("/dev/sda"), "sda");
        assert_eq!(name("memory:1G"), "memory");
        assert_eq!(name("/"), "disk");
        assert_eq!(name("nbd://host/tenants/vm1"), "vm1");
        assert_eq!(name("nbd+unix:///?socket=/s"), "disk");
    }

    #[test]
    fn a_path_stays_a_path() {
        for text in ["vm1.raw", "file:memory:1G", "memory:1G", "null:1G", "nbd://host:7/vm1"] {
            assert_eq!(image(&image(text).spec().unwrap()), image(text));
        }
    }
}
