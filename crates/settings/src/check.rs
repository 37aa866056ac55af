//! Checks a parsed config and converts it to the desired state: all rules between settings. Limits
//! of a disk apply in addition to those of its group (docs/decisions/0006).
//!
//! All rules are checked, so that one run reports all mistakes, except rules that are broken only
//! as a consequence of another mistake.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    path::{self, Path, PathBuf},
};

use block::disk::{DetectZeroes, Discards};
use policy::throttle;
use storage::{ImageFormat, rate::RateOptions};

use super::{
    ConfigError, ConfigWithOrigins, DaemonConfig, DesiredState, Diagnostics, DiskConfig, ExportSpec,
    GroupConfig, ListenAddress, ListenEndpoint, NbdExportConfig, NbdExportSpec, NbdServerSpec, Origin,
    ParsedConfig, ProcessSpec, QuotaSetting, TlsConfig, TlsMode, clients,
    groups::{self, GroupIndex},
    reservations,
};

/// Longest name in bytes, by the NBD protocol ("Values", strings).
const MAX_NAME_BYTES: usize = 4096;

impl DesiredState {
    /// Desired state for a parsed config. `inherited` is the number of sockets that the service
    /// manager passed; those that no export names serve NBD.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn new(parsed: ParsedConfig, inherited: usize) -> Result<Self, ConfigError> {
        Self::with_diagnostics(parsed, inherited, Diagnostics::default()).map_err(first_error)
    }

    /// As [`new`](Self::new), for a config with known mistakes (`diagnostics`). The tables with
    /// these mistakes are missing from `parsed`, so only rules within single tables are checked
    /// then.
    ///
    /// # Errors
    /// Returns all mistakes, in the order of the file.
    pub fn with_diagnostics(
        parsed: ParsedConfig,
        inherited: usize,
        diagnostics: Diagnostics,
    ) -> Result<Self, Vec<ConfigError>> {
        // In a cluster, disks may come from other hosts.
        if diagnostics.count() == 0 && parsed.disks.is_empty() && parsed.cluster.is_none() {
            let rule = "there is nothing to serve (add a [disk.NAME] with an image)";
            diagnostics.report(Origin::new("no disks").error(rule));
        }
        Self::build(parsed, inherited, diagnostics)
    }

    /// Desired state of a daemon that receives its disks and servers at run time.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn without_disks(parsed: ParsedConfig) -> Result<Self, ConfigError> {
        if let Some(origin) = parsed.daemon.origin_of_given("nbd") {
            return Err(
                origin.error("is not used, because no IMAGE is served (use --nbd-server with --export)")
            );
        }
        Self::build(ParsedConfig { disks: Vec::new(), ..parsed }, 0, Diagnostics::default())
            .map_err(first_error)
    }

    /// Removes disks and their exports. Servers stay, even without exports.
    pub fn remove_disks(&mut self, is_out: impl Fn(&str) -> bool) {
        let mut at = 0;
        let new_indexes: Vec<_> = self
            .disks
            .iter()
            .map(|disk| {
                let index = (!is_out(&disk.name)).then_some(at);
                at += usize::from(index.is_some());
                index
            })
            .collect();
        self.disks.retain(|disk| !is_out(&disk.name));
        for server in &mut self.servers {
            server.exports.retain_mut(|export| match new_indexes[export.disk] {
                Some(index) => {
                    export.disk = index;
                    true
                }
                None => false,
            });
        }
        self.exports.retain_mut(|export| match new_indexes[export.disk] {
            Some(index) => {
                export.disk = index;
                true
            }
            None => false,
        });
    }

    fn build(
        parsed: ParsedConfig,
        inherited: usize,
        diagnostics: Diagnostics,
    ) -> Result<Self, Vec<ConfigError>> {
        // With unreadable tables, rules between tables would report disks and groups as missing.
        let is_complete = diagnostics.count() == 0;
        check_names(&parsed, &diagnostics);
        check_images(&parsed.disks, &diagnostics);
        check_rates(&parsed.disks, &diagnostics);
        // Names and images come first: later checks use names as keys.
        let mut parsed = parsed;
        // Sorted by depth: `reservations::check_reservations` needs each parent before its
        // children.
        parsed.groups = groups::sort_groups(parsed.groups, &diagnostics);
        let known = GroupIndex::new(&parsed.groups);
        parsed.disks.iter_mut().for_each(|disk| check_disk(disk, Some(&known), &diagnostics));
        if diagnostics.count() == 0 {
            // Only with valid limits: the throttle tree would report invalid ones a second time.
            diagnostics.ok_or_report(reservations::check_reservations(&parsed.groups, &parsed.disks));
        }
        parsed.daemon.check_rules(&diagnostics);
        let tls = diagnostics.ok_or_report(parsed.daemon.tls());
        let (mut servers, mut exports) = (Vec::new(), Vec::new());
        if is_complete {
            diagnostics.ok_or_report(check_cluster(&parsed));
            (servers, exports) = resolve_endpoints(&parsed, inherited, &diagnostics).unwrap_or_default();
            if let Some(tls) = &tls {
                for disk in &parsed.disks {
                    diagnostics.ok_or_report(check_access(disk, tls));
                }
            }
        }
        // Without valid TLS settings, dependent rules would report only consequences.
        if let Some(tls) = &tls {
            diagnostics.ok_or_report(parsed.daemon.check_page(tls));
            diagnostics.ok_or_report(parsed.daemon.check_access(tls));
        }
        let ParsedConfig { disks, groups, daemon: mut config, cluster } = parsed;
        // The daemon changes its user after it created the sockets.
        config.sockets.owner = config.sockets.owner.take().or_else(|| config.user.clone());
        let rename_warnings = cluster.iter().flat_map(ConfigWithOrigins::rename_warnings).collect();
        let cluster = cluster.map(ConfigWithOrigins::into_config);
        let service = ProcessSpec { config, tls: tls.unwrap_or(TlsConfig::Off), cluster, rename_warnings };
        diagnostics.finish(Self { disks, groups, servers, exports, process: service })
    }
}

impl DesiredState {
    /// State that consists of one disk, which is added to a running daemon with these TLS settings.
    /// `default_endpoints` are for disks without explicit exports, each with true if it is
    /// read-only.
    ///
    /// The caller checks its group, other disks of the same image or simulated device, and
    /// other exports at the same endpoints.
    ///
    /// # Errors
    /// Returns all mistakes, including those in `diagnostics`.
    pub fn of_disk(
        mut disk: ConfigWithOrigins<DiskConfig>,
        default_endpoints: &[(ListenEndpoint, bool)],
        tls: &TlsConfig,
        diagnostics: Diagnostics,
    ) -> Result<Self, Vec<ConfigError>> {
        diagnostics.ok_or_report(check_object_name(&disk.name).map_err(|rule| disk.own_origin().error(rule)));
        diagnostics.ok_or_report(check_image(&disk));
        check_disk(&mut disk, None, &diagnostics);
        diagnostics.ok_or_report(check_access(&disk, tls));
        let disks = vec![disk];
        let servers = build_servers(&disks, default_endpoints, &[], &diagnostics);
        let exports = build_exports(&disks, &servers, &diagnostics);
        check_clients_of(&disks, &servers, &diagnostics);
        diagnostics.finish(Self { disks, servers, exports, ..Self::empty(tls.clone()) })
    }

    /// State that consists of one checked group, which is added to a running daemon.
    pub fn of_group(group: ConfigWithOrigins<GroupConfig>) -> Self {
        Self { groups: vec![group], ..Self::empty(TlsConfig::Off) }
    }

    fn empty(tls: TlsConfig) -> Self {
        let config = ConfigWithOrigins::default();
        let process = ProcessSpec { config, tls, cluster: None, rename_warnings: Vec::new() };
        Self { disks: Vec::new(), groups: Vec::new(), servers: Vec::new(), exports: Vec::new(), process }
    }
}

fn first_error(all: Vec<ConfigError>) -> ConfigError {
    all.into_iter().next().expect("at least one mistake")
}

/// NBD servers and other exports of all disks; `None` if a mistake prevents finding them.
fn resolve_endpoints(
    parsed: &ParsedConfig,
    inherited: usize,
    diagnostics: &Diagnostics,
) -> Option<(Vec<NbdServerSpec>, Vec<ExportSpec>)> {
    // A socket that an export names serves that export, not NBD by default.
    let inherited = inherited.saturating_sub(named_inherited_sockets(parsed));
    let defaults = diagnostics.ok_or_report(default_endpoints(parsed, inherited))?;
    // In a cluster, configured endpoints listen even without disks, which may arrive later. The
    // default endpoint listens only if a disk uses it.
    let is_configured = !parsed.daemon.nbd.is_empty() || defaults == [(ListenEndpoint::Inherited, false)];
    let always = if parsed.cluster.is_some() && is_configured { &*defaults } else { &[] };
    let before = diagnostics.count();
    let mut servers = build_servers(&parsed.disks, &defaults, always, diagnostics);
    let exports = build_exports(&parsed.disks, &servers, diagnostics);
    if diagnostics.count() > before {
        return None;
    }
    if is_configured || !parsed.disks.iter().all(|disk| has_exports(disk)) {
        for server in &mut servers {
            let absolute = absolute_endpoint(&server.endpoint);
            // Endpoints are compared by absolute path.
            let default_endpoint =
                defaults.iter().find(|(endpoint, _)| absolute_endpoint(endpoint) == absolute);
            server.default_read_only = default_endpoint.map(|(_, read_only)| *read_only);
        }
    }
    if servers.is_empty() {
        diagnostics.ok_or_report(check_without_nbd(parsed));
    }
    check_clients(parsed, &servers, diagnostics);
    check_sockets(&servers, &exports, &parsed.daemon, diagnostics);
    Some((servers, exports))
}

/// True if the disk has explicit exports.
fn has_exports(disk: &DiskConfig) -> bool {
    !disk.exports.is_empty()
}

fn check_access(disk: &ConfigWithOrigins<DiskConfig>, tls: &TlsConfig) -> Result<(), ConfigError> {
    clients::check_access(disk, &disk.access, tls, false)
}

fn check_names(parsed: &ParsedConfig, diagnostics: &Diagnostics) {
    let disks = parsed.disks.iter().map(|disk| (&disk.name, disk.origin("name")));
    let groups = parsed.groups.iter().map(|group| (&group.name, group.origin("name")));
    for (name, origin) in disks.clone().chain(groups.clone()) {
        diagnostics.ok_or_report(check_object_name(name).map_err(|rule| origin.error(rule)));
    }
    let mut seen = HashSet::new();
    if let Some((name, origin)) = disks.clone().find(|(name, _)| !seen.insert(*name)) {
        diagnostics
            .report(origin.error(format!("another disk is named {name:?} (set unique names with --name)")));
    }
    let disks: HashSet<_> = disks.map(|(name, _)| name).collect();
    for (name, origin) in groups.filter(|(name, _)| disks.contains(name)) {
        let rule = format!("a disk is named {name:?} too, and commands accept both (rename one)");
        diagnostics.report(origin.error(rule));
    }
}

/// Checks groups with cluster-wide limits: these are set once for all hosts, and apply
/// independently of a device's utilization.
fn check_cluster(parsed: &ParsedConfig) -> Result<(), ConfigError> {
    let cluster = parsed.cluster.as_ref();
    let control_groups = cluster.map_or(&[][..], |cluster| cluster.control_groups.as_slice());
    let is_control_group = |name: &str| control_groups.iter().any(|other| other == name);
    if let Some(group) = parsed.groups.iter().find(|group| is_control_group(&group.name)) {
        return Err(group.origin("name").error(
            "has disks, and [cluster] names it in control-groups (a group is for disks or for \
             control groups)",
        ));
    }
    if let Some(incomplete) =
        cluster.filter(|_| !control_groups.is_empty() && parsed.daemon.cgroup_limits.is_none())
    {
        return Err(incomplete.own_origin().error(
            "control-groups needs cgroup-limits in [daemon], the file of the limits of control groups",
        ));
    }
    for group in parsed.groups.iter().filter(|group| group.cluster) {
        let name = &group.name;
        if parsed.cluster.is_none() {
            return Err(group.error("cluster", "there is no cluster (add [cluster] with name and etcd)"));
        }
        let is_limit = |key: &str| throttle::LimitSetting::from_name(key).is_some();
        if let Some((_, limit)) = group.given_origins().find(|(key, _)| is_limit(key)) {
            return Err(limit.error(format!(
                "is set by the cluster, for all hosts (remove it here; `weir throttle {name} \
                 --cluster` sets it for all hosts)"
            )));
        }
        if !group.schedule.entries.is_empty() {
            return Err(group.error("schedule", "its limits are the cluster's, for all hosts (remove it)"));
        }
        let quota = QuotaSetting::ALL.into_iter().find_map(|setting| group.origin_of_given(setting.name()));
        if let Some(quota) = quota {
            return Err(quota.error(
                "counts the bytes of this host, but the limits of this group are the cluster's, for all \
                 hosts (remove one of them, or set quotas for the disks)",
            ));
        }
        if let Some(watermark) = group.origin_of_given("watermark") {
            return Err(watermark.error(
                "lifts limits by the load of this host's device, but these limits are for all \
                 hosts (remove one of them)",
            ));
        }
    }
    Ok(())
}

/// Checks a name or description that may be empty.
fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() { Ok(()) } else { check_object_name(name) }
}

/// Checks the name of a disk or a group: it has to fit the NBD protocol, a log line and a URL, in
/// which `.` and `..` are no segments (RFC 3986, section 5.2.4).
///
/// # Errors
/// Returns the violated rule as a message.
pub fn check_object_name(name: &str) -> Result<(), String> {
    match name {
        "" => Err("the name is empty (set one)".to_owned()),
        _ if name.len() > MAX_NAME_BYTES => {
            Err(format!("the name is too long; at most {MAX_NAME_BYTES} bytes"))
        }
        _ if name.chars().any(char::is_control) => {
            Err("the name has a control character (remove it)".to_owned())
        }
        "." | ".." => Err("the name has a special meaning in paths (choose another)".to_owned()),
        _ => Ok(()),
    }
}

/// Checks that no two disks write one file, or write and read it: they would not see each other's
/// writes in time.
fn check_images(disks: &[ConfigWithOrigins<DiskConfig>], diagnostics: &Diagnostics) {
    for disk in disks {
        diagnostics.ok_or_report(check_image(disk));
    }
    check_clusters(disks, diagnostics);
    let mut writer_of: HashMap<&Path, bool> = HashMap::new();
    for disk in disks {
        let Some(path) = disk.image.path() else { continue };
        // Compared by path. Other names of one file are detected by file locks when it is opened.
        match writer_of.entry(path) {
            Entry::Occupied(other) if *other.get() || !disk.is_read_only() => {
                diagnostics.report(disk.error("image", IMAGE_IN_USE_RULE));
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(free) => {
                free.insert(!disk.is_read_only());
            }
        }
    }
}

const IMAGE_IN_USE_RULE: &str =
    "another disk uses this image (export one disk twice, or make both read-only)";

/// Checks keys that the image does not support.
fn check_image(disk: &ConfigWithOrigins<DiskConfig>) -> Result<(), ConfigError> {
    if disk.force_share && !disk.is_read_only() {
        return Err(
            disk.error("force-share", "needs read-only, because another program may write to the image")
        );
    }
    // Only an NBD client reconnects.
    let mut times =
        ["reconnect-delay", "open-timeout"].into_iter().filter_map(|key| disk.origin_of_given(key));
    if let Some(origin) = times.next().filter(|_| disk.image.remote().is_none()) {
        return Err(origin.error("is for images at NBD servers only (remove it)"));
    }
    if disk.handover {
        if disk.is_read_only() {
            let rule = "is for writable disks only (several daemons can open a read-only image)";
            return Err(disk.error("handover", rule));
        }
        // Handing over needs file locks.
        if disk.image.path().is_none() {
            let rule = "is for images in files only (remove it)";
            return Err(disk.error("handover", rule));
        }
    }
    Ok(())
}

/// Checks that no image in a Ceph cluster is opened twice for writing. Opening would fail as well,
/// but the error would not name the key.
fn check_clusters(disks: &[ConfigWithOrigins<DiskConfig>], diagnostics: &Diagnostics) {
    let mut seen: HashMap<String, bool> = HashMap::new();
    for disk in disks.iter().filter(|disk| disk.image.is_rbd()) {
        let is_written = !disk.is_read_only() && !disk.image.is_snapshot();
        let other = seen.insert(disk.image.to_string(), is_written);
        if other.is_some_and(|other| other || is_written) {
            diagnostics.report(disk.error("image", IMAGE_IN_USE_RULE));
        }
    }
}

/// Checks that disks on one simulated device have equal rates.
fn check_rates(disks: &[ConfigWithOrigins<DiskConfig>], diagnostics: &Diagnostics) {
    let mut first: HashMap<&str, &RateOptions> = HashMap::new();
    for disk in disks {
        let Some(rate) = &disk.rate else { continue };
        let Some(name) = &rate.shared else { continue };
        if *first.entry(name).or_insert(rate) != rate {
            let rule = format!(
                "another disk shares {name:?} with other rates (use the same rates, or another name)"
            );
            diagnostics.report(disk.error("rate", rule));
        }
    }
}

/// Checks a disk by itself and with its group, and sets values that follow from other keys. Without
/// `groups` the caller looks up its group.
fn check_disk(
    disk: &mut ConfigWithOrigins<DiskConfig>,
    groups: Option<&GroupIndex<'_>>,
    diagnostics: &Diagnostics,
) {
    if check_name(&disk.description).is_err() {
        diagnostics.report(disk.error("description", "must be one line of at most 4096 bytes"));
    }
    disk.check_rules(diagnostics);
    if let Some(group) = &disk.group {
        groups.map(|groups| groups.find_or_report(group, diagnostics, |rule| disk.error("group", rule)));
        let above = groups.and_then(|groups| groups.with_latency_target(Some(group)));
        if let Some(above) = above.filter(|_| disk.settings.latency.target_ns > 0) {
            diagnostics.report(disk.error("latency-target", groups::nested_target_rule(above)));
        }
        // The watermark is the group's: it applies to all members together.
        if disk.settings.watermark > 0 {
            let rule = format!(
                "the disk is in group {group:?}, whose watermark applies to its members (set it in \
                 [group.{group}])"
            );
            diagnostics.report(disk.error("watermark", rule));
        }
    }
    if disk.detect_zeroes == DetectZeroes::Unmap && disk.discard == Discards::Ignore {
        let rule = format!("frees space, and {} keeps it (use on instead)", disk.origin("discard"));
        diagnostics.report(disk.error("detect-zeroes", rule));
    }
    disk.format = diagnostics.ok_or_report(known_format(disk)).flatten();
    // Made explicit: later code reads only the field.
    disk.read_only = disk.is_read_only();
}

/// Format, if it is known before the image is opened.
fn known_format(disk: &ConfigWithOrigins<DiskConfig>) -> Result<Option<ImageFormat>, ConfigError> {
    let of_qcow2 = disk.first_qcow2_key().or(disk.origin_of_given("snapshot"));
    match (disk.format, disk.origin_of_given("options"), of_qcow2) {
        (Some(ImageFormat::Raw), _, Some(origin)) => {
            Err(origin.error("is for qcow2 images, and this one is raw (leave it out)"))
        }
        (Some(ImageFormat::Qcow2), Some(options), _) => {
            Err(options.error("is for raw images, and this one is qcow2 (leave it out)"))
        }
        (_, Some(options), Some(origin)) => {
            Err(origin.error(format!("is for qcow2 images, and {options} for raw ones")))
        }
        // `options` belongs to the raw format, as in QEMU. A part of a file is never probed,
        // because the guest controls its first bytes.
        (_, Some(_), None) => Ok(Some(ImageFormat::Raw)),
        (format, None, _) => Ok(format),
    }
}

/// Number of inherited sockets that exports or NBD servers name.
fn named_inherited_sockets(parsed: &ParsedConfig) -> usize {
    let name = |endpoint: &'_ ListenEndpoint| match endpoint {
        ListenEndpoint::Passed(name) => Some(name.clone()),
        ListenEndpoint::Address(_) | ListenEndpoint::Inherited => None,
    };
    let listens = parsed.disks.iter().flat_map(|disk| disk.nbd_exports()).map(|(_, export)| &export.listen);
    let nbd = parsed.daemon.nbd.iter().map(|nbd| &nbd.endpoint).chain(listens).filter_map(name);
    let targets = parsed.disks.iter().flat_map(|disk| disk.targets());
    let targets = targets.filter_map(|(_, target)| target.inherited_name().map(str::to_owned));
    nbd.chain(targets).collect::<HashSet<_>>().len()
}

/// Endpoints for disks without explicit exports, each with true if it is read-only.
fn default_endpoints(
    parsed: &ParsedConfig,
    inherited: usize,
) -> Result<Vec<(ListenEndpoint, bool)>, ConfigError> {
    // Disks that come from other hosts of a cluster have no explicit exports.
    let all_have_exports = parsed.cluster.is_none() && parsed.disks.iter().all(|disk| has_exports(disk));
    let nbd = &parsed.daemon.nbd;
    if !nbd.is_empty() {
        let to_error = |index, rule: &str| {
            Err(parsed.daemon.item_origin("nbd", index, "").unwrap_or(parsed.daemon.own_origin()).error(rule))
        };
        if inherited > 0 {
            return to_error(
                0,
                "the service manager passed sockets too, in LISTEN_FDS (use one or the other)",
            );
        }
        if all_have_exports {
            return to_error(0, "is not used, because every disk has its own exports (remove it)");
        }
        let mut seen = HashSet::new();
        if let Some(duplicate) = nbd.iter().position(|nbd| !seen.insert(&nbd.endpoint)) {
            return to_error(duplicate, "is given twice (remove one)");
        }
        let read_only = nbd.iter().position(|nbd| nbd.read_only);
        if let (Some(index), Some(_)) = (read_only, &parsed.cluster) {
            return to_error(
                index,
                "read-only: would not apply to disks moved from other hosts (remove it, or make \
                 the disks read-only)",
            );
        }
        return Ok(nbd.iter().map(|nbd| (nbd.endpoint.clone(), nbd.read_only)).collect());
    }
    match (inherited, all_have_exports) {
        // The default address, used only by disks without explicit exports.
        (0, _) => Ok(vec![(ListenEndpoint::Address(ListenAddress::nbd_default()), false)]),
        (_, false) => Ok(vec![(ListenEndpoint::Inherited, false)]),
        (_, true) => Err(Origin::new("LISTEN_FDS").error(format!(
            "sockets passed by the service manager ({inherited}) are not used, because every disk \
             has its own exports (pass only those that exports use as fd:NAME)"
        ))),
    }
}

/// NBD servers of the disks' exports, and servers at the `always` endpoints.
fn build_servers(
    disks: &[ConfigWithOrigins<DiskConfig>],
    default_endpoints: &[(ListenEndpoint, bool)],
    always: &[(ListenEndpoint, bool)],
    diagnostics: &Diagnostics,
) -> Vec<NbdServerSpec> {
    let empty =
        |endpoint: ListenEndpoint| NbdServerSpec { endpoint, default_read_only: None, exports: Vec::new() };
    let always = always.iter().map(|(endpoint, _)| endpoint);
    let mut servers: Vec<NbdServerSpec> = always.clone().cloned().map(empty).collect();
    let mut at: HashMap<ListenEndpoint, usize> = always.map(absolute_endpoint).zip(0..).collect();
    // Export names are unique for each server.
    let mut taken: HashSet<(usize, String)> = HashSet::new();
    for (index, disk) in disks.iter().enumerate() {
        for NbdExportWithOrigin { endpoint, name, read_only, origin: place } in
            nbd_exports_of(disk, default_endpoints)
        {
            diagnostics.ok_or_report(check_name(name).map_err(|rule| place.error(rule)));
            let server = *at.entry(absolute_endpoint(endpoint)).or_insert_with(|| {
                servers.push(empty(endpoint.clone()));
                servers.len() - 1
            });
            if !taken.insert((server, name.to_owned())) {
                let rule = format!("another export has the name {name:?} at this address (choose another)");
                diagnostics.report(place.error(rule));
            }
            servers[server].exports.push(NbdExportSpec { name: name.to_owned(), disk: index, read_only });
        }
    }
    servers
}

/// NBD export, with the origin of its name.
struct NbdExportWithOrigin<'a> {
    endpoint: &'a ListenEndpoint,
    name: &'a str,
    read_only: bool,
    origin: &'a Origin,
}

fn nbd_exports_of<'a>(
    disk: &'a ConfigWithOrigins<DiskConfig>,
    default_endpoints: &'a [(ListenEndpoint, bool)],
) -> Vec<NbdExportWithOrigin<'a>> {
    if !has_exports(disk) {
        let name = disk.export_name.as_ref().unwrap_or(&disk.name);
        let origin = disk.origin("name");
        let at = |(endpoint, read_only): &'a (ListenEndpoint, bool)| NbdExportWithOrigin {
            endpoint,
            name,
            read_only: *read_only,
            origin,
        };
        return default_endpoints.iter().map(at).collect();
    }
    let export = |(index, export): (usize, &'a NbdExportConfig)| NbdExportWithOrigin {
        endpoint: &export.listen,
        name: export.name.as_ref().unwrap_or(&disk.name),
        read_only: export.read_only,
        origin: disk
            .item_origin("export", index, ".name")
            // The most specific origin that was recorded.
            .or_else(|| disk.item_origin("export", index, ""))
            .unwrap_or(disk.own_origin()),
    };
    disk.nbd_exports().map(export).collect()
}

fn build_exports(
    disks: &[ConfigWithOrigins<DiskConfig>],
    servers: &[NbdServerSpec],
    diagnostics: &Diagnostics,
) -> Vec<ExportSpec> {
    let mut taken: HashSet<PathBuf> = servers.iter().filter_map(socket_path_of).collect();
    let of_server = |server: &'_ NbdServerSpec| match &server.endpoint {
        ListenEndpoint::Passed(name) => Some(name.clone()),
        ListenEndpoint::Address(_) | ListenEndpoint::Inherited => None,
    };
    // A passed socket can serve one export only.
    let mut passed: HashSet<String> = servers.iter().filter_map(of_server).collect();
    let mut exports = Vec::new();
    for (disk, config) in disks.iter().enumerate() {
        for (index, target) in config.targets() {
            let passed = target.inherited_name().is_some_and(|name| !passed.insert(name.to_owned()));
            if passed || target.path().is_some_and(|path| !taken.insert(absolute_path(&path))) {
                let origin = config.item_origin("export", index, "").unwrap_or(config.own_origin());
                diagnostics.report(origin.error("another export has the same address (choose another)"));
            }
            exports.push(ExportSpec { target: target.clone(), disk });
        }
    }
    exports
}

/// Rejects settings that affect only NBD clients, in a config without NBD exports.
fn check_without_nbd(parsed: &ParsedConfig) -> Result<(), ConfigError> {
    // Only given keys are reported, never defaults.
    let connections = parsed.daemon.origin_of_given("max-connections");
    let descriptions = parsed.disks.iter().filter_map(|disk| disk.origin_of_given("description"));
    // The web page uses the certificates too.
    let has_page = matches!(parsed.daemon.http_address, Some(ListenAddress::Tcp { .. }));
    let is_encrypted = parsed.daemon.tls_mode != TlsMode::Off;
    let tls = parsed.daemon.origin_of_given("tls").filter(|_| is_encrypted && !has_page);
    let mut unused = connections.into_iter().chain(tls).chain(descriptions);
    match unused.next() {
        Some(origin) => Err(origin
            .error("is not used, because no disk is exported over NBD (remove it, or add an NBD export)")),
        None => Ok(()),
    }
}

/// True if clients of other hosts may connect: over TCP, or over an inherited socket, whose
/// address family is not known here.
fn accepts_network_clients(server: &NbdServerSpec) -> bool {
    !matches!(server.endpoint, ListenEndpoint::Address(ListenAddress::Unix(_)))
}

const NETWORK_RULE_UNUSED: &str = "is not used, because no server listens on the network \
                                   (--socket-mode and --socket-owner are for Unix sockets)";

/// Checks that network rules are used: with Unix sockets alone, or without NBD, they never apply.
fn check_clients(parsed: &ParsedConfig, servers: &[NbdServerSpec], diagnostics: &Diagnostics) {
    // A daemon without disks may get a server later.
    let of_all = parsed.daemon.network();
    let per_address = parsed.daemon.origin_of_given("max-connections-per-address");
    if !parsed.disks.is_empty()
        && let Some(origin) = of_all.or(per_address)
        && !servers.iter().any(accepts_network_clients)
    {
        diagnostics.report(origin.error(NETWORK_RULE_UNUSED));
    }
    check_clients_of(&parsed.disks, servers, diagnostics);
}

/// Checks that the rules of single disks are used.
fn check_clients_of(
    disks: &[ConfigWithOrigins<DiskConfig>],
    servers: &[NbdServerSpec],
    diagnostics: &Diagnostics,
) {
    for (index, disk) in disks.iter().enumerate() {
        let exports_disk = |server: &&NbdServerSpec| server.exports.iter().any(|export| export.disk == index);
        let mut at = servers.iter().filter(exports_disk).peekable();
        if let Some(name) = disk.origin_of_given("tls-authz").filter(|_| at.peek().is_none()) {
            diagnostics
                .report(name.error("is not used, because the disk is not exported over NBD (remove it)"));
        }
        let network = disk.origin_of_given("allow").or(disk.origin_of_given("deny"));
        if let Some(network) = network.filter(|_| !at.any(accepts_network_clients)) {
            diagnostics.report(network.error(NETWORK_RULE_UNUSED));
        }
    }
}

/// Absolute path, so that different notations compare equal. Does not resolve links.
fn absolute_path(path: &Path) -> PathBuf {
    path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn absolute_endpoint(endpoint: &ListenEndpoint) -> ListenEndpoint {
    match endpoint {
        ListenEndpoint::Address(ListenAddress::Unix(path)) => {
            ListenEndpoint::Address(ListenAddress::Unix(absolute_path(path)))
        }
        other => other.clone(),
    }
}

fn socket_path_of(server: &NbdServerSpec) -> Option<PathBuf> {
    match &server.endpoint {
        ListenEndpoint::Address(ListenAddress::Unix(path)) => Some(absolute_path(path)),
        ListenEndpoint::Address(ListenAddress::Tcp { .. })
        | ListenEndpoint::Inherited
        | ListenEndpoint::Passed(_) => None,
    }
}

fn check_sockets(
    servers: &[NbdServerSpec],
    other_exports: &[ExportSpec],
    service: &ConfigWithOrigins<DaemonConfig>,
    diagnostics: &Diagnostics,
) {
    let export_paths =
        other_exports.iter().filter_map(|export| export.target.path()).map(|path| absolute_path(&path));
    let exports: HashSet<PathBuf> = servers.iter().filter_map(socket_path_of).chain(export_paths).collect();
    const RULE: &str = "disks are exported at this socket (use another)";
    for (index, _) in
        service.qmp.iter().enumerate().filter(|(_, path)| exports.contains(&absolute_path(path)))
    {
        diagnostics.report(service.qmp_origin(index).error(RULE));
    }
    if service.metrics.is_some() && service.metrics == service.http_address {
        diagnostics.report(service.error("http", "metrics and http have the same address (use another)"));
    }
    let http = [("metrics", &service.metrics), ("http", &service.http_address)];
    let http_sockets = http.into_iter().filter_map(|(key, address)| match address {
        Some(ListenAddress::Unix(path)) => Some((key, path)),
        Some(ListenAddress::Tcp { .. }) | None => None,
    });
    if let Some(path) = &service.pid_file {
        let path = absolute_path(path);
        let mut other_sockets = service.qmp.iter().chain(http_sockets.clone().map(|(_, path)| path));
        if exports.contains(&path) || other_sockets.any(|socket| absolute_path(socket) == path) {
            diagnostics.report(service.error("pid-file", "a socket uses this path (choose another file)"));
        }
    }
    for (key, path) in http_sockets {
        if exports.contains(&absolute_path(path)) {
            diagnostics.report(service.error(key, RULE));
        } else if service.qmp.contains(path) {
            diagnostics.report(service.error(key, "is a control socket (use another)"));
        }
    }
}
