//! Requests that may be asked more than once, also by another thread than the one that waits: what
//! they carry is frozen.
//!
//! The server that is asked may be another one than that which was there when the request was made.
//! So what it can do is looked at here, as the request goes out: what is longer than it takes goes
//! in parts, and what it does not know is made of what it does.

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

/// Zeroes that are sent at a time to a server that writes none itself, in bytes.
const ZEROES_SENT: usize = 1 << 20;

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
            Self::Read { offset, length } => read(client, *offset, *length).await.map(Answer::Data),
            Self::Change { change, force } => change.on(client, *force).await.map(|()| Answer::Done),
            // A hint.
            Self::Trim { .. } if !client.about().can_trim() => Ok(Answer::Done),
            Self::Trim { offset, length } => client.trim(*offset, *length).await.map(|()| Answer::Done),
            Self::Extents { length, .. } if !client.about().tells_allocation() => {
                Ok(Answer::Extents(vec![RawExtent { length: *length, flags: 0 }]))
            }
            Self::Extents { offset, length } => client.extents(*offset, *length).await.map(Answer::Extents),
            Self::Flush => client.flush().await.map(|()| Answer::Done),
        }
    }

    /// Whether the server is to keep what it does, so that its answer holds for that server alone.
    pub(super) fn is_lasting(&self) -> bool {
        matches!(self, Self::Change { .. } | Self::Flush)
    }
}

/// In parts, each of which is copied: small buffers take more memory than they hold.
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

/// Writes, in parts where it has to be; with `force` durably, by a flush where the server has no
/// FUA.
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
    if force && !fua { client.flush().await } else { Ok(()) }
}

/// The same for all who send some.
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
