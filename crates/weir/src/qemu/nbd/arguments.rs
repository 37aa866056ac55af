//! The command line of `qemu-nbd`, and its help.

use std::{ffi::OsString, path::PathBuf};

use clap::Parser;

/// Help text below the options.
const AFTER: &str = "\
Examples:
  qemu-nbd -f qcow2 vm1.qcow2
      Exports the disk at port 10809 for one client, and ends with it.
  qemu-nbd --fork --persistent --shared=5 --socket=/run/vm1.sock --read-only --format=qcow2 vm1.qcow2
      For five clients at a time, in the background.
  qemu-nbd -c /dev/nbd0 -f qcow2 vm1.qcow2; qemu-nbd -d /dev/nbd0
      Connects a block device of this host, and disconnects it.

This is weir under the name of qemu-nbd. `weir serve --help` describes its other features, and docs/from-qemu.md \
the differences.
Exit status: 0 success, 1 failure.";

/// Command line of `qemu-nbd`.
#[derive(Clone, Debug, Default, Parser)]
#[command(
    name = "qemu-nbd",
    about = "Export a disk image over NBD",
    override_usage = "qemu-nbd [OPTIONS] FILE\n       qemu-nbd -L [OPTIONS]\n       qemu-nbd -d DEV",
    after_help = AFTER,
    max_term_width = 100,
    infer_long_args = true,
    args_override_self = true
)]
pub(super) struct QemuNbdArgs {
    /// Disk image; options of an image with --image-opts; a device with --disconnect
    #[arg(value_name = "FILE", num_args = 0..)]
    pub(super) file: Vec<OsString>,
    /// TCP port to listen on, or to connect to with --list [default: 10809]
    #[arg(short, long, value_name = "PORT")]
    pub(super) port: Option<String>,
    /// Address to listen on, or to connect to with --list [default: 0.0.0.0]
    #[arg(short, long, value_name = "IFACE")]
    pub(super) bind: Option<String>,
    /// Unix socket to listen on
    #[arg(short = 'k', long, value_name = "PATH")]
    pub(super) socket: Option<String>,
    /// Largest number of clients at a time, 0 for no limit [default: 1]
    #[arg(short = 'e', long, value_name = "NUM", allow_hyphen_values = true)]
    pub(super) shared: Option<String>,
    /// Do not end when the last client disconnects
    #[arg(short = 't', long)]
    pub(super) persistent: bool,
    /// Log more
    #[arg(short, long)]
    pub(super) verbose: bool,
    /// Name of the export [default: empty]
    #[arg(short = 'x', long, value_name = "NAME")]
    pub(super) export_name: Option<String>,
    /// Description of the export, for clients
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub(super) description: Option<String>,
    /// Offset of the disk in a raw image
    #[arg(short, long, value_name = "OFFSET")]
    pub(super) offset: Option<String>,
    /// Offer qemu:allocation-depth; always on
    #[arg(short = 'A', long)]
    pub(super) allocation_depth: bool,
    /// Offer this dirty bitmap to clients; repeatable
    #[arg(short = 'B', long, value_name = "NAME", action = clap::ArgAction::Append)]
    pub(super) bitmap: Vec<String>,
    /// List the exports of another server
    #[arg(short = 'L', long)]
    pub(super) list: bool,
    /// A secret, tls-creds-x509, tls-creds-psk, authz-simple or authz-list, for other options;
    /// repeatable
    #[arg(long, value_name = "OBJECT", action = clap::ArgAction::Append)]
    pub(super) object: Vec<String>,
    /// Require TLS, with the credentials of this --object id
    #[arg(long, value_name = "ID")]
    pub(super) tls_creds: Option<String>,
    #[arg(long, value_name = "HOSTNAME", hide = true)]
    pub(super) tls_hostname: Option<String>,
    /// Accept only clients whose name the --object of this id allows
    #[arg(long, value_name = "ID")]
    pub(super) tls_authz: Option<String>,
    #[arg(short = 'T', long, value_name = "EVENTS", hide = true)]
    pub(super) trace: Option<String>,
    #[arg(long, value_name = "LABEL", hide = true)]
    pub(super) selinux_label: Option<String>,
    /// Continue in the background once the server is ready
    #[arg(long)]
    pub(super) fork: bool,
    /// Write the process id to this file
    #[arg(long, value_name = "PATH")]
    pub(super) pid_file: Option<PathBuf>,
    /// Connect FILE to this device of the kernel's NBD client, /dev/nbdN
    #[arg(short, long, value_name = "DEV")]
    pub(super) connect: Option<String>,
    /// Disconnect such a device
    #[arg(short, long)]
    pub(super) disconnect: bool,
    /// raw or qcow2 [default: probed if safe]
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) format: Option<String>,
    /// Reject writes
    #[arg(short, long)]
    pub(super) read_only: bool,
    /// Write to a temporary overlay of FILE, which is deleted at the end
    #[arg(short, long)]
    pub(super) snapshot: bool,
    /// Serve this internal snapshot of a qcow2 image, read-only: its id or name,
    /// snapshot.id=ID or snapshot.name=NAME
    #[arg(short, long, value_name = "SNAPSHOT")]
    pub(super) load_snapshot: Option<String>,
    /// Same as --cache=none
    #[arg(short, long, conflicts_with = "cache")]
    pub(super) nocache: bool,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE")]
    pub(super) cache: Option<String>,
    /// threads, native or io_uring; weir always uses io_uring
    #[arg(long, value_name = "MODE")]
    pub(super) aio: Option<String>,
    /// Handling of discards: ignore (off) or unmap (on) [default: ignore]
    #[arg(long, value_name = "MODE")]
    pub(super) discard: Option<String>,
    /// Convert writes of zeroes: off, on, or unmap to free their space [default: off]
    #[arg(long, value_name = "MODE")]
    pub(super) detect_zeroes: Option<String>,
    /// Print the version
    #[arg(short = 'V', long)]
    pub(super) version: bool,
    /// Parse FILE as options of an image, such as driver=qcow2,file.filename=vm1.qcow2
    #[arg(long)]
    pub(super) image_opts: bool,
}
