//! Requests that may be asked more than once, also by another thread than the one that waits: what
//! they carry is frozen.

use std::sync::Arc;

use super::unflushed::Change;
use crate::{
    buffer::{Buffer, Frozen},
    error::{Error, Result},
    nbd::client::{Client, Established, RawExtent},
};

#[derive(Clone, Debug)]
pub(super) enum Ask {
    Read { offset: u64, length: usize },
    Change { change: Change, force: bool },
    Trim { offset: u64, length: u32 },
    Extents { offset: u64, length: u32 },
    Flush,
}

/// What comes of it.
#[derive(Debug)]
pub(super) enum Answer {
    Data(Buffer),
    Extents(Vec<RawExtent>),
    Done,
}

/// The same for another thread.
#[derive(Debug)]
pub(super) enum Sent {
    Data(Frozen),
    Extents(Vec<RawExtent>),
    Done,
}

/// What the thread that has a connection is asked by others.
#[derive(Debug)]
pub(super) enum Job {
    Ask(Ask, async_channel::Sender<Result<Sent>>),
    /// To leave the conversation to whoever asks, once nothing is in flight.
    Leave(async_channel::Sender<Option<Established>>),
}

impl Ask {
    pub(super) async fn on(&self, client: &Client) -> Result<Answer> {
        match self {
            Self::Read { offset, length } => client.read(*offset, *length).await.map(Answer::Data),
            Self::Change { change, force } => change.on(client, *force).await.map(|()| Answer::Done),
            Self::Trim { offset, length } => client.trim(*offset, *length).await.map(|()| Answer::Done),
            Self::Extents { offset, length } => client.extents(*offset, *length).await.map(Answer::Extents),
            Self::Flush => client.flush().await.map(|()| Answer::Done),
        }
    }
}

impl Change {
    pub(super) async fn on(&self, client: &Client, force: bool) -> Result<()> {
        match self {
            Self::Data { offset, data } => client.write(*offset, shared(data).into(), force).await,
            Self::Zeroes { offset, length, flags } => client.write_zeroes(*offset, *length, *flags).await,
        }
    }
}

fn shared(data: &Arc<Frozen>) -> Buffer {
    Buffer::shared(data)
}

impl From<Answer> for Sent {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Data(data) => Self::Data(data.freeze()),
            Answer::Extents(extents) => Self::Extents(extents),
            Answer::Done => Self::Done,
        }
    }
}

impl From<Sent> for Answer {
    fn from(sent: Sent) -> Self {
        match sent {
            Sent::Data(data) => Self::Data(Buffer::shared(&Arc::new(data))),
            Sent::Extents(extents) => Self::Extents(extents),
            Sent::Done => Self::Done,
        }
    }
}

impl Answer {
    pub(super) fn data(self) -> Result<Buffer> {
        if let Self::Data(data) = self { Ok(data) } else { Err(Error::IO) }
    }

    pub(super) fn extents(self) -> Result<Vec<RawExtent>> {
        if let Self::Extents(extents) = self { Ok(extents) } else { Err(Error::IO) }
    }
}
