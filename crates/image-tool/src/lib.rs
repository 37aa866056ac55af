//! `weir image`: the commands of `qemu-img`, with its options, JSON and exit statuses, so that
//! scripts keep working.
//!
//! ```text
//!   create, check, info, …   a file for each subcommand: its options and implementation
//!     │
//!     ├─► image_args             meaning of FILE: a name, `json:{…}`, or options (`--image-opts`)
//!     ├─► opening                format and storage of a file, for commands that access its bytes
//!     ├─► disk, keys             the disk inside an image, and its passphrases
//!     ├─► copy ◄─ source         copies with many requests in flight: convert, commit
//!     ├─► options                `-o key=value`
//!     ├─► snapshot_selector      `-l SNAPSHOT`
//!     └─► qemu_format, progress  output in qemu-img's form
//! ```
//!
//! `qemu_img_advice` suggests replacements for options of qemu-img that are missing here.
//!
//! Never interprets an image itself: that is the task of the crate `image`.

mod amend;
mod bitmap;
mod bitmap_copy;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod disk;
mod encrypt;
mod image_args;
mod info;
mod keys;
mod map;
mod measure;
mod opening;
mod options;
mod progress;
mod qemu_format;
mod qemu_img_advice;
mod rebase;
mod resize;
mod snapshot;
mod snapshot_selector;
mod source;
mod sparse;
mod temporary_target;

use std::path::Path;

use clap::{Args, Subcommand, ValueEnum};
use console::CommandFailure;

pub use self::{qemu_img_advice::advise, resize::ServedDisk};

/// Commands for images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Create an image
    #[command(after_help = create::EXAMPLES)]
    Create(create::CreateArgs),
    /// Check the consistency of an image, and repair it
    #[command(after_help = check::EXAMPLES)]
    Check(check::ImageCheckArgs),
    /// Change options of an image in place
    #[command(after_help = amend::EXAMPLES)]
    Amend(amend::AmendArgs),
    /// Change persistent bitmaps
    #[command(after_help = bitmap::EXAMPLES)]
    Bitmap(bitmap::BitmapArgs),
    /// List, create, apply and delete internal snapshots
    #[command(after_help = snapshot::EXAMPLES)]
    Snapshot(snapshot::SnapshotArgs),
    /// Show the format, size and features of an image
    #[command(after_help = info::EXAMPLES)]
    Info(info::ImageInfoArgs),
    /// Copy a disk into a new image
    #[command(after_help = convert::EXAMPLES)]
    Convert(convert::ImageConvertArgs),
    /// Compare the content of two images
    #[command(after_help = compare::EXAMPLES)]
    Compare(compare::CompareArgs),
    /// Show the allocation of a disk and its location in files
    #[command(after_help = map::EXAMPLES)]
    Map(map::MapArgs),
    /// Show the file size that a new image would need
    #[command(after_help = measure::EXAMPLES)]
    Measure(measure::MeasureArgs),
    /// Change the size of a disk
    #[command(after_help = resize::EXAMPLES)]
    Resize(resize::ResizeArgs),
    /// Move the content of an image into its backing file
    #[command(after_help = commit::EXAMPLES)]
    Commit(commit::CommitArgs),
    /// Change the backing file of an image
    #[command(after_help = rebase::EXAMPLES)]
    Rebase(rebase::RebaseArgs),
}

/// Runs the command. `serving` finds the disk that a running daemon serves from an image.
///
/// # Errors
/// Fails if the command fails or its options are invalid.
pub fn run(command: ImageCommand, serving: fn(&Path) -> Option<ServedDisk>) -> Result<(), CommandFailure> {
    match command {
        ImageCommand::Create(arguments) => create::run(arguments),
        ImageCommand::Check(arguments) => check::run(arguments),
        ImageCommand::Amend(arguments) => amend::run(arguments),
        ImageCommand::Bitmap(arguments) => bitmap::run(arguments),
        ImageCommand::Snapshot(arguments) => snapshot::run(arguments),
        ImageCommand::Info(arguments) => info::run(arguments),
        ImageCommand::Convert(arguments) => convert::run(arguments),
        ImageCommand::Compare(arguments) => compare::run(arguments),
        ImageCommand::Map(arguments) => map::run(arguments),
        ImageCommand::Measure(arguments) => measure::run(arguments),
        ImageCommand::Resize(arguments) => resize::run(arguments, serving),
        ImageCommand::Commit(arguments) => commit::run(arguments),
        ImageCommand::Rebase(arguments) => rebase::run(arguments),
    }
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ImageOutputArgs {
    /// Output format
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    output: ImageOutput,
    /// Same as --output=json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl ImageOutputArgs {
    pub(crate) fn kind(self) -> ImageOutput {
        if self.json { ImageOutput::Json } else { self.output }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageOutput {
    #[default]
    Human,
    Json,
}
