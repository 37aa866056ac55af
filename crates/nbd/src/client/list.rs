//! Lists the exports of a server and their properties, without opening one.
//!
//! The server is not trusted: at most [`MAX_EXPORTS`] exports, [`MAX_CONTEXTS`] contexts of each,
//! and [`MAX_TEXT_BYTES`] of names and descriptions in total are kept.

use policy::time::Duration;

use super::{
    super::{
        proto::{info, opt, rep},
        stream::NbdStream,
        wire::{WireFields, string},
    },
    connect::{NbdEndpoint, dial},
    handshake::{NbdConnectError, Negotiation, refused_error},
};
use reactor::{operation::Fd, run_blocking, timeout};

const MAX_EXPORTS: usize = 1 << 16;
const MAX_CONTEXTS: usize = 1 << 10;
/// Maximum bytes of all names and descriptions together.
const MAX_TEXT_BYTES: usize = 16 << 20;

/// An export in a server's list.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedExport {
    pub name: String,
    pub description: String,
    pub size_bytes: u64,
    /// `proto::export_flag`s.
    pub flags: u16,
    /// Minimum and preferred block size and maximum payload, in bytes.
    pub block_sizes: Option<[u32; 3]>,
    pub contexts: Vec<String>,
}

/// Requests a server's list of exports.
///
/// # Errors
/// Fails if no server accepts the connection, it violates the protocol, or the list is not complete
/// within `limit`.
pub async fn list(endpoint: &NbdEndpoint, limit: Duration) -> Result<Vec<ListedExport>, NbdConnectError> {
    let endpoint = endpoint.clone();
    let listing = async {
        let socket = run_blocking(move || dial(&endpoint, limit)).await?;
        list_on(NbdStream::Plain(Fd::from(socket))).await
    };
    match timeout(limit, listing).await {
        Ok(result) => result,
        Err(_) => Err(NbdConnectError::TimedOut(limit.as_secs())),
    }
}

async fn list_on(stream: NbdStream) -> Result<Vec<ListedExport>, NbdConnectError> {
    let mut negotiation = Negotiation::new(stream);
    negotiation.greet().await?;
    // A server lists contexts and sends chunks only after structured replies were negotiated.
    let structured = negotiation.negotiate_structured_replies().await?;
    let mut text = TextBudget(MAX_TEXT_BYTES);
    let mut exports = names(&mut negotiation, &mut text).await?;
    for export in &mut exports {
        query_export(&mut negotiation, export, &mut text).await?;
        if structured {
            export.contexts = contexts(&mut negotiation, &export.name, &mut text).await?;
        }
    }
    // The server may close the connection before it replies.
    let _ = negotiation.option(opt::ABORT, &[]).await;
    Ok(exports)
}

/// Number of bytes of text that the server may still send.
struct TextBudget(usize);

impl TextBudget {
    fn charge(&mut self, text: &str) -> Result<String, NbdConnectError> {
        // An empty name needs memory as well.
        let remaining = self.0.checked_sub(text.len() + size_of::<String>());
        self.0 = remaining
            .ok_or(NbdConnectError::ProtocolViolation("its names and descriptions exceed 16 MiB"))?;
        Ok(text.to_owned())
    }
}

const UNEXPECTED_REPLY: NbdConnectError =
    NbdConnectError::ProtocolViolation("it sends an unexpected reply to an option");

async fn names(
    negotiation: &mut Negotiation,
    text: &mut TextBudget,
) -> Result<Vec<ListedExport>, NbdConnectError> {
    let mut exports = Vec::new();
    negotiation.option(opt::LIST, &[]).await?;
    loop {
        let reply = negotiation.reply(opt::LIST).await?;
        match reply.kind {
            rep::ACK => return Ok(exports),
            rep::SERVER if exports.len() < MAX_EXPORTS => {
                let name = text.charge(WireFields::new(&reply.data).string().ok_or(UNEXPECTED_REPLY)?)?;
                exports.push(ListedExport { name, ..ListedExport::default() });
            }
            rep::SERVER => return Err(NbdConnectError::ProtocolViolation("it has too many exports")),
            kind if kind >= rep::ERR_UNSUP => return Err(refused_error("", kind, &reply.data)),
            _ => return Err(UNEXPECTED_REPLY),
        }
    }
}

/// Encodes a name with its length, followed by the rest of an option's data.
fn option_data(name: &str, queries: &[u8]) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes(), name.as_bytes(), queries].concat()
}

async fn query_export(
    negotiation: &mut Negotiation,
    export: &mut ListedExport,
    text: &mut TextBudget,
) -> Result<(), NbdConnectError> {
    // Two information items are requested; NBD_INFO_EXPORT (size and flags) is always sent.
    let requested = [2, info::DESCRIPTION, info::BLOCK_SIZE].map(u16::to_be_bytes).concat();
    negotiation.option(opt::INFO, &option_data(&export.name, &requested)).await?;
    loop {
        let reply = negotiation.reply(opt::INFO).await?;
        let mut fields = WireFields::new(&reply.data);
        match reply.kind {
            rep::ACK => return Ok(()),
            rep::INFO => match fields.u16() {
                Some(info::EXPORT) => {
                    (export.size_bytes, export.flags) =
                        fields.u64().zip(fields.u16()).ok_or(UNEXPECTED_REPLY)?;
                }
                Some(info::DESCRIPTION) => {
                    export.description = text.charge(string(&reply.data[2..]).ok_or(UNEXPECTED_REPLY)?)?;
                }
                Some(info::BLOCK_SIZE) => {
                    let sizes = fields.u32().zip(fields.u32()).zip(fields.u32());
                    export.block_sizes =
                        sizes.map(|((minimum, preferred), maximum)| [minimum, preferred, maximum]);
                }
                _ => {}
            },
            kind if kind >= rep::ERR_UNSUP => return Err(refused_error(&export.name, kind, &reply.data)),
            _ => return Err(UNEXPECTED_REPLY),
        }
    }
}

/// Lists the contexts of an export; empty if the server does not support that.
async fn contexts(
    negotiation: &mut Negotiation,
    name: &str,
    text: &mut TextBudget,
) -> Result<Vec<String>, NbdConnectError> {
    let mut contexts = Vec::new();
    // With zero queries, the server lists all contexts.
    negotiation.option(opt::LIST_META_CONTEXT, &option_data(name, &0_u32.to_be_bytes())).await?;
    loop {
        let reply = negotiation.reply(opt::LIST_META_CONTEXT).await?;
        match reply.kind {
            rep::ACK => return Ok(contexts),
            rep::META_CONTEXT if contexts.len() < MAX_CONTEXTS => {
                // The name follows a 32-bit id.
                let name = reply.data.get(4..).and_then(string).ok_or(UNEXPECTED_REPLY)?;
                contexts.push(text.charge(name)?);
            }
            rep::META_CONTEXT => return Err(NbdConnectError::ProtocolViolation("it has too many contexts")),
            kind if kind >= rep::ERR_UNSUP => return Ok(contexts),
            _ => return Err(UNEXPECTED_REPLY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::super::{pipe::Pipe, proto},
        *,
    };
    use reactor::{buffer::IoBuffer, sim, spawn};

    fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [&proto::OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, data].concat()
    }

    /// The result for a server that has `count` exports with names of 4096 bytes.
    fn list_of(count: usize) -> Result<Vec<ListedExport>, NbdConnectError> {
        sim::run(1, async move {
            let (client, server) = Pipe::pair();
            let receiving = server.clone();
            spawn(async move { while let (Ok(1..), _) = receiving.receive(IoBuffer::new(4096), 0).await {} });
            spawn(async move {
                let magic = [proto::INIT_MAGIC, proto::OPTION_MAGIC].map(u64::to_be_bytes).concat();
                let greeting = [magic, 3_u16.to_be_bytes().to_vec()].concat();
                let no_chunks = option_reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]);
                let _ = server.send(IoBuffer::copy_of(&[greeting, no_chunks].concat()).into()).await;
                let name = option_reply(opt::LIST, rep::SERVER, &option_data(&"n".repeat(4096), &[]));
                for _ in 0..count {
                    if server.send(IoBuffer::copy_of(&name).into()).await.is_err() {
                        return;
                    }
                }
                let end = option_reply(opt::LIST, rep::ACK, &[]);
                let infos = option_reply(opt::INFO, rep::ACK, &[]).repeat(count);
                let _ = server.send(IoBuffer::copy_of(&[end, infos].concat()).into()).await;
            });
            list_on(NbdStream::Simulated(client)).await
        })
    }

    #[test]
    fn memory_of_names_is_bounded() {
        assert_eq!(list_of(100).unwrap().len(), 100);
        let error = list_of(MAX_TEXT_BYTES / 4096).unwrap_err().to_string();
        assert!(error.contains("names and descriptions exceed 16 MiB"), "{error}");
    }
}
