//! The command line of `qemu-nbd`, and its help.

use std::{ffi::OsString, path::PathBuf};

use clap::Parser;

/// Below the options.
const AFTER: &str = "\
Examples:
  qemu-nbd -f qcow2 vm1.qcow2
      The disk at port 10809, for one client; ends with it.
  qemu-nbd --fork --persistent --shared=5 --socket=/run/vm1.sock --read-only --format=qcow2 vm1.qcow2
      For five at a time, in the background.
  qemu-nbd -c /dev/nbd0 -f qcow2 vm1.qcow2; qemu-nbd -d /dev/nbd0
      As a block device of this host, and away again.

This is weir under the name of qemu-nbd: `weir serve --help` has what else it can do, and docs/from-qemu.md \
what differs.
Exit status: 0 ended as asked, 1 failed.";

/// What `qemu-nbd` is told.
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
pub(super) struct Arguments {
    /// A disk image, or options of one with --image-opts; the device, with --disconnect
    #[arg(value_name = "FILE", num_args = 0..)]
    pub(super) file: Vec<OsString>,
    /// TCP port to listen on, or to ask with --list [default: 10809]
    #[arg(short, long, value_name = "PORT")]
    pub(super) port: Option<String>,
    /// Address to listen on, or to ask with --list [default: 0.0.0.0]
    #[arg(short, long, value_name = "IFACE")]
    pub(super) bind: Option<String>,
    /// Unix socket to listen on
    #[arg(short = 'k', long, value_name = "PATH")]
    pub(super) socket: Option<String>,
    /// Clients at a time, 0 for any number [default: 1]
    #[arg(short = 'e', long, value_name = "NUM", allow_hyphen_values = true)]
    pub(super) shared: Option<String>,
    /// Do not end with the last client
    #[arg(short = 't', long)]
    pub(super) persistent: bool,
    /// Say more
    #[arg(short, long)]
    pub(super) verbose: bool,
    /// The export's name [default: empty]
    #[arg(short = 'x', long, value_name = "NAME")]
    pub(super) export_name: Option<String>,
    /// What clients are told about it
    #[arg(short = 'D', long, value_name = "TEXT")]
    pub(super) description: Option<String>,
    /// Where in a raw image the disk begins
    #[arg(short, long, value_name = "OFFSET")]
    pub(super) offset: Option<String>,
    /// Offer qemu:allocation-depth, as always
    #[arg(short = 'A', long)]
    pub(super) allocation_depth: bool,
    /// Let clients see which parts this bitmap marks; repeatable
    #[arg(short = 'B', long, value_name = "NAME", action = clap::ArgAction::Append)]
    pub(super) bitmap: Vec<String>,
    /// List what another server has
    #[arg(short = 'L', long)]
    pub(super) list: bool,
    /// A secret, tls-creds-x509, tls-creds-psk, authz-simple or authz-list, for other options to
    /// name; repeatable
    #[arg(long, value_name = "OBJECT", action = clap::ArgAction::Append)]
    pub(super) object: Vec<String>,
    /// Require TLS, with the --object of this id
    #[arg(long, value_name = "ID")]
    pub(super) tls_creds: Option<String>,
    #[arg(long, value_name = "HOSTNAME", hide = true)]
    pub(super) tls_hostname: Option<String>,
    /// Serve only clients with a name that the --object of this id allows
    #[arg(long, value_name = "ID")]
    pub(super) tls_authz: Option<String>,
    #[arg(short = 'T', long, value_name = "EVENTS", hide = true)]
    pub(super) trace: Option<String>,
    #[arg(long, value_name = "LABEL", hide = true)]
    pub(super) selinux_label: Option<String>,
    /// Go on in the background once clients can come
    #[arg(long)]
    pub(super) fork: bool,
    /// Leave the process's number in this file
    #[arg(long, value_name = "PATH")]
    pub(super) pid_file: Option<PathBuf>,
    /// Make FILE this block device, /dev/nbdN, by the kernel's NBD client
    #[arg(short, long, value_name = "DEV")]
    pub(super) connect: Option<String>,
    /// Take such a device away
    #[arg(short, long)]
    pub(super) disconnect: bool,
    /// raw or qcow2 [default: found by probing, where that is safe]
    #[arg(short, long, value_name = "FORMAT")]
    pub(super) format: Option<String>,
    /// Refuse writes
    #[arg(short, long)]
    pub(super) read_only: bool,
    /// Write to a temporary file in front of FILE, which goes at the end
    #[arg(short, long)]
    pub(super) snapshot: bool,
    /// Serve this internal snapshot of a qcow2 image, read-only: its id or name,
    /// snapshot.id=ID or snapshot.name=NAME
    #[arg(short, long, value_name = "SNAPSHOT")]
    pub(super) load_snapshot: Option<String>,
    /// As --cache=none
    #[arg(short, long, conflicts_with = "cache")]
    pub(super) nocache: bool,
    /// The host's page cache: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE")]
    pub(super) cache: Option<String>,
    /// threads, native or io_uring; weir always uses io_uring
    #[arg(long, value_name = "MODE")]
    pub(super) aio: Option<String>,
    /// What becomes of discards: ignore (off) or unmap (on) [default: ignore]
    #[arg(long, value_name = "MODE")]
    pub(super) discard: Option<String>,
    /// Look for writes of zeroes alone: off, on, or unmap to give their space back [default: off]
    #[arg(long, value_name = "MODE")]
    pub(super) detect_zeroes: Option<String>,
    /// Print the version
    #[arg(short = 'V', long)]
    pub(super) version: bool,
    /// FILE is options of an image, such as driver=qcow2,file.filename=vm1.qcow2
    #[arg(long)]
    pub(super) image_opts: bool,
}
