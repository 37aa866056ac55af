//! Clients that break the protocol or the connection, each in one way, and expect that their
//! connection ends.

use policy::time::Duration;

use super::{
    super::{
        pipe::Pipe,
        proto::{cmd, cmd_flag},
        session::ReplyStyle,
    },
    REGION, SIZE, chance, some_time,
    wire::{NbdTestWire, StreamEnded, request},
};
use reactor::{now, sim, sleep_until, timeout};

/// Time for which a client keeps a connection that it neglects.
const NEGLECT: Duration = Duration::from_secs(20);

pub(super) struct HostileClient {
    misbehaviour: Misbehaviour,
    /// First byte of the region that it may write to.
    region: u64,
}

#[derive(Clone, Copy, Debug)]
enum Misbehaviour {
    /// Noise from the first byte on.
    GarbageAtOnce,
    /// Noise in place of requests.
    GarbageAsRequests,
    /// A connection without a handshake.
    NoHandshake,
    /// A part of a request.
    HalfRequest,
    /// A write with a part of its payload.
    HalfPayload,
    /// A request with a wrong magic number.
    WrongMagic,
    /// Requests past the end, with unknown flags, of unknown kinds.
    Nonsense,
    /// Many requests; reads no reply.
    Deaf,
    /// Many requests, then a disconnect.
    Gone,
}

impl HostileClient {
    pub(super) fn draw(region: u64) -> Self {
        use Misbehaviour::*;
        const WAYS: [Misbehaviour; 9] = [
            GarbageAtOnce,
            GarbageAsRequests,
            NoHandshake,
            HalfRequest,
            HalfPayload,
            WrongMagic,
            Nonsense,
            Deaf,
            Gone,
        ];
        Self { misbehaviour: WAYS[sim::random(|random| random.usize(..WAYS.len()))], region }
    }

    pub(super) async fn run(self, pipe: Pipe) {
        let mut wire = NbdTestWire::new(pipe);
        // The server may close before the client has sent everything.
        let _ = self.misbehave(&mut wire).await;
        wire.close();
    }

    async fn misbehave(&self, wire: &mut NbdTestWire) -> Result<(), StreamEnded> {
        match self.misbehaviour {
            Misbehaviour::GarbageAtOnce => {
                wire.send(&noise()).await?;
                return linger(wire).await;
            }
            Misbehaviour::NoHandshake => return linger(wire).await,
            _ => {}
        }
        let style = sim::random(|random| {
            [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended][random.usize(..3)]
        });
        wire.handshake(style).await?;
        match self.misbehaviour {
            Misbehaviour::GarbageAtOnce | Misbehaviour::NoHandshake => {}
            Misbehaviour::GarbageAsRequests => wire.send(&noise()).await?,
            Misbehaviour::HalfRequest => {
                let requests = self.reads(style, 3);
                let cut = sim::random(|random| random.usize(1..requests.len()));
                wire.send(&requests[..cut]).await?;
            }
            Misbehaviour::HalfPayload => {
                let mut bytes = self.reads(style, 2);
                bytes.extend(request(style, cmd::WRITE, 0, 7, self.region, 5000));
                bytes.extend(vec![7; sim::random(|random| random.usize(..5000))]);
                wire.send(&bytes).await?;
            }
            Misbehaviour::WrongMagic => {
                let mut bytes = self.reads(style, 3);
                bytes.extend(request(style, cmd::READ, 0, 7, 0, 1));
                let at = bytes.len() - style.request_bytes();
                // The first byte of the last request's magic number.
                bytes[at] ^= 1;
                bytes.extend(self.reads(style, 3));
                wire.send(&bytes).await?;
            }
            Misbehaviour::Nonsense => wire.send(&self.nonsense(style)).await?,
            Misbehaviour::Deaf => {
                _ = timeout(NEGLECT, wire.send(&self.reads(style, 3000))).await;
                return Ok(());
            }
            Misbehaviour::Gone => {
                let mut bytes = request(style, cmd::WRITE, 0, 7, self.region, 6000);
                bytes.extend(vec![7; 6000]);
                bytes.extend(self.reads(style, 100));
                _ = timeout(some_time(), wire.send(&bytes)).await;
                sleep_until(now() + some_time()).await;
                return Ok(());
            }
        }
        if chance(50) { linger(wire).await } else { Ok(()) }
    }

    fn reads(&self, style: ReplyStyle, count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in 0..count {
            let (offset, length) = sim::random(|random| (random.u64(..REGION), random.u64(1..3000)));
            bytes.extend(request(
                style,
                cmd::READ,
                0,
                number,
                self.region + offset,
                length.min(REGION - offset),
            ));
        }
        bytes
    }

    fn nonsense(&self, style: ReplyStyle) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in 0..50 {
            let (kind, flags) = sim::random(|random| (random.u16(..12), 1 << random.u16(..16)));
            let offset = sim::random(|random| if random.bool() { random.u64(..) } else { self.region });
            let length = sim::random(|random| random.u64(..2 * SIZE));
            // Requests without payload keep the stream in step; a write turns the rest into noise.
            let kind = if kind == cmd::WRITE && chance(90) { cmd::TRIM } else { kind };
            let length = if offset == self.region { length % REGION } else { length };
            bytes.extend(request(style, kind, flags & !cmd_flag::PAYLOAD_LEN, number, offset, length));
        }
        bytes
    }
}

/// Reads until the server closes, for at most [`NEGLECT`].
async fn linger(wire: &mut NbdTestWire) -> Result<(), StreamEnded> {
    let reading = async {
        loop {
            wire.take(1).await?;
        }
    };
    timeout(NEGLECT, reading).await.unwrap_or(Ok(()))
}

fn noise() -> Vec<u8> {
    sim::random(|random| (0..random.usize(1..20_000)).map(|_| random.u8(..)).collect())
}
