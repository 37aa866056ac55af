//! A client's end of a connection: bytes out, whole messages in. Written against the specification;
//! shares nothing with the server but the names of the numbers.

use super::super::{
    pipe::Pipe,
    proto::{self, client_flag, cmd, cmd_flag, info, opt, rep},
    session::ReplyStyle,
};
use reactor::buffer::IoBuffer;

#[derive(Clone)]
pub(super) struct NbdTestWire {
    pipe: Pipe,
    received: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct NegotiatedExport {
    pub(super) size_bytes: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct StreamEnded;

impl NbdTestWire {
    pub(super) fn new(pipe: Pipe) -> Self {
        Self { pipe, received: Vec::new() }
    }

    pub(super) async fn send(&self, bytes: &[u8]) -> Result<(), StreamEnded> {
        self.pipe.send(IoBuffer::copy_of(bytes).into()).await.map_err(|_| StreamEnded)
    }

    pub(super) fn close(&self) {
        self.pipe.close();
    }

    /// The next `count` bytes; [`StreamEnded`] if the stream ends first.
    pub(super) async fn take(&mut self, count: usize) -> Result<Vec<u8>, StreamEnded> {
        while self.received.len() < count {
            let (result, buffer) = self.pipe.receive(IoBuffer::new(4096), 0).await;
            match result.expect("a pipe does not fail to receive") {
                0 => return Err(StreamEnded),
                more => self.received.extend_from_slice(&buffer[..more]),
            }
        }
        let rest = self.received.split_off(count);
        Ok(std::mem::replace(&mut self.received, rest))
    }

    pub(super) fn left_over(&self) -> usize {
        self.received.len()
    }

    /// Negotiates the default export, with `base:allocation` if the style can carry it.
    pub(super) async fn handshake(&mut self, style: ReplyStyle) -> Result<NegotiatedExport, StreamEnded> {
        let greeting = self.take(18).await?;
        assert_eq!(greeting[..8], proto::INIT_MAGIC.to_be_bytes());
        assert_eq!(greeting[8..16], proto::OPTION_MAGIC.to_be_bytes());
        let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
        self.send(&flags.to_be_bytes()).await?;
        match style {
            ReplyStyle::Simple => {}
            ReplyStyle::Structured => _ = self.option(opt::STRUCTURED_REPLY, &[]).await?,
            ReplyStyle::Extended => _ = self.option(opt::EXTENDED_HEADERS, &[]).await?,
        }
        if style.has_chunks() {
            let query = b"base:allocation";
            let mut data = [0, 0, 0, 0, 0, 0, 0, 1].to_vec();
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query);
            self.option(opt::SET_META_CONTEXT, &data).await?;
        }
        let info_replies = self.option(opt::GO, &[0; 6]).await?;
        let export =
            info_replies.iter().find(|reply| reply[..2] == info::EXPORT.to_be_bytes()).expect("always sent");
        Ok(NegotiatedExport {
            size_bytes: u64::from_be_bytes(export[2..10].try_into().expect("eight bytes")),
        })
    }

    /// Sends an option and returns the replies before its ACK.
    async fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<Vec<u8>>, StreamEnded> {
        let mut message = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend(option.to_be_bytes());
        message.extend((data.len() as u32).to_be_bytes());
        message.extend(data);
        self.send(&message).await?;
        let mut replies = Vec::new();
        loop {
            let header = self.take(20).await?;
            assert_eq!(header[..8], proto::OPTION_REPLY_MAGIC.to_be_bytes());
            assert_eq!(u32_at(&header, 8), option);
            let data = self.take(u32_at(&header, 16) as usize).await?;
            match u32_at(&header, 12) {
                rep::ACK => return Ok(replies),
                // Error replies have bit 31 set ("Option reply types").
                kind if kind < rep::ERR_UNSUP => replies.push(data),
                kind => panic!("option {option} was refused with {kind:#x}"),
            }
        }
    }
}

/// Encodes a request's header. `length` is that of the range, or of the payload of a write.
pub(super) fn request(
    style: ReplyStyle,
    kind: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    length: u64,
) -> Vec<u8> {
    let extended = style == ReplyStyle::Extended;
    let with_payload = if extended && kind == cmd::WRITE { cmd_flag::PAYLOAD_LEN } else { 0 };
    let magic = if extended { proto::EXTENDED_REQUEST_MAGIC } else { proto::REQUEST_MAGIC };
    let mut header = magic.to_be_bytes().to_vec();
    header.extend((flags | with_payload).to_be_bytes());
    header.extend(kind.to_be_bytes());
    header.extend(cookie.to_be_bytes());
    header.extend(offset.to_be_bytes());
    if extended {
        header.extend(length.to_be_bytes());
    } else {
        header.extend((length as u32).to_be_bytes());
    }
    header
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
