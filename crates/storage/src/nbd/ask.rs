//! Requests that may be sent more than once, also by another thread than the waiting one. Their
//! data is frozen, so it cannot change in between.
//!
//! After a reconnect the server may have other capabilities than when the request was made. So they
//! are checked here, when the request is sent: a request beyond the server's maximum is split, and
//! an unsupported command is replaced by supported ones.

use std::sync::{Arc, OnceLock};

use super::unflushed::Change;
use nbd::{
    client::{Client, Established, RawExtent},
    proto::cmd_flag,
};
use reactor::{
    buffer::{Buffer, Frozen, Segments},
    error::{Error, Result},
};

/// Bytes of zeroes in one write to a server without `NBD_CMD_WRITE_ZEROES`.
const ZEROES_SENT: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(super) enum Ask {
    Read { offset: u64, length: usize },
    Change { change: Change, force: bool },
    Trim { offset: u64, length: u32 },
    Extents { offset: u64, length: u32 },
    Flush,
}

/// Result of a request.
#[derive(Debug)]
pub(super) enum Answer {
    Data(Buffer),
    Extents(Vec<RawExtent>),
    Done,
}

/// Result of a request that was executed on another thread.
#[derive(Debug)]
pub(super) enum Sent {
    Data(Frozen),
    Extents(Vec<RawExtent>),
    Done,
}

/// Job for the thread that has a connection.
#[derive(Debug)]
pub(super) enum Job {
    Ask(Ask, async_channel::Sender<Result<Sent>>),
    /// Retires the connection and returns it to the sender, once nothing is in flight.
    Leave(async_channel::Sender<Option<Established>>),
}

impl Ask {
    pub(super) async fn on(&self, client: &Client) -> Result<Answer> {
        match self {
            Self::Read { offset, length } => read(client, *offset, *length).await.map(Answer::Data),
            Self::Change { change, force } => change.on(client, *force).await.map(|()| Answer::Done),
            // A hint, so it may be ignored.
            Self::Trim { .. } if !client.about().can_trim() => Ok(Answer::Done),
            Self::Trim { offset, length } => client.trim(*offset, *length).await.map(|()| Answer::Done),
            Self::Extents { length, .. } if !client.about().tells_allocation() => {
                Ok(Answer::Extents(vec![RawExtent { length: *length, flags: 0 }]))
            }
            Self::Extents { offset, length } => client.extents(*offset, *length).await.map(Answer::Extents),
            Self::Flush => client.flush().await.map(|()| Answer::Done),
        }
    }

    /// True if the request changes the server's data, so that its reply is only valid for that
    /// server.
    pub(super) fn is_lasting(&self) -> bool {
        matches!(self, Self::Change { .. } | Self::Flush)
    }
}

/// Reads in parts if necessary. Parts are copied to one buffer, because small buffers occupy more
/// memory than their length.
async fn read(client: &Client, offset: u64, length: usize) -> Result<Buffer> {
    let most = client.about().maximum_payload as usize;
    if length <= most {
        return client.read(offset, length).await;
    }
    let (mut whole, mut done) = (Buffer::new(length), 0);
    while done < length {
        let part = client.read(offset + done as u64, most.min(length - done)).await?;
        whole[done..done + part.len()].copy_from_slice(&part);
        done += part.len();
    }
    Ok(whole)
}

/// Writes, in parts if necessary; with `force` durably, by a flush if the server has no FUA.
///
/// # Errors
/// As [`Client::write`].
pub(super) async fn write(client: &Client, offset: u64, mut data: Segments, force: bool) -> Result<()> {
    let about = client.about();
    let (most, fua) = (about.maximum_payload as usize, force && about.can_force());
    let mut at = offset;
    while !data.is_empty() {
        let rest = data.split_off(most.min(data.len()));
        let length = data.len() as u64;
        client.write(at, data, fua).await?;
        at += length;
        data = rest;
    }
    if force && !fua { client.flush().await } else { Ok(()) }
}

async fn zero(client: &Client, offset: u64, length: u32, flags: u16, force: bool) -> Result<()> {
    let about = client.about();
    let is_fast = flags & cmd_flag::FAST_ZERO != 0;
    if is_fast && !(about.can_zero() && about.can_refuse_slow_zeroing()) {
        return Err(Error::UNSUPPORTED);
    }
    let fua = force && about.can_force();
    if about.can_zero() {
        client.write_zeroes(offset, length, flags | if fua { cmd_flag::FUA } else { 0 }).await?;
    } else {
        let (mut at, end) = (offset, offset + u64::from(length));
        while at < end {
            let mut data = Buffer::shared(zeroes());
            data.truncate((about.maximum_payload as usize).min((end - at) as usize));
            let sent = data.len() as u64;
            client.write(at, data.into(), fua).await?;
            at += sent;
        }
    }
    // Without FUA one flush after the last part covers all of them.
    if force && !fua { client.flush().await } else { Ok(()) }
}

/// One buffer of zeroes, shared by all requests.
fn zeroes() -> &'static Arc<Frozen> {
    static ZEROES: OnceLock<Arc<Frozen>> = OnceLock::new();
    ZEROES.get_or_init(|| Arc::new(Buffer::zeroed(ZEROES_SENT).freeze()))
}

impl Change {
    pub(super) async fn on(&self, client: &Client, force: bool) -> Result<()> {
        match self {
            Self::Data { offset, data } => write(client, *offset, Buffer::shared(data).into(), force).await,
            Self::Zeroes { offset, length, flags } => zero(client, *offset, *length, *flags, force).await,
        }
    }
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
