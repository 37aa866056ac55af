//! Data of a disk's migration: offer, answer and the steps in etcd. `migration` performs the steps.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Offer of a disk to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationOffer {
    /// Host that offers the disk.
    pub from: String,
    /// Revision of that host's key: differs for each run.
    #[serde(rename = "run")]
    pub host_revision: i64,
    /// Random number of the migration.
    pub number: u64,
    /// True once the image is closed there and may be opened here.
    #[serde(rename = "given")]
    pub is_released: bool,
    /// Description of the disk, in the format of the control crate.
    pub described: Value,
}

/// A received offer.
#[derive(Clone, Debug)]
pub struct ReceivedOffer {
    /// Name of the disk.
    pub disk: String,
    /// Offer that etcd has.
    pub offer: MigrationOffer,
    pub(crate) revision: i64,
}

/// Answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationAnswer {
    pub(crate) by: String,
    /// Number of the offer.
    pub(crate) number: u64,
    /// The answer.
    pub said: MigrationReply,
    /// Image of a disk that was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<String>,
    /// True if the new host's config file lists the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<bool>,
    /// True once the host that claimed the disk has read that its claim succeeded.
    #[serde(default)]
    pub settled: bool,
}

/// Content of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationReply {
    /// The disk can be migrated.
    Ready,
    /// The disk cannot be migrated, with the reason.
    Refused(String),
    /// The host serves the disk.
    Taken,
}

/// Step of a migration in etcd.
#[derive(Debug)]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum MigrationStep {
    /// Offers a disk. `Done` has the offer's revision.
    Offer {
        to: String,
        disk: String,
        offer: Box<MigrationOffer>,
    },
    /// Changes the offer of this revision to one that may be claimed. Idempotent.
    Release {
        to: String,
        disk: String,
        offer: Box<MigrationOffer>,
        revision: i64,
    },
    /// `Done`: the disk stays on this host.
    Withdraw {
        to: String,
        disk: String,
        number: u64,
    },
    Reply {
        offered: Box<ReceivedOffer>,
        said: MigrationReply,
    },
    /// `Done`: the offer could be claimed at this moment.
    Check {
        offered: Box<ReceivedOffer>,
    },
    /// `Done`: the disk belongs to this host. Idempotent.
    Claim {
        offered: Box<ReceivedOffer>,
        /// True if this host's config file lists the disk.
        listed: Option<bool>,
    },
    /// Confirms to the offering host that this host has read the result of its claim.
    Settle {
        offered: Box<ReceivedOffer>,
    },
    /// Deletes the record of a disk that left this host and is not in its config file, once no host
    /// needs it.
    Forget {
        disk: String,
    },
    /// Deletes the record that a disk of this name left this host: it exists here again.
    Reclaim {
        disk: String,
    },
}

/// Result of a step in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// Done, at this revision of etcd.
    Done(i64),
    /// A concurrent step of either host was faster, or the step is impossible, for this reason.
    Lost(String),
    /// No running host has this name.
    Absent(String),
    /// Nothing was done: etcd is unreachable.
    Disconnected(String),
}
