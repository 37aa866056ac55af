//! Between a newcomer and the daemon that it takes over from: what both say passes here, message by
//! message, so that a newcomer can be killed at any step of it.
//!
//! Knows no message, only where one ends. Both sides see of each other what they would see without
//! it, but that the daemon sees another process.

use std::{
    fs,
    io::{BufRead as _, BufReader, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde_json::{Value, json};

use crate::harness::{DEADLINE, Qmp, Serve};

/// As many descriptors come beside one byte at most.
const AT_ONCE: usize = 250;

/// When a newcomer is killed, as the daemon and the newcomer see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpgradeStep {
    /// It has heard a part of what there is.
    OfferCutShort,
    /// It has heard all of it, and opens images.
    Offered,
    /// All is open, and nobody has heard so.
    Prepared,
    /// The daemon has heard so, and stands still.
    Suspended,
    /// It has heard a part of how everything stands.
    StateCutShort,
    /// It has heard all of it, and reads tables.
    State,
    /// It could serve, and nobody has heard so.
    Ready,
}

impl UpgradeStep {
    pub(super) const ALL: [Self; 7] = [
        Self::OfferCutShort,
        Self::Offered,
        Self::Prepared,
        Self::Suspended,
        Self::StateCutShort,
        Self::State,
        Self::Ready,
    ];
}

/// Has a newcomer ask for everything and killed at this step; the daemon hears of its end once this
/// returns. `place` is a path for a socket.
#[track_caller]
pub(super) fn kill_new_process(serve: Serve, control: &Path, place: &Path, step: UpgradeStep) {
    let listener = UnixListener::bind(place).unwrap();
    let newcomer = serve.arg(format!("--takeover=unix:{}", place.display())).spawn_unready();
    let (its, daemons) = ask(&listener.accept().unwrap().0, control);
    pass_until(step, &its, &daemons);
    newcomer.kill();
    // What is left of what it said, and the end; a reset is one too, where it had not read all.
    match (&its).read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{step:?}"),
    }
    fs::remove_file(place).unwrap();
}

fn pass_until(step: UpgradeStep, its: &UnixStream, daemons: &UnixStream) {
    let said = |message: &ProxiedMessage, what: &str| assert_eq!(message.text, what.as_bytes(), "{step:?}");
    let offer = receive_message(daemons);
    if step == UpgradeStep::OfferCutShort {
        return send_half(its, &offer);
    }
    send_message(its, &offer);
    if step == UpgradeStep::Offered {
        return;
    }
    let prepared = receive_message(its);
    said(&prepared, "\"prepared\"");
    if step == UpgradeStep::Prepared {
        return;
    }
    send_message(daemons, &prepared);
    if step == UpgradeStep::Suspended {
        return;
    }
    let state = receive_message(daemons);
    if step == UpgradeStep::StateCutShort {
        return send_half(its, &state);
    }
    send_message(its, &state);
    if step == UpgradeStep::Ready {
        said(&receive_message(its), "\"ready\"");
    }
}

/// What a newcomer asks at `socket`, the daemon is asked; where one is heard, and where the other.
fn ask(socket: &UnixStream, control: &Path) -> (UnixStream, UnixStream) {
    let answer = |message: Value| writeln!(&*socket, "{message}").unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    answer(json!({ "QMP": {} }));
    let mut line = String::new();
    BufReader::new(socket.take(1 << 10)).read_line(&mut line).unwrap();
    assert!(line.contains("qmp_capabilities"), "{line}");
    answer(json!({ "return": {} }));
    let mut command = [0; 1 << 10];
    let (length, mut descriptors) = receive(socket, &mut command);
    let command: Value = serde_json::from_slice(&command[..length]).unwrap();
    let its = UnixStream::from(descriptors.remove(0));
    let (daemons, passed) = UnixStream::pair().unwrap();
    let name = command["execute"].as_str().unwrap();
    let said = Qmp::negotiated(control).command_with_descriptor(&passed, name, &command["arguments"]);
    assert!(said.get("return").is_some(), "{said}");
    answer(said);
    for socket in [&its, &daemons] {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    (its, daemons)
}

struct ProxiedMessage {
    text: Vec<u8>,
    bytes: Vec<u8>,
    /// Those beside each byte behind.
    descriptors: Vec<Vec<OwnedFd>>,
}

impl ProxiedMessage {
    fn head(&self) -> Vec<u8> {
        let count = self.descriptors.iter().map(Vec::len).sum();
        [self.text.len(), self.bytes.len(), count].map(|length| (length as u64).to_le_bytes()).concat()
    }
}

fn receive_message(mut socket: &UnixStream) -> ProxiedMessage {
    let mut lengths = [[0; 8]; 3];
    lengths.iter_mut().for_each(|length| socket.read_exact(length).unwrap());
    let [text, bytes, mut count] = lengths.map(|length| u64::from_le_bytes(length) as usize);
    let mut read = |length| {
        let mut read = vec![0; length];
        socket.read_exact(&mut read).unwrap();
        read
    };
    let (text, bytes) = (read(text), read(bytes));
    let mut descriptors = Vec::new();
    while count > 0 {
        let (length, some) = receive(socket, &mut [0]);
        assert_eq!(length, 1);
        count -= some.len();
        descriptors.push(some);
    }
    ProxiedMessage { text, bytes, descriptors }
}

fn send_message(mut socket: &UnixStream, message: &ProxiedMessage) {
    socket.write_all(&[message.head(), message.text.clone(), message.bytes.clone()].concat()).unwrap();
    for some in &message.descriptors {
        let some: Vec<_> = some.iter().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        assert!(beside.push(SendAncillaryMessage::ScmRights(&some)));
        assert_eq!(sendmsg(socket, &[IoSlice::new(b".")], &mut beside, SendFlags::empty()), Ok(1));
    }
}

fn send_half(mut socket: &UnixStream, message: &ProxiedMessage) {
    let half = message.text.len() / 2;
    socket.write_all(&[message.head(), message.text[..half].to_vec()].concat()).unwrap();
}

fn receive(socket: &UnixStream, bytes: &mut [u8]) -> (usize, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut beside, flags).unwrap();
    let descriptors = beside.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    (received.bytes, descriptors.collect())
}
