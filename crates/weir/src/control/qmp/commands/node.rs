//! What `blockdev-add` describes: a node over a node, down to the one that has the bytes.
//!
//! ```text
//!   throttle t0 ─► raw r0 ─► file f0        three nodes of QEMU's, one disk of weir's: t0
//! ```
//!
//! A disk has the name of its topmost node. Below it may be nodes described in place, and at the bottom one described or one that is there
//! already. What weir cannot do is refused by name, never passed over; what it does anyway (image locks, unmapping) may be asked for.
//!
//! Options that a node does not give are those of the node above it, where QEMU has it so (`read-only`, `cache`).
//!
//! Source: `BlockdevOptions` of QEMU's `qapi/block-core.json`.

use block::storage::{CacheMode, Format, OpenOptions, delay::DelayOptions};
use policy::time::Duration;

use crate::{
    control::qmp::{
        arguments::{Arguments, Reference},
        error::Error,
        json::shown,
    },
    plan::Image,
};

/// Bytes of a node's name, as in QEMU.
const MAX_NODE_NAME: usize = 31;
/// The size of `null-co` that says none.
const NULL_BYTES: u64 = 1 << 30;
const DRIVERS: [&str; 6] = ["file", "host_device", "null-co", "raw", "throttle", "x-weir-memory"];

/// A chain of nodes.
#[derive(Debug, PartialEq)]
pub(super) struct Chain {
    /// The names given to them, topmost first; the first is the disk's.
    pub(super) names: Vec<String>,
    /// The group that a `throttle` node names.
    pub(super) group: Option<String>,
    /// Whether the disk is read-only; only without an existing node below.
    pub(super) read_only: bool,
    /// What is at the bottom.
    pub(super) bottom: Bottom,
}

/// What is at the bottom of a chain.
#[derive(Debug, PartialEq)]
pub(super) enum Bottom {
    /// A node there is.
    Node(String),
    /// Storage to be opened.
    Storage {
        /// Which.
        image: Image,
        /// Whether the path must be a block device's (true) or a regular file's (false); nothing where there is none.
        device: Option<bool>,
        /// How the page cache is used.
        cache: CacheMode,
        /// Open it read-only where it cannot be written.
        auto_read_only: bool,
        /// See [`OpenOptions::force_share`].
        force_share: bool,
        /// Latency added.
        latency: Option<Duration>,
    },
}

impl Chain {
    /// Reads the arguments of `blockdev-add`.
    ///
    /// # Errors
    /// The first that is missing or wrong.
    pub(super) fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let mut chain =
            Self { names: Vec::new(), group: None, read_only: false, bottom: Bottom::Node(String::new()) };
        let driver = driver(arguments)?;
        chain.node(driver, arguments, Inherited::default(), true)?;
        Ok(chain)
    }

    /// How the image at the bottom is opened.
    pub(super) fn open_options(&self) -> OpenOptions {
        let Bottom::Storage { cache, force_share, latency, .. } = &self.bottom else {
            return OpenOptions::default();
        };
        let delay = latency.map(|time| DelayOptions {
            read: time,
            write: time,
            zero: time,
            flush: time,
            parallel: None,
        });
        OpenOptions {
            cache: *cache,
            // A node says what its bytes are; nothing is guessed.
            format: Some(Format::Raw),
            read_only: self.read_only,
            force_share: *force_share,
            delay,
            ..OpenOptions::default()
        }
    }

    /// Reads one node, and those below it.
    fn node(
        &mut self,
        driver: &str,
        arguments: &mut Arguments,
        above: Inherited,
        root: bool,
    ) -> Result<(), Error> {
        let name: Option<String> = arguments.optional("node-name")?;
        if let Some(name) = &name {
            check_name(name)?;
        } else if root {
            return Err(Error::generic("'node-name' must be specified for the root node"));
        }
        self.names.extend(name);
        let common = Inherited::read(arguments, above)?;
        self.read_only |= common.read_only;
        match driver {
            "raw" => self.below(arguments, common),
            "throttle" => {
                let group: String = arguments.required("throttle-group")?;
                if let Some(other) = self.group.replace(group) {
                    return Err(Error::rule(
                        "throttle-group",
                        format!("is given twice; a disk is in one group, '{}' already", shown(&other)),
                    ));
                }
                self.below(arguments, common)
            }
            driver => {
                self.bottom = bottom(driver, arguments, common)?;
                Ok(())
            }
        }
    }

    fn below(&mut self, arguments: &mut Arguments, above: Inherited) -> Result<(), Error> {
        match arguments.reference("file", "BlockdevRef")? {
            None => Err(Error::missing(&arguments.name_of("file"))),
            Some(Reference::Name(name)) => {
                self.bottom = Bottom::Node(name);
                Ok(())
            }
            Some(Reference::Description(mut inner)) => {
                let driver = driver(&mut inner)?;
                self.node(driver, &mut inner, above, false)?;
                inner.finish()
            }
        }
    }
}

/// Options that nodes below take over.
#[derive(Clone, Copy, Debug, Default)]
struct Inherited {
    read_only: bool,
    auto_read_only: bool,
    force_share: bool,
    direct: bool,
    no_flush: bool,
}

impl Inherited {
    /// What holds for a node below `above`.
    fn read(arguments: &mut Arguments, above: Self) -> Result<Self, Error> {
        let mut flag = |key: &str, default: bool| -> Result<bool, Error> {
            Ok(arguments.optional(key)?.unwrap_or(default))
        };
        let mut own = Self {
            read_only: flag("read-only", above.read_only)?,
            auto_read_only: flag("auto-read-only", above.auto_read_only)?,
            force_share: flag("force-share", above.force_share)?,
            ..above
        };
        if own.force_share && !own.read_only {
            return Err(Error::generic("force-share=on can only be used with read-only images"));
        }
        if let Some(mut cache) = arguments.object("cache")? {
            own.direct = cache.optional("direct")?.unwrap_or(above.direct);
            own.no_flush = cache.optional("no-flush")?.unwrap_or(above.no_flush);
            if own.direct && own.no_flush {
                return Err(Error::rule(&cache.name_of("no-flush"), "does not go with 'direct' (give one)"));
            }
            cache.finish()?;
        }
        always(arguments, "discard", &["unmap", "ignore"], &["unmap"])?;
        always(arguments, "detect-zeroes", &["off", "on", "unmap"], &["off"])?;
        Ok(own)
    }

    fn cache_mode(self) -> CacheMode {
        match (self.direct, self.no_flush) {
            (true, _) => CacheMode::None,
            (false, true) => CacheMode::Unsafe,
            (false, false) => CacheMode::Writeback,
        }
    }
}

/// A choice of QEMU's that weir has made: only `possible` may be asked for.
fn always(arguments: &mut Arguments, key: &str, words: &[&str], possible: &[&str]) -> Result<(), Error> {
    match arguments.choice(key, words)? {
        Some(place) if !possible.contains(&words[place]) => Err(Error::rule(
            &arguments.name_of(key),
            format!("is always '{}' here; '{}' is not to be had", possible[0], words[place]),
        )),
        _ => Ok(()),
    }
}

fn driver(arguments: &mut Arguments) -> Result<&'static str, Error> {
    let place = arguments.choice("driver", &DRIVERS)?;
    place.map(|place| DRIVERS[place]).ok_or_else(|| Error::missing(&arguments.name_of("driver")))
}

fn bottom(driver: &str, arguments: &mut Arguments, common: Inherited) -> Result<Bottom, Error> {
    let (mut latency, mut device) = (None, None);
    let spec = match driver {
        "file" | "host_device" => {
            device = Some(driver == "host_device");
            let path: String = arguments.required("filename")?;
            always(arguments, "locking", &["on", "auto", "off"], &["on", "auto"])?;
            always(arguments, "aio", &["io_uring", "threads", "native"], &["io_uring"])?;
            format!("file:{path}")
        }
        "null-co" => {
            let nanos = arguments.optional::<u64>("latency-ns")?.filter(|&nanos| nanos > 0);
            latency = nanos.map(Duration::from_nanos);
            // Without it what is read is undefined: zeroes will do.
            let _: Option<bool> = arguments.optional("read-zeroes")?;
            format!("null:{}", size(arguments)?.unwrap_or(NULL_BYTES))
        }
        _ => {
            let bytes = size(arguments)?.ok_or_else(|| Error::missing(&arguments.name_of("size")))?;
            format!("memory:{bytes}")
        }
    };
    let image = spec.parse().map_err(|error| Error::generic(format!("{error}")))?;
    Ok(Bottom::Storage {
        image,
        device,
        cache: common.cache_mode(),
        auto_read_only: common.auto_read_only,
        force_share: common.force_share,
        latency,
    })
}

fn size(arguments: &mut Arguments) -> Result<Option<u64>, Error> {
    arguments.number("size", 1..=1 << 63)
}

/// As QEMU judges a node's name.
fn check_name(name: &str) -> Result<(), Error> {
    let mut bytes = name.bytes();
    let begins = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let goes_on = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if !begins || !bytes.all(goes_on) {
        return Err(Error::generic(format!("Invalid node-name: '{}'", shown(name))));
    }
    if name.len() > MAX_NODE_NAME {
        return Err(Error::generic(format!("Node name too long (it has {MAX_NODE_NAME} bytes at most)")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Result<Chain, String> {
        let Value::Object(members) = value else { panic!("an object") };
        let mut arguments = Arguments::new(members);
        let chain = Chain::read(&mut arguments).map_err(|error| error.to_string())?;
        arguments.finish().map_err(|error| error.to_string())?;
        Ok(chain)
    }

    #[track_caller]
    fn refused(value: Value, expected: &str) {
        assert_eq!(read(value).unwrap_err(), expected);
    }

    #[test]
    fn a_chain_is_read_to_its_bottom() {
        let chain = read(json!({
            "driver": "throttle", "node-name": "t0", "throttle-group": "gold", "read-only": true,
            "file": {
                "driver": "raw", "cache": {"direct": true},
                "file": {"driver": "file", "node-name": "f0", "filename": "memory:1", "aio": "io_uring"},
            },
        }))
        .unwrap();
        assert_eq!(chain.names, ["t0", "f0"]);
        assert_eq!(chain.group.as_deref(), Some("gold"));
        assert!(chain.read_only);
        let options = chain.open_options();
        assert_eq!(
            (options.cache, options.format, options.read_only),
            (CacheMode::None, Some(Format::Raw), true)
        );
        let Bottom::Storage { image, device: Some(false), .. } = chain.bottom else { panic!("{chain:?}") };
        assert_eq!(
            image.path().unwrap().to_str(),
            Some("memory:1"),
            "a file name is one, whatever it looks like"
        );
    }

    #[test]
    fn a_bottom_may_be_there_already() {
        let chain = read(json!({"driver": "raw", "node-name": "r0", "file": "f0"})).unwrap();
        assert_eq!((chain.names, chain.bottom), (vec!["r0".to_owned()], Bottom::Node("f0".to_owned())));
    }

    #[test]
    fn what_is_wrong_is_refused_in_qemus_words() {
        refused(json!({"node-name": "a"}), "Parameter 'driver' is missing");
        refused(
            json!({"driver": "qcow2", "node-name": "a"}),
            "Parameter 'driver' does not accept value 'qcow2' (there are: file, host_device, null-co, raw, throttle, x-weir-memory)",
        );
        let file = |key: &str, value: Value| {
            let mut arguments = json!({"driver": "file", "node-name": "a", "filename": "x"});
            arguments[key] = value;
            arguments
        };
        refused(json!({"driver": "null-co"}), "'node-name' must be specified for the root node");
        refused(file("node-name", json!("1x")), "Invalid node-name: '1x'");
        refused(file("node-name", json!("a".repeat(32))), "Node name too long (it has 31 bytes at most)");
        refused(file("bogus", json!(1)), "Parameter 'bogus' is unexpected");
        refused(file("force-share", json!(true)), "force-share=on can only be used with read-only images");
        refused(
            file("cache", json!({"direct": true, "no-flush": true})),
            "Parameter 'cache.no-flush' does not go with 'direct' (give one)",
        );
        refused(
            file("locking", json!("off")),
            "Parameter 'locking' is always 'on' here; 'off' is not to be had",
        );
        refused(
            json!({"driver": "raw", "node-name": "a", "file": 5}),
            "Invalid parameter type for 'file', expected: BlockdevRef",
        );
        refused(json!({"driver": "raw", "node-name": "a"}), "Parameter 'file' is missing");
        refused(
            json!({"driver": "raw", "node-name": "a", "file": {"driver": "null-co", "sise": 5}}),
            "Parameter 'file.sise' is unexpected (did you mean 'size'?)",
        );
        refused(json!({"driver": "x-weir-memory", "node-name": "a"}), "Parameter 'size' is missing");
    }
}
