//! Which image `qemu-nbd` is told of: FILE, or the options of `--image-opts`, as options of
//! `weir serve`.

use anyhow::{Context as _, anyhow, bail};
use settings::keyval;

use super::objects::Objects;

/// Options of QEMU's block drivers that `weir serve` has by the same names.
const SAME: [&str; 5] =
    ["l2-cache-size", "l2-cache-entry-size", "refcount-cache-size", "cache-size", "cache-clean-interval"];

/// What an image is, in options of `weir serve`, and where.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) options: Vec<String>,
    pub(super) file: String,
    /// The file is a URI.
    pub(super) is_remote: bool,
    /// As QEMU calls it, where it is said.
    pub(super) format: Option<String>,
    pub(super) cache: Option<String>,
    pub(super) discard: Option<String>,
    pub(super) detect_zeroes: Option<String>,
    pub(super) part: Vec<String>,
}

impl Described {
    /// FILE is a path.
    pub(super) fn of_file(name: &str) -> anyhow::Result<Self> {
        let protocol = name.split_once(':').map(|(before, _)| before).filter(|before| !before.contains('/'));
        match protocol {
            Some("nbd" | "nbds" | "nbd+unix" | "nbds+unix") if name.contains("://") => {
                Ok(Self { file: name.to_owned(), is_remote: true, ..Self::default() })
            }
            Some("file") => Ok(Self { file: name["file:".len()..].to_owned(), ..Self::default() }),
            Some(protocol) => bail!(
                "Failed to open '{name}': the protocol '{protocol}' is not to be had (a path with a colon is written ./PATH)"
            ),
            None => Ok(Self { file: name.to_owned(), ..Self::default() }),
        }
    }

    /// FILE is a set of options.
    pub(super) fn of_options(text: &str, objects: &Objects) -> anyhow::Result<Self> {
        let mut image = Self::default();
        let (mut direct, mut no_flush, mut file) = (false, false, None);
        for (key, value) in keyval::pairs(text, None).map_err(|rule| anyhow!("{text}: {rule}"))? {
            let refused = || anyhow!("{key}={value}: is not to be had");
            let switch = || match &*value {
                "on" | "yes" | "true" => Ok(true),
                "off" | "no" | "false" => Ok(false),
                _ => Err(anyhow!("{key}={value}: is neither on nor off")),
            };
            match key.as_str() {
                "driver" | "format" => {
                    image.format = Some(match &*value {
                        "file" | "host_device" => "raw".to_owned(),
                        "raw" | "qcow2" => value,
                        _ => return Err(refused()),
                    });
                }
                "file.driver" if ["file", "host_device"].contains(&&*value) => {}
                "filename" | "file.filename" => file = Some(value),
                "offset" | "size" => image.part.push(format!("{key}={value}")),
                "read-only" | "force-share" => {
                    if switch()? {
                        image.options.push(format!("--{key}"));
                    }
                }
                "cache.direct" => direct = switch()?,
                "cache.no-flush" => no_flush = switch()?,
                "discard" => image.discard = Some(value),
                "file.locking" if ["on", "auto"].contains(&&*value) => {}
                "aio" | "file.aio" if ["threads", "native", "io_uring"].contains(&&*value) => {}
                "detect-zeroes" => image.detect_zeroes = Some(value),
                "encrypt.format" if value == "luks" => {}
                "encrypt.key-secret" => image.options.push(objects.secret(&value)?),
                same if SAME.contains(&same) => image.options.push(format!("--{key}={value}")),
                _ => return Err(refused()),
            }
        }
        image.cache = match (direct, no_flush) {
            (true, true) => bail!("cache.no-flush=on: does not go with cache.direct=on (give one)"),
            (true, false) => Some("none".to_owned()),
            (false, true) => Some("unsafe".to_owned()),
            (false, false) => None,
        };
        image.file = file.with_context(|| format!("{text}: names no file (add file.filename=PATH)"))?;
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Described, String> {
        let objects = Objects::read(&["secret,id=s,file=/key".to_owned()]).unwrap();
        Described::of_options(text, &objects).map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_drivers_become_options_of_serve() {
        let image = read("driver=raw,offset=1M,size=2M,file.driver=file,file.filename=/a,,b").unwrap();
        assert_eq!((image.format.as_deref(), &*image.file), (Some("raw"), "/a,b"));
        assert_eq!(image.part, ["offset=1M", "size=2M"]);
        let image = read(
            "driver=qcow2,file.filename=a,l2-cache-size=1M,encrypt.key-secret=s,cache.direct=on,read-only=on,discard=unmap,detect-zeroes=on",
        )
        .unwrap();
        assert_eq!(image.options, ["--l2-cache-size=1M", "--secret-file=/key", "--read-only"]);
        assert_eq!((image.cache.as_deref(), image.discard.as_deref()), (Some("none"), Some("unmap")));
        assert_eq!(image.detect_zeroes.as_deref(), Some("on"));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (text, expect) in [
            ("driver=raw,file.driver=nbd", "file.driver=nbd: is not to be had"),
            ("driver=raw,file.filename=a,bogus=1", "bogus=1: is not to be had"),
            ("driver=raw,file.filename=a,read-only=maybe", "read-only=maybe: is neither on nor off"),
            ("driver=raw,file.filename=a,cache.direct=on,cache.no-flush=on", "does not go with"),
            ("driver=raw", "names no file"),
            (
                "driver=raw,file.filename=a,backing.file.filename=b",
                "backing.file.filename=b: is not to be had",
            ),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(expect), "{said}");
        }
    }

    #[test]
    fn a_protocol_is_no_path() {
        let file =
            |name: &str| Described::of_file(name).map(|image| image.file).map_err(|error| error.to_string());
        assert_eq!(file("file:/a").unwrap(), "/a");
        assert_eq!(file("./a:b").unwrap(), "./a:b");
        assert_eq!(file("nbd://host/x").unwrap(), "nbd://host/x");
        assert!(file("nbd:host:7").unwrap_err().contains("the protocol 'nbd' is not to be had"));
        assert!(file("json:{}").unwrap_err().contains("'json'"));
    }
}
