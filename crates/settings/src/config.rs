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

pub use object::{disk_of_object, group_of_object};
use reactor::regular;
use section::{Entry, Section, Source};
use toml::de::DeTable;

use crate::{
    AddressedKeys, Cluster, DaemonConfig, DiskConfig, Door, Draft, ExportConfig, GroupConfig, Key, Mistakes,
    Place, Placed, Record, Said, Wrong, key::ValueKind, placed::KeySet,
};

/// Largest config file in bytes: enough for some hundred thousand disks.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a config file.
///
/// # Errors Returns the first mistake: an unreadable file, invalid TOML, an unknown key, or a
/// malformed value.
pub fn load(path: &Path) -> Result<Draft, Wrong> {
    let mistakes = Mistakes::default();
    let draft = load_below(path, &Placed::default(), &mistakes);
    mistakes.first_unless(draft)
}

/// Reads a config file below the options of the command line, which replace keys of `[daemon]`.
/// Reports mistakes; a table with a mistake is left out.
pub fn load_below(path: &Path, options: &Placed<DaemonConfig>, mistakes: &Mistakes) -> Draft {
    let nothing = || Draft { service: options.clone(), ..Draft::default() };
    let name = path.display().to_string();
    let place = Place::new(name.as_str());
    if path == Path::new("-") {
        mistakes.tell(place.wrong(
            "is standard input, and a config file is read again when it is reloaded (name a file; ./- is one of this name)",
        ));
        return nothing();
    }
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::FileTooLarge => {
            mistakes.tell(place.wrong(error.to_string()));
            return nothing();
        }
        Err(error) => {
            mistakes.tell(place.wrong(format!("cannot be read: {error}")));
            return nothing();
        }
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    parse_below(&name, &text, directory, options, mistakes)
}

/// Reads the text of a config file.
///
/// # Errors
/// Fails if the file is unreadable, not a regular file, or larger than [`MAX_FILE_BYTES`].
pub fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // One byte more than the bound tells a larger file from one of exactly that size.
    regular::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}

/// Parses the text of a config file called `name`. Paths are relative to `directory`.
///
/// # Errors
/// As [`load`], except for reading the file.
pub fn parse(name: &str, text: &str, directory: &Path) -> Result<Draft, Wrong> {
    let mistakes = Mistakes::default();
    let draft = parse_below(name, text, directory, &Placed::default(), &mistakes);
    mistakes.first_unless(draft)
}

fn parse_below(
    name: &str,
    text: &str,
    directory: &Path,
    options: &Placed<DaemonConfig>,
    mistakes: &Mistakes,
) -> Draft {
    let source = Source::new(name, text, mistakes);
    let document = match DeTable::parse(text) {
        Ok(document) => document,
        Err(error) => {
            // The text after a syntax error is ambiguous, so nothing of it is used.
            mistakes.tell(no_toml(&source, text, &error));
            return Draft { service: options.clone(), ..Draft::default() };
        }
    };
    let reader = Reader { directory };
    let root = Section::root(&source, document.get_ref());
    let table = |key| root.get(key).and_then(Entry::section);
    let service = table("daemon").and_then(|section| reader.daemon(&section, options, mistakes));
    let cluster = table("cluster").and_then(|section| reader.cluster(&section, mistakes));
    let named = |key| table(key).map(|section| section.named_sections()).unwrap_or_default();
    let (groups, disks) = (named("group"), named("disk"));
    // Before the tables are read: an unknown top-level key may be a misspelt table.
    root.finish();
    let groups = groups.into_iter().map(|(name, section)| group(name, &section, mistakes));
    // A generated file with one mistake in each of its disks must not be read to the end.
    let disks = disks.into_iter().take_while(|_| !mistakes.is_full());
    Draft {
        service: service.unwrap_or_else(|| options.clone()),
        cluster,
        groups: groups.collect(),
        disks: disks.filter_map(|(name, section)| reader.disk(name, &section, mistakes)).collect(),
    }
}

fn no_toml(source: &Source<'_>, text: &str, error: &toml::de::Error) -> Wrong {
    let span = error.span().unwrap_or_default();
    match error.message() {
        "duplicate key" => source
            .place(span.start, path_of(text, span))
            .wrong("is there already, further up (take out one of the two)"),
        other => source.place(span.start, "not TOML").wrong(other.replace('\n', "; ")),
    }
}

/// Full name of a key or table that the parser did not reach.
fn path_of(text: &str, key: Range<usize>) -> String {
    let table = |line: &str| Some(line.strip_prefix('[')?.split(']').next()?.to_owned());
    // The parser stopped here, so the enclosing table is found by searching the text backwards.
    let start = text[..key.start].rfind('\n').map_or(0, |end| end + 1);
    let own = text[start..].lines().next().and_then(table);
    own.unwrap_or_else(|| {
        let above = text[..start].lines().rev().find_map(table);
        above.into_iter().chain([text[key].to_owned()]).collect::<Vec<_>>().join(".")
    })
}

/// Reads a group. A group with a mistake is kept with defaults, because its members refer to it.
fn group(name: Said<String>, section: &Section<'_>, mistakes: &Mistakes) -> Placed<GroupConfig> {
    let nothing = Placed::new(GroupConfig { name: name.value, ..GroupConfig::default() }, name.place);
    let mut group = nothing.clone();
    let whole = section.whole(|| {
        read_keys(section, &mut group, Path::new(""));
        Some(())
    });
    match whole {
        Some(()) => group,
        None => {
            group.tell_out_of_range(mistakes);
            nothing
        }
    }
}

/// Reads all keys except tables.
fn read_keys<T: KeySet>(section: &Section<'_>, config: &mut Placed<T>, directory: &Path) {
    for key in T::keys() {
        read_key(section, key, config, directory);
    }
    for (key, rule) in T::REMOVED {
        // Requested as well, or the key would be reported as unknown instead of removed.
        section.parse_switch(key, |_| Err::<(), _>((*rule).to_owned()));
    }
}

/// Reads a key that is not a table.
fn read_key<T: KeySet>(
    section: &Section<'_>,
    key: &'static Key<T>,
    config: &mut Placed<T>,
    directory: &Path,
) {
    let plain = |text: &str| Ok(text.to_owned());
    let values = match key.value {
        // Tables have separate readers (`disk`, `daemon`).
        ValueKind::Table => return,
        ValueKind::Flag => {
            let flag = section.flag(key.name);
            flag.map(|said| Said::new(said.value.to_string(), said.place)).into_iter().collect()
        }
        _ if key.is_list() => section.list(key.name, plain),
        _ if key.is_switch() => section.parse_switch(key.name, plain).into_iter().collect(),
        ValueKind::Text => section.parse_text(key.name, plain).into_iter().collect(),
        _ => section.parse(key.name, plain).into_iter().collect::<Vec<_>>(),
    };
    for said in values {
        section.keep(config.set(key, &said.value, directory, said.place));
    }
}

/// Values of an export's `type`.
pub(crate) const TYPES: [&str; 5] = ["nbd", "vhost-user-blk", "ublk", "fuse", "nbd-device"];

fn types(word: &str) -> String {
    let [first @ .., last] = TYPES.map(|name| format!("{name:?}"));
    format!("{} {word} {last}", first.join(", "))
}

/// Host name of this machine, the default of `host`.
fn cluster_host() -> Result<String, String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim_end();
    crate::cluster_name(name).map_err(|rule| format!("host: this machine's name {name:?} {rule} (add host)"))
}

/// Reader of tables with paths.
struct Reader<'a> {
    directory: &'a Path,
}

impl Reader<'_> {
    /// Reads `[daemon]` without the keys that options replace, and adds the options.
    fn daemon(
        &self,
        section: &Section<'_>,
        options: &Placed<DaemonConfig>,
        mistakes: &Mistakes,
    ) -> Option<Placed<DaemonConfig>> {
        let mut daemon = options.clone();
        let mut replaced = Placed::default();
        let whole = section.whole(|| {
            for key in DaemonConfig::keys() {
                // An overridden key is parsed and checked all the same, but its value is discarded.
                let config = if options.overrides(key.name) { &mut replaced } else { &mut daemon };
                read_key(section, key, config, self.directory);
            }
            if let Some(record) = section.get("record").and_then(|entry| self.record(entry, mistakes))
                && !options.overrides("record")
            {
                // The place of the whole table is that of its address, which every such table has.
                daemon.put("record", record.place(Record::ADDRESS).clone());
                daemon.record = Some(record.into_config());
            }
            Some(())
        });
        if whole.is_none() {
            daemon.tell_out_of_range(mistakes);
        }
        whole.map(|()| daemon)
    }

    fn cluster(&self, section: &Section<'_>, mistakes: &Mistakes) -> Option<Placed<Cluster>> {
        let mut cluster = Placed::new(Cluster::default(), section.place().clone());
        section.whole(|| {
            read_keys(section, &mut cluster, self.directory);
            // `need` reports misspelt names, so it comes after all keys were requested.
            section.need("name", cluster.given("name").map(drop), "no name (add name = \"NAME\")");
            let rule = "no etcd (add etcd = [\"http://HOST:2379\"], with all its members)";
            section.need("etcd", cluster.given("etcd").map(drop), rule);
            // Rules within the table. Rules that involve other tables are in `check`.
            cluster.judge(mistakes);
            if cluster.given("host").is_none() {
                // The host name of the machine may have characters that a cluster's keys cannot.
                let own_name = cluster_host().map_err(|rule| section.place().wrong(rule));
                cluster.host = section.keep(own_name)?;
            }
            Some(())
        })?;
        Some(cluster)
    }

    fn disk(
        &self,
        name: Said<String>,
        section: &Section<'_>,
        mistakes: &Mistakes,
    ) -> Option<Placed<DiskConfig>> {
        let mut disk = Placed::new(DiskConfig { name: name.value, ..DiskConfig::default() }, name.place);
        let whole = section.whole(|| {
            read_keys(section, &mut disk, self.directory);
            for entry in section.items("export") {
                self.export(entry, &mut disk, mistakes);
            }
            let rule = "no image (add image = \"PATH\", \"memory:SIZE\", \"null:SIZE\", \"rbd:POOL/IMAGE\" or \"nbd://HOST/EXPORT\")";
            // After the exports, so that their mistakes are reported as well.
            section.need("image", disk.given("image").map(drop), rule)?;
            section.keep(disk.reach())
        });
        if whole.is_none() {
            disk.tell_out_of_range(mistakes);
        }
        whole.map(|()| disk)
    }

    fn export(&self, entry: Entry<'_>, disk: &mut Placed<DiskConfig>, mistakes: &Mistakes) -> Option<()> {
        let section = entry.section()?;
        let kind = section.parse("type", |text| match TYPES.contains(&text) {
            true => Ok(text.to_owned()),
            false => Err(format!("is not a type of export that weir has; there are {}", types("and"))),
        });
        // The type decides which keys are known.
        let kind = section.need("type", kind, format!("no type (add type = {})", types("or")))?;
        match &*kind.value {
            "vhost-user-blk" => {
                self.export_of(&section, disk, mistakes, |own| ExportConfig::Own(Door::VhostUserBlk(own)))
            }
            "ublk" => self.export_of(&section, disk, mistakes, |own| ExportConfig::Own(Door::Ublk(own))),
            "fuse" => self.export_of(&section, disk, mistakes, |own| ExportConfig::Own(Door::Fuse(own))),
            "nbd-device" => {
                self.export_of(&section, disk, mistakes, |own| ExportConfig::Own(Door::NbdDevice(own)))
            }
            _ => self.export_of(&section, disk, mistakes, ExportConfig::Nbd),
        }
    }

    fn export_of<T: AddressedKeys>(
        &self,
        section: &Section<'_>,
        disk: &mut Placed<DiskConfig>,
        mistakes: &Mistakes,
        export: impl FnOnce(T) -> ExportConfig,
    ) -> Option<()> {
        let read: Placed<T> = self.addressed(section, mistakes)?;
        // The index among valid exports, as `DiskConfig::exports` has them.
        let index = disk.exports.len();
        disk.put(format!("export[{index}]"), read.place(T::ADDRESS).clone());
        if let Some(place) = read.given("name") {
            disk.put(format!("export[{index}].name"), place.clone());
        }
        disk.exports.push(export(read.into_config()));
        Some(())
    }

    fn record(&self, entry: Entry<'_>, mistakes: &Mistakes) -> Option<Placed<Record>> {
        // The option's notation (`record = "DIR"`) is a likely mistake: the message shows the table
        // for it.
        let directory = entry.text().unwrap_or("PATH");
        let section = entry.section_or(format!(
            "is not a table; write record = {{ directory = {directory:?} }}, \
             with keep and limit if they are to be others"
        ))?;
        self.addressed(&section, mistakes)
    }

    fn addressed<T: AddressedKeys>(&self, section: &Section<'_>, mistakes: &Mistakes) -> Option<Placed<T>> {
        let mut config = Placed::new(T::default(), section.place().clone());
        section.whole(|| {
            read_keys(section, &mut config, self.directory);
            if let Some(rule) = T::MISSING {
                section.need(T::ADDRESS, config.given(T::ADDRESS).map(drop), rule)?;
            }
            config.judge(mistakes);
            Some(())
        })?;
        Some(config)
    }
}
