//! Descriptors that clients of a control socket pass with their commands (SCM_RIGHTS of unix(7)):
//! their reception, and their storage until they are used.
//!
//! ```text
//!   recvmsg ─► arrived ── getfd ──► by name, for this client only ─► a socket to listen at
//!                  └───── add-fd ─► a set, for all clients: control/fdsets.rs
//! ```
//!
//! As in QEMU, descriptors belong to the command that they come with: unused ones are closed when
//! more arrive or the client disconnects. Named ones are closed when the client disconnects.
//!
//! Never opens anything by itself.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    io::{self, ErrorKind, IoSliceMut},
    mem::MaybeUninit,
    os::fd::AsFd as _,
};

use reactor::operation::{self, Fd, PassedFd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{error::Error, json::shown};

/// Maximum number of descriptors at once, as in QEMU (`TCP_MAX_FDS`). The kernel closes the excess.
const MOST_AT_ONCE: usize = 16;
/// Maximum number of named descriptors of one client.
const MOST_KEPT: usize = 256;
/// Maximum length of a name in bytes.
const MOST_TEXT: usize = 1024;

/// Descriptors passed by one client.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    arrived: RefCell<VecDeque<PassedFd>>,
    named: RefCell<BTreeMap<String, PassedFd>>,
}

/// Identity: two sets are never equal.
impl PartialEq for Passed {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Passed {
    /// Receives as `recv(2)` does, and stores passed descriptors.
    pub(super) async fn receive(&self, socket: &Fd, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.receive_once(socket, bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => operation::readable(socket).await?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn receive_once(&self, socket: &Fd, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_AT_ONCE))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        // Close-on-exec, or a child process would inherit them.
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(socket.as_fd(), &mut [IoSliceMut::new(bytes)], &mut beside, flags);
        let mut arrived = VecDeque::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                arrived.extend(descriptors.map(PassedFd::from));
            }
        }
        if !arrived.is_empty() {
            // Closes unused descriptors of an earlier message.
            self.arrived.replace(arrived);
        }
        Ok(received?.bytes)
    }

    /// Takes the descriptor that came with a command.
    pub(super) fn next(&self) -> Result<PassedFd, Error> {
        let next = self.arrived.borrow_mut().pop_front();
        next.ok_or_else(|| Error::generic("No file descriptor supplied via SCM_RIGHTS"))
    }

    /// Gives a descriptor a name. An older one of this name is closed.
    pub(super) fn name(&self, name: &str, descriptor: PassedFd) -> Result<(), Error> {
        check_text("fdname", name)?;
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(Error::rule("fdname", "expects a name not starting with a digit"));
        }
        let mut named = self.named.borrow_mut();
        if named.len() >= MOST_KEPT && !named.contains_key(name) {
            return Err(full());
        }
        named.insert(name.to_owned(), descriptor);
        Ok(())
    }

    /// Takes the descriptor with this name.
    pub(super) fn take(&self, name: &str) -> Option<PassedFd> {
        self.named.borrow_mut().remove(name)
    }

    /// As [`Passed::take`]; a missing descriptor is an error.
    pub(super) fn find(&self, name: &str) -> Result<PassedFd, Error> {
        let not_found = || Error::generic(format!("File descriptor named '{}' not found", shown(name)));
        self.take(name).ok_or_else(not_found)
    }
}

fn full() -> Error {
    Error::generic(format!("{MOST_KEPT} descriptors are kept already (close some first)"))
}

fn check_text(key: &str, text: &str) -> Result<(), Error> {
    match text.len() > MOST_TEXT {
        true => Err(Error::rule(key, format!("is longer than {MOST_TEXT} bytes"))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_is_kept_is_bounded() {
        let passed = Passed::default();
        let file = File::open("/dev/null").expect("it is there");
        let another = || PassedFd::from(std::os::fd::OwnedFd::from(file.try_clone().expect("a descriptor")));
        for number in 0..MOST_KEPT {
            passed.name(&format!("n{number}"), another()).expect("room");
        }
        assert!(passed.name("more", another()).is_err());
        passed.name("n0", another()).expect("in the place of the other");
        assert!(passed.name("0", another()).is_err() && passed.next().is_err());
        assert!(passed.take("n0").is_some() && passed.find("n0").is_err());
    }
}
