//! Block status from servers that describe little at a time. Simulated.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use policy::time::Duration;

use super::{
    pipe::Pipe,
    proto::{self, cmd, info, opt, rep, reply_flag, reply_type, state},
    stream::NbdStream,
};
use reactor::{buffer::IoBuffer, error::Error, sim, spawn, timeout};
use storage::{
    MAX_EXTENTS, Storage,
    nbd::{NbdOptions, simulated},
};

const SIZE: u64 = 1 << 20;
const CONTEXT: u32 = 7;

async fn receive<const N: usize>(pipe: &Pipe) -> Option<[u8; N]> {
    let (mut buffer, mut filled) = (IoBuffer::new(N), 0);
    while filled < N {
        let (result, returned) = pipe.receive(buffer, filled).await;
        buffer = returned;
        filled += result.ok().filter(|&count| count > 0)?;
    }
    buffer[..].try_into().ok()
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
    [&proto::OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, data].concat()
}

async fn shake_hands(pipe: &Pipe) -> Option<()> {
    let send = async |bytes: Vec<u8>| pipe.send(IoBuffer::copy_of(&bytes).into()).await.ok();
    let magic = [proto::INIT_MAGIC, proto::OPTION_MAGIC].map(u64::to_be_bytes).concat();
    send([magic, 3_u16.to_be_bytes().to_vec()].concat()).await?;
    receive::<4>(pipe).await?;
    loop {
        let header = receive::<{ proto::OPTION_BYTES }>(pipe).await?;
        let number =
            |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        for _ in 0..number(12) {
            receive::<1>(pipe).await?;
        }
        let option = number(8);
        let reply = match option {
            opt::SET_META_CONTEXT => {
                let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
                option_reply(option, rep::META_CONTEXT, &context)
            }
            opt::GO => {
                let flags = 1_u16.to_be_bytes();
                let export = [&info::EXPORT.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags].concat();
                option_reply(option, rep::INFO, &export)
            }
            _ => Vec::new(),
        };
        send([reply, option_reply(option, rep::ACK, &[])].concat()).await?;
        if option == opt::GO {
            return Some(());
        }
    }
}

/// Serves BLOCK_STATUS requests: `extents_of` returns the extents for an offset and a length.
async fn serve(
    pipe: Pipe,
    requests: Arc<AtomicU64>,
    extents_of: fn(u64, u32) -> Vec<[u32; 2]>,
) -> Option<()> {
    shake_hands(&pipe).await?;
    loop {
        let request = receive::<{ proto::REQUEST_BYTES }>(&pipe).await?;
        let command = u16::from_be_bytes([request[6], request[7]]);
        if command != cmd::BLOCK_STATUS {
            pipe.close();
            return None;
        }
        requests.fetch_add(1, Ordering::Relaxed);
        let offset = u64::from_be_bytes(request[16..24].try_into().ok()?);
        let length = u32::from_be_bytes(request[24..28].try_into().ok()?);
        let extents = extents_of(offset, length).concat().into_iter().flat_map(u32::to_be_bytes);
        let data: Vec<u8> = CONTEXT.to_be_bytes().into_iter().chain(extents).collect();
        let kinds = [reply_flag::DONE, reply_type::BLOCK_STATUS].map(u16::to_be_bytes).concat();
        let magic = proto::STRUCTURED_REPLY_MAGIC.to_be_bytes();
        let length = (data.len() as u32).to_be_bytes();
        let chunk = [&magic[..], &kinds, &request[8..16], &length, &data].concat();
        pipe.send(IoBuffer::copy_of(&chunk).into()).await.ok()?;
    }
}

/// Queries the whole disk as `weir image convert` does. Returns the number of requests and the
/// number of bytes reported as data.
fn walk(extents_of: fn(u64, u32) -> Vec<[u32; 2]>) -> Result<(u64, u64), Error> {
    sim::run(1, async move {
        let requests = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&requests);
        let connect = Box::new(move || {
            let (client_end, server_end) = Pipe::pair();
            spawn({
                let requests = Arc::clone(&requests);
                async move {
                    let _ = serve(server_end, requests, extents_of).await;
                }
            });
            Ok(NbdStream::Simulated(client_end))
        });
        let options = NbdOptions { is_format_known: true, read_only: true, ..NbdOptions::default() };
        let storage: Storage = simulated(connect, "disk", &options).await.unwrap();
        let (mut at, mut data) = (0, 0);
        let walk = async {
            while at < SIZE {
                let extents = storage.block_status(at, SIZE - at).await?;
                assert!((1..=MAX_EXTENTS).contains(&extents.len()));
                for extent in extents {
                    at += extent.length;
                    data += if extent.zero { 0 } else { extent.length };
                }
            }
            Ok::<(), Error>(())
        };
        timeout(Duration::from_secs(3600), walk).await.expect("every request is answered")?;
        assert_eq!(at, SIZE);
        Ok((counted.load(Ordering::Relaxed), data))
    })
}

const ZERO: u32 = state::HOLE | state::ZERO;

#[test]
fn short_extents_cost_one_request_for_64_kib() {
    let (requests, data) = walk(|_, _| vec![[1, ZERO]]).unwrap();
    assert_eq!((requests, data), (16, SIZE - 16));
    let alternating = |_, length: u32| (0..length.min(2000)).map(|n| [1, n % 2 * ZERO]).collect();
    assert_eq!(walk(alternating).unwrap().0, 16);
}

#[test]
fn longer_extents_stay_exact() {
    let halves = |offset: u64, _| {
        if offset < SIZE / 2 { vec![[(SIZE / 2 - offset) as u32, 0]] } else { vec![[1 << 20, ZERO]] }
    };
    assert_eq!(walk(halves).unwrap(), (2, SIZE / 2));
    let clusters = |_, _| [[512, 0], [512, ZERO]].repeat(100);
    assert_eq!(walk(clusters).unwrap().1, SIZE / 2);
}

#[test]
fn more_extents_than_bytes_are_refused() {
    let refused = walk(|_, length| vec![[1, 0]; length as usize + 1]);
    assert!(refused.is_err(), "{refused:?}");
}
