//! Images in the notation of QEMU's block drivers: `--image-opts` and the pseudo-protocol `json:`.
//!
//! ```text
//!   driver=qcow2,file.driver=file,file.filename=/a ─┐
//!                                                   ├─► keys with dots ─► nodes ─► ImageDescription
//!   json:{"driver": "qcow2", "file": {…}}           ┘
//! ```
//!
//! A format node (`raw`, `qcow2`) is stacked on other nodes, down to a protocol node (`file`,
//! `host_device`, `nbd`, `null-co`, `rbd`) that has the bytes. Each key must be known to its node's
//! driver; the first unknown key is rejected by name.
//!
//! Source: `BlockdevOptions` of QEMU's `qapi/block-core.json`; qemu-img(1), `--image-opts`. Never
//! opens an image. Names inside an image are never parsed here: only a user may give an address.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::disk::{DetectZeroes, Discards};
use image::qcow2::CacheSettings;
use nbd::uri;
use policy::time::Duration;
use serde_json::Value;
use storage::{CacheMode, ImageFormat, InvalidValue, StoragePart, rbd::RbdAddress};

use crate::{
    ConfigWithOrigins, DiskConfig, ImageLocation, KeyTable as _, Origin, RuleError as _, keyval, size,
    suggest,
};

const COMMON_KEYS: [&str; 9] = [
    "auto-read-only",
    "cache.direct",
    "cache.no-flush",
    "detect-zeroes",
    "discard",
    "driver",
    "force-share",
    "node-name",
    "read-only",
];
/// Options of the qcow2 driver that `weir serve` has under the same names.
const CACHE_KEYS: [&str; 5] =
    ["cache-clean-interval", "cache-size", "l2-cache-entry-size", "l2-cache-size", "refcount-cache-size"];
/// Keys (last parts) whose JSON values are strings, even if they look like numbers.
const STRING_KEYS: [&str; 13] = [
    "conf",
    "driver",
    "export",
    "filename",
    "host",
    "image",
    "key-secret",
    "namespace",
    "node-name",
    "path",
    "pool",
    "snapshot",
    "user",
];
/// Size of a `null-co` node without a size, as in QEMU.
const NULL_BYTES: u64 = 1 << 30;
/// Maximum number of stacked nodes.
const MAX_NODES: usize = 8;

/// Image with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageDescription {
    /// Location of its bytes.
    pub image: ImageLocation,
    /// Format; `None` without a format driver, which probes it.
    pub format: Option<ImageFormat>,
    /// The part of a raw image that is the disk.
    pub part: Option<StoragePart>,
    /// True to ignore the backing file that the image names.
    pub no_backing: bool,
    /// True if writes are rejected.
    pub read_only: bool,
    /// True if the image may be read while another process writes to it.
    pub force_share: bool,
    /// Cache mode; `None` without a key of `cache`.
    pub cache: Option<CacheMode>,
    /// Handling of discards.
    pub discard: Option<Discards>,
    /// True if a discarded cluster of a qcow2 image keeps its allocation in the file.
    pub discard_no_unref: bool,
    /// Handling of writes of zeroes.
    pub detect_zeroes: Option<DetectZeroes>,
    /// Id of the secret object with the passphrase of the image.
    pub key_secret: Option<String>,
    /// Sizes of the metadata caches.
    pub caches: CacheSettings,
    /// The cache sizes as pairs of key and value, in the order of the keys.
    pub cache_options: Vec<(String, String)>,
    /// Time that requests wait for a disconnected NBD server.
    pub reconnect_delay: Duration,
    /// Time for which the first connection to an NBD server is retried.
    pub open_timeout: Duration,
}

impl ImageDescription {
    /// Parses a name: a path, `file:PATH`, an NBD URI, `rbd:POOL/IMAGE` or `json:{…}`.
    ///
    /// # Errors
    /// Returns the reason, with the name.
    pub fn from_name(name: &str) -> anyhow::Result<Self> {
        match name.strip_prefix("json:") {
            Some(json) => Self::from_json(json).with_context(|| name.to_owned()),
            None => Ok(Self::plain(parse_location(name).map_err(|rule| anyhow!("{name}: {rule}"))?)),
        }
    }

    /// Parses QEMU's option notation: `driver=qcow2,file.filename=PATH`. A comma in a value is
    /// doubled; the last of several values of a key applies.
    ///
    /// # Errors
    /// Returns the reason, with the key.
    pub fn from_options(text: &str) -> anyhow::Result<Self> {
        let pairs = keyval::pairs(text, Some("file")).map_err(|rule| anyhow!("{text}: {rule}"))?;
        Self::read(pairs.into_iter().map(|(key, value)| (key, Some(value))).collect())
    }

    /// Parses the JSON text after `json:`.
    fn from_json(text: &str) -> anyhow::Result<Self> {
        let value: Value = serde_json::from_str(text).context("is not JSON")?;
        ensure!(value.is_object(), "is not a JSON object (json:{{\"driver\": \"qcow2\", …}})");
        let mut keys = BTreeMap::new();
        flatten(value, String::new(), &mut keys)?;
        Self::read(keys)
    }

    fn read(keys: BTreeMap<String, Option<String>>) -> anyhow::Result<Self> {
        let mut keys = DriverKeys { remaining: keys, nodes: Vec::new() };
        let mut description = Self::plain(ImageLocation::null(0));
        let mut cache = CacheKeys::default();
        // Nodes consume their keys, so that the remaining ones are unknown.
        description.read_nodes(&mut keys, &mut cache)?;
        keys.reject_unknown()?;
        description.cache = cache.mode()?;
        ensure!(
            // Sharing a writable image would corrupt it.
            !description.force_share || description.read_only,
            "force-share=on: only for images that are not written to (add read-only=on)"
        );
        ensure!(
            description.part.is_none() || description.format == Some(ImageFormat::Raw),
            "offset, size: a part of the file can be a raw image only (give driver=raw)"
        );
        Ok(description)
    }

    fn plain(image: ImageLocation) -> Self {
        Self {
            image,
            format: None,
            part: None,
            no_backing: false,
            read_only: false,
            force_share: false,
            cache: None,
            discard: None,
            discard_no_unref: false,
            detect_zeroes: None,
            key_secret: None,
            caches: CacheSettings::default(),
            cache_options: Vec::new(),
            reconnect_delay: Duration::ZERO,
            open_timeout: Duration::ZERO,
        }
    }

    /// Reads the nodes from the top down.
    fn read_nodes(&mut self, keys: &mut DriverKeys, cache: &mut CacheKeys) -> anyhow::Result<()> {
        let mut prefix = String::new();
        for depth in 0..MAX_NODES {
            let driver = keys.text(&prefix, "driver")?;
            self.read_common(keys, &prefix, cache)?;
            match driver.as_deref() {
                Some("raw") => {
                    keys.begin_node(&prefix, "raw", &["file", "offset", "size"]);
                    self.raw(keys, &prefix)?;
                }
                Some("qcow2") => {
                    const OWN: [&str; 5] =
                        ["backing", "discard-no-unref", "encrypt.format", "encrypt.key-secret", "file"];
                    keys.begin_node(&prefix, "qcow2", &OWN);
                    self.qcow2(keys, &prefix)?;
                }
                // Only the top node may omit its driver: its format is probed.
                None if depth == 0 => keys.begin_node(&prefix, "", &["file"]),
                driver => {
                    self.image = self.protocol(driver, keys, &prefix)?;
                    if depth == 0 {
                        self.format = Some(ImageFormat::Raw);
                    }
                    return Ok(());
                }
            }
            // A string here is the name of another node; weir has no named nodes.
            if let Some(node) = keys.text(&prefix, "file")? {
                bail!(
                    "{prefix}file={node}: names a node, but named nodes are not supported (give \
                     {prefix}file.filename=PATH)"
                );
            }
            prefix += "file.";
        }
        bail!("{prefix}: more than {MAX_NODES} stacked nodes")
    }

    fn read_common(
        &mut self,
        keys: &mut DriverKeys,
        prefix: &str,
        cache: &mut CacheKeys,
    ) -> anyhow::Result<()> {
        // Any read-only node makes the whole image read-only.
        self.read_only |= keys.switch(prefix, "read-only")?.unwrap_or(false);
        self.force_share |= keys.switch(prefix, "force-share")?.unwrap_or(false);
        // Accepted without effect: commands that write report a read-only image themselves.
        keys.switch(prefix, "auto-read-only")?;
        keys.text(prefix, "node-name")?;
        // The node that is nearest to the file decides, as in QEMU.
        cache.direct = keys.switch(prefix, "cache.direct")?.or(cache.direct);
        cache.no_flush = keys.switch(prefix, "cache.no-flush")?.or(cache.no_flush);
        let discard = keys.index_of(prefix, "discard", &["ignore", "off", "unmap", "on"])?;
        if let Some(discard) = discard {
            // A discard reaches the file only if each node passes it on.
            // Indices 0 and 1 are `ignore` and `off`.
            let passes = discard > 1 && self.discard != Some(Discards::Ignore);
            self.discard = Some(if passes { Discards::Unmap } else { Discards::Ignore });
        }
        let detect = keys.index_of(prefix, "detect-zeroes", &DetectZeroes::ALL.map(DetectZeroes::name))?;
        // The strongest mode of any node, since zeroes found above reach the nodes below.
        self.detect_zeroes = self.detect_zeroes.max(detect.map(|index| DetectZeroes::ALL[index]));
        Ok(())
    }

    fn raw(&mut self, keys: &mut DriverKeys, prefix: &str) -> anyhow::Result<()> {
        let (offset, bytes) = (keys.size(prefix, "offset")?, keys.size(prefix, "size")?);
        ensure!(bytes != Some(0), "{prefix}size=0: is not a disk size (use at least 512)");
        if offset.is_some() || bytes.is_some() {
            ensure!(
                self.format != Some(ImageFormat::Qcow2),
                "{prefix}offset, {prefix}size: not supported below a qcow2 node"
            );
            let part = StoragePart { offset: offset.unwrap_or_default(), size: bytes };
            ensure!(
                // A second part would have to be composed with the first.
                self.part.replace(part).is_none(),
                "{prefix}offset, {prefix}size: given in two nodes (give one)"
            );
        }
        // A raw node below qcow2 does not change the format of the disk.
        self.format = self.format.or(Some(ImageFormat::Raw));
        Ok(())
    }

    fn qcow2(&mut self, keys: &mut DriverKeys, prefix: &str) -> anyhow::Result<()> {
        ensure!(
            self.format != Some(ImageFormat::Qcow2),
            "{prefix}driver=qcow2: not supported below another qcow2 node"
        );
        self.format = Some(ImageFormat::Qcow2);
        match keys.remove(prefix, "backing") {
            None => {}
            Some(None) => self.no_backing = true,
            // `backing=` and JSON's null both mean none.
            Some(Some(name)) if name.is_empty() => self.no_backing = true,
            Some(Some(name)) => bail!(
                "{prefix}backing={name}: names a node, but named nodes are not supported (leave it \
                 empty for no backing file)"
            ),
        }
        if let Some(key) = keys.first_with_prefix(&format!("{prefix}backing.")) {
            bail!(
                "{key}: a backing file is opened as the image names it (remove the key, or give \
                 {prefix}backing= for none)"
            );
        }
        if keys.index_of(prefix, "encrypt.format", &["luks", "aes"])? == Some(1) {
            bail!("{prefix}encrypt.format=aes: QEMU's older encryption is broken and not supported");
        }
        self.key_secret = keys.text(prefix, "encrypt.key-secret")?;
        self.discard_no_unref = keys.switch(prefix, "discard-no-unref")?.unwrap_or(false);
        // Parsed by the table of disk keys, so that names, units and rules are those of
        // `weir serve`.
        let mut disk = ConfigWithOrigins::new(DiskConfig::default(), Origin::new(prefix));
        for name in CACHE_KEYS {
            let Some(value) = keys.text(prefix, name)? else { continue };
            let key = DiskConfig::key(name).expect("a key of the table");
            disk.set(key, &value, Path::new(""), Origin::new(format!("{prefix}{name}={value}")))?;
            self.cache_options.push((name.to_owned(), value));
        }
        self.caches = disk.into_checked()?.qcow2.caches;
        Ok(())
    }

    /// Reads the protocol node.
    fn protocol(
        &mut self,
        driver: Option<&str>,
        keys: &mut DriverKeys,
        prefix: &str,
    ) -> anyhow::Result<ImageLocation> {
        match driver {
            None | Some("file" | "host_device") => {
                keys.begin_node(prefix, driver.unwrap_or("file"), &["aio", "filename", "locking"]);
                let filename = keys.required(prefix, "filename", "PATH")?;
                keys.index_of(prefix, "aio", &["threads", "native", "io_uring"])?;
                if keys.index_of(prefix, "locking", &["auto", "on", "off"])? == Some(2) {
                    bail!(
                        "{prefix}locking=off: files are always locked (remove it; -U reads a locked image)"
                    );
                }
                // As in QEMU, a protocol prefix in the name counts only without a driver.
                let name = if driver.is_none() { filename.clone() } else { format!("file:{filename}") };
                parse_location(&name).map_err(|rule| anyhow!("{prefix}filename={filename}: {rule}"))
            }
            Some("nbd") => {
                keys.begin_node(prefix, "nbd", &["export", "open-timeout", "reconnect-delay", "server.type"]);
                self.reconnect_delay = keys.seconds(prefix, "reconnect-delay")?;
                self.open_timeout = keys.seconds(prefix, "open-timeout")?;
                for key in ["tls-creds", "tls-hostname"] {
                    ensure!(
                        !keys.has(prefix, key),
                        "{prefix}{key}: not supported (give \
                         {prefix}filename=nbds://HOST/EXPORT?tls-certificates=DIR without \
                         {prefix}driver)"
                    );
                }
                nbd(keys, prefix)
            }
            Some("null-co") => {
                keys.begin_node(prefix, "null-co", &["read-zeroes", "size"]);
                // Accepted without effect: reads always return zeroes.
                keys.switch(prefix, "read-zeroes")?;
                Ok(ImageLocation::null(keys.size(prefix, "size")?.unwrap_or(NULL_BYTES)))
            }
            Some("rbd") => {
                keys.begin_node(
                    prefix,
                    "rbd",
                    &["conf", "image", "namespace", "pool", "server.0.host", "snapshot", "user"],
                );
                rbd(keys, prefix)
            }
            Some(other) => bail!(
                "{prefix}driver={other}: not supported (there are file, host_device, nbd, null-co, \
                 qcow2, raw, rbd)"
            ),
        }
    }
}

fn nbd(keys: &mut DriverKeys, prefix: &str) -> anyhow::Result<ImageLocation> {
    let export = keys.text(prefix, "export")?.unwrap_or_default();
    // QEMU also accepts host, port and path without `server`.
    let server = |key: &str| format!("server.{key}");
    let kind = keys.index_of(prefix, "server.type", &["inet", "unix"])?;
    let path = match keys.text(prefix, &server("path"))? {
        Some(path) => Some(path),
        None => keys.text(prefix, "path")?,
    };
    let host = match keys.text(prefix, &server("host"))? {
        Some(host) => Some(host),
        None => keys.text(prefix, "host")?,
    };
    let port = match keys.text(prefix, &server("port"))? {
        Some(port) => Some(port),
        None => keys.text(prefix, "port")?,
    };
    // The type may be omitted if either path or host decides it.
    let text = match (kind, path, host) {
        (None | Some(1), Some(path), None) if port.is_none() => uri::unix_uri(&path, &export),
        (None | Some(0), None, Some(host)) => {
            uri::inet_uri(&host, port.as_deref().unwrap_or("10809"), &export)
        }
        _ => bail!(
            "{prefix}server: give server.type=inet with server.host and server.port, or \
             server.type=unix with server.path"
        ),
    };
    text.parse().map_err(|error: InvalidValue| anyhow!("{prefix}server: {}", error.rule()))
}

fn rbd(keys: &mut DriverKeys, prefix: &str) -> anyhow::Result<ImageLocation> {
    let mut address = RbdAddress {
        pool: keys.required(prefix, "pool", "POOL")?,
        namespace: keys.text(prefix, "namespace")?,
        image: keys.required(prefix, "image", "IMAGE")?,
        snapshot: keys.text(prefix, "snapshot")?,
        config: keys.text(prefix, "conf")?.map(Into::into),
        user: keys.text(prefix, "user")?,
        keyring: None,
        monitors: None,
    };
    let mut monitors = Vec::new();
    // Monitors are an array: indices continue until one is missing.
    while let Some(host) = keys.text(prefix, &format!("server.{}.host", monitors.len()))? {
        let port = keys.required(prefix, &format!("server.{}.port", monitors.len()), "PORT")?;
        // IPv6 monitors need brackets in Ceph's notation.
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        monitors.push(format!("{host}:{port}"));
    }
    address.monitors = (!monitors.is_empty()).then(|| monitors.join(","));
    address
        .to_string()
        .parse()
        .map_err(|error: InvalidValue| anyhow!("{prefix}pool, {prefix}image: {}", error.rule()))
}

/// Parses a name without `json:`.
fn parse_location(name: &str) -> Result<ImageLocation, String> {
    // As in QEMU: a colon after a slash belongs to the path.
    let protocol = name.split_once(':').map(|(before, _)| before).filter(|before| !before.contains('/'));
    match protocol {
        None | Some("file" | "rbd") => {}
        Some("nbd" | "nbds" | "nbd+unix" | "nbds+unix") if name.contains("://") => {}
        Some(protocol) => {
            return Err(format!(
                "the protocol '{protocol}' is not supported (a path with a colon is written ./PATH)"
            ));
        }
    }
    name.parse().map_err(|error: InvalidValue| error.rule())
}

#[derive(Default)]
struct CacheKeys {
    direct: Option<bool>,
    no_flush: Option<bool>,
}

impl CacheKeys {
    fn mode(&self) -> anyhow::Result<Option<CacheMode>> {
        Ok(match (self.direct, self.no_flush) {
            (None, None) => None,
            // QEMU combines them; weir has no cache mode for direct I/O without flushes.
            (Some(true), Some(true)) => {
                bail!("cache.no-flush=on: not supported with cache.direct=on (give one of them)")
            }
            (Some(true), _) => Some(CacheMode::None),
            (_, Some(true)) => Some(CacheMode::Unsafe),
            _ => Some(CacheMode::Writeback),
        })
    }
}

/// Keys that no node has consumed yet; a value is `None` for JSON's `null`.
struct DriverKeys {
    remaining: BTreeMap<String, Option<String>>,
    /// Prefix, driver and known keys of each node.
    nodes: Vec<(String, &'static str, &'static [&'static str])>,
}

impl DriverKeys {
    fn begin_node(&mut self, prefix: &str, driver: &str, known: &'static [&'static str]) {
        const DRIVERS: [&str; 7] = ["file", "host_device", "nbd", "null-co", "qcow2", "raw", "rbd"];
        let driver = DRIVERS.into_iter().find(|name| *name == driver).unwrap_or_default();
        self.nodes.push((prefix.to_owned(), driver, known));
    }

    fn has(&self, prefix: &str, key: &str) -> bool {
        self.remaining.contains_key(&format!("{prefix}{key}"))
    }

    fn first_with_prefix(&self, prefix: &str) -> Option<&str> {
        self.remaining.keys().find(|key| key.starts_with(prefix)).map(String::as_str)
    }

    fn remove(&mut self, prefix: &str, key: &str) -> Option<Option<String>> {
        self.remaining.remove(&format!("{prefix}{key}"))
    }

    fn text(&mut self, prefix: &str, key: &str) -> anyhow::Result<Option<String>> {
        match self.remove(prefix, key) {
            None => Ok(None),
            Some(Some(value)) => Ok(Some(value)),
            Some(None) => bail!("{prefix}{key}: is null (remove it)"),
        }
    }

    fn required(&mut self, prefix: &str, key: &str, value: &str) -> anyhow::Result<String> {
        self.text(prefix, key)?
            .with_context(|| format!("{prefix}{key}: is missing (add {prefix}{key}={value})"))
    }

    fn switch(&mut self, prefix: &str, key: &str) -> anyhow::Result<Option<bool>> {
        match self.text(prefix, key)?.as_deref() {
            None => Ok(None),
            Some("on" | "yes" | "true" | "y") => Ok(Some(true)),
            Some("off" | "no" | "false" | "n") => Ok(Some(false)),
            Some(other) => bail!("{prefix}{key}={other}: is neither on nor off"),
        }
    }

    fn size(&mut self, prefix: &str, key: &str) -> anyhow::Result<Option<u64>> {
        let Some(value) = self.text(prefix, key)? else { return Ok(None) };
        size(&value).map(Some).map_err(|rule| anyhow!("{prefix}{key}={value}: {rule}"))
    }

    fn seconds(&mut self, prefix: &str, key: &str) -> anyhow::Result<Duration> {
        let Some(value) = self.text(prefix, key)? else { return Ok(Duration::ZERO) };
        let seconds: u32 =
            value.parse().map_err(|_| anyhow!("{prefix}{key}={value}: is not a number of seconds"))?;
        Ok(Duration::from_secs(seconds.into()))
    }

    /// Index of the value among `known`.
    fn index_of(&mut self, prefix: &str, key: &str, known: &[&str]) -> anyhow::Result<Option<usize>> {
        let Some(value) = self.text(prefix, key)? else { return Ok(None) };
        match known.iter().position(|name| *name == value) {
            Some(index) => Ok(Some(index)),
            None => bail!("{prefix}{key}={value}: not supported (there are {})", known.join(", ")),
        }
    }

    /// Fails with the first key that no node consumed.
    fn reject_unknown(self) -> anyhow::Result<()> {
        let Some(key) = self.remaining.keys().next() else { return Ok(()) };
        // The innermost node whose prefix matches owns the key.
        let node = self.nodes.iter().rfind(|(prefix, ..)| key.starts_with(prefix.as_str()));
        let Some((prefix, driver, driver_keys)) = node else { bail!("{key}: is not a known key") };
        let name = &key[prefix.len()..];
        let caches: &[&str] = if *driver == "qcow2" { &CACHE_KEYS } else { &[] };
        let known = driver_keys.iter().chain(caches).chain(&COMMON_KEYS).copied();
        let advice = match suggest::nearest(name, known.clone()) {
            Some(nearest) => format!("did you mean {prefix}{nearest}?"),
            None => format!("there are {}", known.collect::<Vec<_>>().join(", ")),
        };
        match *driver {
            "" if suggest::nearest(name, ["driver"]).is_some() => {
                bail!("{key}: is not a known key (did you mean {prefix}driver?)")
            }
            "" => bail!("{key}: needs a driver (add driver=raw or driver=qcow2)"),
            driver => bail!("{key}: is not a key of the driver {driver} ({advice})"),
        }
    }
}

/// Flattens nested objects and arrays to keys with dots.
fn flatten(value: Value, prefix: String, keys: &mut BTreeMap<String, Option<String>>) -> anyhow::Result<()> {
    let key = prefix.rsplit('.').next().unwrap_or_default();
    ensure!(
        // QEMU's schema has types: `"filename": 5` is an error there as well.
        !STRING_KEYS.contains(&key) || !matches!(value, Value::Bool(_) | Value::Number(_)),
        "{prefix}: {value}: is not a string (write \"{value}\" in quotes)"
    );
    let text = match value {
        Value::Object(values) => {
            return values
                .into_iter()
                .try_for_each(|(key, value)| flatten(value, joined(&prefix, &key), keys));
        }
        Value::Array(values) => {
            let mut values = values.into_iter().enumerate();
            return values
                .try_for_each(|(index, value)| flatten(value, joined(&prefix, &index.to_string()), keys));
        }
        Value::Null => None,
        Value::Bool(is_on) => Some(if is_on { "on" } else { "off" }.to_owned()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text),
    };
    // Dotted and nested notation may name one key twice.
    ensure!(!keys.contains_key(&prefix), "{prefix}: is given twice (give it once)");
    keys.insert(prefix, text);
    Ok(())
}

fn joined(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}

#[cfg(test)]
#[path = "image_options_tests.rs"]
mod tests;
