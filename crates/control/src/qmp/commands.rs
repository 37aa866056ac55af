//! The commands, one file per subject. A new one needs a line in this table, and a section of
//! `docs/reference/qmp.md`, which a test compares with it.

/// Defines a command without arguments by its type, its name and its result.
macro_rules! query {
    ($type:ident, $name:literal, |$registry:pat_param| $answer:expr) => {
        #[derive(Debug)]
        pub(super) struct $type;

        impl $crate::qmp::command::QmpCommand for $type {
            const NAME: &'static str = $name;

            fn read(
                _: &mut $crate::qmp::arguments::QmpArguments,
            ) -> Result<Self, $crate::qmp::error::QmpError> {
                Ok(Self)
            }

            async fn run(
                self,
                $registry: std::rc::Rc<$crate::registry::Registry>,
            ) -> Result<serde_json::Value, $crate::qmp::error::QmpError> {
                Ok($answer)
            }
        }
    };
}

mod adding;
mod backup;
mod bitmap;
pub(super) mod block;
mod cluster;
mod descriptor;
mod endpoint;
mod event;
mod export;
mod job;
mod job_arguments;
mod latency;
mod migration;
mod mirror;
mod node;
mod object;
mod process;
mod query;
mod recording;
mod reload;
mod remote;
mod removal;
mod server;
mod set;
mod snapshot;
mod status;
mod stream;
mod throttle;
mod upgrade;

use super::{command::CommandEntry, session};

/// Commands that need a negotiated session.
pub(crate) const TABLE: &[CommandEntry] = &[
    CommandEntry::of::<process::Quit>(),
    CommandEntry::of::<process::QueryVersion>(),
    CommandEntry::of::<process::QueryCommands>(),
    CommandEntry::of::<process::QueryStatus>(),
    CommandEntry::of::<process::QueryName>(),
    CommandEntry::of::<process::Continue>(),
    CommandEntry::of::<process::ResumeDisks>(),
    CommandEntry::of::<descriptor::GetFd>(),
    CommandEntry::of::<descriptor::CloseFd>(),
    CommandEntry::of::<descriptor::AddFd>(),
    CommandEntry::of::<descriptor::RemoveFd>(),
    CommandEntry::of::<descriptor::QueryFdSets>(),
    CommandEntry::of::<block::BlockdevAdd>(),
    CommandEntry::of::<block::BlockdevDel>(),
    CommandEntry::of::<block::BlockResize>(),
    CommandEntry::of::<bitmap::AddBitmap>(),
    CommandEntry::of::<bitmap::RemoveBitmap>(),
    CommandEntry::of::<bitmap::ClearBitmap>(),
    CommandEntry::of::<bitmap::EnableBitmap>(),
    CommandEntry::of::<bitmap::DisableBitmap>(),
    CommandEntry::of::<bitmap::MergeBitmaps>(),
    CommandEntry::of::<server::NbdServerStart>(),
    CommandEntry::of::<server::NbdServerStop>(),
    CommandEntry::of::<export::BlockExportAdd>(),
    CommandEntry::of::<export::BlockExportDel>(),
    CommandEntry::of::<export::QueryBlockExports>(),
    CommandEntry::of::<query::QueryBlock>(),
    CommandEntry::of::<query::QueryNamedBlockNodes>(),
    CommandEntry::of::<query::QueryBlockstats>(),
    CommandEntry::of::<throttle::BlockSetIoThrottle>(),
    CommandEntry::of::<object::ObjectAdd>(),
    CommandEntry::of::<object::ObjectDel>(),
    CommandEntry::of::<object::QomList>(),
    CommandEntry::of::<object::QomGet>(),
    CommandEntry::of::<object::QomSet>(),
    CommandEntry::of_text::<status::QueryDaemonStatus>(),
    CommandEntry::of::<latency::QueryLatencies>(),
    CommandEntry::of::<set::SetSettings>(),
    CommandEntry::of::<adding::AddGroup>(),
    CommandEntry::of::<cluster::QueryCluster>(),
    CommandEntry::of::<cluster::ClusterSet>(),
    CommandEntry::of::<cluster::ClusterRemove>(),
    CommandEntry::of::<cluster::ClusterForget>(),
    CommandEntry::of::<reload::ReloadConfig>(),
    CommandEntry::of::<adding::AddDisk>(),
    CommandEntry::of::<removal::RemoveDisk>(),
    CommandEntry::of::<migration::MoveDisk>(),
    CommandEntry::of::<backup::StartBackup>(),
    CommandEntry::of::<backup::BlockdevBackup>(),
    CommandEntry::of::<mirror::StartMirror>(),
    CommandEntry::of::<mirror::BlockdevMirror>(),
    CommandEntry::of::<stream::StartStream>(),
    CommandEntry::of::<stream::BlockStream>(),
    CommandEntry::of::<job::QueryJobReports>(),
    CommandEntry::of::<job::SetJob>(),
    CommandEntry::of::<job::PauseJob>(),
    CommandEntry::of::<job::ResumeJob>(),
    CommandEntry::of::<job::CancelJob>(),
    CommandEntry::of::<job::CompleteJob>(),
    CommandEntry::of::<job::DismissJob>(),
    CommandEntry::of::<job::QueryJobs>(),
    CommandEntry::of::<job::QueryBlockJobs>(),
    CommandEntry::of::<job::SetBlockJobSpeed>(),
    CommandEntry::of::<job::CancelBlockJob>(),
    CommandEntry::of::<job::CompleteBlockJob>(),
    CommandEntry::of::<job::PauseBlockJob>(),
    CommandEntry::of::<job::ResumeBlockJob>(),
    CommandEntry::of::<snapshot::TakeSnapshots>(),
    CommandEntry::of::<snapshot::BlockdevSnapshot>(),
    CommandEntry::of::<snapshot::BlockdevSnapshotSync>(),
    CommandEntry::of::<snapshot::BlockdevSnapshotInternalSync>(),
    CommandEntry::of::<snapshot::BlockdevSnapshotDeleteInternalSync>(),
    CommandEntry::of::<snapshot::Transaction>(),
    CommandEntry::of::<recording::RecordStart>(),
    CommandEntry::of::<recording::RecordStop>(),
    CommandEntry::of::<recording::QueryRecordings>(),
    CommandEntry::of::<event::QueryEvents>(),
    CommandEntry::of::<upgrade::TakeOver>(),
];

/// Names of all commands, including the one that negotiates.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    std::iter::once(session::NEGOTIATE).chain(TABLE.iter().map(|entry| entry.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_documented_and_unique() {
        let reference = include_str!("../../../../docs/reference/qmp.md");
        let all: Vec<_> = names().collect();
        for (index, name) in all.iter().enumerate() {
            assert!(reference.contains(&format!("`{name}`")), "{name} is missing in docs/reference/qmp.md");
            assert!(!all[..index].contains(name), "{name} is there twice");
        }
    }
}
