//! Requests that may be sent more than once, also by another thread than the waiting one. Their
//! data is frozen, so it cannot change in between.
//!
//! After a reconnect the server may have other capabilities than when the request was made. So they
//! are checked here, when the request is sent: a request beyond the server's maximum is split, and
//! an unsupported command is replaced by supported ones.

use std::sync::{Arc, OnceLock};

use super::unflushed::NbdChange;
use nbd::{
    client::{EstablishedConnection, NbdClient, RawExtent},
    proto::cmd_flag,
};
use reactor::{
    buffer::{FrozenBuffer, IoBuffer, Segments},
    error::{Error, Result},
};

/// Bytes of zeroes in one write to a server without `NBD_CMD_WRITE_ZEROES`.
const ZEROES_SENT: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(super) enum NbdOperation {
    Read { offset: u64, length: usize },
    Change { change: NbdChange, force: bool },
    Trim { offset: u64, length: u32 },
    Extents { offset: u64, length: u32 },
    Flush,
}

/// Result of a request.
#[derive(Debug)]
pub(super) enum NbdResult {
    Data(IoBuffer),
    Extents(Vec<RawExtent>),
    Done,
}

/// Result of a request that was executed on another thread.
#[derive(Debug)]
pub(super) enum SendableResult {
    Data(FrozenBuffer),
    Extents(Vec<RawExtent>),
    Done,
}

/// Job for the thread that has a connection.
#[derive(Debug)]
pub(super) enum ConnectionJob {
    Ask(NbdOperation, async_channel::Sender<Result<SendableResult>>),
    /// Stops using the connection once nothing is in flight, and sends it to the thread that
    /// requested it.
    Leave(async_channel::Sender<Option<EstablishedConnection>>),
}

impl NbdOperation {
    pub(super) async fn on(&self, client: &NbdClient) -> Result<NbdResult> {
        match self {
            Self::Read { offset, length } => read(client, *offset, *length).await.map(NbdResult::Data),
            Self::Change { change, force } => change.on(client, *force).await.map(|()| NbdResult::Done),
            // A hint, so it may be ignored.
            Self::Trim { .. } if !client.export().can_trim() => Ok(NbdResult::Done),
            Self::Trim { offset, length } => client.trim(*offset, *length).await.map(|()| NbdResult::Done),
            Self::Extents { length, .. } if !client.export().has_allocation() => {
                Ok(NbdResult::Extents(vec![RawExtent { length: *length, flags: 0 }]))
            }
            Self::Extents { offset, length } => {
                client.extents(*offset, *length).await.map(NbdResult::Extents)
            }
            Self::Flush => client.flush().await.map(|()| NbdResult::Done),
        }
    }

    /// True if the request changes the server's data, so that its reply is only valid for that
    /// server.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Change { .. } | Self::Flush)
    }
}

/// Reads in parts if necessary. Parts are copied to one buffer, because small buffers occupy more
/// memory than their length.
async fn read(client: &NbdClient, offset: u64, length: usize) -> Result<IoBuffer> {
    let max_payload = client.export().maximum_payload as usize;
    if length <= max_payload {
        return client.read(offset, length).await;
    }
    let (mut buffer, mut done) = (IoBuffer::new(length), 0);
    while done < length {
        let piece = client.read(offset + done as u64, max_payload.min(length - done)).await?;
        buffer[done..done + piece.len()].copy_from_slice(&piece);
        done += piece.len();
    }
    Ok(buffer)
}

/// Writes, in parts if necessary; with `force` durably, by a flush if the server has no FUA.
///
/// # Errors
/// As [`NbdClient::write`].
pub(super) async fn write(client: &NbdClient, offset: u64, mut data: Segments, force: bool) -> Result<()> {
    let export = client.export();
    let (max_payload, fua) = (export.maximum_payload as usize, force && export.can_fua());
    let mut at = offset;
    while !data.is_empty() {
        let unsent = data.split_off(max_payload.min(data.len()));
        let length = data.len() as u64;
        client.write(at, data, fua).await?;
        at += length;
        data = unsent;
    }
    if force && !fua { client.flush().await } else { Ok(()) }
}

async fn zero(client: &NbdClient, offset: u64, length: u32, flags: u16, force: bool) -> Result<()> {
    let export = client.export();
    let is_fast = flags & cmd_flag::FAST_ZERO != 0;
    if is_fast && !(export.can_zero() && export.can_fast_zero()) {
        return Err(Error::UNSUPPORTED);
    }
    let fua = force && export.can_fua();
    if export.can_zero() {
        client.write_zeroes(offset, length, flags | if fua { cmd_flag::FUA } else { 0 }).await?;
    } else {
        let (mut at, end) = (offset, offset + u64::from(length));
        while at < end {
            let mut data = IoBuffer::view_of_frozen(zeroes());
            data.truncate((export.maximum_payload as usize).min((end - at) as usize));
            let sent = data.len() as u64;
            client.write(at, data.into(), fua).await?;
            at += sent;
        }
    }
    // Without FUA one flush after the last part covers all of them.
    if force && !fua { client.flush().await } else { Ok(()) }
}

/// One buffer of zeroes, shared by all requests.
fn zeroes() -> &'static Arc<FrozenBuffer> {
    static ZEROES: OnceLock<Arc<FrozenBuffer>> = OnceLock::new();
    ZEROES.get_or_init(|| Arc::new(IoBuffer::zeroed(ZEROES_SENT).freeze()))
}

impl NbdChange {
    pub(super) async fn on(&self, client: &NbdClient, force: bool) -> Result<()> {
        match self {
            Self::Data { offset, data } => {
                write(client, *offset, IoBuffer::view_of_frozen(data).into(), force).await
            }
            Self::Zeroes { offset, length, flags } => zero(client, *offset, *length, *flags, force).await,
        }
    }
}

impl From<NbdResult> for SendableResult {
    fn from(result: NbdResult) -> Self {
        match result {
            NbdResult::Data(data) => Self::Data(data.freeze()),
            NbdResult::Extents(extents) => Self::Extents(extents),
            NbdResult::Done => Self::Done,
        }
    }
}

impl From<SendableResult> for NbdResult {
    fn from(sent: SendableResult) -> Self {
        match sent {
            SendableResult::Data(data) => Self::Data(IoBuffer::view_of_frozen(&Arc::new(data))),
            SendableResult::Extents(extents) => Self::Extents(extents),
            SendableResult::Done => Self::Done,
        }
    }
}

impl NbdResult {
    pub(super) fn data(self) -> Result<IoBuffer> {
        if let Self::Data(data) = self { Ok(data) } else { Err(Error::IO) }
    }

    pub(super) fn extents(self) -> Result<Vec<RawExtent>> {
        if let Self::Extents(extents) = self { Ok(extents) } else { Err(Error::IO) }
    }
}
