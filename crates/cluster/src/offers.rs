//! Data of a disk's migration: offer, answer and the steps in etcd. The steps are performed by
//! `moving`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Offer of a disk to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Offer {
    /// Host that offers the disk.
    pub from: String,
    /// Revision of that host's key: differs for each run.
    pub run: i64,
    /// Random number of the migration.
    pub number: u64,
    /// True once the image is closed there and may be opened here.
    pub given: bool,
    /// Description of the disk, in the format of the control crate.
    pub described: Value,
}

/// A received offer.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Name of the disk.
    pub disk: String,
    /// Offer that etcd has.
    pub offer: Offer,
    pub(crate) revision: i64,
}

/// Answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub(crate) by: String,
    /// Number of the offer.
    pub(crate) number: u64,
    /// The answer.
    pub said: Said,
    /// Image of a disk that was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<String>,
    /// True if the new host's config file lists the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<bool>,
    /// True once the host that took the disk knows that its claim succeeded.
    #[serde(default)]
    pub settled: bool,
}

/// Content of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
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
pub enum Step {
    /// Offers a disk. `Done` has the offer's revision.
    Ask {
        to: String,
        disk: String,
        offer: Box<Offer>,
    },
    /// Changes the offer of this revision to one that may be claimed. Idempotent.
    Give {
        to: String,
        disk: String,
        offer: Box<Offer>,
        revision: i64,
    },
    /// `Done`: the disk stays on this host.
    Withdraw {
        to: String,
        disk: String,
        number: u64,
    },
    Reply {
        offered: Box<Offered>,
        said: Said,
    },
    /// `Done`: the offer could be claimed at this moment.
    Check {
        offered: Box<Offered>,
    },
    /// `Done`: the disk belongs to this host. Idempotent.
    Claim {
        offered: Box<Offered>,
        /// True if this host's config file lists the disk.
        listed: Option<bool>,
    },
    /// Confirms to the offering host that this host knows the result of its claim.
    Settle {
        offered: Box<Offered>,
    },
    /// Deletes the record of a disk that left this host and is not in its config file, once no host
    /// needs it.
    Forget {
        disk: String,
    },
    /// Deletes the record that a disk of this name left this host: it exists here again.
    Own {
        disk: String,
    },
}

/// Result of a step in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done, at this revision of etcd.
    Done(i64),
    /// A concurrent step of either host was faster, or the step is impossible, for this reason.
    Lost(String),
    /// No running host has this name.
    Absent(String),
    /// Nothing was done: etcd is unreachable.
    Apart(String),
}
