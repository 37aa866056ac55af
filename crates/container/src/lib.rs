//! `weir docker-plugin`: volumes for Docker and Podman that are weir images, over Docker's volume
//! plugin protocol.
//!
//! ```text
//!   Docker, Podman
//!        │  POST /VolumeDriver.Mount {"Name": …, "ID": …}, over a Unix socket
//!        ▼
//!   server ─► plugin_http ─► protocol connections, bytes, JSON
//!                        ▼
//!                     volumes         users; one change at a time for each volume
//!         ┌──────────────┼───────────────┐
//!    volume_store      image          mounter
//!   a file for each  mkfs, and      `weir attach`, `weir detach`,
//!   volume           weir image …   the kernel's mounts
//!                        └─ child_process ┘ child processes, under a deadline
//! ```
//!
//! The plugin is a client of weir's own commands: it serves no disk, and the servers of disks
//! outlive it.
//!
//! Never keeps state in memory that has to survive a restart.

mod child_process;
mod filesystem;
mod image;
mod mounter;
mod options;
mod plugin_http;
mod protocol;
mod server;
mod volume_store;
mod volumes;

use std::{env, fs, path::PathBuf, sync::mpsc};

use anyhow::Context as _;
use clap::Args;
use console::{
    CommandFailure, logging,
    signals::{BlockedSignals, SignalRequest},
};
use nix::sys::stat::{Mode, umask};
use sd_notify::NotifyState;
use settings::{LogFormat, LogSettings};

use self::{mounter::CommandMounter, server::PluginServer, volume_store::VolumeStore, volumes::Volumes};

/// Text below the options in the help.
pub const EXAMPLES: &str = concat!(
    "\
Examples:
  weir docker-plugin
      Docker finds the plugin by the name of its socket, /run/docker/plugins/weir.sock.
  docker volume create -d weir -o size=10G -o group=gold -o iops-total=2000 db
  docker run -v db:/var/lib/postgresql/data postgres
      Create a volume of 10 GiB, and run a container with it.
  podman volume create --driver weir -o size=10G db
      The same with Podman; containers.conf(5) names the socket below [engine.volume_plugins].

Options of a volume (-o KEY=VALUE):
  size=SIZE             size of the volume (required)
  format=FORMAT         image format: qcow2 or raw [qcow2]
  fstype=TYPE           file system: ext4, xfs or btrfs [ext4]
  mount-options=LIST    options of mount(8), such as noatime,discard
  device=WAY            kind of block device: ublk, nbd or fuse [the best available]
  group, weight, cache, l2-cache-size, prefetch, prefetch-…, iops-reservation, bps-reservation,
  watermark, and the limits iops-total, bps-total and so on
                        same as the options of `weir attach`

",
    settings::sizes!(),
    "
SIGTERM and SIGINT end it after the requests in progress; volumes stay mounted, and the next start finds them.
Exit status: 0 ended as asked, 1 failed, 2 wrong use of the command line."
);

/// Command-line arguments of `weir docker-plugin`.
#[derive(Debug, Args)]
pub struct PluginArgs {
    /// Socket to listen on, unless the service manager passes one
    #[arg(long, value_name = "unix:PATH", default_value = "unix:/run/docker/plugins/weir.sock", value_parser = settings::parse_unix_socket)]
    socket: PathBuf,
    /// Directory of the volumes
    #[arg(long, value_name = "DIR", default_value = "/var/lib/weir/volumes")]
    directory: PathBuf,
    /// Attach through the daemon at this control socket, whose groups then apply [default: as for
    /// `weir attach`]
    #[arg(long, value_name = "unix:PATH", value_parser = settings::parse_unix_socket)]
    qmp: Option<PathBuf>,
    /// off, error, warn, info, debug or trace
    #[arg(long, value_name = "FILTER", default_value = "info", value_parser = settings::log::filter)]
    log: String,
    /// Format of log messages: text or json
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// Serves volumes until a signal.
///
/// # Errors
/// Fails if the directory or the socket is unusable.
pub fn run(arguments: PluginArgs) -> Result<(), CommandFailure> {
    let PluginArgs { socket, directory, qmp, log, log_format } = arguments;
    // Before any thread starts: this changes the environment.
    let inherited = control::listen::InheritedSockets::from_environment();
    logging::start(&LogSettings { filter: log, format: log_format, file: None })?;
    // Blocked before other threads start, which inherit the mask.
    let signals = BlockedSignals::block_for_daemon().context("signals cannot be blocked")?;
    let weir = env::current_exe().context("the path of the weir program is unknown")?;
    let store = VolumeStore::open(&directory)?;
    let (listener, _file) = control::listen::only_listener(inherited, &socket, || {
        // Docker creates it only when it first looks for plugins.
        socket.parent().map_or(Ok(()), fs::create_dir_all)
    })?;
    // Images, and files of child processes, are readable by this user only.
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let qmp = qmp.map(|path| format!("unix:{}", path.display()));
    let volumes = Volumes::new(store, CommandMounter { program: weir.clone(), qmp }, &weir);
    // Before the first request, which must not see leftovers.
    volumes.recover()?;
    let server = PluginServer::start(listener, volumes)?;
    tracing::info!(socket = %socket.display(), directory = %directory.display(), "ready");
    notify(&[NotifyState::Ready]);
    let signal = until_ended(signals)?;
    tracing::info!(signal, "ending");
    notify(&[NotifyState::Stopping]);
    // Mounted volumes stay mounted.
    server.end();
    Ok(())
}

/// Waits for a signal that requests the end, and returns its name. A second signal exits the
/// process at once.
fn until_ended(signals: BlockedSignals) -> anyhow::Result<&'static str> {
    let (sender, requests) = mpsc::channel();
    let handle_signal = move |request| match request {
        SignalRequest::EndAtOnce(signal) => {
            console::print_notice(&format!(
                "{signal} again: ending at once; requests in progress are abandoned"
            ));
            logging::exit(1)
        }
        request => sender.send(request).is_ok(),
    };
    signals.forward(handle_signal).context("a thread cannot be started")?;
    let signal = requests.iter().find_map(|request| match request {
        SignalRequest::End(signal) => Some(signal),
        _ => None,
    });
    signal.context("the signal thread has ended")
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager at NOTIFY_SOCKET cannot be notified");
    }
}
