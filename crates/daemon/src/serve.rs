//! `weir serve`: from the command line to a running daemon, and to its end.
//!
//! ```text
//!   main thread     accepts, handles signals, ends the daemon
//!   worker threads  a reactor each; every connection lives on one of them
//! ```
//!
//! Images are opened, keys read and addresses bound before the first client is accepted; then
//! rights that are not needed any more are dropped, and `ready` is logged. At the end every disk
//! is flushed, and a flush that fails is a failure.
//!
//! This file reads the command line; `start` and `shutdown` do the rest.

mod arguments;
mod bind;
mod check;
mod memory;
mod qemu_options;
mod ready;
mod shutdown;
mod start;
mod watchdog;

use reactor::operation;
use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, ServeArgs};
pub use check::{CHECK_EXAMPLES, CheckArgs, check_config};
use cluster;
use console::{
    CommandFailure, descriptors, logging, on_reactor,
    signals::{BlockedSignals, SignalRequest},
};
use control::{
    listen::{AddressConflictRule, InheritedSockets},
    notify,
    qmp::ControlSockets,
    reconcile::source::StartSource,
    registry::{DaemonEnd, Registry},
    upgrade::new_process::NewProcess,
};
pub use qemu_options::QEMU_HEADING;
use settings::{
    ConfigWithOrigins, DaemonConfig, DesiredState, Diagnostics, Origin, ParsedConfig, config,
    control::ControlSocketLocation,
};

use crate::{on_event::EventRunner, pid_file::PidFile};

/// Serves until a signal ends it. Calls `ready` once clients are accepted.
///
/// # Errors
/// [`CommandFailure::Usage`] if the command line contradicts itself, otherwise
/// [`CommandFailure::Failed`].
pub fn run(mut arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), CommandFailure> {
    let inherited = InheritedSockets::from_environment();
    arguments.check_disks().map_err(|rule| CommandFailure::Usage(anyhow::Error::msg(rule)))?;
    let mut steps = std::mem::take(&mut arguments.steps);
    let monitors = steps.take_monitors().map_err(|wrong| CommandFailure::Usage(wrong.into()))?;
    let file = arguments.config.clone();
    let is_checked = arguments.check;
    let takeover = arguments.takeover.take();
    let ServeInput { options, parsed: draft, diagnostics: mistakes } = ServeInput::read(arguments, monitors)?;
    if is_checked {
        let inherited = inherited.unused();
        let plan = match &file {
            Some(_) => DesiredState::with_diagnostics(draft.clone(), inherited, mistakes),
            None => Ok(plan(&draft, false, inherited)?),
        };
        return check::check(draft, plan, AddressConflictRule::Rejected, file);
    }
    let draft = mistakes.finish_first(draft)?;
    let before = takeover.map(|control| connect_to_old(control, &draft)).transpose()?;
    let reporter = before.as_ref().map(NewProcess::failure_reporter).transpose()?;
    let passed =
        before.as_ref().and_then(StartSource::inherited_sockets).unwrap_or_else(|| inherited.unused());
    let plan = plan(&draft, file.is_some(), passed)?;
    logging::start(&plan.process.log)?;
    operation::set_close_on_exec().context("inherited descriptors cannot be closed for child processes")?;
    // Started before any image, key or socket is opened, so that it inherits none.
    let runner = plan.process.on_event.as_ref().map(|target| EventRunner::start(target, &plan.process));
    let runner = runner.transpose()?;
    // Before workers start, which inherit the mask: the main thread reads all signals.
    let signals = BlockedSignals::block_for_daemon().context("signals cannot be blocked")?;
    descriptors::raise_limit();
    notify::open();
    reactor::use_transient_threads();
    memory::set_budget(&plan.process)?;
    on_reactor(async move {
        // This thread serves control sockets and exports, so no disk may block it.
        reactor::forbid_blocking();
        let file = file.map(|file| (file, options));
        let start = start::DaemonStart { plan, steps, file, inherited, old: before, signals, runner };
        let started = Daemon::start(start).await;
        if let (Err(error), Some(reporter)) = (&started, reporter) {
            reporter.report(error);
        }
        match started? {
            Some(daemon) => {
                // A daemon in the background closes its standard error.
                reactor::run_blocking(logging::flush).await;
                ready();
                Ok(daemon.run().await?)
            }
            None => Ok(()),
        }
    })
}

/// Connects to the daemon to be replaced: at this control socket, at the first one of the config,
/// or at the default one.
fn connect_to_old(control: Option<PathBuf>, parsed: &ParsedConfig) -> Result<NewProcess, CommandFailure> {
    descriptors::raise_limit();
    let user = parsed.daemon.user.as_ref().and_then(|owner| owner.user.as_deref());
    if let Some(control) = control {
        return Ok(NewProcess::request(&control, user)?);
    }
    for disk in &parsed.disks {
        let address = disk.image.path().and_then(Path::to_str).filter(|path| path.starts_with("unix:"));
        if let Some(address) = address {
            let origin = Origin::option("takeover", address);
            let rule = format!("is parsed as an image (write --takeover={address})");
            return Err(CommandFailure::Usage(origin.error(rule).into()));
        }
    }
    let control = match parsed.daemon.qmp.first() {
        Some(socket) => socket.clone(),
        None => ControlSocketLocation::for_commands().map_err(|rule| anyhow!("control socket: {rule}"))?.path,
    };
    Ok(NewProcess::request(&control, user)?)
}

struct ServeInput {
    /// Options of the command line.
    options: ConfigWithOrigins<DaemonConfig>,
    /// Options and config file together, as far as they are valid.
    parsed: ParsedConfig,
    /// Mistakes in the config file.
    diagnostics: Diagnostics,
}

impl ServeInput {
    fn read(arguments: ServeArgs, monitors: Vec<(PathBuf, Origin)>) -> Result<Self, CommandFailure> {
        let config = arguments.config.clone();
        let mut parsed =
            arguments.into_parsed_config().map_err(|error| CommandFailure::Usage(error.into()))?;
        for (socket, origin) in monitors {
            let index = parsed.daemon.qmp.len();
            parsed.daemon.record_origin(format!("qmp[{index}]"), origin);
            parsed.daemon.qmp.push(socket);
        }
        let options = parsed.daemon.clone();
        let diagnostics = Diagnostics::default();
        let parsed = config.map_or(parsed, |path| config::load_with_options(&path, &options, &diagnostics));
        Ok(Self { options, parsed, diagnostics })
    }
}

/// Desired state, with this number of sockets from the service manager.
fn plan(parsed: &ParsedConfig, is_of_a_file: bool, inherited: usize) -> Result<DesiredState, CommandFailure> {
    // Without disks and config file, the command line has only options of qemu-storage-daemon.
    let plan = match parsed.disks.is_empty() && !is_of_a_file {
        true => DesiredState::without_disks(parsed.clone()),
        false => DesiredState::new(parsed.clone(), inherited),
    };
    plan.map_err(
        |error| if is_of_a_file { CommandFailure::from(error) } else { CommandFailure::Usage(error.into()) },
    )
}

enum DaemonEvent {
    Signal(SignalRequest),
    End(DaemonEnd),
    /// Every connection has ended, and every disk was flushed or its flush has failed.
    Finished(anyhow::Result<()>),
}

type DaemonEvents = (async_channel::Sender<DaemonEvent>, async_channel::Receiver<DaemonEvent>);

struct Daemon {
    registry: Rc<Registry>,
    control: Rc<ControlSockets>,
    /// Tasks that end when their handles are dropped.
    _watching: Vec<reactor::JoinHandle<()>>,
    _watchdog: Option<reactor::JoinHandle<()>>,
    _http: Option<weir_http::HttpServer>,
    /// Controller of cgroup limits. Dropped before `_cluster`: the configured limits apply again
    /// before the cluster learns that this host's quota is free.
    _cgroups: Option<cgroup::watch::CgroupWatchThread>,
    /// Membership in the cluster; after it is dropped only the fallback share applies here.
    _cluster: Option<cluster::AgentHandle>,
    _pid_file: Option<PidFile>,
    events: DaemonEvents,
}
