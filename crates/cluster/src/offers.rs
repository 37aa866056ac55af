//! What two hosts say of a disk that moves from one to the other, and what is done for it in etcd.
//!
//! Only data: the steps are `moving`'s.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A disk that a host offers another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Offer {
    /// Host that offers the disk.
    pub from: String,
    /// The revision of that host's key: another run of it has another.
    pub run: i64,
    /// Drawn for each move.
    pub number: u64,
    /// The image is closed there, and to be opened.
    pub given: bool,
    /// What it is: the control's to read.
    pub described: Value,
}

/// An offer, of which disk, and when it was written.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Name of the disk.
    pub disk: String,
    /// The offer as it is in etcd.
    pub offer: Offer,
    pub(crate) revision: i64,
}

/// Answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub(crate) by: String,
    /// The offer's.
    pub(crate) number: u64,
    /// The answer.
    pub said: Said,
    /// Of a disk that was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<String>,
    /// Whether the config file there has it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<bool>,
    /// Whoever has taken it knows that.
    #[serde(default)]
    pub settled: bool,
}

/// What a host answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// The disk can be migrated.
    Ready,
    /// It cannot, with the reason.
    Refused(String),
    /// The host serves the disk.
    Taken,
}

/// What is to be done in etcd.
#[derive(Debug)]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum Step {
    /// Done with the offer's revision.
    Ask {
        to: String,
        disk: String,
        offer: Box<Offer>,
    },
    /// The same offer, which had this revision, with the disk. May be said again.
    Give {
        to: String,
        disk: String,
        offer: Box<Offer>,
        revision: i64,
    },
    /// Done: the disk is this host's.
    Withdraw {
        to: String,
        disk: String,
        number: u64,
    },
    Reply {
        offered: Box<Offered>,
        said: Said,
    },
    /// Done: the offer could be claimed at this moment.
    Check {
        offered: Box<Offered>,
    },
    /// Done: the disk is this host's. May be said again.
    Claim {
        offered: Box<Offered>,
        /// Whether this host's config file has it.
        listed: Option<bool>,
    },
    /// Tells whoever has offered it that this host knows it has the disk.
    Settle {
        offered: Box<Offered>,
    },
    /// The disk has left this host, whose config file does not have it: forgets that where nobody
    /// needs to know.
    Forget {
        disk: String,
    },
    /// Forgets that a disk of this name has left this host: it has one again.
    Own {
        disk: String,
    },
}

/// Result of a step in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done, at this revision of etcd.
    Done(i64),
    /// The other host was faster, or this cannot be, for this reason.
    Lost(String),
    /// No host that is there has this name.
    Absent(String),
    /// Nothing was done: etcd cannot be asked.
    Apart(String),
}
