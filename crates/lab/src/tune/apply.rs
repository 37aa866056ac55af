//! Options that apply a configuration: for weir, for QEMU, for libvirt.
//!
//! Sources: docs/reference/cli.md; QEMU's qemu-system-x86_64(1) (`-drive`, `-blockdev`) and
//! docs/qcow2-cache.txt; libvirt's formatdomain (`driver`, `metadata_cache`, since 7.0.0). Missing
//! options are pointed out.

use policy::prefetch::PrefetchMode;
use settings::exact_size;
use storage::CacheMode;

use super::configurations::{DiskConfiguration, L2Share, Qcow2Choice};

/// QEMU's minimum refcount cache, which has precedence over L2 (its docs/qcow2-cache.txt).
const REFCOUNT_CLUSTERS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AppliedDisk<'a> {
    pub(super) name: &'a str,
    pub(super) disk_bytes: u64,
    pub(super) kind: DiskOrigin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskOrigin {
    New,
    Image,
    Device,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApplyCommands {
    /// Command that creates the image; `None` for an existing one, which it would erase.
    pub(super) create: Option<String>,
    pub(super) weir: String,
    pub(super) qemu_drive: String,
    /// `-blockdev` and `-device`, as used by libvirt and management programs.
    pub(super) qemu_blockdev: String,
    pub(super) libvirt: String,
    pub(super) without: Option<&'static str>,
}

impl ApplyCommands {
    /// Builds the commands; names are quoted for a shell.
    pub(super) fn new(configuration: &DiskConfiguration, target: AppliedDisk<'_>) -> Self {
        let AppliedDisk { name, disk_bytes, kind } = target;
        let DiskConfiguration { cache, qcow2, prefetch } = *configuration;
        let mode = cache.name();
        let format = if qcow2.is_some() { "qcow2" } else { "raw" };
        let l2_bytes = qcow2.map(|Qcow2Choice { cluster_bytes, l2 }| l2.bytes(disk_bytes, cluster_bytes));
        // A raw image has no L2 tables, so the option is absent.
        let option = l2_bytes.map_or(String::new(), |bytes| format!(",l2-cache-size={bytes}"));
        let weir_option = qcow2.map_or(String::new(), |qcow2| match qcow2.l2 {
            L2Share::Full => " --l2-cache-size full".to_owned(),
            L2Share::Part(_) => format!(" --l2-cache-size {}", l2_bytes.unwrap_or(0)),
        });
        Self {
            // `qemu-img create` would overwrite an existing image.
            create: qcow2.filter(|_| kind == DiskOrigin::New).map(|Qcow2Choice { cluster_bytes, .. }| {
                let (cluster, size) = (exact_size(cluster_bytes), exact_size(disk_bytes));
                format!("qemu-img create -f qcow2 -o cluster_size={cluster} {} {size}", shell_word(name))
            }),
            weir: format!(
                "weir serve {} --format {format} --cache {mode}{weir_option} --prefetch {prefetch}",
                shell_word(name)
            ),
            qemu_drive: format!(
                "-drive {}",
                shell_word(&format!(
                    "file={},format={format},if=virtio,cache={mode}{option}",
                    name.replace(',', ",,")
                ))
            ),
            qemu_blockdev: blockdev(cache, format, target, &option),
            libvirt: libvirt(mode, format, qcow2, l2_bytes),
            without: (prefetch == PrefetchMode::On).then_some(
                "prefetch: supported by neither QEMU nor libvirt; serve the disk with weir and let \
                 QEMU use it over NBD",
            ),
        }
    }
}

/// Expands `cache=MODE` to its components (qemu-system-x86_64(1), `-drive`).
fn blockdev(cache: CacheMode, format: &str, target: AppliedDisk<'_>, option: &str) -> String {
    let driver = if target.kind == DiskOrigin::Device { "host_device" } else { "file" };
    // A comma ends a value unless it is doubled.
    let name = target.name.replace(',', ",,");
    let switch = |is_on: bool| if is_on { "on" } else { "off" };
    let direct = switch(cache.is_direct());
    let no_flush = switch(cache == CacheMode::Unsafe);
    let node = format!(
        "driver={format},node-name=disk0,cache.direct={direct},cache.no-flush={no_flush}{option},\
         file.driver={driver},file.filename={name},file.cache.direct={direct},file.cache.no-flush={no_flush}"
    );
    // The guest sees a volatile cache, and flushes it, only in these modes.
    let write_cache = switch(cache.has_write_cache());
    format!("-blockdev {} -device virtio-blk-pci,drive=disk0,write-cache={write_cache}", shell_word(&node))
}

/// Quotes one word for a POSIX shell.
fn shell_word(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_./,:=@%+-".contains(letter);
    if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

fn libvirt(mode: &str, format: &str, qcow2: Option<Qcow2Choice>, l2_bytes: Option<u64>) -> String {
    let open = format!("<driver name='qemu' type='{format}' cache='{mode}'");
    match qcow2.zip(l2_bytes) {
        None => open + "/>",
        Some((Qcow2Choice { cluster_bytes, .. }, l2_bytes)) => {
            // libvirt sets the total of both caches, and QEMU deducts the refcount cache.
            let bytes = l2_bytes + REFCOUNT_CLUSTERS * cluster_bytes;
            format!(
                "{open}>\n  <metadata_cache>\n    <max_size unit='bytes'>{bytes}</max_size>\n  \
                 </metadata_cache>\n</driver>"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(cache: CacheMode, prefetch: PrefetchMode) -> DiskConfiguration {
        let qcow2 = Some(Qcow2Choice { cluster_bytes: 2 << 20, l2: L2Share::Full });
        DiskConfiguration { cache, qcow2, prefetch }
    }

    #[test]
    fn every_option_describes_the_configuration() {
        let target = AppliedDisk { name: "vm1.qcow2", disk_bytes: 100 << 30, kind: DiskOrigin::New };
        let commands = ApplyCommands::new(&configuration(CacheMode::None, PrefetchMode::On), target);
        assert_eq!(commands.create.unwrap(), "qemu-img create -f qcow2 -o cluster_size=2M vm1.qcow2 100G");
        assert_eq!(
            commands.weir,
            "weir serve vm1.qcow2 --format qcow2 --cache none --l2-cache-size full --prefetch on"
        );
        assert_eq!(
            commands.qemu_drive,
            "-drive file=vm1.qcow2,format=qcow2,if=virtio,cache=none,l2-cache-size=409600"
        );
        assert_eq!(
            commands.libvirt,
            "<driver name='qemu' type='qcow2' cache='none'>\n  <metadata_cache>\n    \
             <max_size unit='bytes'>8798208</max_size>\n  </metadata_cache>\n</driver>"
        );
        assert!(commands.without.unwrap().starts_with("prefetch: supported by neither QEMU nor libvirt;"));
    }

    #[test]
    fn cache_mode_flags_match_qemu_s_table() {
        // qemu-system-x86_64(1): cache.writeback, cache.direct, cache.no-flush.
        let parts = [
            (CacheMode::Writeback, "off", "off", "on"),
            (CacheMode::Writethrough, "off", "off", "off"),
            (CacheMode::None, "on", "off", "on"),
            (CacheMode::Directsync, "on", "off", "off"),
            (CacheMode::Unsafe, "off", "on", "on"),
        ];
        for (cache, direct, no_flush, write_cache) in parts {
            let target = AppliedDisk { name: "a", disk_bytes: 1 << 30, kind: DiskOrigin::New };
            let text = ApplyCommands::new(&configuration(cache, PrefetchMode::Auto), target).qemu_blockdev;
            assert!(text.contains(&format!(",cache.direct={direct},cache.no-flush={no_flush},")), "{text}");
            assert!(text.ends_with(&format!("write-cache={write_cache}")), "{text}");
        }
    }

    #[test]
    fn raw_disk_has_no_cluster_size_or_l2_cache() {
        let raw =
            DiskConfiguration { cache: CacheMode::Directsync, qcow2: None, prefetch: PrefetchMode::Off };
        let target = AppliedDisk { name: "/dev/sdb", disk_bytes: 1 << 30, kind: DiskOrigin::Device };
        let commands = ApplyCommands::new(&raw, target);
        assert!(commands.qemu_blockdev.contains(",file.driver=host_device,file.filename=/dev/sdb,"));
        assert_eq!((commands.create, commands.without), (None, None));
        assert_eq!(commands.libvirt, "<driver name='qemu' type='raw' cache='directsync'/>");
        assert_eq!(commands.weir, "weir serve /dev/sdb --format raw --cache directsync --prefetch off");
        assert!(!commands.qemu_drive.contains("l2-cache-size"));
    }

    #[test]
    fn existing_image_is_not_created_again() {
        let target = AppliedDisk { name: "vm1.qcow2", disk_bytes: 1 << 30, kind: DiskOrigin::Image };
        assert_eq!(
            ApplyCommands::new(&configuration(CacheMode::None, PrefetchMode::Auto), target).create,
            None
        );
    }

    #[test]
    fn unusual_names_are_quoted() {
        let target = AppliedDisk { name: "/vm's/a, b.qcow2", disk_bytes: 1 << 30, kind: DiskOrigin::New };
        let commands = ApplyCommands::new(&configuration(CacheMode::None, PrefetchMode::Auto), target);
        assert!(commands.weir.starts_with(r"weir serve '/vm'\''s/a, b.qcow2' --format"), "{commands:?}");
        assert!(
            commands.qemu_drive.starts_with(r"-drive 'file=/vm'\''s/a,, b.qcow2,format="),
            "{commands:?}"
        );
        let blockdev = &commands.qemu_blockdev;
        assert!(blockdev.starts_with("-blockdev 'driver=qcow2,"), "{blockdev}");
        assert!(blockdev.contains(r",file.filename=/vm'\''s/a,, b.qcow2,file.cache"), "{blockdev}");
        assert!(
            blockdev.ends_with("no-flush=off' -device virtio-blk-pci,drive=disk0,write-cache=on"),
            "{blockdev}"
        );
    }
}
