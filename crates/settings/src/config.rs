//! The config file: TOML whose keys are the options' names.
//!
//! ```text
//!   [daemon]       the process: where to listen, workers, TLS, logging
//!   [cluster]      the hosts that share limits, and their etcd
//!   [group.NAME]   what disks and other groups are held to together
//!   [disk.NAME]    an image, how it is opened, what it is held to, where it is exported
//! ```
//!
//! Read by hand, because every message names file, line, key and value. The keys of disks and
//! groups
//! come from their tables ([`crate::key`]).
//!
//! Paths are seen from the file's own directory. An unknown key is an error.

mod section;
#[cfg(test)]
mod tests;

use std::{
    io::{self, ErrorKind, Read as _},
    ops::Range,
    path::{Path, PathBuf},
};

use reactor::regular;
use section::{Entry, Section, Source};
use toml::de::DeTable;

use crate::{
    AccessDraft, Address, Cluster, DiskConfig, Door, Draft, Endpoint, Etcd, ExportConfig, Fuse, GroupConfig,
    Keyed, Mistakes, Nbd, NbdDevice, NbdExport, Place, Placed, Record, Said, ServiceDraft, Socket, Ublk,
    VhostUserBlk, Wrong, cluster, doors, key::ValueKind, log, placed::KeySet,
};

/// Largest config file that is read: some hundred thousand disks.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a config file.
///
/// # Errors
/// The first mistake: if it cannot be read, is no TOML, or holds something that is not known or not
/// well formed.
pub fn load(path: &Path) -> Result<Draft, Wrong> {
    let mistakes = Mistakes::default();
    let draft = load_telling(path, &mistakes);
    mistakes.first_unless(draft)
}

/// What a config file says as far as it is well formed: a table in which something is not, and
/// which is told of, says nothing.
pub fn load_telling(path: &Path, mistakes: &Mistakes) -> Draft {
    let name = path.display().to_string();
    let place = Place::new(name.as_str());
    if path == Path::new("-") {
        mistakes.tell(place.wrong(
            "is standard input, and a config file is read again when it is reloaded (name a file; ./- is one of this name)",
        ));
        return Draft::default();
    }
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::FileTooLarge => {
            mistakes.tell(place.wrong(error.to_string()));
            return Draft::default();
        }
        Err(error) => {
            mistakes.tell(place.wrong(format!("cannot be read: {error}")));
            return Draft::default();
        }
    };
    parse_telling(&name, &text, path.parent().unwrap_or(Path::new("")), mistakes)
}

/// Reads the text of a config file.
///
/// # Errors
/// The system's; it is no regular file, or larger than [`MAX_FILE_BYTES`].
pub fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    regular::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes (is this the right file?)");
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(text)
}

/// Reads the text of a config file called `name`, with paths seen from `directory`.
///
/// # Errors
/// As [`load`], once it has the text.
pub fn parse(name: &str, text: &str, directory: &Path) -> Result<Draft, Wrong> {
    let mistakes = Mistakes::default();
    let draft = parse_telling(name, text, directory, &mistakes);
    mistakes.first_unless(draft)
}

fn parse_telling(name: &str, text: &str, directory: &Path, mistakes: &Mistakes) -> Draft {
    let source = Source::new(name, text, mistakes);
    let document = match DeTable::parse(text) {
        Ok(document) => document,
        Err(error) => {
            // What comes after it may be read in ways that nobody meant.
            mistakes.tell(no_toml(&source, text, &error));
            return Draft::default();
        }
    };
    let reader = Reader { directory };
    let root = Section::root(&source, document.get_ref());
    let table = |key| root.get(key).and_then(Entry::section);
    let service = table("daemon").and_then(|section| reader.daemon(&section));
    let cluster = table("cluster").and_then(|section| reader.cluster(&section));
    let named = |key| table(key).map(|section| section.named_sections()).unwrap_or_default();
    let (groups, disks) = (named("group"), named("disk"));
    root.finish();
    let groups = groups.into_iter().map(|(name, section)| group(name, &section, mistakes));
    let disks = disks.into_iter().take_while(|_| !mistakes.is_full());
    Draft {
        service: ServiceDraft { cluster, ..service.unwrap_or_default() },
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

/// The whole name of a key, or of a table, that the parser has not come to.
fn path_of(text: &str, key: Range<usize>) -> String {
    let table = |line: &str| Some(line.strip_prefix('[')?.split(']').next()?.to_owned());
    let start = text[..key.start].rfind('\n').map_or(0, |end| end + 1);
    let own = text[start..].lines().next().and_then(table);
    own.unwrap_or_else(|| {
        let above = text[..start].lines().rev().find_map(table);
        above.into_iter().chain([text[key].to_owned()]).collect::<Vec<_>>().join(".")
    })
}

/// Others name it, whatever is wrong with what it says.
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

/// Reads all keys that are no tables.
fn read_keys<T: KeySet>(section: &Section<'_>, config: &mut Placed<T>, directory: &Path) {
    for key in T::keys() {
        let plain = |text: &str| Ok(text.to_owned());
        let said = match key.value {
            ValueKind::Table => continue,
            ValueKind::Flag => {
                section.flag(key.name).map(|said| Said::new(said.value.to_string(), said.place))
            }
            _ if key.is_list() => {
                for said in section.list(key.name, plain) {
                    section.keep(config.set(key, &said.value, directory, said.place));
                }
                continue;
            }
            _ if key.is_switch() => section.parse_switch(key.name, plain),
            _ => section.parse(key.name, plain),
        };
        if let Some(said) = said {
            section.keep(config.set(key, &said.value, directory, said.place));
        }
    }
}

fn access(section: &Section<'_>) -> AccessDraft {
    AccessDraft {
        allow: section.list("allow", crate::read),
        deny: section.list("deny", crate::read),
        tls_authz: section.list("tls-authz", crate::tls_name),
    }
}

/// What an export's `type` may be.
const TYPES: [&str; 5] = ["nbd", "vhost-user-blk", "ublk", "fuse", "nbd-device"];

fn types(word: &str) -> String {
    let [first @ .., last] = TYPES.map(|name| format!("{name:?}"));
    format!("{} {word} {last}", first.join(", "))
}

fn no_comma(text: &str) -> Result<&str, String> {
    match text.contains(',') {
        true => Err("has a comma; what the command line has behind commas are keys here (such as queues = 4 or discard = false)".to_owned()),
        false => Ok(text),
    }
}

fn ublk(section: &Section<'_>) -> Said<Door> {
    let number = section.parse("number", doors::ublk::device);
    let place = number.as_ref().map_or_else(|| section.place().clone(), |said| said.place.clone());
    let ublk = Ublk { number: number.map(|said| said.value), ..Ublk::default() };
    Said::new(Door::Ublk(with_keys(section, ublk)), place)
}

fn nbd_device(section: &Section<'_>) -> Option<Said<Door>> {
    let device = section.parse("device", |text| doors::nbd_device::device(no_comma(text)?));
    let place = device.as_ref().map(|said| said.place.clone());
    let number = device.and_then(|said| said.value);
    let export = with_keys(section, NbdDevice { number, ..NbdDevice::default() });
    let rule = "no device (add device = \"/dev/nbd0\", or \"auto\" for one that is free)";
    Some(Said::new(Door::NbdDevice(export), section.need("device", place, rule)?))
}

/// What the section says of a door's keys.
fn with_keys<K: Keyed>(section: &Section<'_>, mut keyed: K) -> K {
    for key in K::VALUES {
        section.parse_switch(key, |text| keyed.set(key, text));
    }
    for (key, rule) in K::REMOVED {
        section.parse_switch(key, |_| Err::<(), _>((*rule).to_owned()));
    }
    for (key, flag) in keyed.flags() {
        if let Some(said) = section.flag(key) {
            *flag = said.value;
        }
    }
    keyed
}

/// The machine's name, where the cluster is not told another.
fn cluster_host() -> Result<String, String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim_end();
    crate::cluster_name(name).map_err(|rule| format!("host: this machine's name {name:?} {rule} (add host)"))
}

/// Reads what holds paths.
struct Reader<'a> {
    directory: &'a Path,
}

impl Reader<'_> {
    fn daemon(&self, section: &Section<'_>) -> Option<ServiceDraft> {
        let read = || {
            Some(ServiceDraft {
                nbd: section.list("nbd", |text| self.endpoint(text).map(Nbd::at)),
                socket_mode: section.parse("socket-mode", crate::socket_mode),
                socket_owner: section.parse("socket-owner", str::parse),
                exit_when_idle: section.flag("exit-when-idle"),
                control: section.flag("control"),
                qmp: section.list("qmp", |text| self.socket(text)),
                metrics: section.parse("metrics", |text| self.address(text)),
                on_event: section.value("on-event"),
                http: section.parse("http", |text| self.address(text)),
                http_token_file: self.path(section, "http-token-file"),
                http_name: section.list("http-name", crate::http_name),
                workers: section.parse("workers", crate::workers),
                poll: section.parse_switch("poll", crate::polling),
                max_connections: section.parse("max-connections", crate::connections),
                max_connections_per_address: section.parse("max-connections-per-address", crate::connections),
                access: access(section),
                memory: section.parse("memory", crate::size),
                tls: crate::TlsDraft {
                    mode: section.switch("tls"),
                    certificates: self.path(section, "tls-certificates"),
                    verify_peer: section.flag("tls-verify-peer"),
                    psk: self.path(section, "tls-psk"),
                },
                log: section.parse("log", log::filter),
                log_format: section.value("log-format"),
                log_file: self.path(section, "log-file"),
                pid_file: self.path(section, "pid-file"),
                state: self.path(section, "state"),
                image_root: self.path(section, "image-root"),
                cgroup_limits: self.path(section, "cgroup-limits"),
                record: section.get("record").and_then(|entry| self.record(entry)),
                // A section of its own.
                cluster: None,
                sandbox: section.switch("sandbox"),
                user: section.parse("user", str::parse),
            })
        };
        section.whole_or(read, ServiceDraft::judge_values)
    }

    fn cluster(&self, section: &Section<'_>) -> Option<Said<Cluster>> {
        section.whole(|| self.cluster_of(section))
    }

    fn cluster_of(&self, section: &Section<'_>) -> Option<Said<Cluster>> {
        let name = section.parse("name", crate::cluster_name);
        let host = section.parse("host", crate::cluster_name);
        let etcd = section.list("etcd", crate::read::<Etcd>);
        let certificates = self.path(section, "certificates");
        let user = section.text("user");
        let password_file = self.path(section, "password-file");
        let safe_share = section.parse("safe-share", crate::safe_share);
        let control_groups = section.list("control-groups", crate::cluster_name);
        for (at, said) in control_groups.iter().enumerate() {
            if control_groups[..at].iter().any(|before| before.value == said.value) {
                section.tell(said.wrong("is named twice"));
            }
        }
        let name = section.need("name", name, "no name (add name = \"NAME\")");
        let rule = "no etcd (add etcd = [\"http://HOST:2379\"], with all its members)";
        let first = section.need("etcd", etcd.first(), rule)?;
        section.keep(cluster::check_endpoints(etcd.len()).map_err(|rule| first.wrong(rule)));
        if let Some(said) = certificates.as_ref().filter(|_| etcd.iter().all(|member| !member.value.tls)) {
            section.tell(said.wrong("is not used, because no member of etcd is https"));
        }
        let user = match (user, password_file) {
            (Some(user), Some(file)) => Some((user.value, file.value)),
            (Some(user), None) => section.keep(Err(user.wrong("needs password-file"))),
            (None, Some(file)) => section.keep(Err(file.wrong("needs user"))),
            (None, None) => None,
        };
        let own_name = || section.keep(cluster_host().map_err(|rule| section.place().wrong(rule)));
        let host = host.map_or_else(own_name, |said| Some(said.value));
        let cluster = Cluster {
            name: name?.value,
            host: host?,
            etcd: etcd.into_iter().map(|said| said.value).collect(),
            certificates: certificates.map(|said| said.value),
            user,
            safe_share_ppm: safe_share.map(|said| said.value),
            control_groups: control_groups.into_iter().map(|said| said.value).collect(),
        };
        Some(Said::new(cluster, section.place().clone()))
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
                self.export(entry, &mut disk);
            }
            let rule = "no image (add image = \"PATH\", \"memory:SIZE\", \"null:SIZE\", \"rbd:POOL/IMAGE\" or \"nbd://HOST/EXPORT\")";
            section.need("image", disk.given("image").map(drop), rule)?;
            section.keep(disk.reach())
        });
        if whole.is_none() {
            disk.tell_out_of_range(mistakes);
        }
        whole.map(|()| disk)
    }

    fn export(&self, entry: Entry<'_>, disk: &mut Placed<DiskConfig>) -> Option<()> {
        let section = entry.section()?;
        let kind = section.parse("type", |text| match TYPES.contains(&text) {
            true => Ok(text.to_owned()),
            false => Err(format!("is not a type of export that weir has; there are {}", types("and"))),
        });
        // Without one nobody knows which keys there may be.
        let kind = section.need("type", kind, format!("no type (add type = {})", types("or")))?;
        let mut name_place = None;
        let said = section.whole(|| {
            let door = match &*kind.value {
                "vhost-user-blk" => self.machine(&section)?,
                "ublk" => ublk(&section),
                "fuse" => self.fuse(&section)?,
                "nbd-device" => nbd_device(&section)?,
                _ => {
                    let listen = section.parse("listen", |text| self.endpoint(text));
                    let name = section.text("name");
                    let read_only = section.flag("read-only").is_some_and(|said| said.value);
                    let rule = "no address (add listen = \"unix:PATH\" or \"HOST:PORT\")";
                    let Said { value: listen, place } = section.need("listen", listen, rule)?;
                    name_place = name.as_ref().map(|said| said.place.clone());
                    let name = name.map(|said| said.value);
                    return Some(Said::new(ExportConfig::Nbd(NbdExport { listen, name, read_only }), place));
                }
            };
            Some(Said::new(ExportConfig::Own(door.value), door.place))
        })?;
        let index = disk.exports.len();
        disk.exports.push(said.value);
        disk.put(format!("export[{index}]"), said.place);
        if let Some(place) = name_place {
            disk.put(format!("export[{index}].name"), place);
        }
        Some(())
    }

    fn machine(&self, section: &Section<'_>) -> Option<Said<Door>> {
        let socket = |text: &str| match no_comma(text)?.parse()? {
            Socket::Path(path) => self.socket_at(&path).map(Socket::Path),
            passed @ Socket::Passed(_) => Ok(passed),
        };
        let listen = section.parse("listen", socket);
        let place = listen.as_ref().map(|said| said.place.clone());
        // Also where it is missing: the other keys are known.
        let anywhere = || Socket::Path(PathBuf::new());
        let machine = VhostUserBlk::at(listen.map_or_else(anywhere, |said| said.value));
        let machine = with_keys(section, machine);
        let place = section.need("listen", place, "no socket (add listen = \"unix:PATH\")")?;
        section.keep(machine.check().map_err(|rule| section.place().wrong(rule)))?;
        Some(Said::new(Door::VhostUserBlk(machine), place))
    }

    fn fuse(&self, section: &Section<'_>) -> Option<Said<Door>> {
        let path = |text: &str| Ok(self.directory.join(doors::fuse::file(no_comma(text)?)?));
        let file = section.parse("file", path);
        let place = file.as_ref().map(|said| said.place.clone());
        let fuse = with_keys(section, Fuse::at(file.map(|said| said.value).unwrap_or_default()));
        Some(Said::new(Door::Fuse(fuse), section.need("file", place, "no file (add file = \"PATH\")")?))
    }

    fn record(&self, entry: Entry<'_>) -> Option<Said<Record>> {
        let directory = entry.text().unwrap_or("PATH");
        let section = entry.section_or(format!(
            "is not a table; write record = {{ directory = {directory:?} }}, \
             with keep and limit if they are to be others"
        ))?;
        section.whole(|| {
            let path = |text: &str| Ok(self.directory.join(crate::record::directory(text)?));
            let directory = section.parse("directory", path);
            let place = directory.as_ref().map(|said| said.place.clone());
            let record = Record::at(directory.map(|said| said.value).unwrap_or_default());
            let record = with_keys(&section, record);
            let rule = "no directory (add directory = \"PATH\")";
            Some(Said::new(record, section.need("directory", place, rule)?))
        })
    }

    fn endpoint(&self, text: &str) -> Result<Endpoint, String> {
        match text.parse()? {
            Endpoint::Address(Address::Unix(path)) => {
                Ok(Endpoint::Address(self.socket_at(&path).map(Address::Unix)?))
            }
            other => Ok(other),
        }
    }

    fn address(&self, text: &str) -> Result<Address, String> {
        match text.parse()? {
            Address::Unix(path) => self.socket_at(&path).map(Address::Unix),
            address @ Address::Tcp { .. } => Ok(address),
        }
    }

    fn socket(&self, text: &str) -> Result<PathBuf, String> {
        self.socket_at(&crate::socket(text)?)
    }

    /// A socket's path seen from the directory, which may make it too long.
    fn socket_at(&self, path: &Path) -> Result<PathBuf, String> {
        let path = self.directory.join(path);
        let text = path.to_str().ok_or("the directory of the config file is not UTF-8 (move it)")?;
        crate::socket(&format!("unix:{text}"))
    }

    fn path(&self, section: &Section<'_>, key: &'static str) -> Option<Said<PathBuf>> {
        section.parse(key, |text| match text {
            "" => Err("is empty (write one, or leave the key out)".to_owned()),
            path => Ok(self.directory.join(path)),
        })
    }
}
