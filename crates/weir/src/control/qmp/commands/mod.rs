//! The commands there are, one file a subject.
//!
//! Each is a type that is read from its arguments and then run ([`Command`](super::command::Command)). A new one is a line in the table
//! here, and a section of `docs/reference/qmp.md`, which a test compares with it.

mod block;
mod export;
mod node;
mod process;

use super::{command::Entry, session};

/// Every command that needs a negotiated session.
pub(crate) const TABLE: &[Entry] = &[
    Entry::of::<process::Quit>(),
    Entry::of::<process::QueryVersion>(),
    Entry::of::<process::QueryCommands>(),
    Entry::of::<process::QueryStatus>(),
    Entry::of::<process::QueryName>(),
    Entry::of::<block::BlockdevAdd>(),
    Entry::of::<block::BlockdevDel>(),
    Entry::of::<block::BlockResize>(),
    Entry::of::<export::BlockExportAdd>(),
    Entry::of::<export::BlockExportDel>(),
    Entry::of::<export::QueryBlockExports>(),
];

/// The names of all commands, the one that negotiates included.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    std::iter::once(session::NEGOTIATE).chain(TABLE.iter().map(|entry| entry.name))
}
