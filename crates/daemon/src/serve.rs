//! `weir serve`: from the command line to a running daemon, and to its end.
//!
//! ```text
//!   main thread     accepts, handles signals, ends the daemon
//!   worker threads  a reactor each; every connection lives on one of them
//! ```
//!
//! Images are opened, keys read and addresses bound before the first client is accepted; then
//! rights that are not needed any more are dropped, and the log says `ready`. At the end every disk
//! is flushed, and a flush that fails is a failure.
//!
//! This file reads the command line; `starting` and `ending` follow.

mod addresses;
mod announcing;
mod arguments;
mod check;
mod ending;
mod memory;
mod starting;
mod steps;
mod watchdog;

use reactor::op;
use std::{
    path::{Path, PathBuf},
    rc::Rc,
};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, ServeArgs};
pub use check::{CHECK_EXAMPLES, CheckArgs, check_config};
use cluster;
use console::{
    Failure, descriptors, logging, on_reactor,
    signals::{Request, Signals},
};
use control::{
    listen::{Inherited, Others},
    notify,
    qmp::Control,
    reconcile::source::Source,
    registry::{End, Registry},
    takeover::newcomer::Newcomer,
};
use settings::{DaemonConfig, Draft, Mistakes, Place, Placed, Plan, config, control::ControlSocket};
pub use steps::QEMU_HEADING;

use crate::{on_event::Runner, pid_file::PidFile};

/// Serves until a signal ends it. Calls `ready` once clients are accepted.
///
/// # Errors
/// [`Failure::Usage`] if the command line contradicts itself, otherwise [`Failure::Failed`].
pub fn run(mut arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), Failure> {
    let inherited = Inherited::take();
    arguments.check_disks().map_err(|rule| Failure::Usage(anyhow::Error::msg(rule)))?;
    let mut steps = std::mem::take(&mut arguments.steps);
    let monitors = steps.take_monitors().map_err(|wrong| Failure::Usage(wrong.into()))?;
    let file = arguments.config.clone();
    let is_checked = arguments.check;
    let takeover = arguments.takeover.take();
    let Start { options, draft, mistakes } = Start::read(arguments, monitors)?;
    if is_checked {
        let inherited = inherited.count();
        let plan = match &file {
            Some(_) => Plan::judged(draft.clone(), inherited, mistakes),
            None => Ok(plan(&draft, false, inherited)?),
        };
        return check::check(draft, plan, Others::AreInTheWay, file);
    }
    let draft = mistakes.first_unless(draft)?;
    let before = takeover.map(|control| newcomer(control, &draft)).transpose()?;
    let regrets = before.as_ref().map(Newcomer::regrets).transpose()?;
    let passed = before.as_ref().and_then(Source::inherited).unwrap_or_else(|| inherited.count());
    let plan = plan(&draft, file.is_some(), passed)?;
    logging::start(&plan.service.log)?;
    op::keep_from_children().context("what was passed cannot be kept from other programs")?;
    // Started before any image, key or socket is opened, so that it inherits none.
    let runner = plan.service.on_event.as_ref().map(|target| Runner::start(target, &plan.service));
    let runner = runner.transpose()?;
    // Before workers start, which inherit the mask: the main thread reads all signals.
    let signals = Signals::block_for_daemon().context("signals cannot be blocked")?;
    descriptors::raise_limit();
    notify::open();
    reactor::threads_must_end();
    memory::set_aside(&plan.service)?;
    on_reactor(async move {
        // This thread serves control sockets and exports, so no disk may block it.
        reactor::never_blocks_here();
        let file = file.map(|file| (file, options));
        let start = starting::Start { plan, steps, file, inherited, old: before, signals, runner };
        let started = Daemon::start(start).await;
        if let (Err(error), Some(regrets)) = (&started, regrets) {
            regrets.tell(error);
        }
        match started? {
            Some(daemon) => {
                // A daemon in the background closes its standard error.
                reactor::blocking(logging::flush).await;
                ready();
                Ok(daemon.run().await?)
            }
            None => Ok(()),
        }
    })
}

/// Connects to the daemon to be replaced: at this control socket, at the first one of the config,
/// or at the default one.
fn newcomer(control: Option<PathBuf>, draft: &Draft) -> Result<Newcomer, Failure> {
    descriptors::raise_limit();
    let user = draft.service.user.as_ref().and_then(|owner| owner.user.as_deref());
    if let Some(control) = control {
        return Ok(Newcomer::ask(&control, user)?);
    }
    for disk in &draft.disks {
        let address = disk.image.path().and_then(Path::to_str).filter(|path| path.starts_with("unix:"));
        if let Some(address) = address {
            let place = Place::option("takeover", address);
            let rule = format!("is taken for an image (write --takeover={address})");
            return Err(Failure::Usage(place.wrong(rule).into()));
        }
    }
    let control = match draft.service.qmp.first() {
        Some(socket) => socket.clone(),
        None => ControlSocket::of_commands().map_err(|rule| anyhow!("control socket: {rule}"))?.path,
    };
    Ok(Newcomer::ask(&control, user)?)
}

struct Start {
    /// Options of the command line.
    options: Placed<DaemonConfig>,
    /// Options and config file together, as far as they are valid.
    draft: Draft,
    /// Mistakes in the config file.
    mistakes: Mistakes,
}

impl Start {
    fn read(arguments: ServeArgs, monitors: Vec<(PathBuf, Place)>) -> Result<Self, Failure> {
        let config = arguments.config.clone();
        let mut draft = arguments.into_draft().map_err(|wrong| Failure::Usage(wrong.into()))?;
        for (socket, place) in monitors {
            let index = draft.service.qmp.len();
            draft.service.put(format!("qmp[{index}]"), place);
            draft.service.qmp.push(socket);
        }
        let options = draft.service.clone();
        let mistakes = Mistakes::default();
        let draft = config.map_or(draft, |path| config::load_below(&path, &options, &mistakes));
        Ok(Self { options, draft, mistakes })
    }
}

/// Desired state, with this number of sockets from the service manager.
fn plan(draft: &Draft, is_of_a_file: bool, inherited: usize) -> Result<Plan, Failure> {
    // Without disks and file, only steps in qemu-storage-daemon's syntax were given.
    let plan = match draft.disks.is_empty() && !is_of_a_file {
        true => Plan::without_disks(draft.clone()),
        false => Plan::new(draft.clone(), inherited),
    };
    plan.map_err(|wrong| if is_of_a_file { Failure::from(wrong) } else { Failure::Usage(wrong.into()) })
}

enum Event {
    Signal(Request),
    End(End),
    /// Every connection has ended and every disk was flushed, or its flush has failed.
    Finished(anyhow::Result<()>),
}

type Events = (async_channel::Sender<Event>, async_channel::Receiver<Event>);

struct Daemon {
    registry: Rc<Registry>,
    control: Rc<Control>,
    /// Tasks that end when their handles are dropped.
    _watching: Vec<reactor::JoinHandle<()>>,
    _watchdog: Option<reactor::JoinHandle<()>>,
    _http: Option<weir_http::Http>,
    /// Controller of cgroup limits. Dropped before `_cluster`: the configured limits apply again
    /// before the cluster learns that this host's quota is free.
    _cgroups: Option<cgroup::watch::Running>,
    /// Membership in the cluster; after it is dropped only the fallback share applies here.
    _cluster: Option<cluster::Running>,
    _pid_file: Option<PidFile>,
    events: Events,
}
