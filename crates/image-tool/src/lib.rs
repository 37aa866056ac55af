//! `weir image`: what `qemu-img` does, with its options, its JSON and its exit statuses, so that scripts carry over.
//!
//! One file for each subcommand: its options, and what it does. Here is what they have in common: how results are printed, and the
//! reactor on which a command does its I/O.
//!
//! Never decides what an image means: that is `block`'s.

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
mod info;
mod keys;
mod map;
mod opening;
mod options;
mod pick;
mod progress;
mod rebase;
mod resize;
mod snapshot;
mod source;
mod unfinished;

use std::{
    future::Future,
    io::{Write as _, stdout},
};

use anyhow::Context as _;
use block::reactor::{self, Polling};
use clap::{Subcommand, ValueEnum};
use console::Failure;

pub use self::{elsewhere::advise, info::describe, opening::beside};

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an image
    #[command(after_help = create::EXAMPLES)]
    Create(create::Arguments),
    /// Find out whether an image is consistent, and repair it
    #[command(after_help = check::EXAMPLES)]
    Check(check::Arguments),
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

/// Does it.
///
/// # Errors
/// Whatever keeps it from being done.
pub fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Create(arguments) => create::run(arguments),
        Command::Check(arguments) => check::run(arguments),
        Command::Bitmap(arguments) => bitmap::run(arguments),
        Command::Snapshot(arguments) => snapshot::run(arguments),
        Command::Info(arguments) => info::run(arguments),
        Command::Convert(arguments) => convert::run(arguments),
        Command::Compare(arguments) => compare::run(arguments),
        Command::Map(arguments) => map::run(arguments),
        Command::Resize(arguments) => resize::run(arguments),
        Command::Commit(arguments) => commit::run(arguments),
        Command::Rebase(arguments) => rebase::run(arguments),
    }
}

/// How results are printed: for people, or for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    #[default]
    Human,
    Json,
}

/// Runs a command's I/O to its end, on a reactor of its own.
///
/// # Errors
/// The command's, or that there is no io_uring.
fn on_reactor<T: 'static>(work: impl Future<Output = Result<T, Failure>> + 'static) -> Result<T, Failure> {
    reactor::run(Polling::OFF, work).context("io_uring cannot be used (see kernel.io_uring_disabled)")?
}

/// Prints results.
///
/// # Errors
/// If standard output is closed.
fn print(text: &str) -> anyhow::Result<()> {
    stdout().write_all(text.as_bytes()).context("standard output cannot be written")
}

/// As qemu-img prints JSON: indented by four.
fn json(value: &serde_json::Value) -> String {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    serde::Serialize::serialize(value, &mut serializer).expect("values in memory can be written");
    bytes.push(b'\n');
    String::from_utf8(bytes).expect("JSON is text")
}
