//! The config of a disk, and the table of its keys.
//!
//! The table is the only description of a disk. The config file, command-line options, saved
//! configs, reload, migration and upgrade follow from its rows ([`disk_keys`]).

mod export;

use std::{path::PathBuf, sync::LazyLock};

use block::disk::{DetectZeroes, Discards, ErrorPolicies, OnError};
use image::qcow2::CacheSettings;
use policy::{access::AccessRules, schedule::LimitSchedule, throttle::LimitSetting, time::Duration};
use storage::{
    CacheMode, ImageFormat, StoragePart, delay::DelayOptions, fault::FaultRule, rate::RateOptions,
};

use crate::{
    ExportTarget, ImageLocation, NbdExportConfig, ThrottleConfig, clients,
    diagnostics::{ConfigError, Diagnostics, Origin},
    key::{
        ConfigKey, ConfigValue as _, KeyField, KeyLiteral,
        KeyType::{Flag, Path, Size, Table, Text, Word},
        each, maybe, one, seconds_or_time, table, write_seconds,
    },
    origins::{ConfigWithOrigins, KeyTable},
    prefetch,
    qcow2::Qcow2Settings,
    schedule, throttle,
};

/// Config of one disk.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskConfig {
    /// Unique among disks and groups.
    pub name: String,
    /// Description for clients, in one line; may be empty.
    pub description: String,
    /// Access rules for NBD clients.
    pub access: AccessRules,
    /// Location of the image.
    pub image: ImageLocation,
    /// Ceph's config file, until [`ConfigWithOrigins::apply_ceph_access`] moves it into the image's
    /// address.
    pub rbd_config: Option<PathBuf>,
    /// Ceph's user, until [`ConfigWithOrigins::apply_ceph_access`] moves it into the image's
    /// address.
    pub rbd_user: Option<String>,
    /// Image format; `None` probes it.
    pub format: Option<ImageFormat>,
    /// The part of a raw image that is the disk.
    pub part: Option<StoragePart>,
    /// Internal snapshot of a qcow2 image to serve instead of its current state.
    pub snapshot: Option<String>,
    /// Use of the host's page cache.
    pub cache: CacheMode,
    /// Caches, passphrases and bitmaps of a qcow2 image.
    pub qcow2: Qcow2Settings,
    /// Settings of reading ahead.
    pub prefetch: policy::prefetch::PrefetchConfig,
    /// Reaction to requests that fail on the device.
    pub on_error: ErrorPolicies,
    /// Handling of discards.
    pub discard: Discards,
    /// Detection of zeroes in writes.
    pub detect_zeroes: DetectZeroes,
    /// True if writes are rejected.
    pub read_only: bool,
    /// True to open the image although another process writes to it.
    pub force_share: bool,
    /// True to lock the image only while a guest uses the disk, so that another daemon can take it
    /// over.
    pub handover: bool,
    /// Time that requests wait for a disconnected NBD server; zero fails them at once.
    pub reconnect_delay: Duration,
    /// Time for which the first connection to an NBD server is retried; zero tries once.
    pub open_timeout: Duration,
    /// Added latency that simulates a slower device.
    pub delay: Option<DelayOptions>,
    /// Bandwidth that simulates a slower device.
    pub rate: Option<RateOptions>,
    /// Simulated errors, in order.
    pub faults: Vec<FaultRule>,
    /// Limits, share and watermark of the disk itself.
    pub settings: ThrottleConfig,
    /// Limits that hold at times.
    pub schedule: LimitSchedule,
    /// Name of the disk's group.
    pub group: Option<String>,
    /// Name of the export at the daemon's own addresses; `None` is the disk's name.
    pub export_name: Option<String>,
    /// Explicit exports; without any, the disk is exported at the daemon's addresses.
    pub exports: Vec<ExportConfig>,
}

/// An export of one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportConfig {
    /// At an NBD server.
    Nbd(NbdExportConfig),
    /// By another protocol, at a separate endpoint.
    Target(ExportTarget),
}

impl Default for DiskConfig {
    /// A disk of size zero without a name.
    fn default() -> Self {
        Self {
            name: String::new(),
            description: String::new(),
            access: AccessRules::default(),
            image: ImageLocation::null(0),
            rbd_config: None,
            rbd_user: None,
            format: None,
            part: None,
            snapshot: None,
            cache: CacheMode::default(),
            qcow2: Qcow2Settings::default(),
            prefetch: policy::prefetch::PrefetchConfig::default(),
            on_error: ErrorPolicies::default(),
            discard: Discards::default(),
            detect_zeroes: DetectZeroes::default(),
            read_only: false,
            force_share: false,
            handover: false,
            reconnect_delay: Duration::ZERO,
            open_timeout: Duration::ZERO,
            delay: None,
            rate: None,
            faults: Vec::new(),
            settings: ThrottleConfig::default(),
            schedule: LimitSchedule::default(),
            group: None,
            export_name: None,
            exports: Vec::new(),
        }
    }
}

impl DiskConfig {
    /// True if writes are rejected; always true for a snapshot.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some() || self.image.is_snapshot()
    }

    /// NBD exports, with their indices in the list of exports.
    pub fn nbd_exports(&self) -> impl Iterator<Item = (usize, &NbdExportConfig)> {
        self.exports.iter().enumerate().filter_map(|(index, export)| match export {
            ExportConfig::Nbd(export) => Some((index, export)),
            ExportConfig::Target(_) => None,
        })
    }

    /// Exports by other protocols, with their indices in the list of exports.
    pub fn targets(&self) -> impl Iterator<Item = (usize, &ExportTarget)> {
        self.exports.iter().enumerate().filter_map(|(index, export)| match export {
            ExportConfig::Nbd(_) => None,
            ExportConfig::Target(target) => Some((index, target)),
        })
    }
}

impl ConfigWithOrigins<DiskConfig> {
    /// Moves Ceph's config file and user into the image's address.
    ///
    /// # Errors
    /// Fails if the image is not in a Ceph cluster, or its address has them already.
    pub fn apply_ceph_access(&mut self) -> Result<(), ConfigError> {
        let (config, user) = (self.rbd_config.take(), self.rbd_user.take());
        // One key at a time, so that an error names the right one.
        let image = self.image.clone().with_ceph_access(config.as_deref(), None);
        let image = image.map_err(|rule| self.error("rbd-config", rule))?;
        self.image =
            image.with_ceph_access(None, user.as_deref()).map_err(|rule| self.error("rbd-user", rule))?;
        Ok(())
    }

    /// Origin of the first key that applies to qcow2 images only.
    pub fn first_qcow2_key(&self) -> Option<&Origin> {
        // `secret-fd` is set by options only and has no row.
        let mut keys = DiskConfig::keys().iter().filter(|key| key.heading == "qcow2");
        keys.find_map(|key| self.origin_of_given(key.name)).or_else(|| self.origin_of_given("secret-fd"))
    }
}

impl KeyTable for DiskConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<DiskConfig>>> = LazyLock::new(disk_keys);
        &KEYS
    }

    fn check_rules(disk: &ConfigWithOrigins<Self>, diagnostics: &Diagnostics) {
        // Each check reports independently of the rest.
        throttle::check_limits(disk, &disk.settings, diagnostics);
        schedule::check(disk, &disk.schedule, &disk.settings, false, diagnostics);
        prefetch::check_windows(disk, &disk.prefetch, diagnostics);
        if !OnError::READ_POLICIES.contains(&disk.on_error.read) {
            let rule = "is for write errors only (use report or stop)";
            diagnostics.report(disk.error("on-read-error", rule));
        }
        let CacheSettings { l2, refcount_bytes, total_bytes, .. } = disk.qcow2.caches;
        // QEMU's rule: with all three the sum may contradict the total.
        if l2.is_some() && refcount_bytes.is_some() && total_bytes.is_some() {
            let rule =
                "cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)";
            diagnostics.report(disk.error("cache-size", rule));
        }
    }
}

type Config = DiskConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check. Two fields have no row: `name` is the table's name,
// `export_name` a key of `export`.
const _: fn(DiskConfig) = |DiskConfig {
                               name: _,
                               export_name: _,
                               description: _,
                               access: _,
                               image: _,
                               rbd_config: _,
                               rbd_user: _,
                               format: _,
                               part: _,
                               snapshot: _,
                               cache: _,
                               qcow2: Qcow2Settings { caches: _, secrets: _, bitmaps: _ },
                               prefetch: _,
                               on_error: ErrorPolicies { read: _, write: _ },
                               discard: _,
                               detect_zeroes: _,
                               read_only: _,
                               force_share: _,
                               handover: _,
                               reconnect_delay: _,
                               open_timeout: _,
                               delay: _,
                               rate: _,
                               faults: _,
                               settings: _,
                               schedule: _,
                               group: _,
                               exports: _,
                           }| ();

/// The table of keys, in the order of the help.
fn disk_keys() -> Vec<ConfigKey<DiskConfig>> {
    let mut keys = table! {
        // name, value, placeholder, field, default, change, transfer, help
        "Image" {
            "image", Text, "IMAGE", one!(image), "required", Reject, Transferred,
                "A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE, or an export of \
                 an NBD server, nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH";
            "format", Word(&["raw", "qcow2"]), "FORMAT", maybe!(format), "probed if safe", Reject, Transferred,
                "Format of the image: raw or qcow2";
            "options", Text, "PART", maybe!(part), "the whole image", Reject, Transferred,
                "Part of a raw image to serve, such as offset=1M,size=10M";
            "snapshot", Text, "NAME", maybe!(snapshot), "", Reject, HostOnly,
                "Serve this internal snapshot of a qcow2 image, by its id or name, read-only";
            "cache", Word(&["writeback", "writethrough", "none", "directsync", "unsafe"]), "MODE", one!(cache), "writeback", Reject, Transferred,
                "Cache mode: writeback, writethrough, none, directsync or unsafe";
            "on-read-error", Word(&["report", "stop"]), "POLICY", one!(on_error.read), "report", Apply, Transferred,
                "On read errors: report them to the client, or stop the disk until `weir resume`";
            "on-write-error", Word(&["report", "stop", "enospc"]), "POLICY", one!(on_error.write), "report", Apply, Transferred,
                "On errors of writes, flushes and discards: report, stop, or enospc to stop only \
                 if the device is full";
            "discard", Word(&["unmap", "ignore"]), "MODE", one!(discard), "unmap", Reject, Transferred,
                "Discards: unmap frees the space, ignore keeps it allocated, also for writes of zeroes";
            "detect-zeroes", Word(&["off", "on", "unmap"]), "MODE", one!(detect_zeroes), "off", Reject, Transferred,
                "Detect writes of only zeroes: on stores them as zeroes without data, unmap also \
                 frees the space, off writes the data";
            "rbd-config", Path, "FILE", maybe!(rbd_config), "the default of Ceph", Reject, Transferred,
                "Config file of Ceph, for images rbd:POOL/IMAGE";
            "rbd-user", Text, "NAME", maybe!(rbd_user), "admin", Reject, Transferred,
                "Ceph user, without `client.`";
            "read-only", Flag, "", one!(read_only), "", Reject, Transferred,
                "Reject writes";
            "force-share", Flag, "", one!(force_share), "", Reject, HostOnly,
                "Open an image that another program has locked for writing; needs --read-only";
            "handover", Flag, "", one!(handover), "", Reject, Transferred,
                "Lock the image only while a virtual machine runs on the disk, so that it can \
                 migrate to another daemon";
            "reconnect-delay", Text, "TIME", one!(reconnect_delay), "0, requests fail at once", Reject, Transferred,
                "If an NBD server disconnects: time for which requests wait, such as 30s, and are \
                 sent again after a reconnection";
            "open-timeout", Text, "TIME", one!(open_timeout), "once, for ten seconds", Reject, Transferred,
                "If an NBD server is unreachable at the start: time for which to retry, such as 1m";
            "description", Text, "TEXT", description(), "", Reexport, Separate,
                "Description of the disk for clients";
            "group", Text, "GROUP", maybe!(group), "", Apply, Transferred,
                "Put the disk into this group, whose limits apply to it too";
            "export", Table, "TABLE", exports(), "", Reexport, Separate,
                "An export of the disk: a table with `type` and the keys of that type";
        }
        "Access" {
            "allow", Text, "NETWORK", clients::allow(access, access_mut), "", Reexport, Separate,
                "Serve the disk over NBD only to clients from this network, such as 10.0.0.0/8";
            "deny", Text, "NETWORK", clients::deny(access, access_mut), "", Reexport, Separate,
                "Do not serve the disk over NBD to clients from this network";
            "tls-authz", Text, "NAME", clients::names(access, access_mut), "", Reexport, Separate,
                "Serve the disk only to clients with this name, verified by TLS; * and ? are wildcards";
        }
        "qcow2" {
            "l2-cache-size", Text, "SIZE", maybe!(qcow2.caches.l2), "the need of the disk, at most 32M", Apply, Transferred,
                "Size of the L2 cache in bytes, or full: enough for the whole disk";
            "l2-cache-entry-size", Size, "SIZE", maybe!(qcow2.caches.entry_bytes), "a cluster, or 4K if not all of it fits", Apply, Transferred,
                "Bytes of an L2 table that are read at a time, from 512 to a cluster";
            "refcount-cache-size", Size, "SIZE", maybe!(qcow2.caches.refcount_bytes), "four clusters, the minimum", Apply, Transferred,
                "Size of the refcount cache";
            "cache-size", Size, "SIZE", maybe!(qcow2.caches.total_bytes), "", Apply, Transferred,
                "Size of both caches together; the L2 cache gets it first";
            "cache-clean-interval", Text, "SECONDS", clean_interval(), "600", Apply, Transferred,
                "Free cache entries not used for this many seconds; 0 is never";
            "secret-file", Path, "FILE", each!(qcow2.secrets), "", Reject, HostOnly,
                "File whose whole content is the passphrase of an encrypted image; one for each \
                 image of the chain from the top, or one for all";
            "bitmap", Text, "NAME", each!(qcow2.bitmaps), "", Reexport, Separate,
                "Export this bitmap of the image to clients as qemu:dirty-bitmap:NAME; repeatable";
        }
    };
    keys.extend(prefetch::prefetch_keys(|disk: &DiskConfig| &disk.prefetch, |disk| &mut disk.prefetch));
    keys.extend(throttle::limit_keys(LimitSetting::of_disk(), settings, settings_mut));
    keys.extend(throttle::share_keys(settings, settings_mut));
    keys.extend(throttle::latency_keys(settings, settings_mut));
    keys.extend(throttle::quota_keys(settings, settings_mut));
    keys.extend(schedule::schedule_keys(|disk: &DiskConfig| &disk.schedule, |disk| &mut disk.schedule));
    keys.extend(table! {
        "Devices to imitate" {
            "delay", Text, "TIMES", maybe!(delay), "", Reject, HostOnly,
                "A slower device: each request takes longer, such as read=5ms,write=1ms,parallel=4";
            "rate", Text, "RATES", maybe!(rate), "", Reject, HostOnly,
                "A device of limited throughput, such as bytes=22M per second; with shared=NAME \
                 for all disks together";
            "fault", Text, "RULE", each!(faults), "", Reject, HostOnly,
                "A failing device, such as kind=read,offset=1M-2M,error=EIO,count=3; repeatable";
        }
    });
    keys
}

fn settings(disk: &DiskConfig) -> &ThrottleConfig {
    &disk.settings
}

fn settings_mut(disk: &mut DiskConfig) -> &mut ThrottleConfig {
    &mut disk.settings
}

fn access(disk: &DiskConfig) -> &AccessRules {
    &disk.access
}

fn access_mut(disk: &mut DiskConfig) -> &mut AccessRules {
    &mut disk.access
}

fn description() -> KeyField<DiskConfig> {
    KeyField::new(
        |disk: &mut DiskConfig, given| {
            disk.description = given.text.to_owned();
            Ok(())
        },
        |disk| (!disk.description.is_empty()).then(|| disk.description.write()),
    )
}

fn clean_interval() -> KeyField<DiskConfig> {
    KeyField::new(
        |disk: &mut DiskConfig, given| {
            disk.qcow2.caches.clean_interval = seconds_or_time(given.text)?;
            Ok(())
        },
        |disk| Some(write_seconds(disk.qcow2.caches.clean_interval)),
    )
}

/// Exports. In a config file they are tables with a separate reader ([`ExportConfig`]).
fn exports() -> KeyField<DiskConfig> {
    KeyField::new(
        |_: &mut DiskConfig, _| {
            Err("is not a table; write its settings as KEY = VALUE lines below it".to_owned())
        },
        |disk| {
            let tables = disk.exports.iter().map(ExportConfig::table);
            (!disk.exports.is_empty()).then(|| KeyLiteral::List(tables.collect()))
        },
    )
    .list()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of each key that differs from the default.
    fn sample(key: &ConfigKey<DiskConfig>) -> &'static str {
        match key.name {
            "image" => "/images/vm1.raw",
            "options" => "offset=1048576,size=4096",
            "delay" => "read=5ms,write=1ms,zero=2us,flush=1s,parallel=4",
            "rate" => "bytes=22,iops=5,read=3,write=4,shared=x",
            "fault" => "kind=read,offset=1-2,error=5,count=3,probability=0.5,seed=1",
            "reconnect-delay" | "open-timeout" => "1500ms",
            "time-zone" => "UTC",
            "allow" | "deny" => "10.0.0.0/8",
            "l2-cache-size" => "full",
            "watermark" => "90",
            "latency-target" => "5ms",
            "latency-percentile" => "99.9",
            "latency-floor" => "2.5",
            "quota" | "write-quota" => "2T per month",
            _ => match key.value {
                Word(words) => words.iter().find(|word| **word != key.default).expect("two words"),
                Flag => "true",
                Text | Path | Table => "text",
                _ => "1048576",
            },
        }
    }

    #[test]
    fn each_row_round_trips_and_changes_one_key() {
        for key in DiskConfig::keys().iter().filter(|key| key.value != Table) {
            let mut disk = DiskConfig::default();
            let text = match key.name {
                "prefetch-streams" | "weight" | "cache-clean-interval" => "17",
                _ => sample(key),
            };
            if key.read(&mut disk, text, std::path::Path::new("")).is_err() {
                panic!("{}: {text}", key.name);
            }
            assert!(!key.is_default(&disk), "{}", key.name);
            let changed: Vec<_> = disk.differences(&DiskConfig::default()).map(|key| key.name).collect();
            assert_eq!(changed, [key.name]);
            let mut restored = DiskConfig::default();
            for text in key.write(&disk).expect("a value").texts() {
                key.read(&mut restored, &text, std::path::Path::new("")).expect("what was written");
            }
            assert_eq!(restored, disk, "{}", key.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = DiskConfig::keys().iter().map(|key| key.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DiskConfig::keys().len());
    }
}
