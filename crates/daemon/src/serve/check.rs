//! `weir check-config`, and `weir serve --check`: check whether a daemon would start, without
//! starting it.
//!
//! ```text
//!   the file      as every start reads it: all mistakes are reported, and end the check
//!   the machine   images, passphrases, keys, sockets' directories, devices: all are reported
//!   a cluster     each member of etcd, as at a start: some seconds in all
//! ```
//!
//! Follows the start as far as that leaves no trace. Images are opened for reading even if another
//! program writes to them. A config file may be checked while a daemon serves it: then only images
//! in use by programs other than weir are reported. `weir serve --check` is for a daemon that does
//! not run yet, and reports everything in use. Never listens, makes a device or locks an image.

mod diagnostics;
mod files;

use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use anyhow::{Context as _, anyhow};
use api::Severity;
use clap::Args;
use cluster;
use console::{CommandFailure, descriptors, figures, logging, on_reactor, print, print_error, print_json};
use control::{
    assemble, endpoints,
    listen::{self, AddressConflictRule},
    reconcile::{PlanDifference, ReconcileReason, Reconciliation},
    recording,
    registry::Registry,
};
use nix::unistd::{AccessFlags, access};
use policy::throttle::LimitKind;
use sandbox;
use settings::{
    ConfigError, ConfigWithOrigins, ControlSocketPolicy, DesiredState, Diagnostics, ExportConfig,
    ExportTarget, ListenAddress, ListenEndpoint, LogSettings, Origin, ParsedConfig, ProcessSpec,
    control::ControlSocketLocation,
};
use storage::rate::RateBudgets;
use weir_http::ChangeToken;

use super::memory;
use crate::on_event;

/// Shown below the options.
pub const CHECK_EXAMPLES: &str = "\
Examples:
  weir check-config /etc/weir/weir.toml
      Whether `weir serve --config` would start with it; also while a daemon serves it.
  weir check-config weir.toml && weir reload
  weir serve --config weir.toml --check
      The same before a start: also whether another weir has an image, or a process listens at a
      socket or a port.

Exit status: 0 no problems, 1 problems, which are printed with line and key.";

/// Arguments of `weir check-config`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The config file
    #[arg(value_name = "FILE")]
    config: PathBuf,
    /// Print an array of diagnostics as JSON: severity, file, line, key, message
    #[arg(long)]
    json: bool,
}

/// Reports all problems that would keep a daemon with this config file from serving.
///
/// # Errors
/// [`CommandFailure::Found`] after all problems were reported.
pub fn check_config(arguments: CheckArgs) -> Result<(), CommandFailure> {
    let diagnostics = Diagnostics::default();
    let parsed =
        settings::config::load_with_options(&arguments.config, &ConfigWithOrigins::default(), &diagnostics);
    let plan = DesiredState::with_diagnostics(parsed.clone(), 0, diagnostics);
    if !arguments.json {
        return check(parsed, plan, AddressConflictRule::Tolerated, Some(arguments.config));
    }
    let found = diagnostics::collect_diagnostics(parsed, plan, arguments.config)?;
    print_json(&found)?;
    match found.iter().any(|diagnostic| diagnostic.severity == Severity::Error) {
        true => Err(CommandFailure::Found(1)),
        false => Ok(()),
    }
}

/// Reports all problems of a config, from a file or from the command line alone.
pub(super) fn check(
    parsed: ParsedConfig,
    plan: Result<DesiredState, Vec<ConfigError>>,
    conflict_rule: AddressConflictRule,
    file: Option<PathBuf>,
) -> Result<(), CommandFailure> {
    let plan = match plan {
        Ok(plan) => plan,
        Err(all) => {
            all.into_iter().for_each(|error| print_error(&error.into()));
            return Err(CommandFailure::Found(1));
        }
    };
    let (sum, bursts) = (plan_summary(&plan), bursts(&plan));
    let name = file.as_ref().map_or_else(|| "weir serve".to_owned(), |file| file.display().to_string());
    let found = find_problems(parsed, plan, conflict_rule, file)?;
    found.iter().for_each(print_error);
    // All problems are printed before the first one decides the exit status.
    if !found.is_empty() {
        return Err(CommandFailure::Found(1));
    }
    let verdict = match logging::warnings() {
        0 => "no errors".to_owned(),
        warnings => format!("it would start, with {}", count(warnings, "warning")),
    };
    Ok(print(&format!("{name}: {sum}: {verdict}\n{bursts}"))?)
}

/// Returns all problems that would keep a daemon from serving this plan. Logs warnings.
fn find_problems(
    parsed: ParsedConfig,
    plan: DesiredState,
    conflict_rule: AddressConflictRule,
    file: Option<PathBuf>,
) -> Result<Vec<anyhow::Error>, CommandFailure> {
    // Warnings are for the user of this command, not for the daemon's log file.
    logging::start(&LogSettings { file: None, ..plan.process.log.clone() })?;
    // Same limits as at a start, or the check could fail where a start succeeds.
    descriptors::raise_limit();
    memory::set_budget(&plan.process)?;
    on_reactor(async move { Ok(problems(&parsed, &plan, conflict_rule, file).await) })
}

/// Number of bursts that are shown.
const MAX_BURSTS_SHOWN: usize = 20;

/// Durations of full bursts that are not admitted at once, one per line: a full burst lasts longer
/// than `-max-length`.
fn bursts(plan: &DesiredState) -> String {
    let groups = plan.groups.iter().map(|group| ("group", &group.name, &group.settings.limits));
    let disks = plan.disks.iter().map(|disk| ("disk", &disk.name, &disk.settings.limits));
    let lines = groups.chain(disks).flat_map(|(label, name, limits)| {
        let long = LimitKind::ALL.into_iter().filter(|&kind| limits.limit(kind).has_burst_rate_bucket());
        let lasting = long.filter_map(|kind| figures::full_burst(kind, limits.limit(kind)));
        lasting.map(move |burst| format!("{label} {name}: {burst}\n"))
    });
    let mut lines = lines.collect::<Vec<_>>();
    let more = lines.len().saturating_sub(MAX_BURSTS_SHOWN);
    lines.truncate(MAX_BURSTS_SHOWN);
    if more > 0 {
        lines.push(format!("and {more} more\n"));
    }
    lines.concat()
}

fn count(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

fn plan_summary(plan: &DesiredState) -> String {
    let exports = plan.servers.iter().map(|server| server.exports.len()).sum::<usize>() + plan.exports.len();
    let parts =
        [count(plan.disks.len(), "disk"), count(plan.groups.len(), "group"), count(exports, "export")];
    parts.join(", ")
}

/// All problems, in the order of a start.
async fn problems(
    parsed: &ParsedConfig,
    plan: &DesiredState,
    conflict_rule: AddressConflictRule,
    file: Option<PathBuf>,
) -> Vec<anyhow::Error> {
    let mut found = Vec::new();
    let registry = Registry::new(file, Rc::new(|_| {}));
    if let Err(error) = images(parsed, plan, conflict_rule, &registry, &mut found).await {
        found.push(error);
    }
    memory::warn_of_disks(&plan.disks);
    registry.read_capacities(plan.process.state.as_deref());
    found.extend(registry.check_devices().err());
    let service = &parsed.daemon;
    // Only one of these keys can be set.
    let keys = service.origin_of_given("tls-certificates").or(service.origin_of_given("tls-psk"));
    found.extend(
        assemble::read_tls_credentials(&plan.process.tls).err().map(|error| with_origin(keys, error)),
    );
    let sandbox_error = sandbox::check(plan).err();
    found.extend(sandbox_error.map(|error| with_origin(service.origin_of_given("user"), error)));
    found.extend(sandbox::check_descriptor_limit(plan).err());
    sockets(parsed, plan, conflict_rule, &mut found);
    for disk in &plan.disks {
        found.extend(disk.targets().filter_map(|(index, target)| {
            Some(with_origin(
                disk.item_origin("export", index, ""),
                endpoints::check_host_support(target).err()?,
            ))
        }));
    }
    found.extend(plan.process.on_event.as_ref().and_then(|target| {
        on_event::check(target).err().map(|error| with_origin(service.origin_of_given("on-event"), error))
    }));
    found.extend(service.http_token_file.as_ref().and_then(|file| {
        let error = ChangeToken::read(file).err()?;
        Some(with_origin(service.origin_of_given("http-token-file"), error))
    }));
    found.extend(service.origin_of_given("cgroup-limits").and_then(|origin| {
        let error = cgroup::watch::check_machine().err()?;
        Some(with_origin(Some(origin), error))
    }));
    let origin = parsed.cluster.as_ref().map(ConfigWithOrigins::own_origin);
    found.extend(cluster::check_start(plan).await.err().map(|error| with_origin(origin, error)));
    found.extend(service.record.as_ref().and_then(|record| {
        // The dot makes access(2) fail for a regular file.
        let writable = access(&record.directory.join("."), AccessFlags::W_OK);
        let why = || recording::unusable_directory(record);
        let error = writable.map_err(std::io::Error::from).with_context(why).err()?;
        Some(with_origin(service.origin_of_given("record"), error))
    }));
    let pid_file =
        service.pid_file.as_deref().map_or(Ok(()), |path| files::check_pid_file(path, conflict_rule));
    found.extend(pid_file.err().map(|error| with_origin(service.origin_of_given("pid-file"), error)));
    let log_file = plan.process.log.file.as_deref().map_or(Ok(()), files::check_log_file);
    found.extend(log_file.err().map(|error| with_origin(service.origin_of_given("log-file"), error)));
    found
}

/// Adds the origin of the setting to an error.
fn with_origin(place: Option<&Origin>, error: anyhow::Error) -> anyhow::Error {
    match place {
        Some(place) => error.context(place.clone()),
        None => error,
    }
}

/// Checks the images; fails if none can be opened at all.
async fn images(
    parsed: &ParsedConfig,
    plan: &DesiredState,
    conflict_rule: AddressConflictRule,
    registry: &Rc<Registry>,
    found: &mut Vec<anyhow::Error>,
) -> anyhow::Result<()> {
    assemble::log_remarks(plan);
    if let Some(path) = plan.process.image_root.as_deref() {
        let origin = parsed.daemon.origin_of_given("image-root");
        registry.confine(assemble::open_image_root(path).map_err(|error| with_origin(origin, error))?);
    }
    let (difference, _) = PlanDifference::from_empty(registry, plan, |_| false).await?;
    let mut work = Reconciliation::new(ReconcileReason::Start, registry, plan, None, RateBudgets::default());
    let (unavailable, errors) = work.check_images(&difference, conflict_rule).await?;
    for (index, reason) in unavailable {
        let origin = plan.disks[index].origin("image");
        tracing::warn!("{origin}: {reason}: a start continues without the disk, and retries it later");
    }
    found.extend(errors);
    Ok(())
}

fn sockets(
    parsed: &ParsedConfig,
    plan: &DesiredState,
    conflict_rule: AddressConflictRule,
    found: &mut Vec<anyhow::Error>,
) {
    let standard = parsed.daemon.origin_of_given("qmp").or(parsed.daemon.origin_of_given("control"));
    let control = control(&plan.process).unwrap_or_else(|error| {
        found.push(with_origin(standard, error));
        Vec::new()
    });
    found.extend(control.iter().filter_map(|socket| {
        let index = parsed.daemon.qmp.iter().position(|path| *path == socket.path);
        let origin = index.map(|index| parsed.daemon.qmp_origin(index)).or(standard);
        listen::check_control(socket, conflict_rule).err().map(|error| with_origin(origin, error))
    }));
    // Directories that the control socket creates exist when other sockets need them.
    let is_created = |path: &Path| {
        control.iter().any(|place| place.directory_mode.is_some() && place.path.parent() == path.parent())
    };
    let of_servers = plan.servers.iter().filter_map(|server| match &server.endpoint {
        ListenEndpoint::Address(address) => Some(address.clone()),
        ListenEndpoint::Inherited | ListenEndpoint::Passed(_) => None,
    });
    let socket_of = |target: &ExportTarget| match target {
        ExportTarget::VhostUserBlk(machine) if !machine.client => {
            machine.socket.path().map(|path| ListenAddress::Unix(path.to_owned()))
        }
        _ => None,
    };
    let of_exports = plan.exports.iter().filter_map(|export| socket_of(&export.target));
    let is_at = |export: &ExportConfig, address: &ListenAddress| match export {
        ExportConfig::Nbd(export) => {
            matches!(&export.listen, ListenEndpoint::Address(known) if known == address)
        }
        ExportConfig::Target(target) => socket_of(target).as_ref() == Some(address),
    };
    let of_disk = |address: &ListenAddress| {
        plan.disks.iter().find_map(|disk| {
            let index = disk.exports.iter().position(|export| is_at(export, address))?;
            disk.item_origin("export", index, "")
        })
    };
    let origin_of = |address: &ListenAddress| {
        let listens_at =
            |at: &ListenEndpoint| matches!(at, ListenEndpoint::Address(known) if known == address);
        let service = &parsed.daemon;
        let nbd = service.nbd.iter().position(|nbd| listens_at(&nbd.endpoint));
        let nbd = nbd.and_then(|index| service.item_origin("nbd", index, ""));
        let http = [("metrics", &service.metrics), ("http", &service.http_address)];
        let http = || http.into_iter().find(|(_, configured)| configured.as_ref() == Some(address));
        nbd.or_else(|| of_disk(address)).or_else(|| service.origin_of_given(http()?.0))
    };
    let http_addresses = plan.process.metrics.clone().into_iter().chain(plan.process.http_address.clone());
    let all: Vec<_> = of_servers.chain(of_exports).chain(http_addresses).collect();
    for address in &all {
        match address {
            ListenAddress::Unix(path) if is_created(path) && !path.exists() => {}
            address => {
                found.extend(
                    listen::check(address, conflict_rule)
                        .err()
                        .map(|error| with_origin(origin_of(address), error)),
                );
            }
        }
    }
    let of_control = control.iter().map(|socket| ListenAddress::Unix(socket.path.clone()));
    let everything: Vec<_> = of_control.chain(all.iter().cloned()).collect();
    for (second, first) in listen::find_address_conflicts(&everything) {
        let (second, first) = (&everything[second], &everything[first]);
        let error =
            anyhow!("{second}: this daemon also listens at {first} (give each server its own address)");
        found.push(with_origin(origin_of(second), error));
    }
    // The owner of `user` is checked elsewhere.
    if let Some(owner) = &parsed.daemon.sockets.owner
        && all.iter().any(|address| matches!(address, ListenAddress::Unix(_)))
    {
        found.extend(
            listen::check_owner(owner)
                .err()
                .map(|error| with_origin(parsed.daemon.origin_of_given("socket-owner"), error)),
        );
    }
}

/// Control sockets that are required for a start.
fn control(service: &ProcessSpec) -> anyhow::Result<Vec<ControlSocketLocation>> {
    let mut sockets: Vec<_> = service.qmp.iter().cloned().map(ControlSocketLocation::at).collect();
    if service.control_socket() == ControlSocketPolicy::Required {
        sockets.push(ControlSocketLocation::for_daemon().map_err(|rule| anyhow!("control socket: {rule}"))?);
    }
    Ok(sockets)
}
