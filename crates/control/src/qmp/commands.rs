//! The commands, one file per subject. A new one needs a line in this table, and a section of
//! `docs/reference/qmp.md`, which a test compares with it.

/// Defines a command without arguments by its type, its name and its result.
macro_rules! query {
    ($type:ident, $name:literal, |$registry:pat_param| $answer:expr) => {
        #[derive(Debug)]
        pub(super) struct $type;

        impl $crate::qmp::command::Command for $type {
            const NAME: &'static str = $name;

            fn read(_: &mut $crate::qmp::arguments::Arguments) -> Result<Self, $crate::qmp::error::Error> {
                Ok(Self)
            }

            async fn run(
                self,
                $registry: std::rc::Rc<$crate::registry::Registry>,
            ) -> Result<serde_json::Value, $crate::qmp::error::Error> {
                Ok($answer)
            }
        }
    };
}

mod adding;
pub(super) mod block;
mod cluster;
mod descriptor;
mod door;
mod event;
mod export;
mod latency;
mod moving;
mod node;
mod object;
mod process;
mod query;
mod recording;
mod reload;
mod remote;
mod removal;
mod server;
mod status;
mod takeover;
mod throttle;
mod weir;

use super::{command::Entry, session};

/// Commands that need a negotiated session.
pub(crate) const TABLE: &[Entry] = &[
    Entry::of::<process::Quit>(),
    Entry::of::<process::QueryVersion>(),
    Entry::of::<process::QueryCommands>(),
    Entry::of::<process::QueryStatus>(),
    Entry::of::<process::QueryName>(),
    Entry::of::<process::Continue>(),
    Entry::of::<process::Resume>(),
    Entry::of::<descriptor::GetFd>(),
    Entry::of::<descriptor::CloseFd>(),
    Entry::of::<descriptor::AddFd>(),
    Entry::of::<descriptor::RemoveFd>(),
    Entry::of::<descriptor::QueryFdSets>(),
    Entry::of::<block::BlockdevAdd>(),
    Entry::of::<block::BlockdevDel>(),
    Entry::of::<block::BlockResize>(),
    Entry::of::<server::NbdServerStart>(),
    Entry::of::<server::NbdServerStop>(),
    Entry::of::<export::BlockExportAdd>(),
    Entry::of::<export::BlockExportDel>(),
    Entry::of::<export::QueryBlockExports>(),
    Entry::of::<query::QueryBlock>(),
    Entry::of::<query::QueryNamedBlockNodes>(),
    Entry::of::<query::QueryBlockstats>(),
    Entry::of::<throttle::BlockSetIoThrottle>(),
    Entry::of::<object::ObjectAdd>(),
    Entry::of::<object::ObjectDel>(),
    Entry::of::<object::QomList>(),
    Entry::of::<object::QomGet>(),
    Entry::of::<object::QomSet>(),
    Entry::of_text::<status::QueryStatus>(),
    Entry::of::<latency::QueryLatencies>(),
    Entry::of::<weir::Set>(),
    Entry::of::<adding::AddGroup>(),
    Entry::of::<cluster::QueryCluster>(),
    Entry::of::<cluster::ClusterSet>(),
    Entry::of::<cluster::ClusterRemove>(),
    Entry::of::<cluster::ClusterForget>(),
    Entry::of::<reload::Reload>(),
    Entry::of::<adding::AddDisk>(),
    Entry::of::<removal::RemoveDisk>(),
    Entry::of::<moving::MoveDisk>(),
    Entry::of::<recording::Start>(),
    Entry::of::<recording::Stop>(),
    Entry::of::<recording::QueryRecordings>(),
    Entry::of::<event::QueryEvents>(),
    Entry::of::<takeover::TakeOver>(),
];

/// Names of all commands, including the one that negotiates.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    std::iter::once(session::NEGOTIATE).chain(TABLE.iter().map(|entry| entry.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_the_reference_and_has_a_name_of_its_own() {
        let reference = include_str!("../../../../docs/reference/qmp.md");
        let all: Vec<_> = names().collect();
        for (index, name) in all.iter().enumerate() {
            assert!(reference.contains(&format!("`{name}`")), "{name} is missing in docs/reference/qmp.md");
            assert!(!all[..index].contains(name), "{name} is there twice");
        }
    }
}
