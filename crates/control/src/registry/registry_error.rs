//! Reasons for which a change of the running state is refused, with their remedies, for clients of
//! the control socket and the web page.

use reactor::memory::OutOfBudget;

/// Reason of a refusal. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name variants and fields")]
pub enum RegistryError {
    #[error("disk {0}: no disk has this name (`weir status` lists all)")]
    UnknownDisk(String),
    #[error("disk {0}: its image is not open yet (`weir status` shows the reason)")]
    NotOpen(String),
    #[error("group {0}: no group has this name (`weir status` lists all)")]
    UnknownGroup(String),
    #[error("export {0}: no export has this id (`query-block-exports` lists all)")]
    UnknownExport(String),
    #[error("secret {0}: no secret has this id (`object-add` creates one)")]
    UnknownSecret(String),
    #[error("object {id}: it has {bytes} bytes; an object has at most {most} (make it smaller)")]
    ObjectTooLarge { id: String, bytes: usize, most: usize },
    #[error(
        "object {id}: the daemon has {most} objects already, and accepts no more \
         (`object-del` removes one)"
    )]
    TooManyObjects { id: String, most: usize },
    #[error("object {id}: {error}")]
    NoMemory { id: String, error: OutOfBudget },
    #[error("{0}: a disk or a group has this name already (choose another)")]
    NameTaken(String),
    #[error("export {0}: another export has this id already (choose another id)")]
    IdTaken(String),
    #[error("export {name}: an export of this name exists at {address} (choose another)")]
    ExportNameTaken { name: String, address: String },
    #[error(
        "export {name} at {address}: reserved for disk {disk}, whose image is not open yet (choose \
         another, or remove that disk)"
    )]
    ExportReserved { name: String, address: String, disk: String },
    #[error("{0}: in use by another command (try again)")]
    Busy(String),
    #[error(
        "An upgrade is in progress; no changes are accepted (try again; the log names the new \
         process, which must be ready within a minute)"
    )]
    TakenOver,
    #[error("disk {disk}: it is exported as {export} (remove the export first)")]
    Exported { disk: String, export: String },
    #[error("disk {disk}: the job {job} uses it (wait for it, or end it with `weir job cancel {job}`)")]
    HasJob { disk: String, job: String },
    #[error(
        "disk {disk}: the job {job} is starting (wait until its target is open, which takes at most \
         a minute)"
    )]
    HasStartingJob { disk: String, job: String },
    #[error("group {group}: {member} is a member (move {member} out of the group first)")]
    HasMembers { group: String, member: String },
    #[error("export {id}: in use by {clients} (disconnect first, or remove the export with mode hard)")]
    HasClients { id: String, clients: String },
}
