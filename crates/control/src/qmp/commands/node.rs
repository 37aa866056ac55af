//! Arguments of `blockdev-add`: a chain of nodes, down to the protocol node, which stores the
//! bytes.
//!
//! ```text
//!   throttle t0 ─► raw r0 ─► file f0        three nodes of QEMU, one disk of weir: t0
//! ```
//!
//! A disk has the name of its topmost node; the bottom may be an existing disk. Unsupported options
//! are rejected by name; options that request weir's fixed behaviour (image locks, unmapping) are
//! accepted. The files of a `qcow2` node are no nodes. Prefetch is set at the topmost node.
//!
//! Source: `BlockdevOptions` of QEMU's `qapi/block-core.json`.

use block::disk::{DetectZeroes, Discards};
use image::{
    Secret,
    open::{BackingChoice, ImageOptions},
    qcow2::CacheSettings,
};
use policy::time::Duration;
use settings::DiskConfig;
use storage::{CacheMode, ImageFormat, OpenOptions, Root, StoragePart, delay::DelayOptions, rbd::RbdAddress};

use crate::{
    qmp::{
        arguments::{NodeReference, QmpArguments},
        caches::Qcow2CacheChanges,
        error::QmpError,
        errors::ErrorPolicyChanges,
        identifier,
        json::excerpt,
        prefetch::PrefetchChanges,
    },
    registry::ProtocolNode,
};

/// Maximum length of a node's name in bytes, as in QEMU.
const MAX_NODE_NAME: usize = 31;
/// Maximum `reconnect-delay` and `open-timeout` in seconds: QEMU uses 32 bits.
const MAX_DELAY_SECONDS: u64 = u32::MAX as u64;
/// Default size of `null-co`.
const NULL_BYTES: u64 = 1 << 30;
const DRIVERS: [&str; 9] =
    ["file", "host_device", "nbd", "null-co", "qcow2", "raw", "rbd", "throttle", "x-weir-memory"];

#[derive(Debug, PartialEq)]
pub(super) struct NodeChain {
    /// Node names, topmost first; the first is the disk's.
    pub(super) names: Vec<String>,
    pub(super) group: Option<String>,
    pub(super) read_only: bool,
    pub(super) qcow2: Option<Qcow2Node>,
    /// Part of a raw image that the disk consists of.
    pub(super) part: Option<StoragePart>,
    /// Another daemon may open it while this one runs: see `--handover`.
    pub(super) handover: bool,
    pub(super) discards: Discards,
    pub(super) detect_zeroes: DetectZeroes,
    pub(super) prefetch: PrefetchChanges,
    pub(super) policies: ErrorPolicyChanges,
    pub(super) bottom: ChainBottom,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Qcow2Node {
    pub(super) caches: CacheSettings,
    /// Ignores the backing file that the image names.
    pub(super) no_backing: bool,
    pub(super) key_secret: Option<String>,
    /// Internal snapshot to serve.
    pub(super) snapshot: Option<String>,
}

#[derive(Debug, PartialEq)]
pub(super) enum ChainBottom {
    Node(String),
    Storage(ProtocolNode),
}

impl NodeChain {
    /// `name` is the disk's name if it was already read, by weir's rule instead of QEMU's.
    pub(super) fn read(arguments: &mut QmpArguments, name: Option<String>) -> Result<Self, QmpError> {
        let mut chain = Self {
            names: name.into_iter().collect(),
            group: None,
            read_only: false,
            qcow2: None,
            part: None,
            handover: arguments.optional("x-weir-handover")?.unwrap_or(false),
            discards: Discards::default(),
            detect_zeroes: DetectZeroes::default(),
            prefetch: PrefetchChanges::read(arguments, "x-weir-")?,
            policies: ErrorPolicyChanges::read(arguments, "x-weir-")?,
            bottom: ChainBottom::Node(String::new()),
        };
        let driver = read_driver(arguments)?;
        chain.read_node(driver, arguments, InheritedOptions::default(), true)?;
        if chain.part.is_some() && chain.qcow2.is_some() {
            return Err(QmpError::rule("offset", "is of a raw image, and this is a 'qcow2'"));
        }
        if chain.detect_zeroes == DetectZeroes::Unmap && chain.discards == Discards::Ignore {
            let rule = "cannot be 'unmap' if 'discard' is 'ignore' (use 'on', or set 'discard' to \
                        'unmap')";
            return Err(QmpError::rule("detect-zeroes", rule));
        }
        if chain.reopens_node() {
            return Ok(chain);
        }
        if chain.handover && matches!(chain.bottom, ChainBottom::Node(_)) {
            let rule = "is set where the image is opened";
            return Err(QmpError::rule("x-weir-handover", rule));
        }
        if chain.discards == Discards::Ignore && matches!(chain.bottom, ChainBottom::Node(_)) {
            return Err(QmpError::rule(
                "discard",
                "is set where the image is opened; 'ignore' is not supported here",
            ));
        }
        if chain.detect_zeroes != DetectZeroes::Off && matches!(chain.bottom, ChainBottom::Node(_)) {
            return Err(QmpError::rule("detect-zeroes", "is set where the image is opened, not here"));
        }
        Ok(chain)
    }

    /// Chain of one node that was opened without a format.
    pub(super) fn of_storage(name: &str, storage: &ProtocolNode) -> Self {
        Self {
            names: vec![name.to_owned()],
            group: None,
            read_only: storage.read_only,
            qcow2: None,
            part: None,
            handover: storage.handover,
            discards: storage.discards,
            detect_zeroes: storage.detect_zeroes,
            prefetch: PrefetchChanges::default(),
            policies: ErrorPolicyChanges::default(),
            bottom: ChainBottom::Storage(storage.clone()),
        }
    }

    /// True if an existing node below must be opened with other options.
    pub(super) fn reopens_node(&self) -> bool {
        matches!(self.bottom, ChainBottom::Node(_)) && (self.qcow2.is_some() || self.part.is_some())
    }

    /// Chain of these nodes over a node that is described instead of named.
    pub(super) fn over_storage(self, storage: &ProtocolNode) -> Self {
        Self {
            read_only: self.read_only || storage.read_only,
            handover: self.handover || storage.handover,
            discards: if storage.discards == Discards::Ignore { Discards::Ignore } else { self.discards },
            detect_zeroes: self.detect_zeroes.max(storage.detect_zeroes),
            bottom: ChainBottom::Storage(storage.clone()),
            ..self
        }
    }

    /// Options of its protocol node, if the nodes above do not change the format.
    pub(super) fn plain_storage(&self) -> Option<ProtocolNode> {
        let ChainBottom::Storage(storage) = &self.bottom else { return None };
        let is_plain = self.qcow2.is_none() && self.part.is_none();
        let Self { read_only, handover, discards, detect_zeroes, .. } = *self;
        is_plain.then(|| ProtocolNode { read_only, handover, discards, detect_zeroes, ..storage.clone() })
    }

    pub(super) fn format(&self) -> ImageFormat {
        if self.qcow2.is_some() { ImageFormat::Qcow2 } else { ImageFormat::Raw }
    }

    pub(super) fn caches(&self) -> CacheSettings {
        self.qcow2.as_ref().map(|node| node.caches).unwrap_or_default()
    }

    /// Config of the described disk on this storage, without settings that can change later.
    pub(super) fn config(&self, storage: &ProtocolNode) -> DiskConfig {
        DiskConfig {
            image: storage.image.clone(),
            format: Some(self.format()),
            part: self.part,
            snapshot: self.qcow2.as_ref().and_then(|node| node.snapshot.clone()),
            cache: storage.cache,
            read_only: self.read_only,
            force_share: storage.force_share,
            handover: self.handover,
            discard: self.discards,
            detect_zeroes: self.detect_zeroes,
            reconnect_delay: storage.reconnect_delay,
            open_timeout: storage.open_timeout,
            delay: storage.latency.map(uniform_delay),
            ..DiskConfig::default()
        }
    }

    /// Option that is no config key, and is valid on this host only.
    pub(super) fn host_local_option(&self) -> Option<&'static str> {
        let node = self.qcow2.as_ref()?;
        node.key_secret.is_some().then_some("key-secret").or(node.no_backing.then_some("backing"))
    }

    pub(super) fn open_options(&self, root: Option<Root>, secret: Option<Secret>) -> ImageOptions {
        let no_backing = self.qcow2.as_ref().is_some_and(|node| node.no_backing);
        ImageOptions {
            storage: OpenOptions { root, ..self.storage_options() },
            caches: self.caches(),
            secrets: secret.into_iter().collect(),
            backing: if no_backing { BackingChoice::Nothing } else { BackingChoice::AsInImage },
            snapshot: self.qcow2.as_ref().and_then(|node| node.snapshot.clone()),
        }
    }

    fn storage_options(&self) -> OpenOptions {
        let ChainBottom::Storage(node) = &self.bottom else { return OpenOptions::default() };
        let delay = node.latency.map(uniform_delay);
        OpenOptions {
            cache: node.cache,
            format: Some(self.format()),
            read_only: self.read_only,
            force_share: node.force_share,
            handover: self.handover,
            part: self.part,
            reconnect_delay: node.reconnect_delay,
            open_timeout: node.open_timeout,
            delay,
            ..OpenOptions::default()
        }
    }

    fn read_node(
        &mut self,
        driver: &str,
        arguments: &mut QmpArguments,
        above: InheritedOptions,
        root: bool,
    ) -> Result<(), QmpError> {
        // The name of the root may already be known: see `read`.
        if !root || self.names.is_empty() {
            let name: Option<String> = arguments.optional("node-name")?;
            if let Some(name) = &name {
                check_name(name)?;
            } else if root {
                return Err(QmpError::generic("'node-name' must be specified for the root node"));
            }
            self.names.extend(name);
        }
        let common = InheritedOptions::read(arguments, above)?;
        self.read_only |= common.read_only;
        // A discard passes only if no node ignores it. The default is `unmap`; QEMU's is `ignore`.
        if arguments.choice("discard", &["unmap", "ignore"])? == Some(1) {
            self.discards = Discards::Ignore;
        }
        // The strongest mode of all nodes applies.
        let detect_zeroes = arguments.choice("detect-zeroes", &DetectZeroes::ALL.map(DetectZeroes::name))?;
        let detect_zeroes = detect_zeroes.map(|index| DetectZeroes::ALL[index]).unwrap_or_default();
        self.detect_zeroes = self.detect_zeroes.max(detect_zeroes);
        match driver {
            "raw" => {
                self.part = read_part(arguments)?.or(self.part);
                self.read_below(arguments, common)
            }
            "qcow2" => {
                let node = read_qcow2(arguments)?;
                // An internal snapshot cannot be written.
                self.read_only |= node.snapshot.is_some();
                if self.qcow2.replace(node).is_some() {
                    let rule = "does not go into another 'qcow2' (one image, one node)";
                    return Err(QmpError::rule(&arguments.full_name("driver"), rule));
                }
                self.read_below(arguments, common)
            }
            "throttle" => {
                let group: String = arguments.required("throttle-group")?;
                if let Some(other) = self.group.replace(group) {
                    return Err(QmpError::rule(
                        "throttle-group",
                        format!("is given twice; a disk is in one group, '{}' already", excerpt(&other)),
                    ));
                }
                self.read_below(arguments, common)
            }
            driver => {
                self.bottom = read_storage(driver, arguments, common)?;
                Ok(())
            }
        }
    }

    fn read_below(&mut self, arguments: &mut QmpArguments, above: InheritedOptions) -> Result<(), QmpError> {
        match arguments.reference("file", "BlockdevRef")? {
            None => Err(QmpError::missing(&arguments.full_name("file"))),
            Some(NodeReference::Name(name)) => {
                self.bottom = ChainBottom::Node(name);
                Ok(())
            }
            Some(NodeReference::Description(mut inner)) => {
                let driver = read_driver(&mut inner)?;
                self.read_node(driver, &mut inner, above, false)?;
                inner.finish()
            }
        }
    }
}

/// Emulated device with the same latency for every request.
fn uniform_delay(time: Duration) -> DelayOptions {
    DelayOptions { read: time, write: time, zero: time, flush: time, parallel: None }
}

/// Options that nodes below inherit, as in QEMU.
#[derive(Clone, Copy, Debug, Default)]
struct InheritedOptions {
    read_only: bool,
    auto_read_only: bool,
    force_share: bool,
    direct: bool,
    no_flush: bool,
}

impl InheritedOptions {
    fn read(arguments: &mut QmpArguments, above: Self) -> Result<Self, QmpError> {
        let mut flag = |key: &str, default: bool| -> Result<bool, QmpError> {
            Ok(arguments.optional(key)?.unwrap_or(default))
        };
        let mut options = Self {
            read_only: flag("read-only", above.read_only)?,
            auto_read_only: flag("auto-read-only", above.auto_read_only)?,
            force_share: flag("force-share", above.force_share)?,
            ..above
        };
        if options.force_share && !options.read_only {
            return Err(QmpError::generic("force-share=on can only be used with read-only images"));
        }
        if let Some(mut cache) = arguments.object("cache")? {
            // As in QEMU, a node inherits cache options that it does not set.
            options.direct = cache.optional("direct")?.unwrap_or(above.direct);
            options.no_flush = cache.optional("no-flush")?.unwrap_or(above.no_flush);
            if options.direct && options.no_flush {
                return Err(QmpError::rule(
                    &cache.full_name("no-flush"),
                    "does not go with 'direct' (give one)",
                ));
            }
            cache.finish()?;
        }
        Ok(options)
    }

    fn cache_mode(self) -> CacheMode {
        match (self.direct, self.no_flush) {
            (true, _) => CacheMode::None,
            (false, true) => CacheMode::Unsafe,
            (false, false) => CacheMode::Writeback,
        }
    }
}

/// Checks an option whose value is fixed in weir: only `possible` values are accepted.
fn read_fixed(
    arguments: &mut QmpArguments,
    key: &str,
    choices: &[&str],
    possible: &[&str],
) -> Result<(), QmpError> {
    match arguments.choice(key, choices)? {
        Some(index) if !possible.contains(&choices[index]) => Err(QmpError::rule(
            &arguments.full_name(key),
            format!("is always '{}' here; '{}' is not supported", possible[0], choices[index]),
        )),
        _ => Ok(()),
    }
}

fn read_driver(arguments: &mut QmpArguments) -> Result<&'static str, QmpError> {
    let index = arguments.choice("driver", &DRIVERS)?;
    index.map(|index| DRIVERS[index]).ok_or_else(|| QmpError::missing(&arguments.full_name("driver")))
}

fn read_storage(
    driver: &str,
    arguments: &mut QmpArguments,
    common: InheritedOptions,
) -> Result<ChainBottom, QmpError> {
    let (mut latency, mut device) = (None, None);
    let (mut reconnect_delay, mut open_timeout) = (Duration::ZERO, Duration::ZERO);
    let spec = match driver {
        "rbd" => read_rbd(arguments)?,
        "file" | "host_device" => {
            device = Some(driver == "host_device");
            let path: String = arguments.required("filename")?;
            read_fixed(arguments, "locking", &["on", "auto", "off"], &["on", "auto"])?;
            // Access method in QEMU; weir always uses io_uring.
            arguments.choice("aio", &["io_uring", "threads", "native"])?;
            format!("file:{path}")
        }
        "nbd" => {
            for (key, time) in
                [("reconnect-delay", &mut reconnect_delay), ("open-timeout", &mut open_timeout)]
            {
                *time = Duration::from_secs(arguments.number(key, 0..=MAX_DELAY_SECONDS)?.unwrap_or(0));
            }
            super::remote::read_uri(arguments)?
        }
        "null-co" => {
            let nanos = arguments.optional::<u64>("latency-ns")?.filter(|&nanos| nanos > 0);
            latency = nanos.map(Duration::from_nanos);
            // Without it the contents are undefined, so zeroes are valid.
            let _: Option<bool> = arguments.optional("read-zeroes")?;
            format!("null:{}", read_size(arguments)?.unwrap_or(NULL_BYTES))
        }
        _ => {
            let bytes =
                read_size(arguments)?.ok_or_else(|| QmpError::missing(&arguments.full_name("size")))?;
            format!("memory:{bytes}")
        }
    };
    let image = spec.parse().map_err(|error| QmpError::generic(format!("{error}")))?;
    Ok(ChainBottom::Storage(ProtocolNode {
        image,
        device,
        cache: common.cache_mode(),
        read_only: common.read_only,
        auto_read_only: common.auto_read_only,
        force_share: common.force_share,
        latency,
        reconnect_delay,
        open_timeout,
        handover: false,
        discards: Discards::default(),
        detect_zeroes: DetectZeroes::default(),
    }))
}

/// Arguments of QEMU's `BlockdevOptionsRbd`: the image, and the connection to its cluster. Keys
/// must be in a keyring, where they are not exposed; `key-secret` is not supported.
fn read_rbd(arguments: &mut QmpArguments) -> Result<String, QmpError> {
    let mut address = RbdAddress {
        pool: arguments.required("pool")?,
        namespace: arguments.optional("namespace")?,
        image: arguments.required("image")?,
        snapshot: arguments.optional("snapshot")?,
        config: arguments.optional::<String>("conf")?.map(Into::into),
        user: arguments.optional("user")?,
        keyring: None,
        monitors: None,
    };
    let mut monitors = Vec::new();
    for mut server in arguments.objects("server")? {
        let (host, port): (String, String) = (server.required("host")?, server.required("port")?);
        server.finish()?;
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        monitors.push(format!("{host}:{port}"));
    }
    if !monitors.is_empty() {
        address.monitors = Some(monitors.join(","));
    }
    Ok(address.to_string())
}

/// Arguments of QEMU's `BlockdevOptionsRaw`.
fn read_part(arguments: &mut QmpArguments) -> Result<Option<StoragePart>, QmpError> {
    let offset = arguments.optional("offset")?;
    let size = arguments.number("size", 1..=u64::MAX)?;
    let is_set = offset.is_some() || size.is_some();
    Ok(is_set.then(|| StoragePart { offset: offset.unwrap_or_default(), size }))
}

fn read_qcow2(arguments: &mut QmpArguments) -> Result<Qcow2Node, QmpError> {
    let no_backing = arguments.take_null("backing");
    if arguments.reference("backing", "BlockdevRefOrNull")?.is_some() {
        let rule = "must be null or absent; the image names its backing file, which is not a node";
        return Err(QmpError::rule(&arguments.full_name("backing"), rule));
    }
    let caches = Qcow2CacheChanges::read(arguments)?.apply_to(CacheSettings::default());
    let mut key_secret = None;
    if let Some(mut encrypt) = arguments.object("encrypt")? {
        if encrypt.choice("format", &["aes", "luks"])? == Some(0) {
            let rule = "is 'luks' here; the old 'aes' is broken and not supported";
            return Err(QmpError::rule(&encrypt.full_name("format"), rule));
        }
        key_secret = encrypt.optional("key-secret")?;
        encrypt.finish()?;
    }
    let snapshot = arguments.optional("x-weir-snapshot")?;
    Ok(Qcow2Node { caches, no_backing, key_secret, snapshot })
}

fn read_size(arguments: &mut QmpArguments) -> Result<Option<u64>, QmpError> {
    arguments.number("size", 1..=1 << 63)
}

/// QEMU's rule for node names.
fn check_name(name: &str) -> Result<(), QmpError> {
    if !identifier::is_well_formed(name) {
        return Err(QmpError::generic(format!(
            "Invalid node-name: '{}' {}",
            excerpt(name),
            identifier::RULE
        )));
    }
    if name.len() > MAX_NODE_NAME {
        return Err(QmpError::generic(format!("Node name too long (it has {MAX_NODE_NAME} bytes at most)")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Result<NodeChain, String> {
        QmpArguments::read_all(value, |arguments| NodeChain::read(arguments, None))
    }

    #[track_caller]
    fn refused(value: Value, expected: &str) {
        assert_eq!(read(value).unwrap_err(), expected);
    }

    #[test]
    fn chain_is_read_to_the_protocol_node() {
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
        let options = chain.open_options(None, None).storage;
        assert_eq!(
            (options.cache, options.format, options.read_only),
            (CacheMode::None, Some(ImageFormat::Raw), true)
        );
        let ChainBottom::Storage(ProtocolNode { image, device: Some(false), .. }) = chain.bottom else {
            panic!("{chain:?}")
        };
        assert_eq!(
            image.path().unwrap().to_str(),
            Some("memory:1"),
            "a file name is one, whatever it looks like"
        );
    }

    #[test]
    fn a_qcow2_node_has_caches_and_a_file() {
        let file = json!({"driver": "file", "filename": "a.qcow2"});
        let chain = read(json!({
            "driver": "qcow2", "node-name": "q", "backing": null, "l2-cache-size": 4096, "cache-clean-interval": 5,
            "encrypt": {"format": "luks", "key-secret": "s"}, "file": file,
        }))
        .unwrap();
        let node = chain.qcow2.as_ref().unwrap();
        assert_eq!((node.no_backing, node.key_secret.as_deref()), (true, Some("s")));
        assert_eq!(chain.caches().l2, Some(image::qcow2::L2CacheSize::Bytes(4096)));
        assert_eq!(chain.open_options(None, None).storage.format, Some(ImageFormat::Qcow2));
        let with = |key: &str, value: Value| {
            let mut arguments = json!({"driver": "qcow2", "node-name": "q", "file": file});
            arguments[key] = value;
            arguments
        };
        refused(
            with("backing", json!("base")),
            "Parameter 'backing' must be null or absent; the image names its backing file, which is not \
             a node",
        );
        refused(
            with("encrypt", json!({"format": "aes"})),
            "Parameter 'encrypt.format' is 'luks' here; the old 'aes' is broken and not supported",
        );
        // A format over a named node, which is opened again with it.
        let over = read(with("file", json!("f0"))).unwrap();
        assert!(over.reopens_node() && over.bottom == ChainBottom::Node("f0".to_owned()));
        refused(
            with("file", with("node-name", json!("inner"))),
            "Parameter 'file.driver' does not go into another 'qcow2' (one image, one node)",
        );
    }

    #[test]
    fn chain_over_existing_node() {
        let chain = read(json!({"driver": "raw", "node-name": "r0", "file": "f0"})).unwrap();
        assert_eq!((chain.names, chain.bottom), (vec!["r0".to_owned()], ChainBottom::Node("f0".to_owned())));
    }

    #[test]
    fn errors_have_qemus_wording() {
        refused(json!({"node-name": "a"}), "Parameter 'driver' is missing");
        refused(
            json!({"driver": "qcow", "node-name": "a"}),
            "Parameter 'driver' does not accept value 'qcow' (accepted: file, host_device, nbd, \
             null-co, qcow2, raw, rbd, throttle, x-weir-memory)",
        );
        let file = |key: &str, value: Value| {
            let mut arguments = json!({"driver": "file", "node-name": "a", "filename": "x"});
            arguments[key] = value;
            arguments
        };
        assert_eq!(read(file("discard", json!("ignore"))).unwrap().discards, Discards::Ignore);
        assert_eq!(read(file("discard", json!("unmap"))).unwrap().discards, Discards::Unmap);
        for mode in DetectZeroes::ALL {
            let chain = read(file("detect-zeroes", json!(mode.name()))).unwrap();
            assert_eq!(chain.detect_zeroes, mode);
        }
        refused(
            json!({"driver": "raw", "node-name": "a", "discard": "ignore", "file": "b"}),
            "Parameter 'discard' is set where the image is opened; 'ignore' is not supported here",
        );
        refused(json!({"driver": "null-co"}), "'node-name' must be specified for the root node");
        refused(
            file("node-name", json!("1x")),
            "Invalid node-name: '1x' (a letter, then letters, digits, '-', '.' and '_')",
        );
        refused(file("node-name", json!("a".repeat(32))), "Node name too long (it has 31 bytes at most)");
        refused(file("bogus", json!(1)), "Parameter 'bogus' is unexpected");
        refused(file("force-share", json!(true)), "force-share=on can only be used with read-only images");
        refused(
            file("cache", json!({"direct": true, "no-flush": true})),
            "Parameter 'cache.no-flush' does not go with 'direct' (give one)",
        );
        refused(
            file("locking", json!("off")),
            "Parameter 'locking' is always 'on' here; 'off' is not supported",
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
