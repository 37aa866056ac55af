//! LUKS, version 1, as it lies inside an encrypted qcow2 image: a header, and eight key slots
//! behind it.
//!
//! ```text
//!   passphrase ─PBKDF2─► slot key ─┐
//!                                  ▼
//!   key slot: the master key, spread over 4000 stripes and encrypted ─► stripes ─merge─► master key ─PBKDF2─► the digest in the header?
//!                                                                                            │
//!   clusters of guest data ◄─────────────────────── AES, by sector of the file ◄─────────────┘
//! ```
//!
//! - `header`: 592 bytes to meaning and back.
//! - `cipher`: what encrypts sectors; the one part that the data path uses.
//! - `stripes`: the anti-forensic splitter.
//! - `unlock`: from a passphrase to a [`Cipher`], and the slots of a new image.
//!
//! The master key lies in memory only inside openssl's contexts, which wipe it; what passes through
//! here is wiped when it is dropped.
//!
//! Never supports what openssl has no fast code for: ciphers other than AES are refused by name.
//!
//! Source: cryptsetup's "LUKS On-Disk Format Specification" 1.2.3; what QEMU does with it inside
//! qcow2 (docs/interop/qcow2.rst, "Full disk encryption header pointer") was looked at in images
//! that it made.

mod cipher;
mod header;
mod stripes;
mod unlock;

pub use self::{
    cipher::{Cipher, CipherKind, IvKind, Mode, SECTOR_BYTES},
    header::{HEADER_BYTES, Hash, KeySlot, LuksHeader, MOST_ITERATIONS, SLOTS, check_slots},
    unlock::{LuksOptions, NewLuks, UnlockError, create, read_header, unlock},
};
