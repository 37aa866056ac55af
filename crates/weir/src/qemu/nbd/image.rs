//! The image of a `qemu-nbd` command line, FILE or the options of `--image-opts`, as options of
//! `weir serve`.

use anyhow::bail;
use block::disk::{DetectZeroes, Discards};
use settings::ImageDescription;

use super::objects::QemuObjects;

/// An image as options of `weir serve`, and its location.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ServedImage {
    pub(super) options: Vec<String>,
    pub(super) file: String,
    /// True if `file` is an address: a URI or an image in Ceph.
    pub(super) is_remote: bool,
    /// QEMU's name of the format, if it was given.
    pub(super) format: Option<String>,
    pub(super) cache: Option<String>,
    pub(super) discard: Option<String>,
    pub(super) detect_zeroes: Option<String>,
    pub(super) part: Vec<String>,
}

impl ServedImage {
    /// Parses FILE as a path, an address or `json:{…}`.
    pub(super) fn of_file(name: &str, objects: &QemuObjects) -> anyhow::Result<Self> {
        match ImageDescription::from_name(name) {
            Ok(description) => Self::of(description, objects),
            Err(error) => bail!("Failed to open {error:#}"),
        }
    }

    /// Parses FILE as a set of options.
    pub(super) fn of_options(text: &str, objects: &QemuObjects) -> anyhow::Result<Self> {
        Self::of(ImageDescription::from_options(text)?, objects)
    }

    fn of(description: ImageDescription, objects: &QemuObjects) -> anyhow::Result<Self> {
        let ImageDescription {
            image,
            format,
            part,
            no_backing,
            read_only,
            force_share,
            cache,
            discard,
            discard_no_unref,
            detect_zeroes,
            key_secret,
            // `cache_options` has the same values.
            caches: _,
            cache_options,
            reconnect_delay,
            open_timeout,
        } = description;
        // Ignoring it silently would change the image's layout over time.
        if discard_no_unref {
            bail!("discard-no-unref=on: not supported (leave it out, or give discard=ignore)");
        }
        if no_backing {
            bail!("backing: an image cannot be served without its backing file (leave it out)");
        }
        let mut options: Vec<_> =
            cache_options.into_iter().map(|(key, value)| format!("--{key}={value}")).collect();
        if let Some(id) = key_secret {
            options.push(objects.secret(&id)?);
        }
        for (name, is_on) in [("read-only", read_only), ("force-share", force_share)] {
            if is_on {
                options.push(format!("--{name}"));
            }
        }
        for (name, time) in [("reconnect-delay", reconnect_delay), ("open-timeout", open_timeout)] {
            if !time.is_zero() {
                options.push(format!("--{name}={}s", time.as_nanos() / 1_000_000_000));
            }
        }
        let part = part.into_iter().flat_map(|part| {
            let size = part.size.map(|size| format!("size={size}"));
            std::iter::once(format!("offset={}", part.offset)).chain(size)
        });
        Ok(Self {
            options,
            is_remote: image.path().is_none(),
            file: image.to_string(),
            format: format.map(|format| format.name().to_owned()),
            cache: cache.map(|mode| mode.to_string()),
            discard: discard.map(|discard| match discard {
                Discards::Unmap => "unmap".to_owned(),
                Discards::Ignore => "ignore".to_owned(),
            }),
            detect_zeroes: detect_zeroes.map(DetectZeroes::name).map(str::to_owned),
            part: part.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ServedImage, String> {
        let objects = QemuObjects::read(&["secret,id=s,file=/key".to_owned()]).unwrap();
        ServedImage::of_options(text, &objects).map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_drivers_become_options_of_serve() {
        let image = read("driver=raw,offset=1M,size=2M,file.driver=file,file.filename=/a,,b").unwrap();
        assert_eq!((image.format.as_deref(), &*image.file), (Some("raw"), "/a,b"));
        assert_eq!(image.part, ["offset=1048576", "size=2097152"]);
        let image = read(
            "driver=qcow2,file.filename=a,l2-cache-size=1M,encrypt.key-secret=s,cache.direct=on,read-only=on,discard=unmap,detect-zeroes=on",
        )
        .unwrap();
        assert_eq!(image.options, ["--l2-cache-size=1M", "--secret-file=/key", "--read-only"]);
        assert_eq!((image.cache.as_deref(), image.discard.as_deref()), (Some("none"), Some("unmap")));
        assert_eq!(image.detect_zeroes.as_deref(), Some("on"));
        let image = read("driver=raw,file.driver=nbd,file.host=h,file.reconnect-delay=5").unwrap();
        assert_eq!((&*image.file, image.is_remote), ("nbd://h:10809/", true));
        assert_eq!(image.options, ["--reconnect-delay=5s"]);
    }

    #[test]
    fn an_image_that_cannot_be_served_is_refused_by_name() {
        for (text, expect) in [
            ("driver=raw,file.driver=iscsi", "file.driver=iscsi: not supported"),
            (
                "driver=qcow2,file.filename=a,backing=",
                "backing: an image cannot be served without its backing file",
            ),
            ("driver=qcow2,file.filename=a,encrypt.key-secret=t", "No secret with id 't'"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(expect), "{refused}");
        }
    }

    #[test]
    fn protocols_are_not_paths() {
        let file = |name: &str| {
            let described = ServedImage::of_file(name, &QemuObjects::default());
            described.map(|image| image.file).map_err(|error| error.to_string())
        };
        assert_eq!(file("file:/a").unwrap(), "/a");
        assert_eq!(file("./a:b").unwrap(), "./a:b");
        assert_eq!(file("nbd://host/x").unwrap(), "nbd://host/x");
        assert_eq!(file("json:{\"driver\": \"raw\", \"file.filename\": \"a\"}").unwrap(), "a");
        assert!(file("nbd:host:7").unwrap_err().contains("the protocol 'nbd' is not supported"));
    }
}
