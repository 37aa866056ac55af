//! The config file: TOML whose keys are the names of the options.
//!
//! ```text
//!   [daemon]       the process: endpoints, workers, TLS, logging
//!   [cluster]      the hosts that share limits, and their etcd
//!   [group.NAME]   limits that disks and other groups share
//!   [disk.NAME]    an image, its options, limits and exports
//! ```
//!
//! Keys are defined by their tables ([`crate::key`]). Every message names file, line, key and
//! value.
//!
//! Paths are relative to the file's directory. An unknown key is an error.

mod object;
mod section;
#[cfg(test)]
mod tests;

use std::{
    io::{self, ErrorKind, Read as _},
    ops::Range,
    path::Path,
};

pub use object::{disk_from_json, group_from_json};
use policy::schedule::{LimitSchedule, ScheduleEntry};
use reactor::regular_file;
use section::{ConfigText, TomlEntry, TomlSection};
use toml::de::DeTable;

use crate::{
    AddressedConfig, ClusterConfig, ConfigError, ConfigKey, ConfigWithOrigins, DaemonConfig, Diagnostics,
    DiskConfig, ExportConfig, ExportTarget, GroupConfig, Origin, ParsedConfig, RecordingConfig, Spanned,
    daemon::DEPRECATED_CONTROL, key::KeyType, origins::KeyTable, schedule,
};

/// Largest config file in bytes: enough for several hundred thousand disks.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a config file.
///
/// # Errors
/// Returns the first mistake: an unreadable file, invalid TOML, an unknown key, or a malformed
/// value.
pub fn load(path: &Path) -> Result<ParsedConfig, ConfigError> {
    let diagnostics = Diagnostics::default();
    let parsed = load_with_options(path, &ConfigWithOrigins::default(), &diagnostics);
    diagnostics.finish_first(parsed)
}

/// Reads a config file below the options of the command line, which replace keys of `[daemon]`.
/// Reports mistakes; a table with a mistake is omitted.
pub fn load_with_options(
    path: &Path,
    options: &ConfigWithOrigins<DaemonConfig>,
    diagnostics: &Diagnostics,
) -> ParsedConfig {
    let options_only = || ParsedConfig { daemon: options.clone(), ..ParsedConfig::default() };
    let name = path.display().to_string();
    let origin = Origin::new(name.as_str());
    if path == Path::new("-") {
        diagnostics.report(
            origin.error(
                "is standard input, which cannot be read again on a reload (name a file, such as ./-)",
            ),
        );
        return options_only();
    }
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::FileTooLarge => {
            diagnostics.report(origin.error(error.to_string()));
            return options_only();
        }
        Err(error) => {
            diagnostics.report(origin.error(format!("cannot be read: {error}")));
            return options_only();
        }
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    parse_with_options(&name, &text, directory, options, diagnostics)
}

/// Reads the text of a config file.
///
/// # Errors
/// Fails if the file is unreadable, not a regular file, or larger than [`MAX_FILE_BYTES`].
pub fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // One byte more than the bound, to detect a file that is larger than it.
    regular_file::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let message = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(text)
}

/// Parses the text of a config file called `name`. Paths are relative to `directory`.
///
/// # Errors
/// As [`load`], except for reading the file.
pub fn parse(name: &str, text: &str, directory: &Path) -> Result<ParsedConfig, ConfigError> {
    let diagnostics = Diagnostics::default();
    let parsed = parse_with_options(name, text, directory, &ConfigWithOrigins::default(), &diagnostics);
    diagnostics.finish_first(parsed)
}

fn parse_with_options(
    name: &str,
    text: &str,
    directory: &Path,
    options: &ConfigWithOrigins<DaemonConfig>,
    diagnostics: &Diagnostics,
) -> ParsedConfig {
    let source = ConfigText::new(name, text, diagnostics);
    let document = match DeTable::parse(text) {
        Ok(document) => document,
        Err(error) => {
            // The text after a syntax error is ambiguous, so nothing of it is used.
            diagnostics.report(syntax_error(&source, text, &error));
            return ParsedConfig { daemon: options.clone(), ..ParsedConfig::default() };
        }
    };
    let reader = ConfigReader { directory };
    let root = TomlSection::root(&source, document.get_ref());
    let table = |key| root.request(key).and_then(TomlEntry::section);
    let service = table("daemon").and_then(|section| reader.daemon(&section, options, diagnostics));
    let cluster = table("cluster").and_then(|section| reader.cluster(&section, diagnostics));
    let named = |key| table(key).map(|section| section.named_sections()).unwrap_or_default();
    let (groups, disks) = (named("group"), named("disk"));
    // Before the tables are read: an unknown top-level key may be a misspelt table.
    root.report_unknown_keys();
    let groups = groups.into_iter().map(|(name, section)| group(name, &section, diagnostics));
    // A generated file with one mistake in each of its disks must not be read to the end.
    let disks = disks.into_iter().take_while(|_| !diagnostics.is_full());
    ParsedConfig {
        daemon: service.unwrap_or_else(|| options.clone()),
        cluster,
        groups: groups.collect(),
        disks: disks.filter_map(|(name, section)| reader.disk(name, &section, diagnostics)).collect(),
    }
}

fn syntax_error(source: &ConfigText<'_>, text: &str, error: &toml::de::Error) -> ConfigError {
    let span = error.span().unwrap_or_default();
    match error.message() {
        "duplicate key" => {
            source.origin(span.start, enclosing_path(text, span)).error("is given twice (remove one)")
        }
        other => source.origin(span.start, "not TOML").error(other.replace('\n', "; ")),
    }
}

/// Full name of a key or table that the parser did not reach.
fn enclosing_path(text: &str, key: Range<usize>) -> String {
    let table = |line: &str| Some(line.strip_prefix('[')?.split(']').next()?.to_owned());
    // The parser stopped here, so the enclosing table is found by searching the text backwards.
    let start = text[..key.start].rfind('\n').map_or(0, |end| end + 1);
    let header = text[start..].lines().next().and_then(table);
    header.unwrap_or_else(|| {
        let above = text[..start].lines().rev().find_map(table);
        above.into_iter().chain([text[key].to_owned()]).collect::<Vec<_>>().join(".")
    })
}

/// Reads a group. A group with a mistake is kept with defaults, because its members refer to it.
fn group(
    name: Spanned<String>,
    section: &TomlSection<'_>,
    diagnostics: &Diagnostics,
) -> ConfigWithOrigins<GroupConfig> {
    let defaults =
        ConfigWithOrigins::new(GroupConfig { name: name.value, ..GroupConfig::default() }, name.origin);
    let mut group = defaults.clone();
    let complete = section.read_all(|| {
        read_keys(section, &mut group, Path::new(""));
        for entry in section.items(schedule::ENTRIES) {
            read_schedule_entry(entry, &mut group, |group| &mut group.schedule, diagnostics);
        }
        Some(())
    });
    match complete {
        Some(()) => group,
        None => {
            group.report_out_of_range(diagnostics);
            defaults
        }
    }
}

/// Reads an entry of a schedule.
fn read_schedule_entry<T>(
    entry: TomlEntry<'_>,
    config: &mut ConfigWithOrigins<T>,
    schedule: fn(&mut T) -> &mut LimitSchedule,
    diagnostics: &Diagnostics,
) {
    let Some(section) = entry.section() else { return };
    let mut read = ConfigWithOrigins::new(ScheduleEntry::default(), section.origin().clone());
    let complete = section.read_all(|| {
        read_keys(&section, &mut read, Path::new(""));
        let rule = "no when (add the times, such as when = \"Mon..Fri 22:00-06:00\")";
        section.require("when", read.origin_of_given("when").map(drop), rule)?;
        read.check_rules(diagnostics);
        Some(())
    });
    if complete.is_none() {
        return;
    }
    let index = schedule(config).entries.len();
    config.record_origin(format!("{}[{index}]", schedule::ENTRIES), section.origin().clone());
    schedule(config).entries.push(read.into_config());
}

/// Reads all keys except tables.
fn read_keys<T: KeyTable>(section: &TomlSection<'_>, config: &mut ConfigWithOrigins<T>, directory: &Path) {
    for key in T::keys() {
        read_key(section, key, config, directory);
    }
    for (key, rule) in T::REMOVED {
        // Requested as well, or the key would be reported as unknown instead of removed.
        section.parse_switch(key, |_| Err::<(), _>((*rule).to_owned()));
    }
    for (old, new, _) in T::RENAMED {
        read_old_key(section, old, new, config, directory);
    }
}

/// Reads a key that is given under its old name.
fn read_old_key<T: KeyTable>(
    section: &TomlSection<'_>,
    old: &'static str,
    new: &str,
    config: &mut ConfigWithOrigins<T>,
    directory: &Path,
) {
    // Not requested where it is absent: a message about an unknown key lists the new name alone.
    if !section.contains(old) {
        return;
    }
    let Some(given) = section.parse_text(old, |text| Ok(text.to_owned())) else { return };
    if section.contains(new) {
        section
            .report(given.origin.error(format!("is the old name of {new}, which is given too (remove it)")));
        return;
    }
    let key = T::key(new).expect("a renamed key is in the table");
    // The origin is also recorded under the old name: the warning depends on it.
    config.record_origin(old, given.origin.clone());
    section.ok_or_report(config.set(key, &given.value, directory, given.origin));
}

/// Reads a key that is not a table.
fn read_key<T: KeyTable>(
    section: &TomlSection<'_>,
    key: &'static ConfigKey<T>,
    config: &mut ConfigWithOrigins<T>,
    directory: &Path,
) {
    let plain = |text: &str| Ok(text.to_owned());
    let values = match key.value {
        // Tables have separate readers (`disk`, `daemon`).
        KeyType::Table => return,
        KeyType::Flag => {
            let flag = section.flag(key.name);
            flag.map(|given| Spanned::new(given.value.to_string(), given.origin)).into_iter().collect()
        }
        _ if key.is_list() => section.list(key.name, plain),
        _ if key.accepts_bool() => section.parse_switch(key.name, plain).into_iter().collect(),
        KeyType::Text => section.parse_text(key.name, plain).into_iter().collect(),
        _ => section.parse(key.name, plain).into_iter().collect::<Vec<_>>(),
    };
    for given in values {
        section.ok_or_report(config.set(key, &given.value, directory, given.origin));
    }
}

/// Values of an export's `type`.
pub(crate) const EXPORT_TYPES: [&str; 5] = ["nbd", "vhost-user-blk", "ublk", "fuse", "nbd-device"];

fn types(conjunction: &str) -> String {
    let [first @ .., last] = EXPORT_TYPES.map(|name| format!("{name:?}"));
    format!("{} {conjunction} {last}", first.join(", "))
}

/// Host name of this machine, the default of `host`.
fn cluster_host() -> Result<String, String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim_end();
    crate::parse_cluster_name(name).map_err(|rule| format!("host: the host name {name:?} {rule} (set host)"))
}

/// Reader of tables with paths.
struct ConfigReader<'a> {
    directory: &'a Path,
}

impl ConfigReader<'_> {
    /// Reads `[daemon]` without the keys that options replace, and adds the options.
    fn daemon(
        &self,
        section: &TomlSection<'_>,
        options: &ConfigWithOrigins<DaemonConfig>,
        diagnostics: &Diagnostics,
    ) -> Option<ConfigWithOrigins<DaemonConfig>> {
        let mut daemon = options.clone();
        let mut replaced = ConfigWithOrigins::default();
        let complete = section.read_all(|| {
            for key in DaemonConfig::keys() {
                // An overridden key is parsed and checked all the same, but its value is discarded.
                let config = if options.overrides(key.name) { &mut replaced } else { &mut daemon };
                read_key(section, key, config, self.directory);
            }
            if let Some(control) = section.flag(DEPRECATED_CONTROL)
                && !options.overrides(DEPRECATED_CONTROL)
            {
                daemon.control = Some(control.value);
                daemon.record_origin(DEPRECATED_CONTROL, control.origin);
            }
            if let Some(record) = section.request("record").and_then(|entry| self.record(entry, diagnostics))
                && !options.overrides("record")
            {
                // The address is required, so its origin stands for the whole table.
                daemon.record_origin("record", record.origin(RecordingConfig::ADDRESS).clone());
                daemon.record = Some(record.into_config());
            }
            Some(())
        });
        if complete.is_none() {
            daemon.report_out_of_range(diagnostics);
        }
        complete.map(|()| daemon)
    }

    fn cluster(
        &self,
        section: &TomlSection<'_>,
        diagnostics: &Diagnostics,
    ) -> Option<ConfigWithOrigins<ClusterConfig>> {
        let mut cluster = ConfigWithOrigins::new(ClusterConfig::default(), section.origin().clone());
        section.read_all(|| {
            read_keys(section, &mut cluster, self.directory);
            // `require` reports misspelt names, so it comes after all keys were requested.
            section.require(
                "name",
                cluster.origin_of_given("name").map(drop),
                "no name (add name = \"NAME\")",
            );
            let rule = "no etcd (add etcd = [\"http://HOST:2379\"], with all its members)";
            section.require("etcd", cluster.origin_of_given("etcd").map(drop), rule);
            // Rules within the table. Rules that involve other tables are in `check`.
            cluster.check_rules(diagnostics);
            if cluster.origin_of_given("host").is_none() {
                // The host name of the machine may have characters that a cluster's keys cannot.
                let own_name = cluster_host().map_err(|rule| section.origin().error(rule));
                cluster.host = section.ok_or_report(own_name)?;
            }
            Some(())
        })?;
        Some(cluster)
    }

    fn disk(
        &self,
        name: Spanned<String>,
        section: &TomlSection<'_>,
        diagnostics: &Diagnostics,
    ) -> Option<ConfigWithOrigins<DiskConfig>> {
        let mut disk =
            ConfigWithOrigins::new(DiskConfig { name: name.value, ..DiskConfig::default() }, name.origin);
        let complete = section.read_all(|| {
            read_keys(section, &mut disk, self.directory);
            for entry in section.items("export") {
                self.export(entry, &mut disk, diagnostics);
            }
            for entry in section.items(schedule::ENTRIES) {
                read_schedule_entry(entry, &mut disk, |disk| &mut disk.schedule, diagnostics);
            }
            let rule = "no image (add image = \"PATH\", \"memory:SIZE\", \"null:SIZE\", \
                        \"rbd:POOL/IMAGE\" or \"nbd://HOST/EXPORT\")";
            // After the exports, so that their mistakes are reported as well.
            section.require("image", disk.origin_of_given("image").map(drop), rule)?;
            section.ok_or_report(disk.apply_ceph_access())
        });
        if complete.is_none() {
            disk.report_out_of_range(diagnostics);
        }
        complete.map(|()| disk)
    }

    fn export(
        &self,
        entry: TomlEntry<'_>,
        disk: &mut ConfigWithOrigins<DiskConfig>,
        diagnostics: &Diagnostics,
    ) -> Option<()> {
        let section = entry.section()?;
        let kind = section.parse("type", |text| match EXPORT_TYPES.contains(&text) {
            true => Ok(text.to_owned()),
            false => Err(format!("is not an export type; known are {}", types("and"))),
        });
        // The type decides which keys are known.
        let kind = section.require("type", kind, format!("no type (add type = {})", types("or")))?;
        match &*kind.value {
            "vhost-user-blk" => self.export_of(&section, disk, diagnostics, |config| {
                ExportConfig::Target(ExportTarget::VhostUserBlk(config))
            }),
            "ublk" => self.export_of(&section, disk, diagnostics, |config| {
                ExportConfig::Target(ExportTarget::Ublk(config))
            }),
            "fuse" => self.export_of(&section, disk, diagnostics, |config| {
                ExportConfig::Target(ExportTarget::Fuse(config))
            }),
            "nbd-device" => self.export_of(&section, disk, diagnostics, |config| {
                ExportConfig::Target(ExportTarget::NbdDevice(config))
            }),
            _ => self.export_of(&section, disk, diagnostics, ExportConfig::Nbd),
        }
    }

    fn export_of<T: AddressedConfig>(
        &self,
        section: &TomlSection<'_>,
        disk: &mut ConfigWithOrigins<DiskConfig>,
        diagnostics: &Diagnostics,
        export: impl FnOnce(T) -> ExportConfig,
    ) -> Option<()> {
        let read: ConfigWithOrigins<T> = self.addressed(section, diagnostics)?;
        // The index among valid exports, as `DiskConfig::exports` has them.
        let index = disk.exports.len();
        disk.record_origin(format!("export[{index}]"), read.origin(T::ADDRESS).clone());
        if let Some(origin) = read.origin_of_given("name") {
            disk.record_origin(format!("export[{index}].name"), origin.clone());
        }
        disk.exports.push(export(read.into_config()));
        Some(())
    }

    fn record(
        &self,
        entry: TomlEntry<'_>,
        diagnostics: &Diagnostics,
    ) -> Option<ConfigWithOrigins<RecordingConfig>> {
        // The option's notation (`record = "DIR"`) is a likely mistake: the message shows the table
        // for it.
        let directory = entry.text().unwrap_or("PATH");
        let section = entry.section_or(format!(
            "is not a table; write record = {{ directory = {directory:?} }}, \
             with keep and limit to change their defaults"
        ))?;
        self.addressed(&section, diagnostics)
    }

    fn addressed<T: AddressedConfig>(
        &self,
        section: &TomlSection<'_>,
        diagnostics: &Diagnostics,
    ) -> Option<ConfigWithOrigins<T>> {
        let mut config = ConfigWithOrigins::new(T::default(), section.origin().clone());
        section.read_all(|| {
            read_keys(section, &mut config, self.directory);
            if let Some(rule) = T::MISSING_ADDRESS {
                section.require(T::ADDRESS, config.origin_of_given(T::ADDRESS).map(drop), rule)?;
            }
            config.check_rules(diagnostics);
            Some(())
        })?;
        Some(config)
    }
}
