//! Fixed newstyle negotiation, as far as fio's nbd engine, nbdinfo and nbdcopy need it.
//!
//! One export with the empty name. EXPORT_NAME, INFO, GO and ABORT are answered, everything else
//! with ERR_UNSUP. Constants are the NBD specification's (doc/proto.md).

use std::io;

use crate::inbox::Inbox;
use crate::storage::Storage;

const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

const FLAG_FIXED_NEWSTYLE: u16 = 1;
const FLAG_NO_ZEROES: u16 = 2;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = (1 << 31) + 1;
const REPLY_INVALID: u32 = (1 << 31) + 3;
const REPLY_UNKNOWN: u32 = (1 << 31) + 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2;
/// A name of 4096 bytes (the specification's bound) and a list of infos.
const LONGEST_OPTION: usize = 8192;

/// False where the client chose to leave; `InvalidData` where it broke the protocol.
pub(crate) async fn negotiate(inbox: &mut Inbox, storage: &Storage) -> io::Result<bool> {
    let mut greeting = SERVER_MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    inbox.send(greeting).await?;
    let client_flags = u32::from_be_bytes(inbox.expect().await?);
    loop {
        let Some(magic) = inbox.next().await? else { return Ok(false) };
        if u64::from_be_bytes(magic) != OPTION_MAGIC {
            return Err(invalid("an option without the option magic"));
        }
        let option = u32::from_be_bytes(inbox.expect().await?);
        let length = u32::from_be_bytes(inbox.expect().await?) as usize;
        if length > LONGEST_OPTION {
            return Err(invalid("an option of more than 8192 bytes"));
        }
        let data = inbox.bytes(length).await?;
        match option {
            OPTION_EXPORT_NAME if data.is_empty() => {
                inbox.send(export_name_answer(storage, client_flags)).await?;
                return Ok(true);
            }
            OPTION_EXPORT_NAME => return Err(invalid("a name that is not the default export's")),
            OPTION_ABORT => {
                inbox.send(option_reply(option, REPLY_ACK, &[])).await?;
                return Ok(false);
            }
            OPTION_INFO | OPTION_GO => {
                let (answer, accepted) = info_answer(option, &data, storage);
                inbox.send(answer).await?;
                if accepted && option == OPTION_GO {
                    return Ok(true);
                }
            }
            _ => inbox.send(option_reply(option, REPLY_UNSUPPORTED, &[])).await?,
        }
    }
}

fn export_name_answer(storage: &Storage, client_flags: u32) -> Vec<u8> {
    let mut answer = storage.size().to_be_bytes().to_vec();
    answer.extend(TRANSMISSION_FLAGS.to_be_bytes());
    if client_flags & u32::from(FLAG_NO_ZEROES) == 0 {
        answer.extend([0; 124]);
    }
    answer
}

fn info_answer(option: u32, data: &[u8], storage: &Storage) -> (Vec<u8>, bool) {
    // A name's length, the name, the number of infos asked for, two bytes for each.
    let Some((length, rest)) = data.split_first_chunk() else {
        return (option_reply(option, REPLY_INVALID, &[]), false);
    };
    match u32::from_be_bytes(*length) {
        0 if rest.len() >= 2 => {}
        name if (name as usize) < rest.len() => return (option_reply(option, REPLY_UNKNOWN, &[]), false),
        _ => return (option_reply(option, REPLY_INVALID, &[]), false),
    }
    let mut export = INFO_EXPORT.to_be_bytes().to_vec();
    export.extend(storage.size().to_be_bytes());
    export.extend(TRANSMISSION_FLAGS.to_be_bytes());
    let mut sizes = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [storage.block_size(), 4096, crate::transmission::LONGEST_REQUEST] {
        sizes.extend(size.to_be_bytes());
    }
    let mut answer = option_reply(option, REPLY_INFO, &export);
    answer.extend(option_reply(option, REPLY_INFO, &sizes));
    answer.extend(option_reply(option, REPLY_ACK, &[]));
    (answer, true)
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend(option.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend((data.len() as u32).to_be_bytes());
    reply.extend(data);
    reply
}

pub(crate) fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("connection closed: it sent {what}"))
}
