//! What a server has: its exports, and what it says of each, without a connection to one.
//!
//! As much is kept as is told; the server is not trusted, and tells of [`MOST_EXPORTS`] and of
//! [`MOST_CONTEXTS`] each at most.

use policy::time::Duration;

use super::{
    super::{
        proto::{info, opt, rep},
        stream::Stream,
        wire::{Fields, string},
    },
    connect::{Endpoint, dial},
    handshake::{Negotiation, NotConnected, refused},
};
use crate::reactor::{blocking, op::Fd, timeout};

const MOST_EXPORTS: usize = 1 << 16;
const MOST_CONTEXTS: usize = 1 << 10;

/// An export as a server tells of it.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    pub description: String,
    pub size_bytes: u64,
    /// `proto::export_flag`s.
    pub flags: u16,
    /// Bytes: the minimum, the preferred block, the largest payload.
    pub blocks: Option<[u32; 3]>,
    pub contexts: Vec<String>,
}

/// Asks a server for its exports.
///
/// # Errors
/// Nobody there, no protocol, or no answer within `limit`.
pub async fn list(endpoint: &Endpoint, limit: Duration) -> Result<Vec<Listed>, NotConnected> {
    let endpoint = endpoint.clone();
    let asking = async {
        let socket = blocking(move || dial(&endpoint, limit)).await?;
        let mut negotiation = Negotiation::new(Stream::Plain(Fd::from(socket)));
        negotiation.greet().await?;
        // A server tells of contexts, and of what needs chunks, only where they were agreed on.
        let structured = negotiation.ask_for_chunks().await?;
        let mut exports = names(&mut negotiation).await?;
        for export in &mut exports {
            ask(&mut negotiation, export).await?;
            if structured {
                export.contexts = contexts(&mut negotiation, &export.name).await?;
            }
        }
        // The server may close before it has answered.
        let _ = negotiation.option(opt::ABORT, &[]).await;
        Ok(exports)
    };
    match timeout(limit, asking).await {
        Ok(result) => result,
        Err(_) => Err(NotConnected::TooLate(limit.as_secs())),
    }
}

const STRANGE: NotConnected = NotConnected::Breach("it answers an option with something else");

async fn names(negotiation: &mut Negotiation) -> Result<Vec<Listed>, NotConnected> {
    let mut exports = Vec::new();
    negotiation.option(opt::LIST, &[]).await?;
    loop {
        let reply = negotiation.reply(opt::LIST).await?;
        match reply.kind {
            rep::ACK => return Ok(exports),
            rep::SERVER if exports.len() < MOST_EXPORTS => {
                let name = Fields::new(&reply.data).string().ok_or(STRANGE)?.to_owned();
                exports.push(Listed { name, ..Listed::default() });
            }
            rep::SERVER => return Err(NotConnected::Breach("it has too many exports")),
            kind if kind >= rep::ERR_UNSUP => return Err(refused("", kind, &reply.data)),
            _ => return Err(STRANGE),
        }
    }
}

/// A name with its length, and what is asked about it.
fn question(name: &str, rest: &[u8]) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes(), name.as_bytes(), rest].concat()
}

async fn ask(negotiation: &mut Negotiation, export: &mut Listed) -> Result<(), NotConnected> {
    let wanted = [2, info::DESCRIPTION, info::BLOCK_SIZE].map(u16::to_be_bytes).concat();
    negotiation.option(opt::INFO, &question(&export.name, &wanted)).await?;
    loop {
        let reply = negotiation.reply(opt::INFO).await?;
        let mut fields = Fields::new(&reply.data);
        match reply.kind {
            rep::ACK => return Ok(()),
            rep::INFO => match fields.u16() {
                Some(info::EXPORT) => {
                    (export.size_bytes, export.flags) = fields.u64().zip(fields.u16()).ok_or(STRANGE)?;
                }
                Some(info::DESCRIPTION) => {
                    export.description = string(&reply.data[2..]).ok_or(STRANGE)?.to_owned();
                }
                Some(info::BLOCK_SIZE) => {
                    let sizes = fields.u32().zip(fields.u32()).zip(fields.u32());
                    export.blocks =
                        sizes.map(|((minimum, preferred), maximum)| [minimum, preferred, maximum]);
                }
                _ => {}
            },
            kind if kind >= rep::ERR_UNSUP => return Err(refused(&export.name, kind, &reply.data)),
            _ => return Err(STRANGE),
        }
    }
}

/// None where the server does not tell of any.
async fn contexts(negotiation: &mut Negotiation, name: &str) -> Result<Vec<String>, NotConnected> {
    let mut contexts = Vec::new();
    // No question: all that there are.
    negotiation.option(opt::LIST_META_CONTEXT, &question(name, &0_u32.to_be_bytes())).await?;
    loop {
        let reply = negotiation.reply(opt::LIST_META_CONTEXT).await?;
        match reply.kind {
            rep::ACK => return Ok(contexts),
            rep::META_CONTEXT if contexts.len() < MOST_CONTEXTS => {
                // Behind a number.
                let name = reply.data.get(4..).and_then(string).ok_or(STRANGE)?;
                contexts.push(name.to_owned());
            }
            rep::META_CONTEXT => return Err(NotConnected::Breach("it has too many contexts")),
            kind if kind >= rep::ERR_UNSUP => return Ok(contexts),
            _ => return Err(STRANGE),
        }
    }
}
