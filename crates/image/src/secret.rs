//! A passphrase: bytes that are wiped when dropped and never printed.
//!
//! It is read from a file or an open descriptor, never from an argument: arguments are
//! visible to all users of the machine. Like QEMU's `secret` object and cryptsetup's
//! `--key-file`, it is the entire content of the file, including a trailing line break.

use std::{
    fmt,
    fs::File,
    io::{self, ErrorKind, Read},
};

use zeroize::{Zeroize, Zeroizing};

/// Length limit of a passphrase, in bytes. Larger files are rejected as mistakes.
pub const MAX_SECRET: usize = 64 << 10;

/// A passphrase or key.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Takes ownership of the bytes and wipes them when dropped.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads `file` to its end. Blocks; for a pipe, until the writer closes it.
    ///
    /// # Errors
    /// The system's error, or [`ErrorKind::InvalidData`] if the file is empty or longer
    /// than [`MAX_SECRET`].
    pub fn read(mut file: File) -> io::Result<Self> {
        // Allocated at its final size: a buffer that grows leaves copies of the secret in
        // freed memory.
        let mut bytes = Zeroizing::new(vec![0; MAX_SECRET + 1]);
        let mut length = 0;
        loop {
            match file.read(&mut bytes[length..]) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match length {
            0 => Err(io::Error::new(ErrorKind::InvalidData, "it is empty")),
            1..=MAX_SECRET => Ok(Self::new(bytes[..length].to_vec())),
            _ => Err(io::Error::new(ErrorKind::InvalidData, "it is larger than 64 KiB")),
        }
    }

    /// The bytes, for key derivation.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret")
    }
}

impl Zeroize for Secret {
    fn zeroize(&mut self) {
        self.0.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(content).expect("written");
        file.rewind().expect("rewound");
        file
    }

    #[test]
    fn a_passphrase_is_all_of_the_file() {
        assert_eq!(Secret::read(file(b"two words\n")).expect("read").expose(), b"two words\n");
        let longest = vec![7; MAX_SECRET];
        assert_eq!(Secret::read(file(&longest)).expect("read").expose(), longest);
    }

    #[test]
    fn empty_and_oversized_secrets_are_rejected() {
        assert_eq!(Secret::read(file(b"")).expect_err("empty").to_string(), "it is empty");
        assert!(Secret::read(file(&vec![7; MAX_SECRET + 1])).is_err());
    }

    #[test]
    fn secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::new(b"geheim".to_vec())), "Secret");
    }
}
