//! Conversion of a draft to a plan: all rules between settings. Limits of a disk apply in addition
//! to those of its group (docs/decisions/0006).
//!
//! All rules are checked, so that one run reports all mistakes, except rules that are broken only
//! as a consequence of another mistake.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    path::{self, Path, PathBuf},
};

use block::disk::{DetectZeroes, Discards};
use policy::throttle;
use storage::{Format, rate::RateOptions};

use super::{
    Address, DaemonConfig, DiskConfig, DoorExport, Draft, Endpoint, Export, Mistakes, NbdExport, Place,
    Placed, Plan, PlannedDisk, Server, Service, Tls, TlsMode, Wrong, clients,
    groups::{self, Groups},
    promises,
};

/// Longest name in bytes, by the NBD protocol ("Values", strings).
const MAX_NAME_BYTES: usize = 4096;

impl Plan {
    /// Plan of a draft. `inherited` sockets were passed by the service manager; those that no
    /// export names belong to NBD.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn new(draft: Draft, inherited: usize) -> Result<Self, Wrong> {
        Self::judged(draft, inherited, Mistakes::default()).map_err(the_first)
    }

    /// As [`new`](Self::new), for a draft with known `mistakes`. The tables with these mistakes are
    /// missing from the draft, so only rules within single tables are checked then.
    ///
    /// # Errors
    /// Returns all mistakes, in the order of the file.
    pub fn judged(draft: Draft, inherited: usize, mistakes: Mistakes) -> Result<Self, Vec<Wrong>> {
        // In a cluster, disks may come from other hosts.
        if mistakes.count() == 0 && draft.disks.is_empty() && draft.cluster.is_none() {
            let rule = "there is nothing to serve (add a [disk.NAME] with an image)";
            mistakes.tell(Place::new("no disks").wrong(rule));
        }
        Self::of(draft, inherited, mistakes)
    }

    /// Plan of a daemon that receives its disks and servers at run time.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn without_disks(draft: Draft) -> Result<Self, Wrong> {
        if let Some(place) = draft.service.given("nbd") {
            return Err(place.wrong("is not used, because no IMAGE is served (--nbd-server is for --export)"));
        }
        Self::of(Draft { disks: Vec::new(), ..draft }, 0, Mistakes::default()).map_err(the_first)
    }

    /// Removes disks and their exports. Servers stay, even without exports.
    pub fn leave_out(&mut self, is_out: impl Fn(&str) -> bool) {
        let mut at = 0;
        let places: Vec<_> = self
            .disks
            .iter()
            .map(|disk| {
                let place = (!is_out(&disk.name)).then_some(at);
                at += usize::from(place.is_some());
                place
            })
            .collect();
        self.disks.retain(|disk| !is_out(&disk.name));
        for server in &mut self.servers {
            server.exports.retain_mut(|export| match places[export.disk] {
                Some(place) => {
                    export.disk = place;
                    true
                }
                None => false,
            });
        }
        self.doors.retain_mut(|export| match places[export.disk] {
            Some(place) => {
                export.disk = place;
                true
            }
            None => false,
        });
    }

    fn of(draft: Draft, inherited: usize, mistakes: Mistakes) -> Result<Self, Vec<Wrong>> {
        // With unreadable tables, rules between tables would report missing disks and groups.
        let is_whole = mistakes.count() == 0;
        check_names(&draft, &mistakes);
        check_images(&draft.disks, &mistakes);
        check_rates(&draft.disks, &mistakes);
        // Names and images come first: later checks use names as keys.
        let mut draft = draft;
        // Sorted by depth, as `promises::check` needs them.
        draft.groups = groups::plan(draft.groups, &mistakes);
        let known = Groups::new(&draft.groups);
        draft.disks.iter_mut().for_each(|disk| judge_disk(disk, Some(&known), &mistakes));
        if mistakes.count() == 0 {
            // Only with valid limits: the tree would reject them with other errors.
            mistakes.keep(promises::check(&draft.groups, &draft.disks));
        }
        draft.service.judge(&mistakes);
        let tls = mistakes.keep(draft.service.tls());
        let (mut servers, mut doors) = (Vec::new(), Vec::new());
        if is_whole {
            mistakes.keep(check_cluster(&draft));
            (servers, doors) = places(&draft, inherited, &mistakes).unwrap_or_default();
            if let Some(tls) = &tls {
                for disk in &draft.disks {
                    mistakes.keep(check_access(disk, tls));
                }
            }
        }
        // Without valid TLS settings, dependent rules would report only consequences.
        if let Some(tls) = &tls {
            mistakes.keep(draft.service.check_page(tls));
            mistakes.keep(draft.service.check_access(tls));
        }
        let Draft { disks, groups, service: mut config, cluster } = draft;
        // The daemon changes its user after it created the sockets.
        config.sockets.owner = config.sockets.owner.take().or_else(|| config.user.clone());
        let cluster = cluster.map(Placed::into_config);
        let service = Service { config, tls: tls.unwrap_or(Tls::Off), cluster };
        mistakes.unless(Self { disks, groups, servers, doors, service })
    }
}

impl PlannedDisk {
    /// Checks a disk that is added to a running daemon with these TLS settings. `standard` are the
    /// endpoints of disks without explicit exports, each with true if they are read-only there.
    ///
    /// The caller checks its group, other disks of the same image or simulated device, and
    /// other exports at the same endpoints.
    ///
    /// # Errors
    /// Returns all mistakes, including `mistakes`.
    pub fn new(
        mut disk: Placed<DiskConfig>,
        standard: &[(Endpoint, bool)],
        tls: &Tls,
        mistakes: Mistakes,
    ) -> Result<Self, Vec<Wrong>> {
        mistakes.keep(named(&disk.name).map_err(|rule| disk.own_place().wrong(rule)));
        mistakes.keep(check_image(&disk));
        judge_disk(&mut disk, None, &mistakes);
        mistakes.keep(check_access(&disk, tls));
        let disks = [disk];
        let servers = servers(&disks, standard, &[], &mistakes);
        let doors = doors(&disks, &servers, &mistakes);
        check_clients_of(&disks, &servers, &mistakes);
        let [disk] = disks;
        mistakes.unless(Self { disk, servers, doors })
    }
}

fn the_first(all: Vec<Wrong>) -> Wrong {
    all.into_iter().next().expect("something is wrong")
}

/// Endpoints of all disks; `None` if a mistake prevents finding them.
fn places(draft: &Draft, inherited: usize, mistakes: &Mistakes) -> Option<(Vec<Server>, Vec<DoorExport>)> {
    // Sockets that exports name are not NBD's.
    let inherited = inherited.saturating_sub(passed_by_name(draft));
    let standard = mistakes.keep(standard_endpoints(draft, inherited))?;
    // Without a configured endpoint, a host of a cluster listens only if it has such disks.
    let is_said = !draft.service.nbd.is_empty() || standard == [(Endpoint::Inherited, false)];
    let always = if draft.cluster.is_some() && is_said { &*standard } else { &[] };
    let before = mistakes.count();
    let mut servers = servers(&draft.disks, &standard, always, mistakes);
    let doors = doors(&draft.disks, &servers, mistakes);
    if mistakes.count() > before {
        return None;
    }
    if is_said || !draft.disks.iter().all(|disk| says_where(disk)) {
        for server in &mut servers {
            let place = place_of(&server.endpoint);
            // Endpoints are compared by absolute path.
            let own = standard.iter().find(|(endpoint, _)| place_of(endpoint) == place);
            server.standard = own.map(|(_, read_only)| *read_only);
        }
    }
    if servers.is_empty() {
        mistakes.keep(check_without_nbd(draft));
    }
    check_clients(draft, &servers, mistakes);
    check_sockets(&servers, &doors, &draft.service, mistakes);
    Some((servers, doors))
}

/// True if the disk has explicit exports.
fn says_where(disk: &DiskConfig) -> bool {
    !disk.exports.is_empty()
}

fn check_access(disk: &Placed<DiskConfig>, tls: &Tls) -> Result<(), Wrong> {
    clients::check_access(disk, &disk.access, tls, false)
}

fn check_names(draft: &Draft, mistakes: &Mistakes) {
    let disks = draft.disks.iter().map(|disk| (&disk.name, disk.place("name")));
    let groups = draft.groups.iter().map(|group| (&group.name, group.place("name")));
    for (name, place) in disks.clone().chain(groups.clone()) {
        mistakes.keep(named(name).map_err(|rule| place.wrong(rule)));
    }
    let mut seen = HashSet::new();
    if let Some((name, place)) = disks.clone().find(|(name, _)| !seen.insert(*name)) {
        mistakes
            .tell(place.wrong(format!(
                "another disk is called {name:?} (give each a name of its own, with --name)"
            )));
    }
    let disks: HashSet<_> = disks.map(|(name, _)| name).collect();
    for (name, place) in groups.filter(|(name, _)| disks.contains(name)) {
        let rule = format!("a disk is called {name:?} too, and commands take both (rename one)");
        mistakes.tell(place.wrong(rule));
    }
}

/// Checks groups with cluster-wide limits: these are set once for all hosts, and apply independent
/// of a device's utilization.
fn check_cluster(draft: &Draft) -> Result<(), Wrong> {
    let cluster = draft.cluster.as_ref();
    let control_groups = cluster.map_or(&[][..], |cluster| cluster.control_groups.as_slice());
    let of_control_groups = |name: &str| control_groups.iter().any(|other| other == name);
    if let Some(group) = draft.groups.iter().find(|group| of_control_groups(&group.name)) {
        return Err(group.place("name").wrong(
            "is for disks, and [cluster] names it in control-groups (a host's part of a group goes to one of both)",
        ));
    }
    if let Some(said) =
        cluster.filter(|_| !control_groups.is_empty() && draft.service.cgroup_limits.is_none())
    {
        return Err(said.own_place().wrong(
            "control-groups needs cgroup-limits in [daemon], the file of the limits of control groups",
        ));
    }
    for group in draft.groups.iter().filter(|group| group.cluster) {
        let name = &group.name;
        if draft.cluster.is_none() {
            return Err(group.wrong("cluster", "there is no cluster (add [cluster] with name and etcd)"));
        }
        let is_limit = |key: &str| throttle::Setting::from_name(key).is_some();
        if let Some((_, limit)) = group.all_given().find(|(key, _)| is_limit(key)) {
            return Err(limit.wrong(format!(
                "is the cluster's to say, the same for all hosts (leave it out here; `weir throttle {name} --cluster` sets it for all)"
            )));
        }
        if let Some(watermark) = group.given("watermark") {
            return Err(watermark.wrong(
                "lifts limits where a device of this host is idle, and these are of all hosts (leave one of them out)",
            ));
        }
    }
    Ok(())
}

/// Checks a name or description that may be empty.
fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() { Ok(()) } else { named(name) }
}

/// Checks the name of a disk or a group: it has to fit the NBD protocol, a log line and a URL, in
/// which `.` and `..` are no segments (RFC 3986, section 5.2.4).
///
/// # Errors
/// Returns the rule.
pub fn named(name: &str) -> Result<(), String> {
    match name {
        "" => Err("the name is empty (give it one)".to_owned()),
        _ if name.len() > MAX_NAME_BYTES => {
            Err(format!("the name is too long; it has {MAX_NAME_BYTES} bytes at most"))
        }
        _ if name.chars().any(char::is_control) => {
            Err("the name holds a control character (leave it out)".to_owned())
        }
        "." | ".." => Err("the name is a directory's, which no path can hold (give another)".to_owned()),
        _ => Ok(()),
    }
}

/// Checks that no two disks write one file, or write and read it: they would not see each other's
/// writes in time.
fn check_images(disks: &[Placed<DiskConfig>], mistakes: &Mistakes) {
    for disk in disks {
        mistakes.keep(check_image(disk));
    }
    check_clusters(disks, mistakes);
    let mut writer_of: HashMap<&Path, bool> = HashMap::new();
    for disk in disks {
        let Some(path) = disk.image.path() else { continue };
        // Compared by path; locks on the files find other names of one file.
        match writer_of.entry(path) {
            Entry::Occupied(other) if *other.get() || !disk.is_read_only() => {
                mistakes.tell(disk.wrong("image", ANOTHER_HAS_IT));
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(free) => {
                free.insert(!disk.is_read_only());
            }
        }
    }
}

const ANOTHER_HAS_IT: &str = "another disk has this image (export one disk twice, or make both read-only)";

/// Checks keys that the image does not support.
fn check_image(disk: &Placed<DiskConfig>) -> Result<(), Wrong> {
    if disk.force_share && !disk.is_read_only() {
        return Err(disk.wrong(
            "force-share",
            "needs read-only; sharing an image that others write is for reading alone",
        ));
    }
    // Only an NBD client reconnects.
    let mut times = ["reconnect-delay", "open-timeout"].into_iter().filter_map(|key| disk.given(key));
    if let Some(place) = times.next().filter(|_| disk.image.remote().is_none()) {
        return Err(place.wrong("is for images at NBD servers, and this one is at none (leave it out)"));
    }
    if disk.handover {
        if disk.is_read_only() {
            let rule = "is for disks that are written to (what is only read, several may have open)";
            return Err(disk.wrong("handover", rule));
        }
        // Handing over needs file locks.
        if disk.image.path().is_none() {
            let rule = "is for images in files, and this disk is in none (leave it out)";
            return Err(disk.wrong("handover", rule));
        }
    }
    Ok(())
}

/// Checks that no image in a Ceph cluster is opened twice for writing. Opening would fail as well,
/// but without the place of the key.
fn check_clusters(disks: &[Placed<DiskConfig>], mistakes: &Mistakes) {
    let mut seen: HashMap<String, bool> = HashMap::new();
    for disk in disks.iter().filter(|disk| disk.image.is_rbd()) {
        let is_written = !disk.is_read_only() && !disk.image.is_snapshot();
        let other = seen.insert(disk.image.to_string(), is_written);
        if other.is_some_and(|other| other || is_written) {
            mistakes.tell(disk.wrong("image", ANOTHER_HAS_IT));
        }
    }
}

/// Checks that disks on one simulated device have equal rates.
fn check_rates(disks: &[Placed<DiskConfig>], mistakes: &Mistakes) {
    let mut first: HashMap<&str, &RateOptions> = HashMap::new();
    for disk in disks {
        let Some(rate) = &disk.rate else { continue };
        let Some(name) = &rate.shared else { continue };
        if *first.entry(name).or_insert(rate) != rate {
            let rule = format!(
                "another disk shares {name:?} with other rates (give both the same, or another name)"
            );
            mistakes.tell(disk.wrong("rate", rule));
        }
    }
}

/// Checks a disk by itself and with its group, and sets values that follow from other keys. Without
/// `groups` the caller looks up its group.
fn judge_disk(disk: &mut Placed<DiskConfig>, groups: Option<&Groups<'_>>, mistakes: &Mistakes) {
    if check_name(&disk.description).is_err() {
        mistakes.tell(disk.wrong("description", "a description is one line of 4096 bytes at most"));
    }
    disk.judge(mistakes);
    if let Some(group) = &disk.group {
        groups.map(|groups| groups.look_for(group, mistakes, |rule| disk.wrong("group", rule)));
        // The watermark is the group's: it applies to all members together.
        if disk.settings.watermark > 0 {
            let rule = format!(
                "the disk is in group {group:?}, which has the watermark for its members (set it at [group.{group}])"
            );
            mistakes.tell(disk.wrong("watermark", rule));
        }
    }
    if disk.detect_zeroes == DetectZeroes::Unmap && disk.discard == Discards::Ignore {
        let rule = format!("gives space back, and {} keeps it (say on instead)", disk.place("discard"));
        mistakes.tell(disk.wrong("detect-zeroes", rule));
    }
    disk.format = mistakes.keep(format(disk)).flatten();
    // Made explicit: later code reads only the field.
    disk.read_only = disk.is_read_only();
}

/// Format, if it is known before the image is opened.
fn format(disk: &Placed<DiskConfig>) -> Result<Option<Format>, Wrong> {
    let of_qcow2 = disk.qcow2_key().or(disk.given("snapshot"));
    match (disk.format, disk.given("options"), of_qcow2) {
        (Some(Format::Raw), _, Some(place)) => {
            Err(place.wrong("is for qcow2 images, and this one is raw (leave it out)"))
        }
        (Some(Format::Qcow2), Some(options), _) => {
            Err(options.wrong("is for raw images, and this one is qcow2 (leave it out)"))
        }
        (_, Some(options), Some(place)) => {
            Err(place.wrong(format!("is for qcow2 images, and {options} for raw ones")))
        }
        // `options` belongs to the raw format, as in QEMU. A part is never probed, since its first
        // bytes are the guest's.
        (_, Some(_), None) => Ok(Some(Format::Raw)),
        (format, None, _) => Ok(format),
    }
}

/// Number of passed sockets that exports or servers name.
fn passed_by_name(draft: &Draft) -> usize {
    let name = |endpoint: &'_ Endpoint| match endpoint {
        Endpoint::Passed(name) => Some(name.clone()),
        Endpoint::Address(_) | Endpoint::Inherited => None,
    };
    let listens = draft.disks.iter().flat_map(|disk| disk.nbd_exports()).map(|(_, export)| &export.listen);
    let nbd = draft.service.nbd.iter().map(|nbd| &nbd.at).chain(listens).filter_map(name);
    let doors = draft.disks.iter().flat_map(|disk| disk.doors());
    let doors = doors.filter_map(|(_, door)| door.passed().map(str::to_owned));
    nbd.chain(doors).collect::<HashSet<_>>().len()
}

/// Endpoints of disks without explicit exports, each with true if they are read-only there.
fn standard_endpoints(draft: &Draft, inherited: usize) -> Result<Vec<(Endpoint, bool)>, Wrong> {
    // Disks that come from other hosts of a cluster have no explicit exports.
    let all_say = draft.cluster.is_none() && draft.disks.iter().all(|disk| says_where(disk));
    let nbd = &draft.service.nbd;
    if !nbd.is_empty() {
        let wrong = |index, rule: &str| {
            Err(draft.service.item("nbd", index, "").unwrap_or(draft.service.own_place()).wrong(rule))
        };
        if inherited > 0 {
            return wrong(0, "the service manager passed sockets too, in LISTEN_FDS (use one or the other)");
        }
        if all_say {
            return wrong(0, "is not used, because every disk says where it is exported (remove it)");
        }
        let mut seen = HashSet::new();
        if let Some(again) = nbd.iter().position(|nbd| !seen.insert(&nbd.at)) {
            return wrong(again, "is given twice (remove one)");
        }
        let read_only = nbd.iter().position(|nbd| nbd.read_only);
        if let (Some(index), Some(_)) = (read_only, &draft.cluster) {
            return wrong(
                index,
                "read-only: disks that come from other hosts could be written to all the same (leave it out, or make the disks read-only)",
            );
        }
        return Ok(nbd.iter().map(|nbd| (nbd.at.clone(), nbd.read_only)).collect());
    }
    match (inherited, all_say) {
        // The default address, used only by disks without explicit exports.
        (0, _) => Ok(vec![(Endpoint::Address(Address::standard()), false)]),
        (_, false) => Ok(vec![(Endpoint::Inherited, false)]),
        (_, true) => Err(Place::new("LISTEN_FDS").wrong(format!(
            "what was passed (sockets: {inherited}) is not used, because every disk says where it is exported (pass only those that `fd:NAME` of an export takes, as `--vhost-user-blk fd:NAME` and `--nbd fd:NAME` do)"
        ))),
    }
}

/// NBD servers of the disks' exports, and servers at the `always` endpoints.
fn servers(
    disks: &[Placed<DiskConfig>],
    standard: &[(Endpoint, bool)],
    always: &[(Endpoint, bool)],
    mistakes: &Mistakes,
) -> Vec<Server> {
    let empty = |endpoint: Endpoint| Server { endpoint, standard: None, exports: Vec::new() };
    let always = always.iter().map(|(endpoint, _)| endpoint);
    let mut servers: Vec<Server> = always.clone().cloned().map(empty).collect();
    let mut at: HashMap<Endpoint, usize> = always.map(place_of).zip(0..).collect();
    // Export names are unique for each server.
    let mut taken: HashSet<(usize, String)> = HashSet::new();
    for (index, disk) in disks.iter().enumerate() {
        for ExportAt { endpoint, name, read_only, place } in exports_of(disk, standard) {
            mistakes.keep(check_name(name).map_err(|rule| place.wrong(rule)));
            let server = *at.entry(place_of(endpoint)).or_insert_with(|| {
                servers.push(empty(endpoint.clone()));
                servers.len() - 1
            });
            if !taken.insert((server, name.to_owned())) {
                let rule =
                    format!("another export has the name {name:?} at this address (give it another name)");
                mistakes.tell(place.wrong(rule));
            }
            servers[server].exports.push(Export { name: name.to_owned(), disk: index, read_only });
        }
    }
    servers
}

/// NBD export, with the place of its name.
struct ExportAt<'a> {
    endpoint: &'a Endpoint,
    name: &'a str,
    read_only: bool,
    place: &'a Place,
}

fn exports_of<'a>(disk: &'a Placed<DiskConfig>, standard: &'a [(Endpoint, bool)]) -> Vec<ExportAt<'a>> {
    if !says_where(disk) {
        let name = disk.export_name.as_ref().unwrap_or(&disk.name);
        let place = disk.place("name");
        let at = |(endpoint, read_only): &'a (Endpoint, bool)| ExportAt {
            endpoint,
            name,
            read_only: *read_only,
            place,
        };
        return standard.iter().map(at).collect();
    }
    let export = |(index, export): (usize, &'a NbdExport)| ExportAt {
        endpoint: &export.listen,
        name: export.name.as_ref().unwrap_or(&disk.name),
        read_only: export.read_only,
        place: disk
            .item("export", index, ".name")
            // The most specific place that was recorded.
            .or_else(|| disk.item("export", index, ""))
            .unwrap_or(disk.own_place()),
    };
    disk.nbd_exports().map(export).collect()
}

fn doors(disks: &[Placed<DiskConfig>], servers: &[Server], mistakes: &Mistakes) -> Vec<DoorExport> {
    let mut taken: HashSet<PathBuf> = servers.iter().filter_map(socket_of).collect();
    let of_server = |server: &'_ Server| match &server.endpoint {
        Endpoint::Passed(name) => Some(name.clone()),
        Endpoint::Address(_) | Endpoint::Inherited => None,
    };
    // A passed socket can serve one export only.
    let mut passed: HashSet<String> = servers.iter().filter_map(of_server).collect();
    let mut doors = Vec::new();
    for (disk, config) in disks.iter().enumerate() {
        for (index, door) in config.doors() {
            let passed = door.passed().is_some_and(|name| !passed.insert(name.to_owned()));
            if passed || door.path().is_some_and(|path| !taken.insert(spelled_out(&path))) {
                let place = config.item("export", index, "").unwrap_or(config.own_place());
                mistakes.tell(place.wrong("a disk is exported there already (give each export its own)"));
            }
            doors.push(DoorExport { door: door.clone(), disk });
        }
    }
    doors
}

/// Checks for settings that only NBD clients would notice, in a plan without NBD.
fn check_without_nbd(draft: &Draft) -> Result<(), Wrong> {
    // Only given keys are reported, never defaults.
    let connections = draft.service.given("max-connections");
    let descriptions = draft.disks.iter().filter_map(|disk| disk.given("description"));
    // The page uses the certificates as well.
    let has_page = matches!(draft.service.http_address, Some(Address::Tcp { .. }));
    let is_encrypted = draft.service.tls_mode != TlsMode::Off;
    let tls = draft.service.given("tls").filter(|_| is_encrypted && !has_page);
    let mut unused = connections.into_iter().chain(tls).chain(descriptions);
    match unused.next() {
        Some(place) => Err(place.wrong(
            "is not used, because no disk is exported over NBD (leave it out, or export one with NBD too)",
        )),
        None => Ok(()),
    }
}

/// True if clients of other hosts may connect to the server.
fn is_tcp(server: &Server) -> bool {
    !matches!(server.endpoint, Endpoint::Address(Address::Unix(_)))
}

const NO_NETWORK: &str = "is not used, because nobody can come over the network (--socket-mode and --socket-owner are for Unix sockets)";

/// Checks that network rules are used: with Unix sockets alone, or without NBD, they never apply.
fn check_clients(draft: &Draft, servers: &[Server], mistakes: &Mistakes) {
    // A daemon without disks may get a server later.
    let of_all = draft.service.network();
    let per_address = draft.service.given("max-connections-per-address");
    if !draft.disks.is_empty()
        && let Some(place) = of_all.or(per_address)
        && !servers.iter().any(is_tcp)
    {
        mistakes.tell(place.wrong(NO_NETWORK));
    }
    check_clients_of(&draft.disks, servers, mistakes);
}

/// Checks that the rules of single disks are used.
fn check_clients_of(disks: &[Placed<DiskConfig>], servers: &[Server], mistakes: &Mistakes) {
    for (index, disk) in disks.iter().enumerate() {
        let has = |server: &&Server| server.exports.iter().any(|export| export.disk == index);
        let mut at = servers.iter().filter(has).peekable();
        if let Some(name) = disk.given("tls-authz").filter(|_| at.peek().is_none()) {
            mistakes
                .tell(name.wrong("is not used, because the disk is not exported over NBD (leave it out)"));
        }
        let network = disk.given("allow").or(disk.given("deny"));
        if let Some(network) = network.filter(|_| !at.any(is_tcp)) {
            mistakes.tell(network.wrong(NO_NETWORK));
        }
    }
}

/// Absolute path, so that different notations compare equal. Does not resolve links.
fn spelled_out(path: &Path) -> PathBuf {
    path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn place_of(endpoint: &Endpoint) -> Endpoint {
    match endpoint {
        Endpoint::Address(Address::Unix(path)) => Endpoint::Address(Address::Unix(spelled_out(path))),
        other => other.clone(),
    }
}

fn socket_of(server: &Server) -> Option<PathBuf> {
    match &server.endpoint {
        Endpoint::Address(Address::Unix(path)) => Some(spelled_out(path)),
        Endpoint::Address(Address::Tcp { .. }) | Endpoint::Inherited | Endpoint::Passed(_) => None,
    }
}

fn check_sockets(
    servers: &[Server],
    doors: &[DoorExport],
    service: &Placed<DaemonConfig>,
    mistakes: &Mistakes,
) {
    let doors = doors.iter().filter_map(|export| export.door.path()).map(|path| spelled_out(&path));
    let exports: HashSet<PathBuf> = servers.iter().filter_map(socket_of).chain(doors).collect();
    const RULE: &str = "disks are exported at this socket (use another)";
    for (index, _) in service.qmp.iter().enumerate().filter(|(_, path)| exports.contains(&spelled_out(path)))
    {
        mistakes.tell(service.item("qmp", index, "").unwrap_or(service.own_place()).wrong(RULE));
    }
    if service.metrics.is_some() && service.metrics == service.http_address {
        mistakes.tell(service.wrong("http", "both metrics and http are to be there (use another)"));
    }
    let http = [("metrics", &service.metrics), ("http", &service.http_address)];
    let http_sockets = http.into_iter().filter_map(|(key, address)| match address {
        Some(Address::Unix(path)) => Some((key, path)),
        Some(Address::Tcp { .. }) | None => None,
    });
    if let Some(path) = &service.pid_file {
        let path = spelled_out(path);
        let mut others = service.qmp.iter().chain(http_sockets.clone().map(|(_, path)| path));
        if exports.contains(&path) || others.any(|socket| spelled_out(socket) == path) {
            mistakes.tell(service.wrong("pid-file", "a socket is to be there (choose another file)"));
        }
    }
    for (key, path) in http_sockets {
        if exports.contains(&spelled_out(path)) {
            mistakes.tell(service.wrong(key, RULE));
        } else if service.qmp.contains(path) {
            mistakes.tell(service.wrong(key, "is a control socket (use another)"));
        }
    }
}
