//! `weir image`: the commands of `qemu-img`, with its options, JSON and exit statuses, so that
//! scripts keep working.
//!
//! ```text
//!   create, check, info, …   a file for each subcommand: its options and implementation
//!        │
//!        ├─► named           meaning of FILE: a name, `json:{…}`, or options (`--image-opts`)
//!        ├─► opening         format and storage of a file, for commands that access its bytes
//!        ├─► disk, keys      the disk inside an image, and its passphrases
//!        ├─► copy ◄─ source  copies with many requests in flight: convert, commit
//!        ├─► options, pick   `-o key=value`, `-l SNAPSHOT`
//!        └─► form, progress  output in qemu-img's form
//! ```
//!
//! `elsewhere` suggests replacements for options of qemu-img that are missing here.
//!
//! Never interprets an image itself: that is the task of the crate `image`.

mod amend;
mod bitmap;
mod carry;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod disk;
mod elsewhere;
mod encrypt;
mod form;
mod info;
mod keys;
mod map;
mod measure;
mod named;
mod opening;
mod options;
mod pick;
mod progress;
mod rebase;
mod resize;
mod snapshot;
mod source;
mod sparse;
mod unfinished;

use std::path::Path;

use clap::{Args, Subcommand, ValueEnum};
use console::Failure;

// The daemon answers QMP's `query-block` with the `ImageInfo` that `info` prints.
pub use self::{elsewhere::advise, resize::Served};

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an image
    #[command(after_help = create::EXAMPLES)]
    Create(create::Arguments),
    /// Find out whether an image is consistent, and repair it
    #[command(after_help = check::EXAMPLES)]
    Check(check::Arguments),
    /// Change options of an image in place
    #[command(after_help = amend::EXAMPLES)]
    Amend(amend::Arguments),
    /// Change persistent bitmaps
    #[command(after_help = bitmap::EXAMPLES)]
    Bitmap(bitmap::Arguments),
    /// List internal snapshots, take them, go back to them, delete them
    #[command(after_help = snapshot::EXAMPLES)]
    Snapshot(snapshot::Arguments),
    /// Show what an image is
    #[command(after_help = info::EXAMPLES)]
    Info(info::Arguments),
    /// Copy a disk into a new image
    #[command(after_help = convert::EXAMPLES)]
    Convert(convert::Arguments),
    /// Find out whether two images hold the same
    #[command(after_help = compare::EXAMPLES)]
    Compare(compare::Arguments),
    /// Show what a disk is made of, and where it lies
    #[command(after_help = map::EXAMPLES)]
    Map(map::Arguments),
    /// Show how large the file of a new image would be
    #[command(after_help = measure::EXAMPLES)]
    Measure(measure::Arguments),
    /// Give a disk another size
    #[command(after_help = resize::EXAMPLES)]
    Resize(resize::Arguments),
    /// Move what an image has into its backing file
    #[command(after_help = commit::EXAMPLES)]
    Commit(commit::Arguments),
    /// Give an image another backing file
    #[command(after_help = rebase::EXAMPLES)]
    Rebase(rebase::Arguments),
}

/// Runs the command. `serving` finds the disk that a running daemon serves from an image.
///
/// # Errors
/// The command failed, or its options are invalid.
pub fn run(command: Command, serving: fn(&Path) -> Option<Served>) -> Result<(), Failure> {
    match command {
        Command::Create(arguments) => create::run(arguments),
        Command::Check(arguments) => check::run(arguments),
        Command::Amend(arguments) => amend::run(arguments),
        Command::Bitmap(arguments) => bitmap::run(arguments),
        Command::Snapshot(arguments) => snapshot::run(arguments),
        Command::Info(arguments) => info::run(arguments),
        Command::Convert(arguments) => convert::run(arguments),
        Command::Compare(arguments) => compare::run(arguments),
        Command::Map(arguments) => map::run(arguments),
        Command::Measure(arguments) => measure::run(arguments),
        Command::Resize(arguments) => resize::run(arguments, serving),
        Command::Commit(arguments) => commit::run(arguments),
        Command::Rebase(arguments) => rebase::run(arguments),
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// How to print
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    output: Output,
    /// The same as --output=json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl OutputArgs {
    pub(crate) fn kind(self) -> Output {
        if self.json { Output::Json } else { self.output }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    #[default]
    Human,
    Json,
}
